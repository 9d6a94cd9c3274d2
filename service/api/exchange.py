"""Exchange: one attention request from its complete body to its sent answer; its deadline and its times.

Laws: the deadline starts when the body is complete; a caller who leaves frees its place in the queue at once; every time
that is told (trace, answer, Server-Timing) comes from here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from service.api.asgi import ClientGone, Receive
from service.api.trace import Trace
from service.attention.call import Answer, Call
from service.batching.batcher import Batcher
from service.batching.job import Outcome
from service.batching.policy import BatchLimits
from service.layers.stored_layer import StoredLayer
from service.wire.answer import AnswerFacts
from service.wire.request import CheckedRequest


class Exchange:
    """Begins when the body is complete; `now` is monotonic seconds."""

    def __init__(self, trace: Trace, now: Callable[[], float]) -> None:
        self._trace = trace
        self._now = now
        self._complete = now()
        self._answered = self._complete
        trace.stage = "decoding"

    async def ask(
        self,
        request: CheckedRequest,
        batcher: Batcher[Call, Answer],
        max_shared: BatchLimits,
        receive: Receive,
        timeout_s: float,
    ) -> Outcome[Answer]:
        """The layer's answer to the decoded request, within `timeout_s` of the complete body.

        Raises what the waiting room raises, and ClientGone where the caller leaves first.
        """
        trace = self._trace
        trace.tokens, trace.decode_s, trace.stage = request.cost.tokens, self._elapsed_s(), "queued"
        outcome = await _submit(request, batcher, max_shared, receive, self._complete + timeout_s)
        trace.batch_requests, trace.queue_s, trace.compute_s = (
            outcome.batch.requests,
            outcome.queue_s,
            outcome.compute_s,
        )
        trace.masked_rows, trace.stage = request.masked_rows, "sending"
        self._answered = self._now()
        return outcome

    def sent(self) -> None:
        """The answer is written."""
        self._trace.encode_s = self._now() - self._answered

    def facts(self, layer: StoredLayer, request: CheckedRequest, outcome: Outcome[Answer]) -> AnswerFacts:
        """What goes beside the answer's tensors."""
        return AnswerFacts(
            masked_rows=request.masked_rows,
            layer=layer.name,
            digest=layer.digest,
            batch=outcome.batch,
            timing_ms=self.timing_ms,
        )

    def timing_ms(self) -> dict[str, float]:
        """The phases up to now in milliseconds; `total` runs from the complete body."""
        trace = self._trace
        phases = {
            "decode": trace.decode_s,
            "queue": trace.queue_s,
            "compute": trace.compute_s,
            "total": self._elapsed_s(),
        }
        return {name: round((seconds or 0.0) * 1000, 3) for name, seconds in phases.items()}

    def server_timing(self) -> tuple[bytes, bytes]:
        """The same as a header."""
        return b"server-timing", ", ".join(f"{name};dur={ms}" for name, ms in self.timing_ms().items()).encode()

    def _elapsed_s(self) -> float:
        return self._now() - self._complete


async def _submit(
    request: CheckedRequest,
    batcher: Batcher[Call, Answer],
    max_shared: BatchLimits,
    receive: Receive,
    deadline: float,
) -> Outcome[Answer]:
    """Waits for the answer or for the caller to leave, whichever comes first; raises ClientGone for the latter."""
    call, cost = request.call, request.cost
    # Small requests do not wait behind huge ones: what can only run alone has a lane of its own.
    is_large = (
        cost.tokens > max_shared.max_tokens
        or cost.cells > max_shared.max_cells
        or cost.weights_bytes > max_shared.max_weights_bytes
    )
    lane = (call.layer, call.is_float64, is_large)
    async with _watched(receive) as is_gone:
        try:
            return await batcher.submit(call, lane=lane, cost=cost, deadline=deadline)
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
