"""Attend routes: the hot routes of a layer, of attention without a layer and of Open Inference, as plain ASGI endpoints.

Invariants: checks run in the contract's order (media type, size, syntax, fields, tensors, masks, cost), all before the queue.
Every form of a body becomes the same `CheckedRequest` and shares every later step, so the bits of an answer are the same too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.api.reply import JSON, OCTET_STREAM, SAFETENSORS, Coding, answer_coding, answer_type, body_type, collected
from service.api.request_body import joined
from service.api.request_context import LayerRequests, RequestContext
from service.errors import BadRequest, LayerNotFound
from service.http.asgi import Application, Receive, Scope, Send
from service.http.request_parser import HeaderFields
from service.layers.catalog import Catalog, Served, ServedAttention, ServedLayer
from service.layers.store import SDPA
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


def hot_endpoints(layer_requests: LayerRequests) -> dict[str, Application]:
    """Return the ASGI endpoint of each path."""
    attend, infer = AttendRoute(layer_requests), InferRoute(layer_requests)
    return {ROUTE: attend, ATTENTION_ROUTE: attend, **dict.fromkeys(INFER_ROUTES, infer)}


class AttendRoute:
    """The ASGI endpoint of `/v1`: attention through the layer that the path names, or without a layer."""

    def __init__(self, layer_requests: LayerRequests) -> None:
        self._layer_requests = layer_requests
        limits = layer_requests.limits
        self._templates = RequestTemplates(limits.request, limits.max_json_depth, limits.max_text_numbers)

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        with RequestContext(self._layer_requests, scope, _find) as context:
            limits, model = context.limits, context.layer
            sent, wanted, coding = context.fields.make(_negotiated, limits.take_offers)
            parts = await context.read(BODY_CODINGS, is_binary=sent == SAFETENSORS)

            async def decode() -> CheckedRequest:
                if sent == SAFETENSORS:
                    body = joined(parts)
                    is_long = has_long_header(body)
                    checked = await context.checked(lambda: self._read_safetensors(body, model), is_long=is_long)
                    return checked.holding(len(body))
                # Bind no name to the text of a parsed body: a name would keep all of it in memory, beside the document.
                document = await context.parsed(joined(parts))
                return await context.checked(lambda: _checked(document, model, limits.request))

            request = await context.decoded(decode)
            tensors, facts = await context.ask(request)
            is_json = wanted == JSON
            pieces = write_json(tensors, facts, request.form) if is_json else write_safetensors(tensors, facts)
            del request  # its tensors would stay until the answer is sent
            await context.send(send, [(b"content-type", wanted)], pieces, coding)

    def _read_safetensors(self, body: bytearray, model: Served) -> CheckedRequest:
        if isinstance(model, ServedLayer):
            return self._templates.read(body, model.name, model.digest, model.spec)
        limits = self._layer_requests.limits
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

    def __init__(self, layer_requests: LayerRequests) -> None:
        self._layer_requests = layer_requests

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        with RequestContext(self._layer_requests, scope, find_model) as context:
            limits, model = context.limits, context.layer
            kind = InferAttentionRequest if isinstance(model, ServedAttention) else InferRequest
            json_length, coding = context.fields.make(_inference_fields, limits.take_offers)
            parts = await context.read(INFER_CODINGS, is_binary=json_length is not None)

            async def decode() -> tuple[WantedAnswer, CheckedRequest]:
                text, rest = split_inference(joined(parts), json_length)
                parsed = await context.parsed(text)
                del text  # it would stay in memory, beside the document
                document, mask_params, wanted = read_inference(parsed, rest, kind)
                request = await context.checked(lambda: _checked(document, model, limits.request, mask_params))
                return wanted, request

            wanted, request = await context.decoded(decode)
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


def find_model(catalog: Catalog, path: Mapping[str, str]) -> Served:
    """Return the model that a path of Open Inference names; a layer is a model, and so is attention without a layer."""
    if path.get("version", VERSION) != VERSION:
        raise LayerNotFound(f"the only version of a model is {VERSION}")
    return catalog.model(path["layer"])


def _checked(
    document: Mapping[str, object], model: Served, limits: RequestLimits, mask_params: Sequence[str] = ()
) -> CheckedRequest:
    if isinstance(model, ServedAttention):
        return check_attention(document, limits, mask_params)
    return check_request(document, model.name, model.spec, limits, mask_params)


def _inference_fields(fields: HeaderFields, take_offers: bool) -> tuple[bytes | None, Coding | None]:
    """Return the length of the body's JSON (None unless tensor bytes follow it) and the coding of the answer."""
    lengths = fields[b"inference-header-content-length"]
    if len(lengths) > 1:
        raise BadRequest("Inference-Header-Content-Length must be given once")
    return lengths[0] if lengths else None, answer_coding(fields, INFER_CODINGS, take_offers=take_offers)
