"""Request context: one attention request from its headers to its sent answer, with its deadline, its times and its bytes.

Invariants: the deadline starts when the body has arrived and covers decompressing, decoding, waiting and computing. From then on
a disconnect ends the request at once, while its answer is sent at the next write. Large bodies are parsed and checked one after
another, in one thread; the others on the event loop, where no text takes longer than 20 ms. A request that its lane would refuse
is refused before its body is read if the length is announced. Every reported time (log line, answer, Server-Timing) comes from
here.

Byte budgets limit what no other limit counts: bodies until they are decoded, and answers until they are sent. All reservations of
one caller together may hold at most as much as they leave free (dynamic thresholds, Choudhury and Hahne 1998), so large requests
are refused first and small ones still fit. A request frees its bytes at the latest when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, Protocol, Self, TypeVar

import torch

from service.api.outer_middleware import milliseconds, record_of
from service.api.reply import Coding, Headers, Piece, send_reply
from service.api.request_body import announced_body, decompressed, joined, read_body
from service.attention.call import Answer
from service.attention.engine import LayerCall, LoadedLayer
from service.batching.batcher import Batcher
from service.batching.job import NOTHING, Cost
from service.batching.policy import BatchLimits, size_class
from service.errors import CostLimit, DeadlineExceeded, Draining, InvalidInput, NotReady, QueueFull, TooLarge
from service.http.asgi import CYCLE, KEY_DIGEST, ClientGone, Receive, RequestCycle, Scope, Send
from service.http.receive_cycle import ReceiveCycle
from service.http.request_parser import HeaderFields, fields_of
from service.layers.catalog import Catalog
from service.wire.attend_request import AnswerFacts, CheckedRequest, RequestLimits
from service.wire.json_document import parse

P = ParamSpec("P")
R = TypeVar("R")


class Target(Protocol):
    """What a request is for: a layer, attention without a layer, or a model."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str | None: ...
    @property
    def loaded(self) -> LoadedLayer: ...
    def output_bytes(self, call: Any, /) -> int: ...


# Returns what a request is for, given the served layers and the parameters of its path.
Find = Callable[[Catalog, Mapping[str, str]], Target | None]

_SERVER_TIMING = b"decode;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, total;dur=%.3f"
_OF_TEXT = re.compile("; tensors [^;]*safetensors[^;]*")  # a remedy for a body of text
# How much one request counts in what a byte of such bodies takes.
LEARNT_SHARE = 1 / 8


@dataclasses.dataclass(frozen=True, slots=True)
class RequestContextLimits:
    """Limits of one request and of one batch, from the settings; `intake_bytes` and `answer_bytes` are the byte budgets."""

    max_body_bytes: int
    body_timeout_s: float
    request: RequestLimits
    max_json_depth: int
    max_text_numbers: int
    timeout_s: float
    max_shared: BatchLimits
    off_loop_bytes: int
    intake_bytes: int
    answer_bytes: int
    take_offers: bool = False

    @property
    def off_loop_text_bytes(self) -> int:
        """Text takes several times as long to parse and check as other bodies."""
        return self.off_loop_bytes // 4


@dataclasses.dataclass(slots=True)
class ByteBudget:
    """A limit for the bytes of one kind, one for each process; `words` name the kind in the error message."""

    max_bytes: int
    words: str
    num_bytes: int = 0
    by_caller: dict[Hashable, int] = dataclasses.field(default_factory=dict)


class Reservation:
    """The bytes that one request holds of a budget. `caller` is None if callers are not distinguished."""

    __slots__ = ("_budget", "_caller", "_num_bytes")

    def __init__(self, budget: ByteBudget, caller: Hashable = None) -> None:
        self._budget = budget
        self._caller = caller
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes` more; if they do not fit, free the request's other bytes and raise QueueFull.

        Freed later, they would refuse the other large bodies that arrive together with this one.
        """
        budget = self._budget
        own = num_bytes + (self._num_bytes if self._caller is None else budget.by_caller.get(self._caller, 0))
        left = budget.max_bytes - budget.num_bytes - num_bytes
        # At least `own` bytes must stay free, and a fifth of the budget, or 16 times `own` where that is less. So medium bodies,
        # however many, do not fill the budget, and small ones still fit.
        if num_bytes and left < max(own, min(budget.max_bytes // 5, 16 * own)):
            held = budget.num_bytes
            self.release()
            raise QueueFull(
                f"{held:,} of at most {budget.max_bytes:,} bytes of {budget.words}; this request does not fit beside them"
            )
        self._add(num_bytes)

    def release(self) -> None:
        """Free all bytes; a second call changes nothing."""
        if self._num_bytes:
            self._add(-self._num_bytes)

    def _add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._budget.num_bytes += num_bytes
        if self._caller is not None:
            by_caller = self._budget.by_caller
            held = by_caller[self._caller] = by_caller.get(self._caller, 0) + num_bytes
            if not held:
                del by_caller[self._caller]


class RequestContext:
    """Made when the headers have arrived; use it in a `with` block, which frees its reserved bytes in every case."""

    def __init__(self, shared: SharedState, scope: Scope, receive: Receive, find: Find) -> None:
        """Take the layer that `find` returns; raise what it raises, NotReady, or Draining after `SharedState.close`.

        If it returns None, a model that may have to be read first, call `take` before `ask`.
        """
        if shared.is_closed:
            raise Draining("the service is shutting down and accepts no new requests")
        found = find(shared.catalog, scope["path_params"])
        self._shared = shared
        self.limits = shared.limits
        self.fields = fields_of(scope)
        self._key = scope.get(KEY_DIGEST)
        self._body_bytes = Reservation(shared.intake, self._key)
        self._answer_bytes = Reservation(shared.answers, self._key)
        self._task: asyncio.Task[Any] | None = None
        self._end: Callable[[], Exception] | None = None
        self.record = record_of(scope)
        if found is not None:
            self.take(found)
        self._cycle: RequestCycle = scope.get(CYCLE) or ReceiveCycle(receive)
        self._timeout_s = self.limits.timeout_s
        self._complete = self._answered = 0.0
        self._arrival: Callable[[], None] | None = None
        self._is_binary = False

    def take(self, layer: Target) -> None:
        self.layer: Any = layer  # of the kind that `find` returns
        self.record.layer = layer.name

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._shared.opened.add(self)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._shared.opened.discard(self)
        self._cycle.on_disconnect(None)
        self._end_arrival()
        self._body_bytes.release()
        self._answer_bytes.release()
        if isinstance(error, TooLarge) and self._is_binary:
            error.message = _OF_TEXT.sub("", error.message)
        if self._end is not None and self._task is not None and isinstance(error, asyncio.CancelledError):
            # This cancellation is our own and ends here; one from outside (shutdown) propagates.
            self._task.uncancel()
            raise self._end() from None

    def cancel(self, end: Callable[[], Exception]) -> None:
        """Cancel the task that serves the request; the `with` block then raises what `end` returns."""
        if self._task is not None and self._end is None:
            self._end = end
            self._task.cancel()

    def shorten(self, timeout_s: float | None) -> None:
        """Use the caller's deadline if it is sooner."""
        if timeout_s is not None:
            self._timeout_s = min(self._timeout_s, timeout_s)

    async def read(self, codings: tuple[bytes, ...], *, is_binary: bool) -> bytearray:
        """Return the whole body, decompressed; from its arrival until `send` begins, a disconnect ends the request.

        Under overload a body whose length is announced, and which is not compressed, is refused before it is read.
        """
        self._is_binary = is_binary
        limits, reserve = self.limits, self._body_bytes.grow
        coding, num_announced = self.fields.make(announced_body, codings, limits.max_body_bytes)
        asked_s = self.fields.make(_asked_timeout_s)
        self.shorten(asked_s or None)
        self._check_lane(num_announced if coding is None else 0)
        parts = await read_body(self._cycle, limits.max_body_bytes, limits.body_timeout_s, reserve)
        self._complete = self._shared.now()
        self.record.receive_s, self.record.stage = self._complete - self.record.started, "decoding"
        self._cycle.on_disconnect(lambda: self.cancel(ClientGone))
        if coding is not None:
            work = decompressed(parts, coding, limits.max_body_bytes, reserve, self._shared.run_off_loop)
            parts = await self.within_deadline("the body was decompressed", work)
        if asked_s == 0:  # reported after the body's size and coding
            raise InvalidInput("X-Request-Timeout-Ms must be a whole number of milliseconds, at least 1")
        self.record.bytes_in = sum(map(len, parts))
        if self.record.bytes_in >= (limits.off_loop_bytes if is_binary else limits.off_loop_text_bytes):
            self._note_arrival()
        return await self.run(joined, parts)

    async def within_deadline(self, doing: str, work: Coroutine[Any, Any, R]) -> R:
        """Return the result of `work`; at the deadline raise DeadlineExceeded, whose message says what was being done."""
        # Not a generator with `yield`: from Python 3.12 on the error's traceback would refer back to it, and it holds the body.
        try:
            async with asyncio.timeout(self._timeout_s - self._elapsed_s()):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline passed while {doing}") from None

    async def run(self, work: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        """Return what `work` returns; for a large body it runs in the thread, after that of earlier ones."""
        if self.record.bytes_in < self.limits.off_loop_bytes:
            return work(*args, **named)
        return await self.off_loop(functools.partial(work, *args, **named))

    async def off_loop(self, work: Callable[[], R]) -> R:
        """Return what `work` returns, run in the thread; the deadline ends the wait for it."""
        doing = "the body was parsed and checked, or waited for the bodies before it"
        return await self.within_deadline(doing, self._shared.run_off_loop(work))

    async def parsed(self, text: bytearray) -> dict[str, Any]:
        """Return the JSON object in `text`, and empty it unless the object refers to it: memory must not hold both."""
        limits = self.limits
        read = functools.partial(parse, text, max_depth=limits.max_json_depth, max_numbers=limits.max_text_numbers)
        document = await (self.off_loop(read) if len(text) >= limits.off_loop_text_bytes else self.run(read))
        with contextlib.suppress(BufferError):  # its long strings are views of the text
            text.clear()
        return document

    async def counted(self, request: CheckedRequest) -> CheckedRequest:
        """Return the checked request with its masked rows counted, in the thread if that takes long; free the body's bytes."""
        if not request.is_counted:
            request = await self.off_loop(request.counted)
        self._body_bytes.release()
        self.record.decode_s, self.record.stage = self._elapsed_s(), "queued"
        return request

    def _check_lane(self, num_bytes: int) -> None:
        """Raise what the batcher would raise for a request of about this size (0: unknown), which saves reading its body.

        Tokens are estimated from bytes, at the ratio of the last requests for the layer. The estimate may name another lane: then
        this request is refused although its own lane would take it, or read and refused by `ask`.
        """
        batcher = self._shared.batcher
        batcher.check_open(self._key)
        if num_bytes and batcher.is_congested and (cost := self._likely_cost(num_bytes)) is not None:
            batcher.check_lane(self._lane(cost), cost, self._key)

    def _note_arrival(self) -> None:
        """Let the lane count the request from now on: its body waits for others to be parsed, and then for its computation."""
        if cost := self._likely_cost(self.record.bytes_in):
            self._arrival = self._shared.batcher.note_arrival(self._lane(cost), cost, self._key)

    def _end_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival()
            self._arrival = None

    def _likely_cost(self, num_bytes: int) -> Cost | None:
        """Return the cost of a body of this size, by the last ones for the layer; None if there were none."""
        if (each := self._shared.cost_per_byte.get((self.record.layer or "", self._is_binary))) is None:
            return None
        tokens, flops = each
        return NOTHING._replace(tokens=int(num_bytes * tokens), flops=int(num_bytes * flops))

    def _lane(self, cost: Cost, *, is_float64: bool = False) -> Hashable:
        """Return the lane. The digest separates a layer from its replacement, because both may have requests waiting."""
        return self.layer.name, self.layer.digest, is_float64, size_class(cost, self.limits.max_shared)

    async def ask(self, request: CheckedRequest) -> tuple[dict[str, torch.Tensor], AnswerFacts]:
        """Return the tensors and the other fields of the layer's answer; raise what the batcher raises.

        The answer's bytes are reserved until it is sent, because a client that reads slowly keeps all of it in memory.
        """
        call, cost, layer, record = request.call, request.cost, self.layer, self.record
        record.tokens = cost.tokens
        # No reservation can ever hold more than half of the budget.
        num_bytes, most = cost.weights_bytes + layer.output_bytes(call), self._shared.answers.max_bytes // 2
        if num_bytes > most:
            raise CostLimit(
                f"the answer would have {num_bytes:,} bytes, expected at most {most:,} (half of ATTENTION_QUEUE_BYTES, "
                "or twice the largest body and weights if that is more); send fewer sequences, or ask for fewer weights"
            )
        self._answer_bytes.grow(num_bytes)
        self._shared.note_cost((layer.name, self._is_binary), cost, record.bytes_in)
        work, deadline = LayerCall(layer.loaded, call), self._complete + self._timeout_s
        lane = self._lane(cost, is_float64=work.is_float64)
        own = self._complete + self.limits.timeout_s
        self._end_arrival()
        outcome = await self._shared.batcher.submit(work, lane, cost, deadline, self._key, own_deadline=own)
        record.batch, record.queue_s, record.compute_s = outcome.batch, outcome.queue_s, outcome.compute_s
        record.masked_rows, record.stage = request.masked_rows, "sending"
        self._answered = self._shared.now()
        facts = AnswerFacts(request.masked_rows, layer.name, layer.digest, outcome.batch, self._timing_ms)
        return request.tensors(outcome.result), facts

    async def send(self, send: Send, headers: Headers, pieces: Iterable[Piece], coding: Coding | None) -> None:
        """Send the answer with its times in a Server-Timing header, and record how long encoding and sending took."""
        self._cycle.on_disconnect(None)
        timing = b"server-timing", _SERVER_TIMING % tuple([seconds * 1000 for seconds in self._phases_s()])
        await send_reply(send, [*headers, timing], pieces, coding)
        self.record.encode_s = self._shared.now() - self._answered

    def _timing_ms(self) -> dict[str, float]:
        return dict(zip(("decode", "queue", "compute", "total"), map(milliseconds, self._phases_s()), strict=True))

    def _phases_s(self) -> tuple[float, float, float, float]:
        """Return the times of decoding, waiting and computing, and the time since the body was complete."""
        record = self.record
        return record.decode_s or 0.0, record.queue_s or 0.0, record.compute_s or 0.0, self._elapsed_s()

    def _elapsed_s(self) -> float:
        return self._shared.now() - self._complete


def _asked_timeout_s(fields: HeaderFields) -> float | None:
    """Return X-Request-Timeout-Ms, which may shorten the deadline, in seconds; 0 unless it is a whole number of at least 1."""
    values = fields[b"x-request-timeout-ms"]
    if not values:
        return None
    asked = values[0] if len(values) == 1 else b""
    return float(asked) / 1000 if asked.isdigit() else 0.0  # infinite if it has very many digits


class Layers(Protocol):
    """Knows the served layers (`worker/layer_registry.py`); None until they are loaded."""

    catalog: Catalog | None


class SharedState:
    """What all requests of a process share. `not_loaded` returns why `layers` has no catalog yet."""

    def __init__(
        self,
        layers: Layers,
        not_loaded: Callable[[], str],
        batcher: Batcher[LayerCall, Answer],
        limits: RequestContextLimits,
        now: Callable[[], float],
    ) -> None:
        self._layers = layers
        self._not_loaded = not_loaded
        self.batcher = batcher
        self.limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checking")
        self.now = now
        self.intake = ByteBudget(limits.intake_bytes, "bodies are being received and decoded")
        self.answers = ByteBudget(limits.answer_bytes, "answers are being computed and sent")
        self.is_closed = False
        self.opened: set[RequestContext] = set()
        self.cost_per_byte: dict[tuple[str, bool], tuple[float, float]] = {}
        """Tokens and flops of a byte in the last bodies, by layer and whether the bodies are binary."""

    @property
    def catalog(self) -> Catalog:
        """The served layers; raises NotReady until all are loaded and checked."""
        if self._layers.catalog is None:
            raise NotReady(self._not_loaded())
        return self._layers.catalog

    def note_cost(self, body_kind: tuple[str, bool], cost: Cost, num_bytes: int) -> None:
        tokens, flops = cost.tokens / num_bytes, cost.flops / num_bytes
        old_tokens, old_flops = self.cost_per_byte.get(body_kind, (tokens, flops))
        self.cost_per_byte[body_kind] = (
            old_tokens + LEARNT_SHARE * (tokens - old_tokens),
            old_flops + LEARNT_SHARE * (flops - old_flops),
        )

    def close(self) -> None:
        """Open no new request; a request that is open continues to its answer."""
        self.is_closed = True

    def settle(self) -> None:
        """End every request with Draining that the batcher does not have yet (later it ends the request)."""
        for context in self.opened:
            if context.record.stage in ("receiving", "decoding"):
                context.cancel(lambda: Draining("the service shut down before the request finished"))

    async def run_off_loop(self, work: Callable[[], R]) -> R:
        """Run `work` in the one thread for large bodies, after earlier work, and return its result.

        If the caller is cancelled, `work` is dropped at once, with the body that it holds, although its turn comes later.
        """
        waiting = [work]
        del work

        def run() -> R:
            return waiting.pop()()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        finally:
            waiting.clear()

    async def end(self) -> None:
        """End the thread; call this when no request waits for it any more."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
