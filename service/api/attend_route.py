"""Attend routes: the hot routes of a layer, of attention without a layer and of Open Inference, as plain ASGI endpoints.

Invariants: checks run in the contract's order (media type, size, syntax, fields, tensors, masks, cost), all before the queue.
Every form of a body becomes the same `CheckedRequest` and shares every later step, so the bits of an answer are the same too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from service.api.reply import JSON, OCTET_STREAM, SAFETENSORS, Coding, answer_coding, answer_type, body_type, collected
from service.api.request_context import RequestContext, SharedState
from service.errors import BadRequest, LayerNotFound
from service.http.asgi import Application, Receive, Scope, Send
from service.http.request_parser import HeaderFields
from service.layers.catalog import Catalog, Served, ServedAttention, ServedLayer
from service.layers.directory import SDPA
from service.wire.answer import write_json
from service.wire.attend_request import CheckedRequest, RequestLimits, check_request
from service.wire.attention_request import check_attention
from service.wire.inference_codec import (
    VERSION,
    InferAttentionRequest,
    InferRequest,
    WantedAnswer,
    read_inference,
    split_inference,
    write_inference,
)
from service.wire.safetensors_codec import RequestTemplates, has_long_header, parse_safetensors, write_safetensors

ROUTE = "/v1/layers/{layer}/attend"
ATTENTION_ROUTE = "/v1/attention"
INFER_ROUTES = ("/v2/models/{layer}/infer", "/v2/models/{layer}/versions/{version}/infer")
FORMS = (JSON, SAFETENSORS)
"""Media types of bodies and answers, in the order in which error messages name them."""
BODY_CODINGS = (b"gzip", b"zstd")
ANSWER_CODINGS = (b"zstd", b"gzip")
INFER_CODINGS = (b"gzip", b"deflate")


def hot_endpoints(shared: SharedState) -> dict[str, Application]:
    attend, infer = AttendRoute(shared), InferRoute(shared)
    return {ROUTE: attend, ATTENTION_ROUTE: attend, **dict.fromkeys(INFER_ROUTES, infer)}


class AttendRoute:
    """The ASGI endpoint of `/v1`: attention through the layer that the path names, or without a layer."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        limits = shared.limits
        self._templates = RequestTemplates(limits.request, limits.max_json_depth, limits.max_text_numbers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with RequestContext(self._shared, scope, receive, _find) as context:
            sent, wanted, coding = context.fields.make(_negotiated, context.limits.take_offers)
            body = await context.read(BODY_CODINGS, is_binary=sent == SAFETENSORS)
            request = await context.counted(await self._checked(context, sent, body))
            del body  # the request's tensors hold what they need of it
            tensors, facts = await context.ask(request)
            is_json = wanted == JSON
            pieces = write_json(tensors, facts, request.form) if is_json else write_safetensors(tensors, facts)
            del request  # its tensors would stay until the answer is sent
            await context.send(send, [(b"content-type", wanted)], pieces, coding)

    async def _checked(self, context: RequestContext, sent: bytes, body: bytearray) -> CheckedRequest:
        """Return the request in a body of the type that was sent."""
        limits = context.limits.request
        layer: Served = context.layer
        if sent == JSON:
            document = await context.parsed(body)
            return await context.run(_check, document, layer, limits)
        read = functools.partial(self._read_safetensors, body, layer)
        request = await (context.off_loop(read) if has_long_header(body) else context.run(read))
        return request.holding(len(body))

    def _read_safetensors(self, body: bytearray, layer: Served) -> CheckedRequest:
        if isinstance(layer, ServedLayer):
            return self._templates.read(body, layer.name, layer.digest, layer.spec)
        limits = self._shared.limits
        document = parse_safetensors(body, max_depth=limits.max_json_depth, max_numbers=limits.max_text_numbers)
        return check_attention(document, limits.request)


def _find(catalog: Catalog, path: Mapping[str, str]) -> Served:
    return catalog.get(path["layer"]) if "layer" in path else catalog.model(SDPA)


def _negotiated(fields: HeaderFields, take_offers: bool) -> tuple[bytes, bytes, Coding | None]:
    """Return the media type of the body, that of the answer, and the answer's content coding."""
    sent = body_type(fields, FORMS)
    # An answer has the form of its body unless the client asks for another.
    wanted = answer_type(fields, (sent, *(form for form in FORMS if form != sent)))
    return sent, wanted, answer_coding(fields, ANSWER_CODINGS, take_offers=take_offers)


class InferRoute:
    """The ASGI endpoint of Open Inference.

    Inference-Header-Content-Length decides the body's form, not Content-Type: the protocol's clients send none, or octet-stream.
    """

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with RequestContext(self._shared, scope, receive, find_model) as context:
            json_length, coding = context.fields.make(_inference_fields, context.limits.take_offers)
            body = await context.read(INFER_CODINGS, is_binary=json_length is not None)
            request, wanted = await self._checked(context, body, json_length)
            request = await context.counted(request)
            del body  # the request's tensors hold what they need of it
            context.shorten(wanted.timeout_s)
            tensors, facts = await context.ask(request)
            del request  # its tensors would stay until the answer is sent
            pieces, blobs = write_inference(tensors, facts, wanted)
            if not blobs:
                await context.send(send, [(b"content-type", JSON)], pieces, coding)
                return
            head, num_bytes = await collected(pieces)
            length = b"inference-header-content-length", str(num_bytes).encode()
            headers = [(b"content-type", OCTET_STREAM), length]
            await context.send(send, headers, [*head, *blobs], coding)

    async def _checked(
        self, context: RequestContext, body: bytearray, json_length: bytes | None
    ) -> tuple[CheckedRequest, WantedAnswer]:
        """Return the request in a body whose first `json_length` bytes, or all, are JSON."""
        layer: Served = context.layer
        kind = InferAttentionRequest if isinstance(layer, ServedAttention) else InferRequest
        text, rest = split_inference(body, json_length)
        document, mask_params, wanted = read_inference(await context.parsed(text), rest, kind)
        return await context.run(_check, document, layer, context.limits.request, mask_params), wanted


def find_model(catalog: Catalog, path: Mapping[str, str]) -> Served:
    """Return the model that a path of Open Inference names; a layer is a model, and so is attention without a layer."""
    if path.get("version", VERSION) != VERSION:
        raise LayerNotFound(f"the only version of a model is {VERSION}")
    return catalog.model(path["layer"])


def _check(
    document: Mapping[str, object], layer: Served, limits: RequestLimits, mask_params: Sequence[str] = ()
) -> CheckedRequest:
    if isinstance(layer, ServedAttention):
        return check_attention(document, limits, mask_params)
    return check_request(document, layer.name, layer.spec, limits, mask_params)


def _inference_fields(fields: HeaderFields, take_offers: bool) -> tuple[bytes | None, Coding | None]:
    """Return the length of the body's JSON (None unless tensor bytes follow it) and the coding of the answer."""
    lengths = fields[b"inference-header-content-length"]
    if len(lengths) > 1:
        raise BadRequest("Inference-Header-Content-Length must be given once")
    return lengths[0] if lengths else None, answer_coding(fields, INFER_CODINGS, take_offers=take_offers)
