"""Exchange: one attention request from its headers to its sent answer; its deadline and its times.

Laws: the deadline starts when the body is complete and holds for decoding, waiting and computing alike; from then on a caller
who leaves frees its place at once, wherever it is; large bodies are decoded one after another, and one that would be late is
refused before it is read where its length is known; every time that is told (trace, answer, Server-Timing) comes from here.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Hashable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from service.api.byte_budget import ByteBudget
from service.api.caller import Caller, Part, caller_of
from service.api.cancel_on_disconnect import CancelOnDisconnect
from service.api.json_parser import JsonParser
from service.api.request_body import BodyLimits, read_body
from service.api.request_record import RequestRecord, milliseconds
from service.attention.call import Answer, Call
from service.attention.loaded_layer import Work
from service.batching.batcher import Batcher
from service.batching.decoding_queue import DecodingQueue
from service.batching.job import NOTHING, Cost, Outcome
from service.batching.policy import BatchLimits, size_class
from service.errors import CostLimit, DeadlineExceeded, Draining, InvalidInput, LayerNotFound
from service.http.asgi import KEY_DIGEST, Receive, Scope, fields_of
from service.http.header_fields import HeaderFields
from service.layers.catalog import Catalog, ServedLayer
from service.wire.answer import AnswerFacts
from service.wire.attend_request import CheckedRequest, RequestLimits
from service.wire.openinference.inference_schemas import VERSION

R = TypeVar("R")

MAX_TIMEOUT_DIGITS = 12
_SERVER_TIMING = b"decode;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, total;dur=%.3f"
# Of a number in a body, about: base64 has 5, lists 9 and more.
TEXT_BYTES, BINARY_BYTES = 8, 4
# Text of at least so many bytes waits its turn to be decoded; what is shorter takes no longer than a look at the queue is worth.
QUEUED_TEXT_BYTES = 32 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """What one request may be, and what one batch may hold.

    Bodies of `off_loop_bytes` and more are checked in a thread; all bodies that are not tensors yet hold at most
    `intake_bytes`, all answers that are waited for or being sent `answer_bytes`; with `take_offers` answers are compressed for
    whoever can read them so, else only for who asks.
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


class House(Protocol):
    """What an exchange uses of the running service (`reception.py`)."""

    @property
    def limits(self) -> ExchangeLimits: ...

    @property
    def intake(self) -> ByteBudget: ...

    @property
    def answers(self) -> ByteBudget: ...

    @property
    def catalog(self) -> Catalog: ...

    @property
    def batcher(self) -> Batcher[Work, Answer]: ...

    @property
    def bodies(self) -> DecodingQueue: ...

    def now(self) -> float: ...

    def entered(self, exchange: Exchange) -> None: ...

    def left(self, exchange: Exchange) -> None: ...

    @property
    def parser(self) -> JsonParser: ...

    async def run_off_loop(self, work: Callable[[], R]) -> R: ...


class Exchange:
    """Opened by the reception when the headers are there; `with` it, so that whatever happens its bytes are given back."""

    def __init__(self, house: House, trace: RequestRecord, scope: Scope, receive: Receive) -> None:
        self._house = house
        self.limits = house.limits
        self.fields = fields_of(scope)
        self._key = scope.get(KEY_DIGEST)
        self._share = house.intake.share(self._key)
        self._answer_share = house.answers.share(self._key)
        self._serving: asyncio.Task[Any] | None = None
        self._is_settled = False
        self._trace = trace
        self._caller: Caller = caller_of(scope, receive)
        self._timeout_s = self.limits.timeout_s
        self._complete = self._answered = 0.0
        self._is_binary = False

    def __enter__(self) -> Self:
        self._serving = asyncio.current_task()
        self._house.entered(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._house.left(self)
        self._share.release()
        self._answer_share.release()
        if self._is_settled and self._serving is not None and isinstance(error, asyncio.CancelledError):
            self._serving.uncancel()
            raise Draining("the service shut down before this was finished") from None

    def settle(self) -> None:
        """The grace is over: tells the caller so, unless the waiting room does or his answer is on its way."""
        if self._serving is not None and self._trace.stage in ("receiving", "decoding"):
            self._is_settled = True
            self._serving.cancel()

    def layer(self, layer: str, version: str = VERSION) -> ServedLayer:
        """The served layer that the path names; raises LayerNotFound, and NotReady while none is served."""
        found = self._house.catalog.get(layer)
        if version != VERSION:
            raise LayerNotFound(f"every model has one version, {VERSION}")
        self._trace.layer = found.name
        return found

    def shorten(self, timeout_s: float | None) -> None:
        """The deadline that the caller asks for, if it is sooner than ours."""
        if timeout_s is not None:
            self._timeout_s = min(self._timeout_s, timeout_s)

    async def read(self, codings: tuple[bytes, ...], layer: ServedLayer, *, is_binary: bool) -> list[Part]:
        """The parts of the whole body, which is for `layer`; the deadline starts when it is complete.

        Raises what a body of that length is refused with in overload, where the length is announced before it is read.
        """
        self._is_binary = is_binary
        announced = self.fields.make(_announced_bytes)
        if announced <= self.limits.body.max_bytes:  # else it is refused for its size
            self._check_lane(layer, announced)
            if self._house.bodies.num_bytes:
                self.shorten(self.fields.make(_asked_timeout_s))
                self._check_bodies(announced)
        run_off_loop = self._house.run_off_loop
        parts = await read_body(self.fields, self._caller, self.limits.body, codings, self._share, run_off_loop)
        self.shorten(self.fields.make(_asked_timeout_s))
        self._complete = self._house.now()
        self._trace.receive_s = self._complete - self._trace.started
        self._trace.bytes_in, self._trace.stage = sum(map(len, parts)), "decoding"
        self._check_bodies(self._trace.bytes_in)
        self._check_lane(layer, self._trace.bytes_in)
        return parts

    def _waits_its_turn(self, num_bytes: int) -> bool:
        """Whether a body of this size is decoded after those that came before it."""
        return num_bytes >= (self.limits.off_loop_bytes if self._is_binary else QUEUED_TEXT_BYTES)

    def _check_bodies(self, num_bytes: int) -> None:
        if self._waits_its_turn(num_bytes):
            self._house.bodies.check(num_bytes, self._timeout_s, self.limits.timeout_s)

    def watched(self) -> CancelOnDisconnect:
        """Cancels what is inside when the caller disconnects, and then raises ClientGone."""
        return CancelOnDisconnect(self._caller)

    async def decoded(self, decode: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """What `decode` makes of the body, after the large ones that came before."""
        num_bytes = self._trace.bytes_in
        if not self._waits_its_turn(num_bytes):
            result = await decode()
        else:
            try:
                async with asyncio.timeout(self._left_s()), self._house.bodies.turn(num_bytes):
                    result = await decode()
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed while the body waited to be decoded") from None
        self._share.release()
        self._trace.decode_s, self._trace.stage = self._elapsed_s(), "queued"
        return result

    async def parsed(self, text: bytes | bytearray) -> dict[str, Any]:
        """The JSON object in `text`, parsed here or, where that takes long, by the helper process."""
        return await self._house.parser.parse(text)

    async def checked(self, check: Callable[[], CheckedRequest]) -> CheckedRequest:
        """The request that `check` returns; what takes long is done in a thread."""
        is_large = self._trace.bytes_in >= self.limits.off_loop_bytes
        request = await self._house.run_off_loop(check) if is_large else check()
        return request if request.count_masked_rows is None else await self._house.run_off_loop(request.counted)

    def _check_lane(self, layer: ServedLayer, num_bytes: int) -> None:
        """Raises QueueFull where a request of about this size would be refused anyway: reading or decoding it helps nobody.

        How many tokens a body holds is guessed from its bytes; where the guess is wrong it is decoded first.
        """
        batcher = self._house.batcher
        batcher.check_open(self._key)
        if batcher.is_congested:
            bytes_each = BINARY_BYTES if self._is_binary else TEXT_BYTES
            tokens = num_bytes // (bytes_each * layer.spec.query_width)
            batcher.check_lane(self._lane(layer, NOTHING._replace(tokens=tokens)), self._key)

    def _lane(self, layer: ServedLayer, cost: Cost, *, is_float64: bool = False) -> Hashable:
        """The digest, because a layer and the one that replaces it may both have requests waiting."""
        return layer.name, layer.digest, is_float64, size_class(cost, self.limits.max_shared)

    async def ask(self, layer: ServedLayer, request: CheckedRequest) -> Outcome[Answer]:
        """The layer's answer; raises what the waiting room raises."""
        call, cost, trace = request.call, request.cost, self._trace
        trace.tokens = cost.tokens
        # Until it is sent: whoever is slow to read his answer, or reads none of it, holds all of it.
        self._take_answer(cost.weights_bytes + _output_bytes(layer, call))
        lane = self._lane(layer, cost, is_float64=call.is_float64)
        deadline = self._complete + self._timeout_s
        work = Work(layer.resident, call)
        outcome = await self._house.batcher.submit(work, lane=lane, cost=cost, deadline=deadline, caller=self._key)
        trace.batch_requests, trace.queue_s, trace.compute_s = (
            outcome.batch.requests,
            outcome.queue_s,
            outcome.compute_s,
        )
        trace.masked_rows, trace.stage, trace.batch = request.masked_rows, "sending", outcome.batch
        self._answered = self._house.now()
        return outcome

    def _take_answer(self, num_bytes: int) -> None:
        """Room for the answer; raises CostLimit where there will never be enough, QueueFull where there is not enough now."""
        most = self._house.answers.max_share
        if num_bytes > most:
            raise CostLimit(f"the answer would have {num_bytes:,} bytes, at most {most:,} are computed at once")
        self._answer_share.grow(num_bytes)

    def facts(self, layer: ServedLayer, request: CheckedRequest, outcome: Outcome[Answer]) -> AnswerFacts:
        """What goes beside the answer's tensors."""
        return AnswerFacts(
            masked_rows=request.masked_rows,
            layer=layer.name,
            digest=layer.digest,
            batch=outcome.batch,
            timing_ms=self.timing_ms,
        )

    def sent(self) -> None:
        """The answer is written."""
        self._trace.encode_s = self._house.now() - self._answered

    def timing_ms(self) -> dict[str, float]:
        """The phases up to now in milliseconds; `total` runs from the complete body."""
        trace = self._trace
        return {
            "decode": milliseconds(trace.decode_s or 0.0),
            "queue": milliseconds(trace.queue_s or 0.0),
            "compute": milliseconds(trace.compute_s or 0.0),
            "total": milliseconds(self._elapsed_s()),
        }

    def server_timing(self) -> tuple[bytes, bytes]:
        """The same as a header."""
        trace = self._trace
        phases = (trace.decode_s or 0.0, trace.queue_s or 0.0, trace.compute_s or 0.0, self._elapsed_s())
        return b"server-timing", _SERVER_TIMING % tuple([seconds * 1000 for seconds in phases])

    def _elapsed_s(self) -> float:
        return self._house.now() - self._complete

    def _left_s(self) -> float:
        return max(0.0, self._timeout_s - self._elapsed_s())


def _output_bytes(layer: ServedLayer, call: Call) -> int:
    """Of the output [B, L, out_width], in the dtype of the query."""
    query = call.query
    return query.shape[0] * query.shape[1] * layer.spec.out_width * query.element_size()


def _announced_bytes(fields: HeaderFields) -> int:
    """The body's length where it is known before it comes, else 0; a compressed one becomes larger."""
    values = fields[b"content-length"]
    return int(values[0]) if values and values[0].isdigit() and len(values[0]) <= MAX_TIMEOUT_DIGITS else 0


def _asked_timeout_s(fields: HeaderFields) -> float | None:
    """X-Request-Timeout-Ms, with which a caller may shorten the deadline."""
    values = fields[b"x-request-timeout-ms"]
    if not values:
        return None
    asked = values[0].lstrip(b"0") if len(values) == 1 else b""
    if not asked.isdigit():
        raise InvalidInput("X-Request-Timeout-Ms must be a whole number of milliseconds, at least 1")
    return None if len(asked) > MAX_TIMEOUT_DIGITS else int(asked) / 1000
