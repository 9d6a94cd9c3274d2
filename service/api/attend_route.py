"""Attend route: POST /v1/layers/{layer}/attend, a hot route served as a plain ASGI endpoint.

Invariants: checks run in the contract's order (media type, size, syntax, fields, tensors, masks, cost), all before the queue.
Both forms of a body, JSON and safetensors, become the same `CheckedRequest` and share every later step.
"""

from __future__ import annotations

from collections.abc import Iterable

from service.api.accept import answer_coding, answer_type
from service.api.content_type import JSON, SAFETENSORS, body_type
from service.api.exchange import Exchange
from service.api.reception import Reception
from service.api.reply import Piece, send_reply
from service.api.request_body import joined
from service.attention.call import Answer
from service.http.asgi import Receive, Scope, Send
from service.http.header_fields import HeaderFields
from service.wire.answer import AnswerFacts, write_json
from service.wire.attend_request import CheckedRequest, check_request
from service.wire.request_template import RequestTemplates
from service.wire.safetensors_answer import write_safetensors
from service.wire.schemas import checked_request

ROUTE = "/v1/layers/{layer}/attend"
BODY_CODINGS = (b"gzip", b"zstd")
ANSWER_CODINGS = (b"zstd", b"gzip")


class Attend:
    """The ASGI endpoint, with its request-template cache."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        limits = reception.limits
        self._patterns = RequestTemplates(limits.request, limits.max_json_depth, limits.max_text_numbers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reception.open(scope, receive) as exchange:
            await _attend(exchange, self._patterns, scope, send)


async def _attend(exchange: Exchange, patterns: RequestTemplates, scope: Scope, send: Send) -> None:
    limits = exchange.limits
    layer = exchange.layer(**scope["path_params"])
    came, wanted, coding = exchange.fields.make(_forms, limits.take_offers)
    is_binary = came == SAFETENSORS
    parts = await exchange.read(BODY_CODINGS, layer, is_binary=is_binary)

    async def decode() -> CheckedRequest:
        if is_binary:
            return await exchange.checked(lambda: patterns.read(joined(parts), layer.name, layer.digest, layer.spec))
        # No name here refers to the text: the document alone keeps the parts of it that it needs.
        document = await exchange.parsed(joined(parts))
        return await exchange.checked(
            lambda: check_request(checked_request(document), layer.name, layer.spec, limits.request)
        )

    with exchange.watched():
        request = await exchange.decoded(decode)
        outcome = await exchange.ask(layer, request)
    facts = exchange.facts(layer, request, outcome)
    pieces = _pieces(outcome.result, facts, request, wanted)
    await send_reply(send, [(b"content-type", wanted), exchange.server_timing()], pieces, coding)
    exchange.sent()


def _forms(fields: HeaderFields, take_offers: bool) -> tuple[bytes, bytes, bytes | None]:
    """Return the media type of the body, the media type of the answer, and the answer's content coding."""
    came = body_type(fields, (JSON, SAFETENSORS))
    wanted = answer_type(fields, (came, JSON if came == SAFETENSORS else SAFETENSORS))
    return came, wanted, answer_coding(fields, ANSWER_CODINGS, take_offers=take_offers)


def _pieces(answer: Answer, facts: AnswerFacts, request: CheckedRequest, wanted: bytes) -> Iterable[Piece]:
    if wanted == SAFETENSORS:
        return write_safetensors(answer, facts, is_batch=request.is_batch)
    return write_json(answer, facts, request.form, is_batch=request.is_batch)
