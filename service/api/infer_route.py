"""Infer route of the Open Inference Protocol: POST /v2/models/{layer}[/versions/{version}]/infer, as plain ASGI.

Invariants: a layer is a model and its only version is 1. The body is read as the protocol says, whatever Content-Type says: the
protocol's own clients send none, or octet-stream. The call, the queue and the bits of the answer are those of `/v1`.
"""

from __future__ import annotations

from service.api.reply import JSON, OCTET_STREAM, Headers, answer_coding, send_reply
from service.api.request_body import joined
from service.api.request_context import LayerRequests, RequestContext
from service.errors import BadRequest
from service.http.asgi import Receive, Scope, Send
from service.http.head import HeaderFields
from service.wire.attend_request import CheckedRequest, check_request
from service.wire.inference_codec import WantedAnswer, read_inference, split_inference, write_inference

ROUTES = ("/v2/models/{layer}/infer", "/v2/models/{layer}/versions/{version}/infer")
CODINGS = (b"gzip", b"deflate")


class Infer:
    """The ASGI endpoint."""

    def __init__(self, layer_requests: LayerRequests) -> None:
        self._layer_requests = layer_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._layer_requests.open(scope, receive) as context:
            await _infer(context, scope, send)


async def _infer(context: RequestContext, scope: Scope, send: Send) -> None:
    limits = context.limits
    layer = context.layer(**scope["path_params"])
    json_length, coding = context.fields.make(_forms, limits.take_offers)
    parts = await context.read(CODINGS, layer, is_binary=json_length is not None)

    async def decode() -> tuple[WantedAnswer, CheckedRequest]:
        text, rest = split_inference(joined(parts), json_length)
        found = read_inference(await context.parsed(text), rest)
        checked = await context.checked(
            lambda: check_request(found.document, layer.name, layer.spec, limits.request, mask_params=found.mask_params)
        )
        return found.wanted, checked

    with context.watched():
        wanted, request = await context.decoded(decode)
        context.shorten(wanted.timeout_s)
        outcome = await context.ask(layer, request)
    facts = context.facts(layer, request, outcome)
    length, pieces = write_inference(outcome.result, facts, wanted)
    await send_reply(send, [*_content(length), context.server_timing()], pieces, coding)
    context.sent()


def _forms(fields: HeaderFields, take_offers: bool) -> tuple[bytes | None, bytes | None]:
    """Return the length of the body's JSON (None unless tensor bytes follow it) and the coding of the answer."""
    lengths = fields[b"inference-header-content-length"]
    if len(lengths) > 1:
        raise BadRequest("Inference-Header-Content-Length must be given once")
    return lengths[0] if lengths else None, answer_coding(fields, CODINGS, take_offers=take_offers)


def _content(length: int | None) -> Headers:
    if length is None:
        return [(b"content-type", JSON)]
    return [(b"content-type", OCTET_STREAM), (b"inference-header-content-length", str(length).encode())]
