"""Preemption: a long batch is preempted between two pieces and resumes without a changed bit; pieces cover a sequence once."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from service.attention import engine as engine_module
from service.attention import kernels, preemption
from service.attention.call import Call, WeightsWanted
from service.attention.engine import EngineOptions
from service.attention.kernels import MAX_WORK, Heads, attend, may_share
from service.attention.layer import Layer
from service.attention.masks import CombinedMask, Sizes, causal
from service.attention.preemption import Dropped, Steps, preemption_point
from service.attention.projection import PIECE_ROWS, Plain
from tests.attention_fixtures import (
    CPU,
    DTYPES,
    OneLayer,
    blas_keeps_rows,
    make_layer,
    make_spec,
    make_tensors,
    randn,
    random_heads,
    same_answers,
    same_bits,
)


def in_thread(steps: Steps[Any], work) -> threading.Thread:
    thread = threading.Thread(target=steps.run, args=(work,))
    thread.start()
    return thread


def pieces(number: int) -> list[int]:
    done = []
    for piece in range(number):
        done.append(piece)
        preemption_point()
    return done


def to_the_end(future: Future[Any]) -> tuple[Any, int]:
    """Resume a batch until it ends; return its result and how often it was preempted."""
    for times in itertools.count():
        result = future.result(10)
        if not isinstance(result, Steps):
            return result, times
        future = result.resume()
    raise AssertionError


# One batch


def test_a_point_outside_a_batch_in_steps_does_nothing():
    preemption_point()


def test_a_batch_is_preempted_at_each_due_point_and_continues_when_resumed():
    notified: list[str] = []

    class Recorded(threading.Event):
        def set(self) -> None:
            notified.append("preempted")

        def clear(self) -> None:
            notified.append("resumed")

    steps: Steps[list[int]] = Steps(threading.Lock(), 0.0, Recorded())
    thread = in_thread(steps, lambda: pieces(3))
    assert to_the_end(steps.first) == ([0, 1, 2], 3)
    assert notified == ["preempted", "resumed"] * 3
    thread.join()


def test_a_batch_that_ends_in_its_first_step_is_never_preempted():
    steps: Steps[list[int]] = Steps(threading.Lock(), math.inf, threading.Event())
    in_thread(steps, lambda: pieces(3)).join()
    assert to_the_end(steps.first) == ([0, 1, 2], 0)


def test_the_lock_is_free_while_a_batch_is_preempted_and_held_while_it_computes():
    lock, was_locked = threading.Lock(), []

    def work() -> None:
        was_locked.append(lock.locked())
        preemption_point()
        was_locked.append(lock.locked())

    steps: Steps[None] = Steps(lock, 0.0, threading.Event())
    thread = in_thread(steps, work)
    assert isinstance(steps.first.result(10), Steps)
    assert lock.acquire(timeout=10)
    lock.release()
    to_the_end(steps.resume())
    thread.join()
    assert was_locked == [True, True]
    assert not lock.locked()


def test_a_dropped_batch_ends_where_it_was_preempted():
    done = []
    steps: Steps[None] = Steps(threading.Lock(), 0.0, threading.Event())

    def work() -> None:
        preemption_point()
        done.append("more")

    thread = in_thread(steps, work)
    assert steps.first.result(10) is steps
    steps.drop()
    thread.join()
    assert done == []


def test_a_failure_in_a_later_step_is_the_failure_of_that_step():
    def work() -> None:
        preemption_point()
        raise ValueError("later")

    steps: Steps[None] = Steps(threading.Lock(), 0.0, threading.Event())
    thread = in_thread(steps, work)
    with pytest.raises(ValueError, match="later"):
        to_the_end(steps.first)
    thread.join()


@pytest.mark.parametrize("how", ["answers", "fails at once", "fails later", "is dropped"])
def test_a_batch_that_has_ended_leaves_no_reference_cycle(how):
    """A cycle would keep the batch's tensors until some later gc, just when memory is short."""

    def compute(tensor: torch.Tensor) -> torch.Tensor:
        if how != "fails at once":
            preemption_point()
        if how != "answers":
            raise RuntimeError(tensor.shape)
        return tensor

    gc.disable()
    try:
        tensor = torch.zeros(1)
        held = weakref.ref(tensor)
        steps: Steps[Any] = Steps(threading.Lock(), 0.0, threading.Event())
        first = steps.first
        with ThreadPoolExecutor(1) as pool:  # as in the engine: the pool's frames hold the work, too
            pool.submit(steps.run, functools.partial(compute, tensor))
            if how == "is dropped":
                first.result(10).drop()
            elif how != "fails at once":
                first.result(10).resume()
        del tensor, steps, first, pool
        assert held() is None
    finally:
        gc.enable()


def test_a_batch_cancelled_before_its_start_does_nothing():
    done: list[int] = []
    steps: Steps[None] = Steps(threading.Lock(), 0.0, threading.Event())
    assert steps.first.cancel()
    steps.run(lambda: done.append(1))
    assert done == []


def test_a_batch_that_must_finish_is_preempted_no_more():
    steps: Steps[list[int]] = Steps(threading.Lock(), 0.0, threading.Event())
    thread = in_thread(steps, lambda: pieces(5))
    assert steps.first.result(10) is steps
    steps.finish()
    thread.join(10)
    assert not thread.is_alive()
    assert steps._step.result(0) == [0, 1, 2, 3, 4]


def test_dropping_raises_no_exception_that_handlers_catch():
    assert not issubclass(Dropped, Exception)


# The engine


def large_calls() -> dict[str, Call]:
    sizes = Sizes(1, 3, 300, 300)
    query = randn(1, 300, 24)
    return {
        "plain": Call(query),
        "many sequences": Call(randn(40, 5, 24)),
        "causal": Call(query, mask=CombinedMask(sizes, (causal(sizes, 0),))),
        "weights": Call(query, weights=WeightsWanted("heads")),
        "top_k": Call(query, weights=WeightsWanted("top_k", 200)),
        "mean": Call(query, weights=WeightsWanted("mean", None, (2, 0), (299, 5, 131))),
        "float64": Call(query.double()),
        "cross": Call(query, randn(1, 400, 24, seed=1), randn(1, 400, 24, seed=2)),
    }


@pytest.mark.parametrize("name", large_calls())
def test_an_answer_has_the_same_bits_whether_its_batch_was_preempted_or_not(monkeypatch, name):
    monkeypatch.setattr(kernels, "MAX_WORK", 10**6)  # so that a small sequence is computed in pieces
    monkeypatch.setattr(kernels, "MAX_SMALL_SCORES", 0)
    call = large_calls()[name]
    once, often = (
        OneLayer(EngineOptions(CPU, torch.float32, step_s=step_s), make_spec(24, 3)) for step_s in (math.inf, 0)
    )
    try:
        (whole,), none = to_the_end(once.run([call]))
        (other,), times = to_the_end(often.run([call]))
        assert none == 0 < times
        assert same_answers(whole, other)
    finally:
        once.close()
        often.close()


def test_a_batch_that_arrives_while_another_is_preempted_runs_in_one_step():
    engine = OneLayer(EngineOptions(CPU, torch.float32, step_s=0.0), make_spec(24, 3))
    try:
        small = Call(randn(1, 4, 24, seed=3))
        (alone,), _ = to_the_end(engine.run([small]))
        preempted = engine.run([large_calls()["many sequences"]]).result(10)
        assert isinstance(preempted, Steps)
        for is_inline in (False, True):
            (beside,) = engine.run([small], is_inline=is_inline).result(10)
            assert same_answers(alone, beside)
        assert len(to_the_end(preempted.resume())[0]) == 1
    finally:
        engine.close()


def test_a_load_goes_on_while_a_batch_is_preempted():
    """Otherwise one step of it would run a batch, however long the batches are."""
    spec = make_spec(24, 3)
    engine = OneLayer(EngineOptions(CPU, torch.float32, step_s=0.0), spec)
    try:
        loading = engine.engine.load(spec, make_tensors(spec, seed=1))
        future = engine.run([large_calls()["many sequences"]])
        preempted = future.result(10)
        assert isinstance(preempted, Steps)
        assert loading.result(10).variants
        to_the_end(preempted.resume())
    finally:
        engine.close()


def test_an_engine_with_a_preempted_batch_closes():
    engine = OneLayer(EngineOptions(CPU, torch.float32, step_s=0.0), make_spec(24, 3))
    assert isinstance(engine.run([large_calls()["many sequences"]]).result(10), Steps)
    assert engine.engine.close(10)


def test_the_busy_time_of_the_engine_excludes_the_time_of_preemptions(monkeypatch):
    """A clock that advances by 1 ms with each reading, and by 100 s during one preemption."""
    readings, offset_s = itertools.count(), 0.0
    clock = SimpleNamespace(perf_counter=lambda: next(readings) / 1000 + offset_s)
    engine = OneLayer(EngineOptions(CPU, torch.float32, step_s=0.0), make_spec(24, 3))
    monkeypatch.setattr(preemption, "time", clock)
    monkeypatch.setattr(engine_module, "time", clock)
    try:
        before = engine.engine.busy_seconds
        preempted = engine.run([large_calls()["many sequences"]]).result(10)
        offset_s = 100.0
        to_the_end(preempted.resume())
        assert preempted.preempted_s > 100 > engine.engine.busy_seconds - before > 0
    finally:
        engine.close()


def test_each_filler_row_counts_once_although_batches_of_the_layer_run_between_two_steps():
    def num_rows(num_between: int) -> int:
        engine = OneLayer(EngineOptions(CPU, torch.float32, step_s=0.0), make_spec(24, 3))
        small = [Call(randn(1, 1, 24))]
        try:
            before = engine.engine.filler_rows
            preempted = engine.run([large_calls()["many sequences"]]).result(10)
            for _ in range(num_between):
                engine.run(small).result(10)
            to_the_end(preempted.resume())
            for _ in range(5 - num_between):
                to_the_end(engine.run(small))
            return engine.engine.filler_rows - before
        finally:
            engine.close()

    assert num_rows(5) == num_rows(0) > 0


def test_a_batch_between_two_steps_builds_no_variant_that_is_being_checked(monkeypatch):
    """Its bits are those that it gets alone later; a second self-check would keep all batches waiting."""
    built: list[torch.dtype] = []

    def noted(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Layer:
        built.append(dtype)
        return Layer(*args, dtype=dtype, **kwargs)

    monkeypatch.setattr(engine_module, "Layer", noted)
    engine = OneLayer(EngineOptions(CPU, torch.float32, step_s=0.0), make_spec(24, 3))
    beside = [Call(randn(3, 7, 24, seed=4).double()), Call(randn(1, 2, 24, seed=5).double())]
    try:
        future, found = engine.run([large_calls()["float64"]]), []
        while isinstance(preempted := future.result(10), Steps):
            found.append(engine.run(beside).result(10))
            future = preempted.resume()
        assert len(found) > 20
        assert built == [torch.float32, torch.float64]
        assert not engine.loaded.unchecked
        alone = [to_the_end(engine.run([call]))[0][0] for call in beside]
        for answers in found:
            assert all(same_answers(*pair) for pair in zip(answers, alone, strict=True))
    finally:
        engine.close()


def test_a_dropped_self_check_is_begun_again_by_the_next_batch():
    engine = OneLayer(EngineOptions(CPU, torch.float32, step_s=0.0), make_spec(24, 3))
    try:
        for _ in range(2):
            preempted = engine.run([large_calls()["float64"]]).result(10)
            assert isinstance(preempted, Steps)
            preempted.drop()
            assert isinstance(preempted.first.exception(10), Dropped)
            assert not engine.loaded.unchecked
            assert torch.float64 not in engine.loaded.variants
    finally:
        engine.close()


# Pieces


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [Sizes(1, 3, 700, 300), Sizes(1, 8, 65, 40), Sizes(1, 1, 1, 999), Sizes(1, 2, 513, 257)]
)
@pytest.mark.parametrize("most", [1, 10**6, 3 * 10**7])
def test_the_pieces_hold_each_row_of_each_head_once_and_give_the_same_answer(monkeypatch, dtype, sizes, most):
    heads = random_heads(sizes, dtype)
    whole = attend(heads, None, 0.3)
    monkeypatch.setattr(kernels, "MAX_WORK", most)
    monkeypatch.setattr(kernels, "MAX_SMALL_SCORES", 0)
    seen = torch.zeros(sizes.heads, sizes.queries, dtype=torch.int64)
    for some, rows in kernels._pieces(heads):
        seen[some, rows] += 1
    assert bool((seen == 1).all())
    mask = torch.zeros(1, sizes.queries, sizes.keys, dtype=torch.promote_types(dtype, torch.float32))
    mask[:, : sizes.queries // 2, 0] = -torch.inf if sizes.keys > 1 else 0.0
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(attend(heads, None, 0.3), whole, rtol=tolerance, atol=tolerance)
    monkeypatch.setattr(kernels, "MAX_WORK", math.inf)
    uncut = attend(heads, mask, 0.3)
    monkeypatch.setattr(kernels, "MAX_WORK", most)
    torch.testing.assert_close(attend(heads, mask, 0.3), uncut, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_mask_and_the_order_of_heads_change_no_bit_of_the_pieces(monkeypatch, dtype):
    monkeypatch.setattr(kernels, "MAX_WORK", 10**6)
    monkeypatch.setattr(kernels, "MAX_SMALL_SCORES", 0)
    heads = random_heads(Sizes(1, 3, 600, 50), dtype)
    zeros = torch.zeros(3, 600, 50, dtype=torch.promote_types(dtype, torch.float32))
    assert same_bits(attend(heads, None, 0.3), attend(heads, zeros.to(dtype), 0.3))
    other = Heads(heads.q.flip(0).contiguous(), heads.k.flip(0).contiguous(), heads.v.flip(0).contiguous())
    assert same_bits(attend(heads, None, 0.3), attend(other, None, 0.3).flip(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sequences_computed_in_pieces_share_no_call(dtype):
    like = torch.zeros(1, dtype=dtype)
    assert not may_share((1, 512, 512), like)
    assert 2**18 * (1024 + kernels.SOFTMAX_WORK) > MAX_WORK, "this sequence is computed in pieces"
    layer = make_layer(make_spec(512, 1, biases=False), dtype)
    calls = [Call(randn(1, 512, 512, seed=seed)) for seed in range(2)]
    together = layer.forward(calls)
    assert all(same_answers(layer.forward([call])[0], answer) for call, answer in zip(calls, together, strict=True))


@pytest.mark.parametrize("rows", [2 * PIECE_ROWS - 4, 2 * PIECE_ROWS, 2 * PIECE_ROWS + 4, 5 * PIECE_ROWS + 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_plain_product_of_many_rows_equals_that_of_its_pieces(rows, dtype):
    plain = Plain(randn(36, 24, dtype=dtype), randn(36, seed=1, dtype=dtype))
    x = randn(rows, 24, seed=2, dtype=dtype)
    torch.testing.assert_close(plain(x), torch.nn.functional.linear(x, plain.weight, plain.bias))
    if blas_keeps_rows():
        assert same_bits(plain(x)[:1024], plain(x[:1024].clone()))
