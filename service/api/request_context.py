"""Request context: one attention request from its headers to its sent answer, with its deadline and its times.

Invariants: the deadline starts when the body is complete and covers decoding, waiting and computing. From then on a disconnect
frees its place at once, at every stage. Large bodies are decoded one after another. One that would be late is refused before it
is read if its length is known. Every reported time (log line, answer, Server-Timing) comes from here.

Layer requests: opens a request context for each, and holds what both hot routes share.
Invariants: there is one for each process. After `close` it opens no new request; a request that is open continues to its answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from service.api.byte_budget import ByteBudget
from service.api.json_parser import JsonParser
from service.api.outer_middleware import RequestRecord, milliseconds, record_of
from service.api.reply import Headers, Piece, send_reply
from service.api.request_body import BodyLimits, Caller, CancelOnDisconnect, Part, caller_of, read_body
from service.attention.call import AnyAnswer
from service.attention.engine import LayerCall
from service.batching.batcher import Batcher
from service.batching.decoding_queue import DecodingQueue
from service.batching.job import NOTHING, Cost, Outcome
from service.batching.policy import BatchLimits, size_class
from service.errors import CostLimit, DeadlineExceeded, Draining, InvalidInput, LayerNotFound
from service.http.asgi import KEY_DIGEST, Receive, Scope, Send
from service.http.request_parser import HeaderFields, fields_of
from service.layers.catalog import Catalog, Served, ServedLayer
from service.wire.answer import AnswerFacts
from service.wire.attend_request import CheckedRequest, RequestLimits
from service.wire.inference_schemas import VERSION
from service.wire.json_document import parse, parse_s

R = TypeVar("R")

MAX_TIMEOUT_DIGITS = 12
_SERVER_TIMING = b"decode;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, total;dur=%.3f"
# Longest time, by `parse_s`, for which a body is parsed on the event loop.
MAX_HERE_S = 0.008
# Approximate bytes of one number in a body: base64 takes 5, lists take 9 and more.
TEXT_BYTES, BINARY_BYTES = 8, 4
# Text of at least so many bytes enters the decoding queue; shorter text is decoded too fast for the queue to pay off.
QUEUED_TEXT_BYTES = 32 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class RequestContextLimits:
    """Limits of one request and of one batch.

    Bodies of `off_loop_bytes` and more are checked in a thread. All bodies that are not decoded yet hold at most
    `intake_bytes`; all answers that are awaited or being sent hold at most `answer_bytes`. With `take_offers` an answer is
    compressed for every client that can read it so, else only on request.
    """

    body: BodyLimits
    request: RequestLimits
    max_json_depth: int
    max_text_numbers: int
    timeout_s: float
    max_shared: BatchLimits
    off_loop_bytes: int
    intake_bytes: int
    answer_bytes: int
    take_offers: bool = False


class RequestContext:
    """Opened when the headers have arrived; use it in a `with` block, which frees its reserved bytes in every case."""

    def __init__(self, requests: LayerRequests, record: RequestRecord, scope: Scope, receive: Receive) -> None:
        self._requests = requests
        self.limits = requests.limits
        self.fields = fields_of(scope)
        self._key = scope.get(KEY_DIGEST)
        self._share = requests.intake.share(self._key)
        self._answer_share = requests.answers.share(self._key)
        self._serving: asyncio.Task[Any] | None = None
        self._is_settled = False
        self._trace = record
        self._caller: Caller = caller_of(scope, receive)
        self._timeout_s = self.limits.timeout_s
        self._complete = self._answered = 0.0
        self._is_binary = False

    def __enter__(self) -> Self:
        self._serving = asyncio.current_task()
        self._requests.entered(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, record: TracebackType | None
    ) -> None:
        self._requests.left(self)
        self._share.release()
        self._answer_share.release()
        if self._is_settled and self._serving is not None and isinstance(error, asyncio.CancelledError):
            self._serving.uncancel()
            raise Draining("the service shut down before the request finished") from None

    def settle(self) -> None:
        """End the request with Draining, unless the batcher has it (and ends it) or its answer is being sent."""
        if self._serving is not None and self._trace.stage in ("receiving", "decoding"):
            self._is_settled = True
            self._serving.cancel()

    def layer(self, layer: str) -> ServedLayer:
        """Return the served layer that the path names; raise LayerNotFound, or NotReady while no layer is served."""
        found = self._requests.catalog.get(layer)
        self._trace.layer = found.name
        return found

    def model(self, layer: str, version: str = VERSION) -> Served:
        """Return the same, or attention without a layer."""
        found = self._requests.catalog.model(layer)
        if version != VERSION:
            raise LayerNotFound(f"the only version of a model is {VERSION}")
        self._trace.layer = found.name
        return found

    def shorten(self, timeout_s: float | None) -> None:
        """Use the caller's deadline if it is sooner than ours."""
        if timeout_s is not None:
            self._timeout_s = min(self._timeout_s, timeout_s)

    async def read(self, codings: tuple[bytes, ...], layer: Served, *, is_binary: bool) -> list[Part]:
        """Return the parts of the whole body, which is for `layer`; the deadline starts when it is complete.

        In overload this raises the refusal of a body of that length, before reading it if the length is announced.
        """
        self._is_binary = is_binary
        announced = self.fields.make(_announced_bytes)
        if announced <= self.limits.body.max_bytes:  # read_body refuses a larger one
            self._check_lane(layer, announced)
            if self._requests.bodies.num_bytes:
                self.shorten(self.fields.make(_asked_timeout_s))
                self._check_bodies(announced)
        run_off_loop = self._requests.run_off_loop
        parts = await read_body(self.fields, self._caller, self.limits.body, codings, self._share, run_off_loop)
        self.shorten(self.fields.make(_asked_timeout_s))
        self._complete = self._requests.now()
        self._trace.receive_s = self._complete - self._trace.started
        self._trace.bytes_in, self._trace.stage = sum(map(len, parts)), "decoding"
        self._check_bodies(self._trace.bytes_in)
        self._check_lane(layer, self._trace.bytes_in)
        return parts

    def _waits_its_turn(self, num_bytes: int) -> bool:
        """Return whether a body of this size waits until earlier bodies are decoded."""
        return num_bytes >= (self.limits.off_loop_bytes if self._is_binary else QUEUED_TEXT_BYTES)

    def _check_bodies(self, num_bytes: int) -> None:
        if self._waits_its_turn(num_bytes):
            self._requests.bodies.check(num_bytes, self._timeout_s, self.limits.timeout_s)

    def watched(self) -> CancelOnDisconnect:
        """Return a context manager that cancels its block when the caller disconnects, and then raises ClientGone."""
        return CancelOnDisconnect(self._caller)

    async def decoded(self, decode: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Return what `decode` makes of the body; a large body waits for the large ones before it."""
        num_bytes = self._trace.bytes_in
        if not self._waits_its_turn(num_bytes):
            result = await decode()
        else:
            try:
                async with asyncio.timeout(self._left_s()), self._requests.bodies.decoding(num_bytes):
                    result = await decode()
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed while the body waited to be decoded") from None
        self._share.release()
        self._trace.decode_s, self._trace.stage = self._elapsed_s(), "queued"
        return result

    async def parsed(self, text: bytes | bytearray) -> dict[str, Any]:
        """Return the JSON object in `text`, parsed here or, if that takes long, by the helper process."""
        limits = self.limits
        if parse_s(text) <= MAX_HERE_S:
            return parse(text, max_depth=limits.max_json_depth, max_numbers=limits.max_text_numbers)
        return await self._requests.parser.parse(text)

    async def checked(self, check: Callable[[], CheckedRequest]) -> CheckedRequest:
        """Return the request that `check` returns; long checks run in a thread."""
        is_large = self._trace.bytes_in >= self.limits.off_loop_bytes
        request = await self._requests.run_off_loop(check) if is_large else check()
        return request if request.count_masked_rows is None else await self._requests.run_off_loop(request.counted)

    def _check_lane(self, layer: Served, num_bytes: int) -> None:
        """Raise QueueFull if a request of about this size would be refused anyway, which saves reading or decoding it.

        The number of tokens is estimated from the bytes; after a wrong estimate the body is decoded before the refusal.
        """
        batcher = self._requests.batcher
        batcher.check_open(self._key)
        if batcher.is_congested:
            bytes_each = BINARY_BYTES if self._is_binary else TEXT_BYTES
            tokens = num_bytes // (bytes_each * layer.row_values)
            batcher.check_lane(self._lane(layer, NOTHING._replace(tokens=tokens)), self._key)

    def _lane(self, layer: Served, cost: Cost, *, is_float64: bool = False) -> Hashable:
        """Return the lane. It has the digest because a layer and its replacement may both have requests waiting."""
        return layer.name, layer.digest, is_float64, size_class(cost, self.limits.max_shared)

    async def ask(self, layer: Served, request: CheckedRequest) -> Outcome[AnyAnswer]:
        """Return the layer's answer; raise what the batcher raises."""
        call, cost, record = request.call, request.cost, self._trace
        record.tokens = cost.tokens
        # Reserved until it is sent: a client that reads its answer slowly, or not at all, keeps all of it in memory.
        self._take_answer(cost.weights_bytes + layer.output_bytes(call))
        lane = self._lane(layer, cost, is_float64=call.is_float64)
        deadline = self._complete + self._timeout_s
        work = LayerCall(layer.loaded, call)
        outcome = await self._requests.batcher.submit(work, lane=lane, cost=cost, deadline=deadline, caller=self._key)
        record.batch_requests, record.queue_s, record.compute_s = (
            outcome.batch.requests,
            outcome.queue_s,
            outcome.compute_s,
        )
        record.masked_rows, record.stage, record.batch = request.masked_rows, "sending", outcome.batch
        self._answered = self._requests.now()
        return outcome

    def _take_answer(self, num_bytes: int) -> None:
        """Reserve the bytes of the answer; raise CostLimit if they can never fit, QueueFull if they do not fit now."""
        most = self._requests.answers.max_share
        if num_bytes > most:
            raise CostLimit(f"the answer would have {num_bytes:,} bytes, expected at most {most:,}")
        self._answer_share.grow(num_bytes)

    def facts(self, layer: Served, request: CheckedRequest, outcome: Outcome[AnyAnswer]) -> AnswerFacts:
        """Return the answer's fields besides its tensors."""
        return AnswerFacts(
            masked_rows=request.masked_rows,
            layer=layer.name,
            digest=layer.digest,
            batch=outcome.batch,
            timing_ms=self.timing_ms,
        )

    async def send(self, send: Send, headers: Headers, pieces: Iterable[Piece], coding: bytes | None) -> None:
        """Send the answer with its times in a Server-Timing header, and record how long encoding and sending took."""
        await send_reply(send, [*headers, self._server_timing()], pieces, coding)
        self._trace.encode_s = self._requests.now() - self._answered

    def timing_ms(self) -> dict[str, float]:
        """Return the phases up to now in milliseconds; `total` starts at the complete body."""
        record = self._trace
        return {
            "decode": milliseconds(record.decode_s or 0.0),
            "queue": milliseconds(record.queue_s or 0.0),
            "compute": milliseconds(record.compute_s or 0.0),
            "total": milliseconds(self._elapsed_s()),
        }

    def _server_timing(self) -> tuple[bytes, bytes]:
        """Return the same phases as a Server-Timing header."""
        record = self._trace
        phases = (record.decode_s or 0.0, record.queue_s or 0.0, record.compute_s or 0.0, self._elapsed_s())
        return b"server-timing", _SERVER_TIMING % tuple([seconds * 1000 for seconds in phases])

    def _elapsed_s(self) -> float:
        return self._requests.now() - self._complete

    def _left_s(self) -> float:
        return max(0.0, self._timeout_s - self._elapsed_s())


def _announced_bytes(fields: HeaderFields) -> int:
    """Return the announced length of the body, 0 if there is none; a compressed body becomes larger than that."""
    values = fields[b"content-length"]
    return int(values[0]) if values and values[0].isdigit() and len(values[0]) <= MAX_TIMEOUT_DIGITS else 0


def _asked_timeout_s(fields: HeaderFields) -> float | None:
    """Return X-Request-Timeout-Ms, which may shorten the deadline, in seconds; raise InvalidInput if it is no whole number."""
    values = fields[b"x-request-timeout-ms"]
    if not values:
        return None
    asked = values[0].lstrip(b"0") if len(values) == 1 else b""
    if not asked.isdigit():
        raise InvalidInput("X-Request-Timeout-Ms must be a whole number of milliseconds, at least 1")
    return None if len(asked) > MAX_TIMEOUT_DIGITS else int(asked) / 1000


class LayerRequests:
    """`catalog` returns the layers that are served now, or raises NotReady; `now` returns monotonic seconds."""

    def __init__(
        self,
        catalog: Callable[[], Catalog],
        batcher: Batcher[LayerCall, AnyAnswer],
        bodies: DecodingQueue,
        limits: RequestContextLimits,
        now: Callable[[], float],
    ) -> None:
        self.batcher = batcher
        self.bodies = bodies
        self.limits = limits
        self._catalog = catalog
        self.parser = JsonParser(limits.max_json_depth, limits.max_text_numbers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checking")
        self.now = now
        self.intake = ByteBudget(limits.intake_bytes, "bodies are being received and decoded")
        self.answers = ByteBudget(limits.answer_bytes, "answers are being computed and sent")
        self._is_closed = False
        self._open: set[RequestContext] = set()

    @property
    def catalog(self) -> Catalog:
        return self._catalog()

    def open(self, scope: Scope, receive: Receive) -> RequestContext:
        """Return the context of a request whose headers have arrived; raise Draining after `close`."""
        if self._is_closed:
            raise Draining("the service is shutting down and accepts no new requests")
        return RequestContext(self, record_of(scope), scope, receive)

    def entered(self, context: RequestContext) -> None:
        self._open.add(context)

    def left(self, context: RequestContext) -> None:
        self._open.discard(context)

    def close(self) -> None:
        self._is_closed = True

    def settle(self) -> None:
        """End every request that the batcher does not have yet; its answer is Draining."""
        for context in list(self._open):
            context.settle()

    async def run_off_loop(self, work: Callable[[], R]) -> R:
        """Run `work` in the one thread for checks and decompression, after earlier work, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def end(self) -> None:
        """End the helper process and the thread; call this when no request waits for them any more."""
        self.parser.close()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
