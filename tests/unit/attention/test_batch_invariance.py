"""P1 and P2: the same bits alone and in any batch, with and without weights, in four dtypes, at one and two threads.

Where this machine's matrix products break the rule that a row's bits do not depend on the row count (`may_run_apart`), the
self-check must detect it. The layer then runs one sequence at a time, and the tests check that instead.

The needle test has a long form of 10,000 draws a dtype (T19), which runs only with its marker:

    pytest -m slow tests/unit/attention/test_batch_invariance.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from service.attention import layer as layer_module
from service.attention.call import Answer, Call, WeightsWanted
from service.attention.engine import EngineOptions
from service.attention.layer import Layer
from service.attention.masks import CombinedMask, Sizes, causal, lengths
from tests.attention_fixtures import (
    DEVICE,
    DTYPES,
    THREADS,
    OneLayer,
    every_thread_count,
    keeps_bits,
    make_layer,
    make_spec,
    make_tensors,
    may_run_apart,
    randn,
    same_answers,
    same_bits,
    settled,
    torch_threads,
)
from tests.strategies import calls, extras_wanted, seeds, specs

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Factors of a test's few draws: 1 in `make test`, which takes seconds; more, and each thread count, in `make test-long`.
few_and_many_draws = pytest.mark.parametrize(
    ("threads", "times"),
    [(THREADS[0], 1), *(pytest.param(n, 4 if n == THREADS[0] else 2, marks=pytest.mark.long) for n in THREADS)],
)


def differing(layer: Layer, batch: Sequence[Call]) -> list[int]:
    """Return the indices of the calls whose answers in this batch differ from those alone."""
    together = layer.forward(batch)
    return [i for i, call in enumerate(batch) if not same_answers(together[i], layer.forward([call])[0])]


def assert_no_difference(layer: Layer, batch: Sequence[Call]) -> None:
    found = differing(layer, batch)
    if found and may_run_apart(layer):
        assert not keeps_bits(layer), "calls differ in a batch, and the self-check did not detect it"
        found = differing(settled(layer), batch)
    assert not found, f"calls {found} of {len(batch)} have other bits in the batch than alone"


@every_dtype
@few_and_many_draws
def test_an_answer_has_the_same_bits_alone_and_in_any_batch(dtype, threads, times):
    """Layers of any widths, self- and cross-attention, any masks and requested weights in one batch."""

    @settings(max_examples=30 * times)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        spec = data.draw(specs())
        query_dtype = torch.float64 if dtype == torch.float64 else data.draw(st.sampled_from(DTYPES[:1] + DTYPES[2:]))
        batch = [data.draw(calls(spec, dtype=query_dtype)).call for _ in range(data.draw(st.integers(2, 6)))]
        assert_no_difference(make_layer(spec, dtype, seed=data.draw(seeds)), batch)

    with torch_threads(threads):
        check()


@every_dtype
@few_and_many_draws
def test_an_answer_has_the_same_bits_at_the_widths_of_published_models(dtype, threads, times):
    """At these widths a product is split among the threads."""

    @settings(max_examples=4 * times)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        width, heads, kv_heads = data.draw(st.sampled_from([(384, 12, 12), (512, 8, 8), (256, 8, 2), (768, 12, 12)]))
        spec = make_spec(width, heads, num_kv_heads=kv_heads)
        num_rows = data.draw(st.lists(st.integers(1, 90), min_size=2, max_size=6))
        batch = [Call(randn(1, rows, width, seed=i)) for i, rows in enumerate(num_rows)]
        assert_no_difference(make_layer(spec, dtype), batch)

    with torch_threads(threads):
        check()


@every_dtype
@few_and_many_draws
def test_an_answer_has_the_same_bits_while_the_other_thread_computes(dtype, threads, times):
    """Each call alone, and in batches on both threads of one engine at once."""
    spec = make_spec(64, 4)
    options = EngineOptions(DEVICE, torch.float32 if dtype == torch.float64 else dtype, threads)
    with torch_threads(threads):  # of this thread
        engine = OneLayer(options, spec)
        try:
            for seed in range(3 * times):
                draw = random.Random(seed)
                query_dtype = torch.float64 if dtype == torch.float64 else torch.float32
                batch = [
                    Call(
                        randn(1, draw.randint(1, 90), 64, seed=draw.randrange(10**6), dtype=query_dtype),
                        weights=draw.choice([None, WeightsWanted("heads")]),
                    )
                    for _ in range(12)
                ]
                alone = [engine.run([one]).result(60)[0] for one in batch]
                runs = [engine.run(batch, is_long=is_long) for is_long in (False, True) * 10]
                for answers in [run.result(60) for run in runs]:
                    assert all(same_answers(*pair) for pair in zip(answers, alone, strict=True))
        finally:
            engine.close()


@every_dtype
@few_and_many_draws
def test_an_answer_has_the_same_bits_in_one_pass_and_in_several(dtype, threads, times, monkeypatch):
    """Calls of few rows each in passes of 40 rows; one call alone may have more."""
    monkeypatch.setattr(layer_module, "MAX_ROWS", 40)

    @settings(max_examples=12 * times)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        spec = data.draw(specs())
        query_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        drawn = st.lists(calls(spec, dtype=query_dtype), min_size=6, max_size=14)
        assert_no_difference(make_layer(spec, dtype), [one.call for one in data.draw(drawn)])

    with torch_threads(threads):
        check()


@every_dtype
@every_thread_count
def test_an_answer_has_the_same_bits_in_a_batch_of_more_rows_than_one_pass_takes(dtype, threads):
    lengths_in_rows = (7, 1300, 16, 300, 16, 900, 1, 64)
    batch = [Call(randn(1, rows, 64, seed=rows)) for rows in lengths_in_rows]
    with torch_threads(threads):
        assert_no_difference(make_layer(make_spec(64, 4), dtype), batch)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_passes_keep_the_order_and_are_few_and_of_similar_size(rows):
    order = list(range(len(rows)))[::-1]
    passes = layer_module._passes(order, rows)
    assert [i for some in passes for i in some] == order
    assert len(passes) <= -(-sum(rows) // layer_module.MAX_ROWS)
    assert all(sum(rows[i] for i in some) <= layer_module.MAX_ROWS + max(rows) for some in passes)


@every_dtype
@few_and_many_draws
def test_no_request_changes_a_bit_of_the_output(dtype, threads, times):
    """P2, for weights of every form and selection, scores, lse and entropy, in a batch with another call."""

    @settings(max_examples=15 * times)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        spec = data.draw(specs())
        query_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        call, other = (data.draw(calls(spec, dtype=query_dtype)).call for _ in range(2))
        sizes = Sizes(call.query.shape[0], spec.num_heads, call.query.shape[1], call.source.shape[1])
        layer = make_layer(spec, dtype, seed=data.draw(seeds))
        bare = Call(call.query, call.key, call.value, call.mask)
        plain = layer.forward([bare, other])[0]
        asked = bare._replace(**data.draw(extras_wanted(sizes)))
        assert same_answers(plain, Answer(layer.forward([asked, other])[0].output))

    with torch_threads(threads):
        check()


@every_dtype
@few_and_many_draws
def test_a_batch_gives_the_results_of_its_sequences_one_by_one(dtype, threads, times):
    """A call [B, L, d] is B sequences: outputs and weights are those of B calls with one sequence each."""

    @settings(max_examples=15 * times)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        spec = data.draw(specs())
        query_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        call = data.draw(calls(spec, dtype=query_dtype)).call
        layer = make_layer(spec, dtype, seed=data.draw(seeds))
        note(f"{spec} {call.query.shape}")
        if may_run_apart(layer):
            settled(layer)
        together = layer.forward([call])[0]
        layer.is_sequential = True
        assert same_answers(together, layer.forward([call])[0])
        for b, part in enumerate(call.sequences()):
            assert same_bits(together.output[b : b + 1], layer.forward([part])[0].output)

    with torch_threads(threads):
        check()


@every_dtype
@every_thread_count
@pytest.mark.parametrize("columns", [8, 16, 24, 32, 44])
def test_narrow_projections_of_wide_inputs_keep_their_bits(columns, dtype, threads):
    """A single narrow head, or a narrow output: products that a BLAS may split along their inner width."""
    with torch_threads(threads):
        for spec in (
            make_spec(384, 1, head_width=columns, value_head_width=columns),
            make_spec(384, 6, out_width=columns),
        ):
            batch = [Call(randn(1, rows, 384, seed=rows)) for rows in (3, 12, 30, 50, 90)]
            assert_no_difference(make_layer(spec, dtype), batch)


NEEDLE_SPECS = {
    "384 wide, 12 heads": make_spec(384, 12),
    "64 wide, 4 heads": make_spec(64, 4),
    "70 wide, 5 heads": make_spec(70, 5),
    "512 wide, 8 heads on 2": make_spec(512, 8, num_kv_heads=2),
}


def changed_needles(dtype: torch.dtype, threads: int, draws: int) -> list[str]:
    """Return the random batches, of 1 to 16 sequences, in which one sequence at a random place has other bits than alone."""
    rng = random.Random()
    seed = rng.randrange(2**31)
    rng.seed(seed)
    found = []
    layers = {name: Layer(spec, make_tensors(spec), dtype=dtype, device=DEVICE) for name, spec in NEEDLE_SPECS.items()}
    for layer in layers.values():
        if may_run_apart(layer):
            settled(layer)
    for draw in range(draws):
        name = rng.choice(list(layers))
        layer, width = layers[name], NEEDLE_SPECS[name].query_width
        length = rng.randint(1, 48)  # several calls get this length, so that some share an attention call
        batch = [_random_call(rng, NEEDLE_SPECS[name], layer.dtype, length) for _ in range(rng.randint(0, 15))]
        needle = _random_call(rng, NEEDLE_SPECS[name], layer.dtype, length)
        place = rng.randint(0, len(batch))
        batch.insert(place, needle)
        if not same_answers(layer.forward([needle])[0], layer.forward(batch)[place]):
            rows = [call.query.shape[1] for call in batch]
            found.append(f"seed {seed} draw {draw}: {name} ({width}), {threads} threads, place {place} of rows {rows}")
    return found


def _random_call(rng: random.Random, spec, dtype: torch.dtype, length: int) -> Call:
    rows = rng.choice([1, 2, 3, rng.randint(1, 16), rng.randint(1, 48), length, length])
    seed = rng.randrange(2**31)
    query = randn(
        1, rows, spec.query_width, seed=seed, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )
    sizes = Sizes(1, spec.num_heads, rows, rows)
    mask = rng.choice([None, causal(sizes, 0), lengths(torch.tensor([[rng.randint(0, rows)]]))])
    return Call(
        query,
        mask=None if mask is None else CombinedMask(sizes, (mask,)),
        weights=rng.choice([None, None, WeightsWanted("mean")]),
    )


@every_dtype
@few_and_many_draws
def test_a_needle_keeps_its_bits_at_any_place_of_any_batch(dtype, threads, times):
    """T19, with few draws: one sequence at a random place among random ones."""
    with torch_threads(threads):
        assert changed_needles(dtype, threads, draws=80 * times) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@every_dtype
def test_a_needle_keeps_its_bits_ten_thousand_times(dtype, request):
    if "slow" not in request.config.option.markexpr:
        pytest.skip("10,000 draws a dtype take minutes: pytest -m slow tests/unit/attention")
    for threads in THREADS:
        with torch_threads(threads):
            assert changed_needles(dtype, threads, draws=5000) == []
