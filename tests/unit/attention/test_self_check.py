"""The self-check detects a layer whose bits depend on the batch; such a layer runs one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from service.attention import cost, kernels, projection
from service.attention.call import Answer, Call
from service.attention.engine import EngineOptions
from service.attention.layer import MAX_ROWS, Layer
from service.attention.masks import Sizes
from service.attention.self_check import RATED, SAME_LENGTHS, checks, first_rate, sample_calls
from tests import attention_fixtures
from tests.attention_fixtures import (
    DEVICE,
    DTYPES,
    OneLayer,
    blas_keeps_rows,
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


class ManyRowsRoundDifferently(Layer):
    """Adds one unit in the last place if several sequences share a product, as a BLAS does that picks its kernel by the rows."""

    def _project(self, projections, parts):
        found = super()._project(projections, parts)
        return [torch.nextafter(x, torch.full_like(x, torch.inf)) for x in found] if len(parts) > 1 else found


class OddPlacesRoundDifferently(Layer):
    """Only a sequence that starts at an odd row is off by one unit in the last place."""

    def _project(self, projections, parts):
        found = super()._project(projections, parts)
        start = 0
        for part in parts:
            stop = start + part.shape[0] * part.shape[1]
            for x in found if start % 2 else ():
                x[start:stop] = torch.nextafter(x[start:stop], torch.tensor(torch.inf).to(x))
            start = stop
        return found


class WeightsChangeTheOutput(Layer):
    """As in torch.nn.MultiheadAttention, which has another kernel with weights."""

    def _forward(self, calls):
        answers = super()._forward(calls)
        return [
            answer if answer.weights is None else Answer(answer.output + 1e-6, answer.weights) for answer in answers
        ]


DOUBLES = [ManyRowsRoundDifferently, OddPlacesRoundDifferently, WeightsChangeTheOutput]


@pytest.mark.parametrize("double", DOUBLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_difference_in_the_last_place_is_detected(double, dtype):
    spec = make_spec(24, 3)
    assert not keeps_bits(double(spec, make_tensors(spec), dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("double", DOUBLES[:2])
def test_a_layer_that_failed_the_self_check_runs_one_sequence_at_a_time(monkeypatch, double):
    monkeypatch.setattr(attention_fixtures, "Layer", double)
    spec = make_spec(24, 3)
    engine = OneLayer(EngineOptions(DEVICE, torch.float32, exact=True), spec)
    try:
        assert engine.loaded.is_sequential
        assert engine.loaded.least_rows == make_layer(spec).least_rows, "alone, any number of rows will do"
        calls = [Call(randn(1, rows, 24, seed=rows)) for rows in (1, 5, 2, 30)]
        together = engine.run(calls).result()
        for call, answer in zip(calls, together, strict=True):
            assert same_answers(engine.run([call]).result()[0], answer)
        batch = Call(torch.cat([randn(1, 5, 24, seed=i) for i in range(3)]))
        for one, part in zip(engine.run([batch]).result()[0].output, batch.sequences(), strict=True):
            assert same_bits(one[None], engine.run([part]).result()[0].output)
    finally:
        engine.close()


def rounding(product, differs):
    """The product, off by one unit in the last place where `differs` says so of its number of rows."""

    def rounded(self, x_RK, *args):
        y = product(self, x_RK, *args)
        return y.nextafter(torch.full_like(y, torch.inf)) if differs(len(x_RK)) else y

    return rounded


@pytest.mark.skipif(not projection.has_packed_product(), reason="torch has no oneDNN here")
@pytest.mark.parametrize(
    ("differs", "least"),
    [
        (lambda rows: rows < 48, 48),
        (lambda rows: rows in (8, 16, 32), 48),  # bfloat16 with AMX: 4 rows round as 48 and more do
        (lambda rows: rows == 4, 8),
        (lambda rows: rows == 240, 256),
    ],
    ids=["below 48", "8 to 32", "4", "240"],
)
@pytest.mark.parametrize("key_width", [24, 10])
def test_products_have_the_least_rows_from_which_on_they_keep_the_bits(monkeypatch, differs, least, key_width):
    monkeypatch.setattr(projection.Packed, "_product", rounding(projection.Packed._product, differs))
    layer = make_layer(make_spec(24, 3, key_width=key_width))
    assert not keeps_bits(layer)
    settled(layer)
    assert (layer.least_rows, layer.is_sequential) == (least, False)
    assert layer.product_sizes == [size for size in projection.SIZES if size >= least]
    assert keeps_bits(layer)
    batch = [Call(randn(1, n, 24), randn(1, n, key_width), randn(1, n, 24)) for n in (1, 5, 40, 77, 300)]
    for call, answer in zip(batch, layer.forward(batch), strict=True):
        assert same_answers(layer.forward([call])[0], answer)


@pytest.mark.skipif(not projection.has_packed_product(), reason="torch has no oneDNN here")
def test_large_sizes_are_left_out_before_small_requests_are_filled_up_to_them(monkeypatch):
    """As bfloat16 with AMX and torch 2.11: 32 to 256 rows round alike, and 1,024 otherwise."""
    large = {(projection.instruction_set(), torch.float32): (1024, 512)}
    monkeypatch.setattr(projection, "LARGE_SIZES", large)
    differs = rounding(projection.Packed._product, lambda rows: rows < 32 or rows > 256)
    monkeypatch.setattr(projection.Packed, "_product", differs)
    layer = make_layer(make_spec(24, 3))
    assert layer.sizes[0] == 1024
    settled(layer)
    assert (layer.least_rows, layer.is_sequential) == (32, False)
    assert layer.product_sizes == [size for size in projection.SIZES if size >= 32]
    batch = [Call(randn(1, n, 24)) for n in (1, 40, 600)]
    for call, answer in zip(batch, layer.forward(batch), strict=True):
        assert same_answers(layer.forward([call])[0], answer)


def test_a_product_of_torch_gets_more_rows_too(monkeypatch):
    """As oneMKL in float64 with two threads, which rounds up to 32 rows differently from 36 and more."""
    monkeypatch.setattr(projection.Plain, "__call__", rounding(projection.Plain.__call__, lambda rows: rows <= 32))
    layer = settled(make_layer(make_spec(24, 3), torch.float64))
    assert (layer.least_rows, layer.is_sequential) == (48, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_another_order_of_a_sum_is_found_in_16_bits_though_rounding_hides_it(monkeypatch, dtype):
    """As bfloat16 with AMX: it changes one of 10,000 queries, keys and values, and attention averages most of these away."""

    def product(self, x_RK, _):
        x_RK, weight = x_RK.float(), self.weight.float()
        is_cut = len(x_RK) <= 32 and len(weight) > 64  # query, key and value together
        parts = [slice(None, 4), slice(4, None)] if is_cut else [slice(None)]
        y = sum(x_RK[:, part] @ weight[:, part].T for part in parts)
        return (y if self.bias is None else y + self.bias).to(dtype)

    monkeypatch.setattr(projection, "has_packed_product", lambda: False)
    monkeypatch.setattr(projection.Plain, "__call__", product)
    layer = settled(Layer(make_spec(64, 4), make_tensors(make_spec(64, 4)), dtype=dtype, device=DEVICE))
    assert (layer.least_rows, layer.is_sequential) == (48, False)


@every_thread_count
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ordinary_layers_pass_the_self_check_on_this_machine(dtype, threads):
    """Where the BLAS has the measured property, the rounding rules are enough for layers of any width."""
    if not blas_keeps_rows():
        pytest.skip("this machine's matrix products depend on the number of rows: layers run one sequence at a time")
    specs = [
        make_spec(384, 12),
        make_spec(512, 8, num_kv_heads=2),
        make_spec(4, 2),
        make_spec(1, 1),
        make_spec(37, 3, key_width=11, value_width=5, value_head_width=7, out_width=2),
        make_spec(129, 1, has_output=False),
    ]
    with torch_threads(threads):
        assert [keeps_bits(make_layer(spec, dtype)) for spec in specs] == [True] * len(specs)


@pytest.mark.skipif(not projection.has_packed_product(), reason="torch has no oneDNN here")
@pytest.mark.parametrize("key_width", [24, 10])
@pytest.mark.parametrize("processor", ["AVX512", "AMX"])
def test_every_size_of_a_product_is_checked(monkeypatch, processor, key_width):
    """Each size is code of its own, for each product: query, key and value fused, each of them, and the output."""
    monkeypatch.setattr(projection, "instruction_set", lambda: processor)
    met: dict[int, set[int]] = {}
    product = projection.Packed._product

    def noting(self, x):
        met.setdefault(id(self), set()).add(len(x))
        return product(self, x)

    monkeypatch.setattr(projection.Packed, "_product", noting)
    layer = make_layer(make_spec(24, 3, key_width=key_width))
    assert keeps_bits(layer)
    checked = [one for one in (*layer._inputs, layer._fused, layer._output) if one is not None]
    assert len(layer.sizes) == {"AVX512": 13, "AMX": 15}[processor]
    assert [met[id(one)] for one in checked] == [set(layer.sizes)] * len(checked)


@pytest.mark.parametrize("spec", [make_spec(24, 3), make_spec(24, 3, key_width=10)], ids=["equal", "unequal"])
def test_a_step_is_one_pass(monkeypatch, spec):
    """Batches wait for it, and a pass of 1,024 rows through a layer 4,096 wide takes a second."""
    layer, rows = make_layer(spec), []
    run_pass = layer._run_pass

    def noting(calls, sort_keys):
        rows.append(sum(call.query.shape[1] for call in calls))
        return run_pass(calls, sort_keys)

    monkeypatch.setattr(layer, "_run_pass", noting)
    num_passes = [len(rows) for _ in checks(layer)]
    assert num_passes == list(range(1, len(num_passes) + 1))
    assert MAX_ROWS * 3 // 4 < max(rows) <= MAX_ROWS


@pytest.mark.parametrize("length", SAME_LENGTHS)
def test_same_length_sequences_that_round_differently_together_are_detected(monkeypatch, length):
    attend = kernels._attend

    def rounding(heads, mask, scale, num_heads):
        output = attend(heads, mask, scale, num_heads)
        is_shared = heads.q.shape[:2] == (2 * num_heads, length)
        return output.nextafter(torch.tensor(torch.inf)) if is_shared else output

    layer = make_layer(make_spec(64, 4))
    with torch_threads(1):
        assert keeps_bits(layer)
        monkeypatch.setattr(kernels, "_attend", rounding)
        assert not keeps_bits(layer)


def test_sample_calls_are_repeatable_and_of_every_kind():
    layer = make_layer(make_spec(24, 3))
    calls, again = sample_calls(layer), sample_calls(layer)
    assert all(same_bits(one.query, other.query) for one, other in zip(calls, again, strict=True))
    assert any(call.is_self_attention for call in calls)
    assert any(not call.is_self_attention for call in calls)
    assert any(call.mask for call in calls)
    assert {1, 2, 11, 12, 13} <= {call.query.shape[1] for call in calls}


def test_a_layer_with_unequal_widths_is_checked_with_cross_attention():
    layer = make_layer(make_spec(24, 3, key_width=10))
    assert not any(call.is_self_attention for call in sample_calls(layer))
    assert keeps_bits(layer) or may_run_apart(layer)


@pytest.mark.skipif(not projection.has_packed_product(), reason="torch has no oneDNN here")
def test_a_layer_whose_products_accept_any_row_count_skips_the_size_checks():
    spec = make_spec(24, 3)
    packed, plain = make_layer(spec), make_layer(spec, torch.float64)
    assert packed.product_sizes == list(projection.SIZES)
    assert plain.product_sizes == []
    assert len(list(checks(packed))) - len(list(checks(plain))) == 2 * len(projection.SIZES)


@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_the_first_rate_is_the_work_of_one_full_pass_by_its_time(seconds):
    spec, length = make_spec(32, 4), RATED[2]
    work = MAX_ROWS // length * cost.flops(spec, Sizes(1, 4, length, length), None, None)
    times = iter([10.0, 10.0 + seconds])
    assert first_rate(make_layer(spec), lambda: next(times)) == work / seconds
