"""Projections: both products against float64 and among other rows, packing and splitting, and row counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention import projection
from service.attention.call import Call
from service.attention.projection import (
    SIZES,
    Packed,
    Plain,
    in_sizes,
    pack,
    packed,
    padded_rows,
    padded_width,
    row_counts,
    side_by_side,
    split,
)
from tests.attention_fixtures import (
    DTYPES,
    blas_keeps_rows,
    every_thread_count,
    keeps_bits,
    make_layer,
    make_spec,
    randn,
    same_bits,
    torch_threads,
)
from tests.strategies import seeds

WITH_LARGE = (1024, 512, *SIZES)
needs_packed = pytest.mark.skipif(not projection.has_packed_product(), reason="torch has no oneDNN here")
widths = st.integers(1, 160).map(lambda quarter: 4 * quarter)
shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=6)


def made(width: int, out: int, dtype: torch.dtype = torch.float32, *, bias: bool = True, seed: int = 0) -> Plain:
    weight = randn(out, width, seed=seed) / width**0.5
    return Plain(weight.to(dtype), randn(out, seed=seed + 1).to(dtype) if bias else None)


@given(st.integers(1, 3000), st.sampled_from(SIZES), st.sampled_from([SIZES, WITH_LARGE]))
def test_rows_are_rounded_up_to_a_sum_of_few_sizes_from_the_least_on(rows, least, allowed):
    sizes = in_sizes(rows, least, allowed)
    assert set(sizes) <= {size for size in allowed if size >= least}
    assert list(sizes) == sorted(sizes, reverse=True)
    assert len(sizes) <= rows // allowed[0] + 7
    assert rows <= sum(sizes) < rows + least
    assert in_sizes(sum(sizes), least, allowed) == sizes


@pytest.mark.parametrize("least", [4, 48])
@pytest.mark.parametrize("num", range(9, 17))
def test_nine_to_sixteen_short_requests_are_one_product_or_two_without_much_filler(num, least):
    sizes = in_sizes(16 * num, least, SIZES)
    assert len(sizes) <= 2
    assert sum(sizes) - 16 * num in (0, 16)


@pytest.mark.parametrize(
    ("rows", "least", "expected"),
    [
        (1, 4, [4]),
        (12, 4, [8, 4]),
        (20, 4, [16, 4]),
        (1024, 4, [256] * 4),
        (1, 48, [48]),
        (65, 48, [48, 48]),
        (112, 48, [64, 48]),
        (144, 48, [160]),
        (260, 48, [224, 48]),
    ],
)
def test_fewer_products_are_worth_some_filler_rows_if_there_must_be_any(rows, least, expected):
    assert in_sizes(rows, least, SIZES) == expected


@pytest.mark.parametrize(
    ("processor", "dtype", "num_weights", "large"),
    [
        ("AVX512", torch.float32, 512 * 1536, []),
        ("AMX", torch.float32, 512 * 1536, [1024, 512]),
        ("AMX", torch.bfloat16, 512 * 1536, [1024, 512]),
        ("AMX", torch.bfloat16, 1024 * 2048, [512]),
        ("AMX", torch.bfloat16, 4096 * 4096, []),  # a batch stops only between products
        ("AMX", torch.float16, 512 * 1536, []),
    ],
)
def test_products_are_larger_where_that_is_faster_and_short(monkeypatch, processor, dtype, num_weights, large):
    monkeypatch.setattr(projection, "instruction_set", lambda: processor)
    assert row_counts(dtype, num_weights) == (*large, *SIZES)


@pytest.mark.parametrize(("has_tiles", "isa"), [(True, "AMX"), (False, "AVX2")])
def test_the_instruction_set_is_torch_s_or_amx_which_torch_does_not_name(monkeypatch, has_tiles, isa):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_tiles})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert projection.instruction_set.__wrapped__() == isa


def test_rows_of_two_large_products_are_not_copied_into_small_ones():
    assert in_sizes(1600, 4, WITH_LARGE) == [1024, 512, 64]
    assert in_sizes(5000, 4, WITH_LARGE) == [1024, 1024, 1024, 1024, 512, 256, 128, 8]


@needs_packed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_thread_count
def test_a_packed_row_has_the_same_bits_beside_any_other_rows(dtype, threads):
    """Among 1,200 rows, and in any slice of them with a multiple of four rows."""
    if not blas_keeps_rows():
        pytest.skip(
            "products round by their rows here (as with AMX), so the self-check of each layer raises its least rows"
        )

    @settings(max_examples=60)
    @given(
        widths,
        st.integers(1, 700),
        st.booleans(),
        st.sampled_from([SIZES, WITH_LARGE]),
        st.integers(0, 299),
        st.integers(1, 300),
        seeds,
    )
    def check(width: int, out: int, bias: bool, sizes: tuple[int, ...], start: int, count: int, seed: int) -> None:
        product = packed(made(width, out, dtype, bias=bias, seed=seed), sizes)
        if not isinstance(product, Packed):  # bfloat16 on a processor without the instructions
            return
        rows = randn(1200, width, seed=seed + 2).to(dtype)
        part = slice(start, start + 4 * min(count, (1200 - start) // 4))
        assert same_bits(product(rows[part].clone(), 4), product(rows, 4)[part])

    with torch_threads(threads):
        check()


@pytest.mark.parametrize("width", [4, 64, 516, 2048])
@pytest.mark.parametrize("rows", [4, 12, 128, 132, 300])
def test_both_products_are_within_rounding_of_float64(width, rows):
    plain, x = made(width, 72), randn(rows, width, seed=7)
    assert plain.bias is not None
    expected = x.double() @ plain.weight.double().T + plain.bias.double()
    for product in (plain, packed(plain, SIZES)):
        assert torch.allclose(product(x, 4).double(), expected, rtol=0, atol=2e-5)


@needs_packed
def test_float32_is_packed_and_float64_is_not():
    assert isinstance(packed(made(8, 8), SIZES), Packed)
    plain = made(8, 8, torch.float64)
    assert packed(plain, SIZES) is plain


def test_without_the_product_in_torch_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(projection, "has_packed_product", lambda: False)
    plain = made(8, 8)
    assert packed(plain, SIZES) is plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_keeps_its_bits_with_either_product(monkeypatch, dtype):
    spec, call = make_spec(64, 4), Call(randn(1, 40, 64))
    one = make_layer(spec, dtype)
    monkeypatch.setattr(projection, "has_packed_product", lambda: False)
    other = make_layer(spec, dtype)
    assert keeps_bits(other)
    close = 1e-5 if dtype == torch.float32 else 0.05
    assert torch.allclose(one.forward([call])[0].output, other.forward([call])[0].output, rtol=0, atol=close)
    assert other.num_bytes == 4 * 64 * 64 * dtype.itemsize, "query, key and value are slices of the fused weight"


@needs_packed
def test_a_wide_layer_keeps_no_second_copy_of_its_input_weights():
    assert make_layer(make_spec(640, 4)).num_bytes == 4 * 640 * 640 * 4


@pytest.mark.parametrize(
    ("dtype", "num_weights", "expected"),
    [
        (torch.float32, 10**6, 12),
        (torch.float64, 4, 12),
        (torch.bfloat16, 4096, 12),
        (torch.bfloat16, 256, 17),
        (torch.float16, 16, 257),
        (torch.float16, 4, 1025),
    ],
)
def test_the_product_of_torch_needs_the_measured_number_of_rows(dtype, num_weights, expected):
    """At least 12; in the 16-bit dtypes more than 4,096 multiply-adds."""
    assert Plain(torch.zeros(num_weights // 4, 4, dtype=dtype), None).least_rows == expected


def test_a_missing_bias_beside_a_present_one_is_zero():
    tensors = {"a.weight": randn(3, 5), "a.bias": randn(3), "b.weight": randn(2, 5)}
    both = side_by_side(tensors, ["a", "b"])
    assert both.weight.shape == (5, 8), "the inner width is padded to a multiple of 4"
    assert not both.weight[:, 5:].any()
    assert both.bias is not None
    assert same_bits(both.bias, torch.cat([tensors["a.bias"], torch.zeros(2)]))
    assert side_by_side(tensors, ["b"]).bias is None
    assert same_bits(both.rows(3, 5).weight[:, :5], tensors["b.weight"])


@given(shapes, st.integers(1, 19), st.integers(0, 15), st.sampled_from(DTYPES), seeds)
@settings(max_examples=150)
def test_split_undoes_pack_exactly(shapes, width, filler, dtype, seed):
    parts = [randn(*shape, width, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]
    rows = sum(b * length for b, length in shapes)
    x_RK = pack(parts, rows + filler, like=torch.empty(0, dtype=dtype))
    back = split(x_RK[:, :width], shapes)
    assert x_RK.shape == (rows + filler, padded_width(width))
    assert all(same_bits(one, other) for one, other in zip(parts, back, strict=True))
    assert not x_RK[rows:].any()
    assert not x_RK[:, width:].any()


@given(shapes, st.integers(1, 19), st.sampled_from(DTYPES))
@settings(max_examples=60)
def test_filler_rows_never_hold_old_memory(shapes, width, dtype):
    """A matrix that is packed in memory full of NaN contains none."""
    rows = sum(b * length for b, length in shapes) + 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda self, *size: self.new_full(size, torch.nan))
        x_RK = pack([randn(*shape, width, dtype=dtype) for shape in shapes], rows, like=torch.empty(0, dtype=dtype))
    assert torch.isfinite(x_RK).all()


def test_a_layer_gives_the_same_results_in_memory_full_of_nan():
    """Nothing of the filler rows or the padded width reaches an answer."""
    layer, call = make_layer(make_spec(10, 2, head_width=3, value_head_width=3)), Call(randn(1, 5, 10))
    clean = layer.forward([call])[0].output
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda self, *size: self.new_full(size, torch.nan))
        assert same_bits(layer.forward([call])[0].output, clean)


def test_pack_accepts_non_contiguous_input_and_converts_the_dtype():
    wide = randn(2, 6, 8)
    parts = [wide[:, ::2, ::2], wide.transpose(1, 2)[:1, :, :4], wide[:, :1, :4].expand(2, 3, 4).double()]
    x_RK = pack(parts, 24, like=torch.empty(0, dtype=torch.float64))
    for part, back in zip(parts, split(x_RK, [part.shape[:2] for part in parts]), strict=True):
        assert same_bits(back, part.double())


def test_parts_do_not_share_memory_with_the_packed_matrix():
    part = randn(1, 12, 4)
    pack([part], 12, like=part).zero_()
    assert part.any()


@pytest.mark.parametrize(
    ("tokens", "least", "expected"),
    [(1, 4, 4), (5, 4, 8), (8, 4, 8), (1, 12, 12), (13, 12, 16), (1, 17, 20), (1, 4097, 4100), (4096, 12, 4096)],
)
def test_rows_are_rounded_up_to_a_multiple_of_four_and_to_the_minimum(tokens, least, expected):
    assert padded_rows(tokens, least, ()) == expected


@pytest.mark.parametrize(("tokens", "least", "expected"), [(1, 4, 4), (5, 4, 8), (49, 48, 64), (65, 48, 96)])
def test_rows_of_packed_products_are_rounded_up_to_a_sum_of_sizes(tokens, least, expected):
    assert padded_rows(tokens, least, SIZES) == expected


@pytest.mark.parametrize(("width", "expected"), [(1, 4), (3, 4), (4, 4), (5, 8), (384, 384), (511, 512)])
def test_an_inner_width_is_rounded_up_to_a_multiple_of_four(width, expected):
    assert padded_width(width) == expected
