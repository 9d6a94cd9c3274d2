"""Attend routes: the hot routes of a layer, of attention without a layer and of Open Inference, as plain ASGI endpoints.

Invariants: checks run in the contract's order (media type, size, syntax, fields, tensors, masks, cost), all before the queue.
Every form of a body becomes the same `CheckedRequest` and shares every later step, so the bits of an answer are the same too.
In Open Inference a layer is a model and its only version is 1. A body is read as the protocol says, whatever Content-Type says:
the protocol's own clients send none, or octet-stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from service.api.reply import JSON, OCTET_STREAM, SAFETENSORS, Headers, Piece, answer_coding, answer_type, body_type
from service.api.request_body import joined
from service.api.request_context import LayerRequests, RequestContext
from service.attention.call import AnyAnswer
from service.errors import BadRequest
from service.http.asgi import Receive, Scope, Send
from service.http.request_parser import HeaderFields
from service.layers.catalog import Served, ServedAttention
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
from service.wire.safetensors_codec import RequestTemplates, parse_safetensors, write_safetensors

ROUTE = "/v1/layers/{layer}/attend"
ATTENTION_ROUTE = "/v1/attention"
INFER_ROUTES = ("/v2/models/{layer}/infer", "/v2/models/{layer}/versions/{version}/infer")
BODY_CODINGS = (b"gzip", b"zstd")
ANSWER_CODINGS = (b"zstd", b"gzip")
INFER_CODINGS = (b"gzip", b"deflate")


class Codec(NamedTuple):
    """One form of bodies and answers. `check` gets the body's bytes, or its parsed JSON if the body is text."""

    media_type: bytes
    is_text: bool
    check: Callable[[Any, Any], CheckedRequest]
    write: Callable[[AnyAnswer, AnswerFacts, CheckedRequest], Iterable[Piece]]


def _codecs(
    check_json: Callable[[Any, Any], CheckedRequest], check_safetensors: Callable[[Any, Any], CheckedRequest]
) -> tuple[Codec, ...]:
    """Return one entry for each form; error messages name them in this order."""
    return (
        Codec(
            JSON,
            True,
            check_json,
            lambda answer, facts, request: write_json(request.tensors(answer), facts, request.form),
        ),
        Codec(
            SAFETENSORS,
            False,
            check_safetensors,
            lambda answer, facts, request: write_safetensors(request.tensors(answer), facts),
        ),
    )


def attend_route(layer_requests: LayerRequests) -> HotRoute:
    """Return the endpoint of `ROUTE`, through a layer."""
    limits = layer_requests.limits
    templates = RequestTemplates(limits.request, limits.max_json_depth, limits.max_text_numbers)
    codecs = _codecs(
        lambda document, layer: check_request(document, layer.name, layer.spec, limits.request),
        lambda body, layer: templates.read(body, layer.name, layer.digest, layer.spec),
    )
    return HotRoute(layer_requests, lambda context, path: context.layer(**path), codecs)


def attention_route(layer_requests: LayerRequests) -> HotRoute:
    """Return the endpoint of `ATTENTION_ROUTE`, on the caller's own tensors."""
    limits = layer_requests.limits

    def check_safetensors(body: bytearray, _: Served) -> CheckedRequest:
        document = parse_safetensors(body, max_depth=limits.max_json_depth, max_numbers=limits.max_text_numbers)
        return check_attention(document, limits.request)

    codecs = _codecs(lambda document, _: check_attention(document, limits.request), check_safetensors)
    return HotRoute(layer_requests, lambda context, _: context.model(SDPA), codecs)


class HotRoute:
    """An ASGI endpoint with its codecs; `find` returns what computes, from the context and the parameters of the path."""

    def __init__(
        self,
        layer_requests: LayerRequests,
        find: Callable[[RequestContext, Mapping[str, str]], Served],
        codecs: Sequence[Codec],
    ) -> None:
        self._layer_requests = layer_requests
        self._find = find
        self._codecs = {codec.media_type: codec for codec in codecs}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._layer_requests.open(scope, receive) as context:
            await self._answer(context, scope, send)

    async def _answer(self, context: RequestContext, scope: Scope, send: Send) -> None:
        model = self._find(context, scope["path_params"])
        came, wanted, coding = context.fields.make(self._forms)
        parts = await context.read(BODY_CODINGS, model, is_binary=not came.is_text)

        async def decode() -> CheckedRequest:
            # No name refers to the text of a parsed body: the document alone keeps the parts of it that it needs.
            found = await context.parsed(joined(parts)) if came.is_text else joined(parts)
            return await context.checked(lambda: came.check(found, model))

        with context.watched():
            request = await context.decoded(decode)
            outcome = await context.ask(model, request)
        pieces = wanted.write(outcome.result, context.facts(model, request, outcome), request)
        await context.send(send, [(b"content-type", wanted.media_type)], pieces, coding)

    def _forms(self, fields: HeaderFields) -> tuple[Codec, Codec, bytes | None]:
        """Return the codec of the body, the codec of the answer, and the answer's content coding."""
        taken = tuple(self._codecs)
        came = body_type(fields, taken)
        # An answer has the form of its body unless the caller asks for another.
        wanted = answer_type(fields, (came, *(media for media in taken if media != came)))
        take_offers = self._layer_requests.limits.take_offers
        return (
            self._codecs[came],
            self._codecs[wanted],
            answer_coding(fields, ANSWER_CODINGS, take_offers=take_offers),
        )


class Infer:
    """The ASGI endpoint of Open Inference."""

    def __init__(self, layer_requests: LayerRequests) -> None:
        self._layer_requests = layer_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._layer_requests.open(scope, receive) as context:
            await _infer(context, scope, send)


async def _infer(context: RequestContext, scope: Scope, send: Send) -> None:
    limits = context.limits
    model = context.model(**scope["path_params"])
    kind = ATTENTION if isinstance(model, ServedAttention) else LAYER
    json_length, coding = context.fields.make(_infer_forms, limits.take_offers)
    parts = await context.read(INFER_CODINGS, model, is_binary=json_length is not None)

    async def decode() -> tuple[WantedAnswer, CheckedRequest]:
        text, rest = split_inference(joined(parts), json_length)
        found = read_inference(await context.parsed(text), rest, kind)
        return found.wanted, await context.checked(lambda: _checked(found, model, limits.request))

    with context.watched():
        wanted, request = await context.decoded(decode)
        context.shorten(wanted.timeout_s)
        outcome = await context.ask(model, request)
    length, pieces = write_inference(request.tensors(outcome.result), context.facts(model, request, outcome), wanted)
    await context.send(send, _content(length), pieces, coding)


def _checked(found: InferenceRequest, model: Served, limits: RequestLimits) -> CheckedRequest:
    if isinstance(model, ServedAttention):
        return check_attention(found.document, limits, found.mask_params)
    return check_request(found.document, model.name, model.spec, limits, found.mask_params)


def _infer_forms(fields: HeaderFields, take_offers: bool) -> tuple[bytes | None, bytes | None]:
    """Return the length of the body's JSON (None unless tensor bytes follow it) and the coding of the answer."""
    lengths = fields[b"inference-header-content-length"]
    if len(lengths) > 1:
        raise BadRequest("Inference-Header-Content-Length must be given once")
    return lengths[0] if lengths else None, answer_coding(fields, INFER_CODINGS, take_offers=take_offers)


def _content(length: int | None) -> Headers:
    if length is None:
        return [(b"content-type", JSON)]
    return [(b"content-type", OCTET_STREAM), (b"inference-header-content-length", str(length).encode())]
