"""Request context: where a body is decoded, and how the request ends while it waits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gzip
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

from service.api.outer_middleware import start_record
from service.api.request_body import HERE_BYTES
from service.api.request_context import RequestContext, SharedState
from service.attention.call import Call
from service.batching.job import NOTHING
from service.errors import (
    BadEncoding,
    BadJson,
    BodyTooLarge,
    CostLimit,
    DeadlineExceeded,
    Draining,
    InvalidInput,
    QueueFull,
    UnsupportedContentEncoding,
)
from service.http.asgi import CYCLE, ClientGone
from service.http.receive_cycle import ReceiveCycle
from service.limits import context_limits
from service.settings import load_settings
from service.wire.attend_request import CheckedRequest
from service.wire.layouts import Layout
from service.wire.tensors import TensorForm
from tests.doubles import ManualClock, on_loop_with

OFF_LOOP = 100
INTAKE = 10_000


BINARY = ("layer", True)  # binary bodies for this layer
LAYER: Any = SimpleNamespace(name="layer", digest="sha256:0")


async def unread() -> Any:
    raise AssertionError("the transport reports the body")


def idle_batcher() -> Any:
    def note_arrival(lane: Any, cost: Any, caller: Any) -> Any:
        batcher.arrived.append((lane[-1], cost.tokens, cost.flops))
        return lambda: batcher.arrived.remove((lane[-1], cost.tokens, cost.flops))

    batcher = SimpleNamespace(check_open=lambda _: None, is_congested=False, arrived=[], note_arrival=note_arrival)
    return batcher


class Setup:
    """SharedState with a real thread and doubles, and the contexts of requests with a body."""

    def __init__(self) -> None:
        settings = load_settings(decode_off_loop_bytes=OFF_LOOP, queue_bytes=1024)
        limits = dataclasses.replace(context_limits(settings), intake_bytes=INTAKE, answer_bytes=INTAKE)
        self.clock = ManualClock()
        layers: Any = SimpleNamespace(catalog=())
        self.batcher = idle_batcher()
        self.shared = SharedState(layers, str, self.batcher, limits, self.clock.now)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shared.end()

    def opened(
        self, headers: list[tuple[bytes, bytes]], cycle: ReceiveCycle | None, layer: Any = LAYER
    ) -> RequestContext:
        """Return the context of a request for the layer with these headers."""
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "path_params": {}, "headers": headers}
        start_record(scope, self.clock.now())
        return RequestContext(self.shared, scope | {CYCLE: cycle}, unread, lambda *_: layer)

    async def context(
        self, num_bytes: int, *, is_binary: bool = True, **headers: str
    ) -> tuple[RequestContext, asyncio.Queue[dict[str, Any]]]:
        """Return a context whose body has been read, and the messages of its connection."""
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b"x" * num_bytes})
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        found = self.opened(named, ReceiveCycle(messages.get))
        await found.read((b"gzip",), is_binary=is_binary)
        return found, messages

    async def announced(self, num_bytes: int) -> None:
        """Read a body whose length is announced."""
        await self.context(num_bytes, content_length=str(num_bytes))


class Held:
    """Work that holds the thread until it is let go."""

    def __init__(self, setup: Setup) -> None:
        self.runs = threading.Event()
        self.may_go_on = threading.Event()
        self._setup = setup

    async def work(self) -> None:
        await self._setup.shared.run_off_loop(self.hold)

    def hold(self) -> None:
        self.runs.set()
        assert self.may_go_on.wait(10)


# A request whose body is not read leaves a task that waits for its disconnect, of which `run` would complain.
with_setup = on_loop_with(Setup, lambda main: asyncio.run(main()))


def where() -> Any:
    """A checked request that says in which thread it was checked."""
    return SimpleNamespace(thread=threading.current_thread().name, is_counted=True)


@pytest.mark.parametrize(
    ("num_bytes", "thread"), [(0, "Main"), (OFF_LOOP - 1, "Main"), (OFF_LOOP, "checking"), (OFF_LOOP * 9, "checking")]
)
@with_setup
async def test_a_body_is_parsed_and_checked_off_the_loop_from_a_size_on(setup: Setup, num_bytes, thread):
    context, _ = await setup.context(num_bytes)
    found: Any = await context.run(where)
    assert found.thread.startswith(thread)


@pytest.mark.parametrize(("num_bytes", "is_off_loop"), [(OFF_LOOP // 4 - 1, False), (OFF_LOOP // 4, True)])
@with_setup
async def test_text_is_parsed_off_the_loop_from_a_quarter_of_that_size_on(setup: Setup, num_bytes, is_off_loop):
    """It takes longer than a binary body."""
    context, _ = await setup.context(num_bytes, x_request_timeout_ms="2")
    held = Held(setup)
    holding = asyncio.ensure_future(held.work())
    await asyncio.to_thread(held.runs.wait)
    with pytest.raises(DeadlineExceeded) if is_off_loop else contextlib.nullcontext():
        assert await context.parsed(bytearray(b"{}".ljust(num_bytes))) == {}
    held.may_go_on.set()
    await holding


@with_setup
async def test_a_parsed_text_is_freed(setup: Setup):
    context, _ = await setup.context(1)
    text = bytearray(b'{"query":[[0.5]]}')
    assert (await context.parsed(text))["query"].shape == (1, 1)
    assert not text


@with_setup
async def test_large_masks_are_counted_off_the_loop(setup: Setup):
    context, _ = await setup.context(1)
    request: Any = SimpleNamespace(is_counted=False, counted=where)
    found: Any = await context.counted(request)
    assert found.thread.startswith("checking")


@with_setup
async def test_a_deadline_that_passes_while_other_bodies_are_checked_is_reported(setup: Setup):
    held = Held(setup)
    holding = asyncio.ensure_future(held.work())
    await asyncio.to_thread(held.runs.wait)
    with pytest.raises(DeadlineExceeded, match="waited for the bodies before it"):
        await setup.context(OFF_LOOP, x_request_timeout_ms="2")
    held.may_go_on.set()
    await holding


@with_setup
async def test_a_disconnect_ends_the_wait_for_the_checking_thread(setup: Setup):
    context, messages = await setup.context(OFF_LOOP)
    held = Held(setup)
    holding = asyncio.ensure_future(held.work())
    await asyncio.to_thread(held.runs.wait)

    async def serve() -> None:
        with context:
            await context.run(where)

    serving = asyncio.ensure_future(serve())
    await asyncio.sleep(0)
    messages.put_nowait({"type": "http.disconnect"})
    with pytest.raises(ClientGone):
        await serving
    assert setup.shared.intake.num_bytes == 0
    held.may_go_on.set()
    await holding


@with_setup
async def test_what_waits_for_the_checking_thread_is_freed_when_its_caller_leaves(setup: Setup):
    held = Held(setup)
    holding = asyncio.ensure_future(held.work())
    await asyncio.to_thread(held.runs.wait)
    waiting: list[Any] = [type("Body", (), {})()]
    body = weakref.ref(waiting[0])

    def run() -> Any:
        return asyncio.ensure_future(setup.shared.run_off_loop(functools.partial(repr, waiting.pop())))

    task = run()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    is_freed = body() is None
    held.may_go_on.set()
    await holding
    assert is_freed


@pytest.mark.parametrize("end", ["disconnect", "deadline"])
@with_setup
async def test_decompression_ends_with_the_deadline_and_when_the_client_disconnects(setup: Setup, end):
    """Its body is complete: from then on both count."""
    held = Held(setup)
    holding = asyncio.ensure_future(held.work())
    await asyncio.to_thread(held.runs.wait)
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    body = gzip.compress(os.urandom(HERE_BYTES))
    setup.shared.intake.max_bytes = 2**20
    messages.put_nowait({"type": "http.request", "body": body})
    named = [(b"content-encoding", b"gzip"), *([(b"x-request-timeout-ms", b"20")] if end == "deadline" else [])]
    context = setup.opened(named, ReceiveCycle(messages.get))
    if end == "disconnect":
        messages.put_nowait({"type": "http.disconnect"})

    async def serve() -> None:
        with context:
            await context.read((b"gzip",), is_binary=True)

    try:
        with pytest.raises(ClientGone if end == "disconnect" else DeadlineExceeded):
            await asyncio.wait_for(serve(), 1)
        assert setup.shared.intake.num_bytes == 0
    finally:
        held.may_go_on.set()
        await holding


@with_setup
async def test_the_deadline_ends_a_small_body_that_waits_for_the_checking_thread(setup: Setup):
    is_over = threading.Event()
    busy = asyncio.ensure_future(setup.shared.run_off_loop(is_over.wait))
    await asyncio.sleep(0)
    request: Any = SimpleNamespace(is_counted=False, counted=where)
    context, _ = await setup.context(1, x_request_timeout_ms="2")
    try:
        async with asyncio.timeout(5):
            with pytest.raises(DeadlineExceeded, match="the body was parsed and checked, or waited"), context:
                await context.counted(request)
    finally:
        is_over.set()
        await busy


@with_setup
async def test_bytes_of_bodies_are_released_after_the_check_and_at_the_end_of_the_request(setup: Setup):
    intake = setup.shared.intake
    checked, _ = await setup.context(OFF_LOOP)
    refused, _ = await setup.context(OFF_LOOP - 1)
    assert intake.num_bytes == 2 * OFF_LOOP - 1
    with pytest.raises(QueueFull, match="does not fit beside them"):
        await setup.context(INTAKE - 2 * OFF_LOOP + 2)
    await checked.counted(where())
    assert intake.num_bytes == OFF_LOOP - 1
    with pytest.raises(BadJson), refused:
        raise BadJson("it is")
    assert intake.num_bytes == 0


def refuse(lane: Any, cost: Any, caller: Any) -> None:
    raise QueueFull("the queue stands")


def checked_sizes(setup: Setup) -> list[int]:
    """The size class of each lane that is checked, under sustained overload and with batches of up to 100 tokens."""
    sizes: list[int] = []
    setup.batcher.is_congested = True
    setup.batcher.check_lane = lambda lane, cost, caller: sizes.append(lane[-1])
    limits = dataclasses.replace(setup.shared.limits.max_shared, max_tokens=100)
    setup.shared.limits = dataclasses.replace(setup.shared.limits, max_shared=limits)
    return sizes


@with_setup
async def test_under_sustained_overload_the_body_is_not_read(setup: Setup):
    setup.batcher.is_congested, setup.batcher.check_lane = True, refuse
    setup.shared.note_cost(BINARY, NOTHING, 1)
    received: list[str] = []

    async def receive() -> dict[str, Any]:
        received.append("a part")
        return {"type": "http.request", "body": b""}

    context = setup.opened([(b"content-length", b"9")], ReceiveCycle(receive))
    with pytest.raises(QueueFull, match="stands"):
        await context.read((), is_binary=True)
    assert received == []


@pytest.mark.parametrize(
    ("header", "error"),
    [
        ((b"content-encoding", b"br"), UnsupportedContentEncoding),
        ((b"content-length", b"9" * 15), BodyTooLarge),
    ],
)
@with_setup
async def test_under_sustained_overload_headers_that_never_fit_are_no_reason_to_retry(setup: Setup, header, error):
    setup.batcher.is_congested, setup.batcher.check_lane = True, refuse
    context = setup.opened([header], None)
    with pytest.raises(error):
        await context.read((b"gzip",), is_binary=True)


@pytest.mark.parametrize(
    ("headers", "sizes"),
    [
        ([(b"content-length", b"400")], [1]),
        ([], []),
        ([(b"content-length", b"23"), (b"content-encoding", b"gzip")], []),
    ],
    ids=["announced", "chunked", "compressed"],
)
@with_setup
async def test_under_sustained_overload_the_lane_is_that_of_the_whole_body(setup: Setup, headers, sizes):
    """A body of unknown length is not refused before it is read, but at admission."""
    lanes = checked_sizes(setup)
    setup.shared.note_cost(BINARY, NOTHING._replace(tokens=1), 4)
    body = gzip.compress(bytes(400)) if len(headers) > 1 else bytes(400)

    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": body})
    with setup.opened(headers, ReceiveCycle(messages.get)) as context:
        await context.read((b"gzip",), is_binary=True)
    assert lanes == sizes


@with_setup
async def test_under_sustained_overload_the_lane_follows_the_bytes_that_a_number_took_lately(setup: Setup):
    lanes = checked_sizes(setup)
    await setup.announced(400)
    assert not lanes, "no body has told how many tokens a byte takes"
    setup.shared.note_cost(BINARY, NOTHING._replace(tokens=1), 4)
    await setup.announced(400)
    assert lanes[-1] == 1, "100 tokens at 4 bytes each share a batch"
    for _ in range(100):
        setup.shared.note_cost((LAYER.name, False), NOTHING._replace(tokens=1), 20)
    await setup.announced(400)
    assert lanes[-1] == 1, "text says nothing of binary bodies"
    for _ in range(100):
        setup.shared.note_cost(BINARY, NOTHING._replace(tokens=1), 2)
    await setup.announced(400)
    assert lanes[-1] == 2, "200 tokens run alone"


@with_setup
async def test_the_lane_counts_a_large_body_from_its_arrival_to_the_end_of_its_request(setup: Setup):
    """Its size says how much work it likely is. A small one is a job at once."""
    with (await setup.context(OFF_LOOP))[0]:
        assert setup.batcher.arrived == [], "no body has told how much work a byte is"
    setup.shared.note_cost(BINARY, NOTHING._replace(tokens=1, flops=80), 4)
    with (await setup.context(OFF_LOOP - 1))[0]:
        assert setup.batcher.arrived == []
    with (await setup.context(OFF_LOOP * 2))[0]:
        assert setup.batcher.arrived == [(0, 50, 4000)]
    assert setup.batcher.arrived == []
    setup.shared.note_cost((LAYER.name, False), NOTHING._replace(tokens=1, flops=80), 5)
    with (await setup.context(OFF_LOOP // 4 - 1, is_binary=False))[0]:
        assert setup.batcher.arrived == []
    with (await setup.context(OFF_LOOP // 4, is_binary=False))[0]:
        assert setup.batcher.arrived == [(0, 5, 400)]


@with_setup
async def test_a_request_counts_once_when_it_has_become_a_job(setup: Setup):
    class Asked(Exception):
        pass

    async def submit(*_: Any, **__: Any) -> Any:
        assert setup.batcher.arrived == []
        raise Asked

    setup.shared.note_cost(BINARY, NOTHING._replace(tokens=1, flops=80), 4)
    setup.batcher.submit = submit
    layer = SimpleNamespace(name="layer", digest="sha256:0", output_bytes=lambda _: 4, loaded=None)
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": bytes(OFF_LOOP)})
    context = setup.opened([], ReceiveCycle(messages.get), layer)
    await context.read((), is_binary=True)
    assert len(setup.batcher.arrived) == 1
    with pytest.raises(Asked):
        await context.ask(CheckedRequest(Call(torch.zeros(1, 1, 1)), NOTHING, Layout("ld"), TensorForm.BASE64))


@with_setup
async def test_an_answer_above_the_whole_byte_budget_is_a_cost_limit(setup: Setup):
    layer = SimpleNamespace(name="wide", output_bytes=lambda call: call.query.nbytes * INTAKE)
    context = setup.opened([], None, layer)
    call = Call(torch.zeros(1, 1, 1))
    with pytest.raises(CostLimit, match=r"40,000 bytes, expected at most 5,000 \(half of ATTENTION_QUEUE_BYTES"):
        await context.ask(CheckedRequest(call, NOTHING, Layout("ld"), TensorForm.BASE64))
    assert setup.shared.answers.num_bytes == 0


@with_setup
async def test_after_close_no_request_enters_and_entered_ones_continue(setup: Setup):
    context, _ = await setup.context(OFF_LOOP)
    setup.shared.close()
    with pytest.raises(Draining):
        await setup.context(OFF_LOOP)
    assert await context.run(where)


@pytest.mark.parametrize("value", ["0", "000", "-1", "1.5", "", "x", "1e3", "²"])
@with_setup
async def test_a_malformed_deadline_is_refused(setup: Setup, value):
    with pytest.raises(InvalidInput, match="whole number of milliseconds"):
        await setup.context(OFF_LOOP, x_request_timeout_ms=value)


@pytest.mark.parametrize(("headers", "fault"), [({"content_encoding": "gzip"}, BadEncoding), ({}, BodyTooLarge)])
@with_setup
async def test_of_a_malformed_deadline_and_a_faulty_body_the_body_is_reported(setup: Setup, headers, fault):
    num_bytes = setup.shared.limits.max_body_bytes + 1 if fault is BodyTooLarge else OFF_LOOP
    with pytest.raises(fault):
        await setup.context(num_bytes, x_request_timeout_ms="soon", **headers)


@pytest.mark.parametrize("value", ["1" * 12, "9" * 400, "0" * 400 + "1"])
@with_setup
async def test_a_deadline_of_many_digits_is_capped(setup: Setup, value):
    context, _ = await setup.context(1, x_request_timeout_ms=value)
    assert await context.run(where)


@with_setup
async def test_a_request_outside_the_queue_gets_draining_when_the_grace_is_over(setup: Setup):
    """L6: while its body is checked, and while it waits for that."""
    held = Held(setup)
    first, _ = await setup.context(OFF_LOOP)
    second, _ = await setup.context(OFF_LOOP)

    async def serve(context: RequestContext) -> None:
        with context:
            await context.run(held.hold)

    tasks = [asyncio.ensure_future(serve(context)) for context in (first, second)]
    await asyncio.to_thread(held.runs.wait)
    setup.shared.settle()
    for task in tasks:
        with pytest.raises(Draining, match="shut down before"):
            await task
    held.may_go_on.set()
    assert setup.shared.intake.num_bytes == 0
