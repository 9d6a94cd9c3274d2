"""The hot route: POST /v1/layers/{layer}/attend, as a plain ASGI endpoint.

Laws: checks run in the contract's order (media type, size, syntax, fields, tensors, masks, cost) and all before the queue;
both forms of a body become the same document and take one way from there.
"""

from __future__ import annotations

from collections.abc import Iterable

from service.api.accept import answer_coding, answer_type
from service.api.asgi import Receive, Scope, Send
from service.api.body import joined
from service.api.caller import Part
from service.api.content_type import JSON, SAFETENSORS, body_type
from service.api.exchange import Exchange
from service.api.reception import Reception
from service.api.reply import Piece, send_reply
from service.attention.call import Answer
from service.wire.answer import AnswerFacts, write_json
from service.wire.json_document import parse
from service.wire.request import CheckedRequest, check_request
from service.wire.safetensors_answer import write_safetensors
from service.wire.safetensors_document import parse_safetensors
from service.wire.schemas import AttendRequest, checked_request

ROUTE = "/v1/layers/{layer}/attend"
BODY_CODINGS = (b"gzip", b"zstd")
ANSWER_CODINGS = (b"zstd", b"gzip")


class Attend:
    """The endpoint."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reception.open(scope, receive) as exchange:
            await _attend(exchange, scope, send)


async def _attend(exchange: Exchange, scope: Scope, send: Send) -> None:
    limits = exchange.limits
    layer = exchange.layer(**scope["path_params"])
    came = body_type(scope, (JSON, SAFETENSORS))
    wanted = answer_type(scope, (came, JSON if came == SAFETENSORS else SAFETENSORS))
    coding = answer_coding(scope, ANSWER_CODINGS, take_offers=limits.take_offers)
    parts = await exchange.read(BODY_CODINGS)
    exchange.check_lane(layer, is_binary=came == SAFETENSORS)

    async def decode() -> CheckedRequest:
        document = await _document(parts, came, limits.max_json_depth)
        return await check_request(document, layer.name, layer.spec, limits.request)

    with exchange.watched():
        request = await exchange.decoded(decode)
        outcome = await exchange.ask(layer, request)
    facts = exchange.facts(layer, request, outcome)
    pieces = _pieces(outcome.result, facts, request, wanted)
    await send_reply(send, [(b"content-type", wanted), exchange.server_timing()], pieces, coding)
    exchange.sent()


async def _document(parts: list[Part], came: bytes, max_depth: int) -> AttendRequest:
    """Empties `parts`: from here on the document alone holds the bytes."""
    if came == SAFETENSORS:
        body = joined(parts)
        return checked_request(await parse_safetensors(body, max_depth=max_depth))
    text = b"".join(parts)
    parts.clear()
    return checked_request(await parse(text, max_depth=max_depth))


def _pieces(answer: Answer, facts: AnswerFacts, request: CheckedRequest, wanted: bytes) -> Iterable[Piece]:
    if wanted == SAFETENSORS:
        return write_safetensors(answer, facts, is_batch=request.is_batch)
    return write_json(answer, facts, request.form, is_batch=request.is_batch)
