"""The hot route: POST /v1/layers/{layer}/attend, as a plain ASGI endpoint.

Laws: checks run in the contract's order (media type, size, syntax, fields, tensors, masks, cost) and all before the queue; a
caller who leaves frees its place in the queue at once; a large answer is written in pieces that never hold the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator

from service.api.accept import check_accepts_json
from service.api.asgi import ClientGone, Receive, Scope, Send, header
from service.api.body import BodyLimits, check_json, read_body
from service.api.trace import Trace, trace_of
from service.attention.call import Answer, Call
from service.batching.batcher import Batcher
from service.batching.job import Outcome
from service.batching.policy import BatchLimits
from service.errors import InvalidInput
from service.layers.catalog import Catalog
from service.wire.answer import AnswerFacts, write_answer
from service.wire.json_document import parse
from service.wire.request import CheckedRequest, RequestLimits, check_request
from service.wire.schemas import checked_request

ROUTE = "/v1/layers/{layer}/attend"
# An answer up to this size is sent whole, with its length; a larger one is streamed so that it is never in memory at once.
WHOLE_BYTES = 2**20
MAX_TIMEOUT_DIGITS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class AttendLimits:
    body: BodyLimits
    request: RequestLimits
    max_json_depth: int
    timeout_s: float
    max_shared: BatchLimits


class Attend:
    """The endpoint; `catalog` answers which layers are served now (or raises NotReady)."""

    def __init__(
        self,
        catalog: Callable[[], Catalog],
        batcher: Batcher[Call, Answer],
        limits: AttendLimits,
        now: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._batcher = batcher
        self._limits = limits
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = trace_of(scope)
        trace.route = ROUTE
        layer = self._catalog().get(scope["path_params"]["layer"])
        trace.layer = layer.name
        check_accepts_json(scope)
        check_json(scope)
        timeout_s = self._timeout(scope)
        body = await read_body(scope, receive, self._limits.body)
        complete = self._now()
        trace.bytes_in, trace.stage = len(body), "decoding"
        document = await parse(body, max_depth=self._limits.max_json_depth)
        del body
        request = await check_request(checked_request(document), layer.name, layer.spec, self._limits.request)
        del document
        trace.tokens, trace.decode_s, trace.stage = request.cost.tokens, self._now() - complete, "queued"
        outcome = await self._submit(request, receive, complete + timeout_s)
        trace.batch_requests, trace.queue_s, trace.compute_s = (
            outcome.batch.requests,
            outcome.queue_s,
            outcome.compute_s,
        )
        trace.masked_rows, trace.stage = request.masked_rows, "sending"
        facts = AnswerFacts(
            masked_rows=request.masked_rows,
            layer=layer.name,
            digest=layer.digest,
            batch=outcome.batch,
            timing_ms=lambda: _timing_ms(trace, self._now() - complete),
        )
        pieces = write_answer(outcome.result, facts, request.form, is_batch=request.is_batch)
        await _send_json(send, pieces, trace, lambda: self._now() - complete)

    def _timeout(self, scope: Scope) -> float:
        """The request deadline, which the caller may shorten with X-Request-Timeout-Ms."""
        asked = header(scope, b"x-request-timeout-ms")
        if asked is None:
            return self._limits.timeout_s
        if not asked.isdigit() or not asked.strip(b"0"):
            raise InvalidInput("X-Request-Timeout-Ms must be a whole number of milliseconds, at least 1")
        if len(asked) > MAX_TIMEOUT_DIGITS:
            return self._limits.timeout_s
        return min(self._limits.timeout_s, int(asked) / 1000)

    async def _submit(self, request: CheckedRequest, receive: Receive, deadline: float) -> Outcome[Answer]:
        """Waits for the answer or for the caller to leave, whichever comes first; raises ClientGone for the latter."""
        call, cost = request.call, request.cost
        # Small requests do not wait behind huge ones: what can only run alone has a lane of its own.
        shared = self._limits.max_shared
        is_large = (
            cost.tokens > shared.max_tokens
            or cost.cells > shared.max_cells
            or cost.weights_bytes > shared.max_weights_bytes
        )
        lane = (call.layer, call.is_float64, is_large)
        async with _watched(receive) as is_gone:
            try:
                return await self._batcher.submit(call, lane=lane, cost=cost, deadline=deadline)
            except asyncio.CancelledError:
                if not is_gone():
                    raise
                # The cancellation was the watcher's and ends here; one from outside (shutdown) goes on.
                if (serving := asyncio.current_task()) is not None:
                    serving.uncancel()
                raise ClientGone from None


@contextlib.asynccontextmanager
async def _watched(receive: Receive) -> AsyncIterator[Callable[[], bool]]:
    """Cancels the body of the `async with` when the caller disconnects; the answer tells whether that was why."""
    serving = asyncio.current_task()
    assert serving is not None, "an endpoint runs in a task. This is a bug."
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        serving.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield lambda: gone
    finally:
        watcher.cancel()


async def _send_json(send: Send, pieces: Iterator[bytes], trace: Trace, elapsed: Callable[[], float]) -> None:
    """Whole with its length where it is small, else streamed; others get the loop between two pieces."""
    ready: list[bytes] = []
    size, is_whole = 0, True
    for piece in pieces:
        ready.append(piece)
        size += len(piece)
        if size > WHOLE_BYTES:
            is_whole = False
            break
        if size > WHOLE_BYTES // 4:
            await asyncio.sleep(0)
    headers = [(b"content-type", b"application/json"), (b"server-timing", _server_timing(trace, elapsed()))]
    if is_whole:
        headers.append((b"content-length", str(size).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"".join(ready), "more_body": not is_whole})
    if is_whole:
        return
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


def _timing_ms(trace: Trace, total_s: float) -> dict[str, float]:
    phases = {"decode": trace.decode_s, "queue": trace.queue_s, "compute": trace.compute_s, "total": total_s}
    return {name: round((seconds or 0.0) * 1000, 3) for name, seconds in phases.items()}


def _server_timing(trace: Trace, total_s: float) -> bytes:
    return ", ".join(f"{name};dur={ms}" for name, ms in _timing_ms(trace, total_s).items()).encode()
