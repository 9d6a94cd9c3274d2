"""The hot route: POST /v1/layers/{layer}/attend, as a plain ASGI endpoint.

Laws: checks run in the contract's order (media type, size, syntax, fields, tensors, masks, cost) and all before the queue;
both forms of a body become the same document and take one way from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from service.api.accept import answer_coding, answer_type
from service.api.asgi import Receive, Scope, Send, header
from service.api.body import BodyLimits, read_body
from service.api.content_type import JSON, SAFETENSORS, body_type
from service.api.exchange import Exchange
from service.api.reply import Piece, send_reply
from service.api.trace import trace_of
from service.attention.call import Answer, Call
from service.batching.batcher import Batcher
from service.batching.policy import BatchLimits
from service.errors import InvalidInput
from service.layers.catalog import Catalog
from service.wire.answer import AnswerFacts, write_json
from service.wire.decoding_thread import DecodingThread
from service.wire.json_document import parse
from service.wire.request import CheckedRequest, RequestLimits, check_request
from service.wire.safetensors_answer import write_safetensors
from service.wire.safetensors_document import parse_safetensors
from service.wire.schemas import AttendRequest, checked_request

ROUTE = "/v1/layers/{layer}/attend"
BODY_CODINGS = (b"gzip", b"zstd")
ANSWER_CODINGS = (b"zstd", b"gzip")
MAX_TIMEOUT_DIGITS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class AttendLimits:
    """What one request may be, and what one batch may hold.

    Bodies of `off_loop_bytes` and more are decoded in the decoding thread; with `take_offers` answers are compressed for
    whoever can read them so, else only for who asks.
    """

    body: BodyLimits
    request: RequestLimits
    max_json_depth: int
    timeout_s: float
    max_shared: BatchLimits
    off_loop_bytes: int
    take_offers: bool = False


class Attend:
    """The endpoint; `catalog` answers which layers are served now (or raises NotReady)."""

    def __init__(
        self,
        catalog: Callable[[], Catalog],
        batcher: Batcher[Call, Answer],
        decoding: DecodingThread,
        limits: AttendLimits,
        now: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._decoding = decoding
        self._batcher = batcher
        self._limits = limits
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace, limits = trace_of(scope), self._limits
        layer = self._catalog().get(scope["path_params"]["layer"])
        trace.layer = layer.name
        came = body_type(scope, (JSON, SAFETENSORS))
        wanted = answer_type(scope, (came, JSON if came == SAFETENSORS else SAFETENSORS))
        timeout_s = asked_timeout_s(scope, limits.timeout_s)
        parts = await read_body(scope, receive, limits.body, BODY_CODINGS)
        exchange = Exchange(trace, self._now)
        trace.bytes_in = sum(map(len, parts))

        async def decode() -> CheckedRequest:
            return await check_request(await self._document(parts, came), layer.name, layer.spec, limits.request)

        is_large = trace.bytes_in >= limits.off_loop_bytes
        request = await (self._decoding.run(decode) if is_large else decode())
        outcome = await exchange.ask(request, self._batcher, limits.max_shared, receive, timeout_s)
        facts = exchange.facts(layer, request, outcome)
        pieces = _pieces(outcome.result, facts, request, wanted)
        coding = answer_coding(scope, ANSWER_CODINGS, take_offers=limits.take_offers)
        await send_reply(send, [(b"content-type", wanted), exchange.server_timing()], pieces, coding)
        exchange.sent()

    async def _document(self, parts: list[bytes], came: bytes) -> AttendRequest:
        """Empties `parts`: from here on the document alone holds the bytes."""
        max_depth = self._limits.max_json_depth
        if came == SAFETENSORS:
            body = bytearray().join(parts)
            parts.clear()
            return checked_request(await parse_safetensors(body, max_depth=max_depth))
        text = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return checked_request(await parse(text, max_depth=max_depth))


def asked_timeout_s(scope: Scope, most_s: float) -> float:
    """The request deadline, which the caller may shorten with X-Request-Timeout-Ms."""
    asked = header(scope, b"x-request-timeout-ms")
    if asked is None:
        return most_s
    if not asked.isdigit() or not asked.strip(b"0"):
        raise InvalidInput("X-Request-Timeout-Ms must be a whole number of milliseconds, at least 1")
    if len(asked) > MAX_TIMEOUT_DIGITS:
        return most_s
    return min(most_s, int(asked) / 1000)


def _pieces(answer: Answer, facts: AnswerFacts, request: CheckedRequest, wanted: bytes) -> Iterable[Piece]:
    if wanted == SAFETENSORS:
        return write_safetensors(answer, facts, is_batch=request.is_batch)
    return write_json(answer, facts, request.form, is_batch=request.is_batch)
