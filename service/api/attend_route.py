"""Attend routes: the hot routes of a layer, of attention without a layer and of Open Inference, as plain ASGI endpoints.

Invariants: checks run in the contract's order (media type, size, syntax, fields, tensors, masks, cost), all before the queue.
Every form of a body becomes the same `CheckedRequest` and shares every later step, so the bits of an answer are the same too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from service.api.reply import JSON, OCTET_STREAM, SAFETENSORS, Piece, answer_coding, answer_type, body_type
from service.api.request_body import joined
from service.api.request_context import LayerRequests
from service.errors import BadRequest, LayerNotFound
from service.http.asgi import Receive, Scope, Send
from service.http.request_parser import HeaderFields
from service.layers.catalog import Catalog, Served, ServedAttention
from service.layers.stored_layer import SDPA
from service.wire.answer import AnswerFacts, write_json
from service.wire.attend_request import CheckedRequest, RequestLimits, check_request
from service.wire.attention_request import check_attention
from service.wire.inference_codec import (
    ATTENTION,
    LAYER,
    InferenceRequest,
    WantedAnswer,
    read_inference,
    split_inference,
    write_inference,
)
from service.wire.inference_schemas import VERSION
from service.wire.safetensors_codec import RequestTemplates, parse_safetensors, write_safetensors
from service.wire.tensors import TensorForm

ROUTE = "/v1/layers/{layer}/attend"
ATTENTION_ROUTE = "/v1/attention"
INFER_ROUTES = ("/v2/models/{layer}/infer", "/v2/models/{layer}/versions/{version}/infer")
BODY_CODINGS = (b"gzip", b"zstd")
ANSWER_CODINGS = (b"zstd", b"gzip")
INFER_CODINGS = (b"gzip", b"deflate")


Check = Callable[[Any, Any], CheckedRequest]


class Codec(NamedTuple):
    """One form of bodies and answers. `check` gets the layer and the body: its parsed JSON if it is text, else its bytes."""

    media_type: bytes
    is_text: bool
    check: Check
    write: Callable[[dict[str, torch.Tensor], AnswerFacts, TensorForm], Iterable[Piece]]


def _codecs(check_json: Check, check_safetensors: Check) -> tuple[Codec, ...]:
    """Return one codec for each form; error messages name them in this order."""
    return (
        Codec(JSON, True, check_json, write_json),
        Codec(SAFETENSORS, False, check_safetensors, lambda tensors, facts, _: write_safetensors(tensors, facts)),
    )


def attend_route(layer_requests: LayerRequests) -> HotRoute:
    """Return the endpoint of `ROUTE`, through a layer."""
    limits = layer_requests.limits
    templates = RequestTemplates(limits.request, limits.max_json_depth, limits.max_text_numbers)
    codecs = _codecs(
        lambda document, layer: check_request(document, layer.name, layer.spec, limits.request),
        lambda body, layer: templates.read(body, layer.name, layer.digest, layer.spec),
    )
    return HotRoute(layer_requests, lambda catalog, path: catalog.get(path["layer"]), codecs)


def attention_route(layer_requests: LayerRequests) -> HotRoute:
    """Return the endpoint of `ATTENTION_ROUTE`, on the caller's own tensors."""
    limits = layer_requests.limits

    def check_safetensors(body: bytearray, _: Served) -> CheckedRequest:
        document = parse_safetensors(body, max_depth=limits.max_json_depth, max_numbers=limits.max_text_numbers)
        return check_attention(document, limits.request)

    codecs = _codecs(lambda document, _: check_attention(document, limits.request), check_safetensors)
    return HotRoute(layer_requests, lambda catalog, _: catalog.model(SDPA), codecs)


class HotRoute:
    """An ASGI endpoint; `find` returns the layer, or attention without one, from the catalog and the path's parameters."""

    def __init__(
        self,
        layer_requests: LayerRequests,
        find: Callable[[Catalog, Mapping[str, str]], Served],
        codecs: Sequence[Codec],
    ) -> None:
        self._layer_requests = layer_requests
        self._find = find
        self._codecs = {codec.media_type: codec for codec in codecs}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._layer_requests.open(scope, receive) as context:
            layer = context.model(self._find, scope["path_params"])
            body_codec, answer_codec, coding = context.fields.make(self._negotiated)
            parts = await context.read(BODY_CODINGS, layer, is_binary=not body_codec.is_text)

            async def decode() -> CheckedRequest:
                # Bind no name to the text of a parsed body: a name would keep all of it in memory, beside the document.
                body = await context.parsed(joined(parts)) if body_codec.is_text else joined(parts)
                return await context.checked(lambda: body_codec.check(body, layer))

            with context.cancel_on_disconnect():
                request = await context.decoded(decode)
                tensors, facts = await context.ask(layer, request)
            headers = [(b"content-type", answer_codec.media_type)]
            await context.send(send, headers, answer_codec.write(tensors, facts, request.form), coding)

    def _negotiated(self, fields: HeaderFields) -> tuple[Codec, Codec, bytes | None]:
        """Return the codec of the body, the codec of the answer, and the answer's content coding."""
        taken = tuple(self._codecs)
        sent = body_type(fields, taken)
        # An answer has the form of its body unless the client asks for another.
        wanted = answer_type(fields, (sent, *(media for media in taken if media != sent)))
        coding = answer_coding(fields, ANSWER_CODINGS, take_offers=self._layer_requests.limits.take_offers)
        return self._codecs[sent], self._codecs[wanted], coding


class InferRoute:
    """The ASGI endpoint of Open Inference.

    Inference-Header-Content-Length decides the body's form, not Content-Type: the protocol's clients send none, or octet-stream.
    """

    def __init__(self, layer_requests: LayerRequests) -> None:
        self._layer_requests = layer_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._layer_requests.open(scope, receive) as context:
            limits, model = context.limits, context.model(find_model, scope["path_params"])
            kind = ATTENTION if isinstance(model, ServedAttention) else LAYER
            json_length, coding = context.fields.make(_inference_fields, limits.take_offers)
            parts = await context.read(INFER_CODINGS, model, is_binary=json_length is not None)

            async def decode() -> tuple[WantedAnswer, CheckedRequest]:
                text, rest = split_inference(joined(parts), json_length)
                found = read_inference(await context.parsed(text), rest, kind)
                return found.wanted, await context.checked(lambda: _checked(found, model, limits.request))

            with context.cancel_on_disconnect():
                wanted, request = await context.decoded(decode)
                context.shorten(wanted.timeout_s)
                tensors, facts = await context.ask(model, request)
            length, pieces = write_inference(tensors, facts, wanted)
            headers = [(b"content-type", JSON if length is None else OCTET_STREAM)]
            if length is not None:
                headers.append((b"inference-header-content-length", str(length).encode()))
            await context.send(send, headers, pieces, coding)


def find_model(catalog: Catalog, path: Mapping[str, str]) -> Served:
    """Return the model that a path of Open Inference names; a layer is a model, and so is attention without a layer."""
    if path.get("version", VERSION) != VERSION:
        raise LayerNotFound(f"the only version of a model is {VERSION}")
    return catalog.model(path["layer"])


def _checked(found: InferenceRequest, model: Served, limits: RequestLimits) -> CheckedRequest:
    if isinstance(model, ServedAttention):
        return check_attention(found.document, limits, found.mask_params)
    return check_request(found.document, model.name, model.spec, limits, found.mask_params)


def _inference_fields(fields: HeaderFields, take_offers: bool) -> tuple[bytes | None, bytes | None]:
    """Return the length of the body's JSON (None unless tensor bytes follow it) and the coding of the answer."""
    lengths = fields[b"inference-header-content-length"]
    if len(lengths) > 1:
        raise BadRequest("Inference-Header-Content-Length must be given once")
    return lengths[0] if lengths else None, answer_coding(fields, INFER_CODINGS, take_offers=take_offers)
