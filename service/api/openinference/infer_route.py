"""Infer route of the Open Inference Protocol: POST /v2/models/{layer}[/versions/{version}]/infer, as plain ASGI.

Invariants: a layer is a model and its only version is 1. The body is read as the protocol says, whatever Content-Type says: the
protocol's own clients send none, or octet-stream. The call, the queue and the bits of the answer are those of `/v1`.
"""

from __future__ import annotations

from service.api.accept import answer_coding
from service.api.content_type import JSON, OCTET_STREAM
from service.api.exchange import Exchange
from service.api.reception import Reception
from service.api.reply import Headers, send_reply
from service.api.request_body import joined
from service.errors import BadRequest
from service.http.asgi import Receive, Scope, Send
from service.http.header_fields import HeaderFields
from service.wire.attend_request import CheckedRequest, check_request
from service.wire.openinference.inference_answer import write_inference
from service.wire.openinference.inference_request import WantedAnswer, read_inference, split_inference

ROUTES = ("/v2/models/{layer}/infer", "/v2/models/{layer}/versions/{version}/infer")
CODINGS = (b"gzip", b"deflate")


class Infer:
    """The ASGI endpoint."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reception.open(scope, receive) as exchange:
            await _infer(exchange, scope, send)


async def _infer(exchange: Exchange, scope: Scope, send: Send) -> None:
    limits = exchange.limits
    layer = exchange.layer(**scope["path_params"])
    json_length, coding = exchange.fields.make(_forms, limits.take_offers)
    parts = await exchange.read(CODINGS, layer, is_binary=json_length is not None)

    async def decode() -> tuple[WantedAnswer, CheckedRequest]:
        text, rest = split_inference(joined(parts), json_length)
        found = read_inference(await exchange.parsed(text), rest)
        checked = await exchange.checked(
            lambda: check_request(found.attend, layer.name, layer.spec, limits.request, mask_params=found.mask_params)
        )
        return found.wanted, checked

    with exchange.watched():
        wanted, request = await exchange.decoded(decode)
        exchange.shorten(wanted.timeout_s)
        outcome = await exchange.ask(layer, request)
    facts = exchange.facts(layer, request, outcome)
    length, pieces = write_inference(outcome.result, facts, wanted)
    await send_reply(send, [*_content(length), exchange.server_timing()], pieces, coding)
    exchange.sent()


def _forms(fields: HeaderFields, take_offers: bool) -> tuple[bytes | None, bytes | None]:
    """Return the length of the body's JSON (None unless tensor bytes follow it) and the coding of the answer."""
    lengths = fields[b"inference-header-content-length"]
    if len(lengths) > 1:
        raise BadRequest("Inference-Header-Content-Length must be there once")
    return lengths[0] if lengths else None, answer_coding(fields, CODINGS, take_offers=take_offers)


def _content(length: int | None) -> Headers:
    if length is None:
        return [(b"content-type", JSON)]
    return [(b"content-type", OCTET_STREAM), (b"inference-header-content-length", str(length).encode())]
