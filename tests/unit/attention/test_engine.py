"""The engine: its two threads, loading and replacing layers, inline batches, failures, closing, the fingerprint of its bits."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import re
import statistics
import sys
import threading
import time
import traceback
import weakref
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from service.attention import cost
from service.attention.call import AttentionCall, Call, WeightsWanted
from service.attention.engine import Engine, EngineOptions, LayerCall, LoadedLayer, fingerprint, pick_device
from service.attention.layer import Layer
from service.attention.masks import Sizes
from service.attention.progress import Stopped
from service.attention.projection import has_packed_product, instruction_set
from service.attention.scaled_dot_product import ScaledDotProduct
from service.errors import CostLimit, EngineDown
from tests.attention_fixtures import (
    CPU,
    DEVICE,
    DTYPES,
    OneLayer,
    make_layer,
    make_spec,
    make_tensors,
    randn,
    same_answers,
    same_bits,
    settled,
    torch_threads,
)

SPEC = make_spec(24, 3)


@pytest.fixture
def engine():
    found = OneLayer(EngineOptions(DEVICE, torch.float32), SPEC)
    yield found
    found.close()


class Gate:
    """Forward passes on the thread of long batches wait until a test opens it; then they may stop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened, forward = threading.Event(), threading.Event(), Layer.forward

        def held(layer, calls):
            if threading.current_thread().name == "compute-long_0":
                self.reached.set()
                assert self.opened.wait(10)
            return forward(layer, calls)

        monkeypatch.setattr(Layer, "forward", held)


def call(rows: int = 4, *, seed: int = 0, **fields) -> Call:
    return Call(randn(1, rows, 24, seed=seed), **fields)


def test_a_loaded_layer_answers_calls_in_order(engine):
    batch = [call(rows, seed=rows) for rows in (4, 1, 9)]
    answers = engine.run(batch).result()
    expected = make_layer(SPEC).forward(batch)
    assert all(same_answers(one, other) for one, other in zip(answers, expected, strict=True))


def test_loading_reports_the_self_check_and_its_duration():
    engine = OneLayer(EngineOptions(DEVICE, torch.float32, exact=True), SPEC)
    engine.close()
    found, expected = engine.loaded, settled(make_layer(SPEC))
    assert (found.is_sequential, found.least_rows) == (expected.is_sequential, expected.least_rows)
    assert found.seconds > 0


def test_each_version_of_a_layer_answers_in_every_dtype(engine):
    double = Call(randn(1, 4, 24, dtype=torch.float64))
    newer = engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC, seed=1))).result()
    for seed, loaded in ((1, newer), (0, engine.loaded)):
        for one, dtype in ((call(), torch.float32), (double, torch.float64)):
            expected = make_layer(SPEC, dtype, seed=seed).forward([one])[0]
            assert same_answers(engine.engine.run([LayerCall(loaded, one)]).future.result()[0], expected)


def test_an_unreferenced_layer_frees_its_memory(engine):
    single = engine.engine.device_bytes
    newer = engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC, seed=1))).result()
    assert engine.engine.device_bytes == 2 * single
    engine.engine.run([LayerCall(newer, Call(randn(1, 4, 24, dtype=torch.float64)))]).future.result()
    assert engine.engine.device_bytes == 2 * single + 4 * 24 * 24 * 8, "four matrices in float64 on top"
    variant = weakref.ref(newer.variants[torch.float32])
    del newer
    for is_long in (False, True):
        engine.run([call()], is_long=is_long).result()  # a compute thread holds a batch until the next one comes
    assert variant() is None
    assert engine.engine.device_bytes == single


def test_long_batches_run_between_the_steps_of_a_load(engine, monkeypatch):
    """Otherwise each would wait for the self-check of a large layer."""
    monkeypatch.setattr("service.attention.engine.LOAD_S", 0.0)
    order, has_arrived = [], threading.Event()
    forward = Layer.forward

    def noted(self, calls):
        assert has_arrived.wait(10)
        order.append("batch" if self is engine.loaded.variants[torch.float32] else "check")
        return forward(self, calls)

    monkeypatch.setattr(Layer, "forward", noted)
    loading, batch = engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC))), engine.run([call()], is_long=True)
    has_arrived.set()
    batch.result()
    loading.result()
    assert order.index("batch") <= 2 < len(order)


def test_a_load_needs_few_turns_beside_a_stream_of_long_batches(engine, monkeypatch):
    """Of some 60 steps; else a load beside batches of a second would take a minute."""
    monkeypatch.setattr("service.attention.engine.LOAD_S", 3600.0)
    loading, num_batches = engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC))), 0
    while not loading.done():
        engine.run([call()], is_long=True).result(10)
        num_batches += 1
    assert loading.result(10).variants
    assert num_batches <= 3


def test_a_layer_that_cannot_be_loaded_raises_and_harms_no_other_layer(engine):
    with pytest.raises(KeyError):
        engine.engine.load(partial(Layer, SPEC, {})).result()
    assert same_answers(engine.run([call()]).result()[0], make_layer(SPEC).forward([call()])[0])


def test_a_float64_query_computes_in_float64_and_any_other_in_the_layers_dtype():
    engine = OneLayer(EngineOptions(DEVICE, torch.bfloat16), SPEC)
    try:
        query = randn(1, 4, 24, dtype=torch.float64)
        exact = engine.run([Call(query)]).result()[0]
        assert same_answers(exact, make_layer(SPEC, torch.float64).forward([Call(query)])[0])
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            one = Call(query.to(dtype))
            assert same_answers(engine.run([one]).result()[0], make_layer(SPEC, torch.bfloat16).forward([one])[0])
    finally:
        engine.close()


def test_short_and_long_batches_each_have_a_thread_with_the_configured_torch_threads(monkeypatch):
    seen = set()
    forward = Layer.forward

    def watching(self, calls):
        seen.add((threading.current_thread().name, torch.get_num_threads(), torch.is_inference_mode_enabled()))
        return forward(self, calls)

    monkeypatch.setattr(Layer, "forward", watching)
    before, engine = torch.get_num_threads(), OneLayer(EngineOptions(DEVICE, torch.float32, num_threads=2), SPEC)
    try:
        seen.clear()  # of the self-check
        for is_long in (False, True):
            engine.run([call()], is_long=is_long).result()
    finally:
        engine.close()
        torch.set_num_threads(before)
    assert seen == {("compute_0", 2, True), ("compute-long_0", 2, True)}


@pytest.fixture
def computing_threads(monkeypatch) -> list[str]:
    """The name of the thread of each forward pass of this file's layer; a service of other tests may compute meanwhile."""
    names = []
    forward = Layer.forward

    def watching(self, calls):
        if self.spec is SPEC:
            names.append(threading.current_thread().name)
        return forward(self, calls)

    monkeypatch.setattr(Layer, "forward", watching)
    return names


def test_an_inline_batch_is_computed_before_run_returns_with_the_same_bits(engine, computing_threads):
    calls = [call(rows, seed=rows, weights=WeightsWanted("mean")) for rows in (4, 1, 9)]
    inline = engine.run(calls, is_inline=True)
    assert inline.done()
    assert computing_threads == [threading.current_thread().name]
    others = engine.run(calls).result()
    assert computing_threads[1:] == ["compute_0"]
    assert all(same_answers(one, other) for one, other in zip(inline.result(), others, strict=True))


def test_an_inline_batch_goes_to_the_compute_thread_while_that_computes(engine, monkeypatch, computing_threads):
    """Two forward passes at once would share the layers' and torch's own state."""
    started, go_on, forward = threading.Event(), threading.Event(), Layer.forward

    def held(self, calls):
        started.set()
        assert go_on.wait(10)
        return forward(self, calls)

    monkeypatch.setattr(Layer, "forward", held)
    running = engine.run([call()])
    assert started.wait(10)
    inline = engine.run([call(seed=1)], is_inline=True)
    assert not inline.done()
    go_on.set()
    assert len(running.result()) == len(inline.result()) == 1
    assert computing_threads == ["compute_0"] * 2


def test_an_inline_batch_goes_to_the_compute_thread_if_the_callers_torch_has_several_threads(engine, computing_threads):
    with torch_threads(2):
        engine.run([call()], is_inline=True).result()
    assert computing_threads == ["compute_0"]


def test_the_thread_of_long_batches_builds_a_variant_that_later_inline_batches_use(engine, computing_threads):
    double = Call(randn(1, 4, 24, dtype=torch.float64))
    first = engine.run([double], is_inline=True).result()
    assert set(computing_threads) == {"compute-long_0"}
    computing_threads.clear()
    assert same_answers(engine.run([double], is_inline=True).result()[0], first[0])
    assert computing_threads == [threading.current_thread().name]


def frames_held_by(error: BaseException) -> set[FrameType]:
    """Return the frames of its traceback and their callers; in Python 3.11 a frame holds its locals even after it returned."""
    found: set[FrameType] = set()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found |= {caller for caller, _ in traceback.walk_stack(frame)}
    return found


def test_the_error_of_a_failed_inline_batch_holds_no_frame_of_the_caller(engine):
    wrong = Call(randn(1, 4, 10))
    error = engine.run([wrong], is_inline=True).exception(10)
    assert isinstance(error, RuntimeError)
    assert error.__context__ is None
    assert sys._getframe() not in frames_held_by(error)
    assert engine.run([call()], is_inline=True).done(), "the next batch can compute"
    assert engine.run([call()]).result(10)


@pytest.mark.parametrize("failure", [StopIteration, SystemExit, KeyboardInterrupt, MemoryError, RuntimeError])
def test_any_exception_of_an_inline_batch_fails_only_that_batch(engine, monkeypatch, failure):
    def fail(self, calls):
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(Layer, "forward", fail)
        error = engine.run([call()], is_inline=True).exception(10)
    assert isinstance(error, CostLimit if failure is MemoryError else failure)
    assert engine.run([call()], is_inline=True).result(0)


@pytest.mark.parametrize(
    "options",
    [{"num_threads": 2}, {"device": torch.device("meta")}],
    ids=["several threads", "a device"],
)
def test_no_batch_is_inline_on_a_device_or_with_several_threads(options, monkeypatch):
    """The event loop would wait for a device that computes without it."""
    engine = Engine(EngineOptions(**{"device": DEVICE, "dtype": torch.float32, **options}))
    names: list[str] = []
    monkeypatch.setattr(engine, "_run", lambda batch: names.append(threading.current_thread().name))
    loaded = LoadedLayer(partial(Layer, SPEC, {}), torch.float32)
    loaded.variants[torch.float32], loaded.rates[torch.float32] = make_layer(SPEC), 1.0
    engine.run([LayerCall(loaded, call())], is_inline=True).future.result(10)
    assert names == ["compute_0"]
    engine.close()


def test_a_closed_engine_computes_no_inline_batch(engine):
    engine.close()
    with pytest.raises(EngineDown):
        engine.run([call()], is_inline=True)


def memory_error_of_torch() -> RuntimeError:
    """Return the error that this build of torch raises for more memory than there is."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    return RuntimeError(str(caught.value))


@pytest.mark.parametrize(
    "failure",
    [
        memory_error_of_torch(),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_running_out_of_memory_fails_the_batch_and_not_the_engine(engine, monkeypatch, failure):
    """It fails with CostLimit, without torch's message, and without a chained error that would keep the batch's tensors alive."""

    def fail(self, calls):
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(Layer, "forward", fail)
        with pytest.raises(CostLimit) as caught:
            engine.run([call()]).result()
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    assert "alloc" not in caught.value.message
    assert same_answers(engine.run([call()]).result()[0], make_layer(SPEC).forward([call()])[0])


def test_any_other_failure_is_raised_unchanged_and_the_next_batch_runs(engine):
    """The wire refuses a call of another width than the layer's; in the engine only its batch fails."""
    with pytest.raises(RuntimeError):
        engine.run([Call(randn(1, 4, 10))]).result()
    assert engine.run([call()]).result()


def test_a_call_full_of_nan_does_not_change_other_calls(engine):
    poisoned = Call(torch.full((2, 5, 24), torch.nan), weights=WeightsWanted("mean"))
    first, spoilt, last = engine.run([call(seed=1), poisoned, call(1, seed=2)]).result()
    assert torch.isnan(spoilt.output).any()
    assert same_answers(first, engine.run([call(seed=1)]).result()[0])
    assert same_answers(last, engine.run([call(1, seed=2)]).result()[0])


def test_each_batch_tells_its_processor_time_and_its_filler_rows(engine, monkeypatch):
    """Time in which the thread waits, here for another one, counts in no rate."""
    forward, go_on, waits = Layer.forward, threading.Event(), threading.Event()

    def waiting(self, calls):
        if threading.current_thread().name == "compute-long_0":
            waits.set()
            assert go_on.wait(10)
        return forward(self, calls)

    monkeypatch.setattr(Layer, "forward", waiting)
    works = [LayerCall(engine.loaded, call(1))]
    long = engine.engine.run(works, is_long=True)
    assert waits.wait(10)
    began = time.monotonic()
    short = []
    while time.monotonic() - began < 0.05:
        short.append(engine.engine.run(works))
        short[-1].future.result(10)
    go_on.set()
    long.future.result(10)
    assert 0.0 < long.progress.seconds < 0.05
    assert {running.progress.filler_rows for running in (long, *short)} == {long.progress.filler_rows} != {0}


def test_device_bytes_are_those_of_the_loaded_layers(engine):
    """24 wide: 7 matrices in float32 (three projections, their fused one, the output), 4 in float64 after a float64 call."""
    if not has_packed_product():
        pytest.skip("without packing, the three projections are slices of the fused one")
    matrix = 24 * 24 * 4
    assert engine.engine.device_bytes == 7 * matrix
    engine.run([Call(randn(1, 4, 24, dtype=torch.float64))]).result()
    assert engine.engine.device_bytes == 7 * matrix + 4 * 2 * matrix


def test_closing_finishes_the_running_batch_and_drops_queued_ones(engine, monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    forward = Layer.forward

    def held(self, calls):
        started.set()
        assert go_on.wait(10)
        return forward(self, calls)

    monkeypatch.setattr(Layer, "forward", held)
    running, waiting = engine.run([call()]), engine.run([call()])
    assert started.wait(10)
    waiting.add_done_callback(lambda _: go_on.set())
    engine.close()
    assert waiting.cancelled()
    assert concurrent.futures.wait([waiting], timeout=10).done == {waiting}
    assert running.result()[0].output.shape == (1, 4, 24)
    with pytest.raises(EngineDown):
        engine.run([call()])
    with pytest.raises(EngineDown):
        engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC)))


def test_closing_ends_a_load_that_is_under_way_with_an_error(engine):
    loading = engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC)))
    engine.close()
    with pytest.raises(EngineDown):
        loading.result(10)


@pytest.fixture
def held_check(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Two events: the self-check of a load sets the first when it begins, and goes on once a test sets the second."""
    started, go_on = threading.Event(), threading.Event()

    def held(_layer):
        started.set()
        assert go_on.wait(10)
        yield True

    monkeypatch.setattr("service.attention.self_check.checks", held)
    return started, go_on


def test_closing_drops_a_cancelled_load_without_an_error(engine, held_check, caplog):
    started, go_on = held_check
    running, waiting = (engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC))) for _ in range(2))
    assert started.wait(10)
    assert waiting.cancel()
    engine.engine.close(0)
    go_on.set()
    with pytest.raises(EngineDown):
        running.result(10)
    assert not caplog.records


def test_a_wait_for_a_cancelled_load_ends(engine, held_check):
    started, go_on = held_check
    loading = engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC)))
    assert started.wait(10)
    assert loading.cancel()
    go_on.set()
    assert concurrent.futures.wait([loading], timeout=10).done == {loading}


@pytest.mark.parametrize("error", [None, MemoryError()], ids=["ends", "fails"])
def test_a_load_cancelled_during_its_last_step_raises_nothing_on_the_compute_thread(engine, monkeypatch, error):
    may_cancel, submitted = threading.Event(), []
    submit = engine.engine._long.submit

    def recorded(work, *args):
        submitted.append(submit(work, *args))
        return submitted[-1]

    def cancelled(_layer):
        assert may_cancel.wait(10)
        assert loading.cancel()
        if error is not None:
            raise error
        yield from ()

    monkeypatch.setattr(engine.engine._long, "submit", recorded)
    monkeypatch.setattr("service.attention.self_check.checks", cancelled)
    loading = engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC)))
    may_cancel.set()
    assert {step.exception(10) for step in submitted} == {None}
    assert loading.cancelled()


def test_closing_waits_a_limited_time_for_a_batch_that_does_not_end(engine, monkeypatch):
    started, go_on = threading.Event(), threading.Event()

    def held(self, calls):
        started.set()
        go_on.wait(20)

    monkeypatch.setattr(Layer, "forward", held)
    engine.run([call()])
    assert started.wait(10)
    assert engine.engine.close(0.01) is False
    go_on.set()
    assert engine.engine.close(10) is True


device_failures = pytest.mark.parametrize(
    "failure",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    ],
    ids=["accelerator", "assert", "cublas"],
)


@device_failures
@pytest.mark.parametrize(
    "use",
    [lambda engine: engine.run([call()]), lambda engine: engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC)))],
    ids=["batch", "load"],
)
def test_a_device_failure_ends_the_engine_rather_than_one_batch_or_load(engine, monkeypatch, failure, use):
    def fail(self, calls):
        raise failure

    monkeypatch.setattr(Layer, "forward", fail)
    with pytest.raises(EngineDown) as caught:
        use(engine).result()
    assert caught.value.__context__ is None
    assert "illegal" not in caught.value.message


@pytest.mark.parametrize(
    "reason",
    [
        "CUDA error: out of memory",
        "CUDA error: no kernel image is available for execution on the device",
        "CUDA error: invalid configuration argument",
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul(...)`",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    ],
)
def test_a_failure_that_leaves_the_device_fails_a_load_or_a_batch_alone(engine, monkeypatch, reason):
    def fail(self, calls):
        raise torch.AcceleratorError(reason)

    with monkeypatch.context() as patched:
        patched.setattr(Layer, "forward", fail)
        with pytest.raises(torch.AcceleratorError, match=re.escape(reason)):
            engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC))).result()
        failure = engine.run([call()]).exception(10)
        assert isinstance(failure, CostLimit if "memory" in reason else torch.AcceleratorError)
    engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC))).result()
    assert engine.run([call()]).result(10)


def test_a_load_that_fails_leaves_the_memory_without_a_collection(engine, monkeypatch):
    """Each retry would keep another copy of the layer, just when memory is short."""
    found = []

    def fail(self, calls):
        found.append(weakref.ref(self))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Layer, "forward", fail)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC))).result()
        engine.engine.release().result()  # the compute thread has left the load
        assert [layer() for layer in found] == [None]
    finally:
        gc.enable()


# Two threads


@pytest.fixture
def long_gate(monkeypatch) -> Gate:
    return Gate(monkeypatch)


def test_short_and_inline_batches_are_answered_beside_a_long_one(engine, long_gate):
    long = engine.run([call(seed=1)], is_long=True)
    assert long_gate.reached.wait(10)
    for is_inline in (False, True):
        assert same_answers(
            engine.run([call()], is_inline=is_inline).result(10)[0], make_layer(SPEC).forward([call()])[0]
        )
    assert not long.done()
    long_gate.opened.set()
    assert same_answers(long.result(10)[0], make_layer(SPEC).forward([call(seed=1)])[0])


def test_a_stopped_batch_fails_and_the_next_one_runs(engine, long_gate):
    running = engine.engine.run([LayerCall(engine.loaded, call())], is_long=True)
    assert long_gate.reached.wait(10)
    running.progress.stop()
    long_gate.opened.set()
    assert isinstance(running.future.exception(10), Stopped)
    assert engine.run([call()], is_long=True).result(10)


@pytest.mark.parametrize("how", ["answers", "fails", "is stopped"])
@pytest.mark.parametrize("is_long", [False, True])
def test_a_batch_that_has_ended_leaves_no_reference_cycle(engine, monkeypatch, how, is_long):
    """A cycle would keep the batch's tensors until some later collection, just when memory is short."""
    forward = Layer.forward

    def ends(self, calls):
        if how == "fails":
            raise ValueError("culprit")
        return forward(self, calls)

    monkeypatch.setattr(Layer, "forward", ends)
    gc.collect()
    gc.disable()
    try:
        one = call()
        held = weakref.ref(one.query)
        running = engine.engine.run([LayerCall(engine.loaded, one)], is_long=is_long)
        if how == "is stopped":
            running.progress.stop()
        running.future.exception(10)
        del one, running
        engine.engine._submit(engine.engine._long if is_long else engine.engine._short, int).result(10)
        assert held() is None
    finally:
        gc.enable()


def test_the_first_batches_in_a_dtype_build_its_variant_once(engine):
    built: list[torch.dtype] = []

    def noted(*, dtype: torch.dtype, device: torch.device) -> Layer:
        built.append(dtype)
        return make_layer(SPEC, dtype)

    engine.loaded.build = noted
    calls = [Call(randn(1, rows, 24, dtype=torch.float64)) for rows in (3, 5)]
    futures = [engine.run([one], is_long=is_long) for one in calls for is_long in (False, True)]
    answers = [future.result(10)[0] for future in futures]
    assert built == [torch.float64]
    for one, (short, long) in zip(calls, (answers[:2], answers[2:]), strict=True):
        assert same_answers(short, long)
        assert same_answers(short, make_layer(SPEC, torch.float64).forward([one])[0])


def test_a_stopped_self_check_is_begun_again_by_the_next_batch(engine):
    double = LayerCall(engine.loaded, Call(randn(1, 4, 24, dtype=torch.float64)))
    running = engine.engine.run([double])
    running.progress.stop()
    assert isinstance(running.future.exception(10), Stopped)
    assert not engine.engine.rate(double)
    assert engine.engine.run([double]).future.result(10)


def test_the_heap_is_not_trimmed_on_the_thread_of_long_batches(engine, monkeypatch):
    trimmed: list[str] = []
    monkeypatch.setattr("service.attention.engine.trim", lambda: trimmed.append(threading.current_thread().name))

    def fail(self, calls):
        raise MemoryError

    monkeypatch.setattr(Layer, "forward", fail)
    for is_long in (True, False):
        assert isinstance(engine.run([call()], is_long=is_long).exception(10), CostLimit)
    engine.engine.release().result(10)
    assert trimmed == ["compute_0"] * 2


def test_closing_joins_both_threads_within_one_time(engine, long_gate):
    engine.run([call()], is_long=True)
    assert long_gate.reached.wait(10)
    assert engine.engine.close(0.01) is False
    long_gate.opened.set()
    assert engine.engine.close(10) is True


@pytest.mark.timed
def test_the_first_rate_is_that_of_the_self_check(engine):
    """It predicts the processor time of a batch of many rows within a factor of two, however slow the machine is."""
    wide = make_spec(256, 8)
    loaded = engine.engine.load(partial(Layer, wide, make_tensors(wide))).result(60)
    batch = [LayerCall(loaded, Call(randn(1, 200, 256, seed=seed))) for seed in range(10)]
    work = sum(cost.flops(wide, Sizes(1, 8, 200, 200), None, None) for _ in batch)
    seconds = []
    for _ in range(5):
        running = engine.engine.run(batch)
        running.future.result(60)
        seconds.append(running.progress.seconds)
    assert 0.5 < work / engine.engine.rate(batch[0]) / statistics.median(seconds) < 2.0


def test_an_engine_in_exact_mode_on_the_cpu_answers_the_same_bits(engine):
    exact = OneLayer(EngineOptions(DEVICE, torch.float32, exact=True), SPEC)
    try:
        one = call(5)
        assert same_bits(exact.run([one, call()]).result()[0].output, engine.run([one]).result()[0].output)
    finally:
        exact.close()


def test_an_engine_turns_off_what_rounds_more_on_a_gpu_or_plans_for_each_shape(engine):
    products, attention = torch.backends.cuda.matmul, torch.backends.cuda
    reductions = products.allow_fp16_reduced_precision_reduction, products.allow_bf16_reduced_precision_reduction
    tf32 = products.allow_tf32, torch.backends.cudnn.allow_tf32
    assert not any((*reductions, *tf32, attention.cudnn_sdp_enabled()))


def test_a_device_is_selected_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == CPU
    with pytest.raises(EngineDown):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")
    assert pick_device("cpu") == CPU


def test_attention_without_a_layer_computes_in_float32_or_float64_also_in_a_bfloat16_service():
    engine = Engine(EngineOptions(DEVICE, torch.bfloat16))
    loaded = engine.load(ScaledDotProduct, dtype=torch.float32).result()
    for dtype, computed in (
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        x = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        call = AttentionCall(x, x, x, 0.5)
        answers: Any = engine.run([LayerCall(loaded, call)]).future.result()
        (expected,) = ScaledDotProduct(dtype=computed, device=DEVICE).forward([call])
        assert same_bits(answers[0].output, expected.output)
    engine.close()
    assert not loaded.is_sequential
    assert loaded.least_rows == 1, "it has no products"
    assert set(loaded.variants) == {torch.float32, torch.float64}


def test_a_fingerprint_names_instruction_set_torch_threads_and_dtype():
    found = fingerprint(EngineOptions(CPU, torch.float32, 2))
    assert found.isa == instruction_set()
    assert found.torch == torch.__version__
    assert (found.threads, found.dtype, found.device) == (2, "float32", "cpu")


def test_fingerprints_differ_where_bits_may():
    found = {fingerprint(EngineOptions(DEVICE, dtype, threads)) for dtype in DTYPES for threads in (1, 2)}
    assert len(found) == 8


def test_a_fingerprint_is_plain_words_and_numbers():
    assert all(
        type(value) in (str, int)
        for value in dataclasses.astuple(fingerprint(EngineOptions(DEVICE, torch.bfloat16, 1)))
    )
