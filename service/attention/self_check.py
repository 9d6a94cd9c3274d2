"""Self-check: tests that a layer on this machine gives a sequence the same bits alone and in a batch (P1).

Invariants: It runs real forward passes, so it is the warm-up as well. It compares bits, never within a tolerance. A result
holds for one layer, dtype, device and number of threads, so the check runs for each. It also checks P2: requesting weights
does not change the output. It finds the least rows from which on this machine's products keep the bits. The first forecasts come
from a pass that follows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from service.attention import cost
from service.attention.call import Answer, AttentionCall, Call, WeightsWanted
from service.attention.layer import MAX_ROWS, Layer
from service.attention.masks import CombinedMask, Sizes, causal, of_positions
from service.attention.projection import Plain, packed
from service.attention.scaled_dot_product import ScaledDotProduct
from service.attention.spec import LayerSpec

# Lengths around every rounding rule of `projection.py`: single rows, odd counts, below and above 12 rows, a common long one. The
# last is self-attention without a mask: a full pass has it 12 times, and one kernel call may compute most or all of these.
LENGTHS = (1, 2, 3, 5, 11, 12, 13, 1, 30, 7, 64, 20, 9, 33)
# Lengths of sequences that are checked alone and twice in one attention call: small products have kernels of their own.
SAME_LENGTHS = (4, 8, 16, 24, 48, 64, 128)
SEED = 20260
# Keys before those of a sample call of a layer with parts.
PAST = 5
# Sequences, heads, rows and head width of the attention that `first_rate` measures; a layer's calls have as many rows.
RATED = (1, 8, 128, 64)
# Bytes of a number in 16 bits; tokens of the products without fixed row counts that are compared; how far their rows are moved;
# and which share of their numbers is one unit off, so that sums do not cancel to zero.
HALF_BYTES = 2
PRODUCT_TOKENS = (1, 14, 33, 64, 132, 400, MAX_ROWS)
MOVED = 129
CHANGED_SHARE = 1 / 16
# A coarse clock may measure 0.
SHORTEST_S = 1e-6


class Variant(Protocol):
    """What computes calls of one kind in one dtype; its class registers how it is checked (`checks`) and rated (`rated`)."""

    dtype: torch.dtype
    is_sequential: bool
    least_rows: int
    num_bytes: int

    def forward(self, calls: Sequence[Any], /) -> list[Answer]: ...


@functools.singledispatch
def checks(variant: Variant) -> Iterator[bool]:
    """Yield whether sample calls give the same bits alone, in pairs and all together, with and without weights.

    A step is one pass of at most MAX_ROWS rows, so that batches can compute in between.
    """
    raise TypeError(f"no self-check is registered for {type(variant).__name__}. This is a bug.")


@functools.singledispatch
def rated(variant: Variant) -> tuple[Sequence[Any], int]:
    """Return calls for one pass about as large as a full batch, and their flops (`cost.py`)."""
    raise TypeError(f"no rated pass is registered for {type(variant).__name__}. This is a bug.")


def settle(layer: Variant) -> Iterator[None]:
    """Find the row counts of products with which a layer passes `checks`; without any, it is sequential.

    A step is one pass.
    """
    rules, has_passed = layer.row_rules if isinstance(layer, Layer) else [(layer.least_rows, ())], True
    for rule in rules:
        if isinstance(layer, Layer):
            layer.set_row_rule(*rule)
        for has_passed in checks(layer):
            yield
            if not has_passed:
                break
        if has_passed:
            return
    if isinstance(layer, Layer):
        layer.set_row_rule(*rules[0])
    layer.is_sequential = True


def first_rate(variant: Variant, clock: Callable[[], float]) -> float:
    """Return the flops per second of one pass about as large as a full batch, at least 1.

    Small batches take longer for their flops, so forecasts from this rate are rather too short than too long.
    """
    calls, work = rated(variant)
    started = clock()
    variant.forward(calls)
    return max(1.0, work / max(clock() - started, SHORTEST_S))


@rated.register
def _(layer: ScaledDotProduct) -> tuple[Sequence[Any], int]:
    x = torch.randn(RATED, generator=torch.Generator().manual_seed(SEED), dtype=layer.dtype)
    call = AttentionCall(x, x, x, x.shape[3] ** -0.5)
    return [call], cost.attention_flops(call, Sizes(*RATED[:3], RATED[2]))


@rated.register
def _(layer: Layer) -> tuple[Sequence[Any], int]:
    spec, length = layer.spec, RATED[2]
    rows = functools.partial(_rows, layer, length, generator=torch.Generator().manual_seed(SEED))
    call = Call(rows(spec.query_width), rows(spec.key_width), rows(spec.value_width))
    calls = [call] * (MAX_ROWS // length)
    return calls, len(calls) * cost.flops(spec, Sizes(1, spec.num_heads, length, length), None, None)


@checks.register
def _(layer: ScaledDotProduct) -> Iterator[bool]:
    """Compare the outputs of sample calls alone with those in a batch and with weights."""
    generator = torch.Generator().manual_seed(SEED)
    shapes = [(1, heads, length, width) for length in LENGTHS for heads, width in ((1, 1), (4, 32))]
    tensors = [torch.randn(shape, generator=generator, dtype=layer.dtype) for shape in shapes]
    calls = [AttentionCall(x, x, x, x.shape[3] ** -0.5) for x in tensors]
    alone = []
    for call in calls:
        alone.append(layer.forward([call])[0].output)
        yield True
    for batch in (calls, [call._replace(weights=WeightsWanted("heads")) for call in calls]):
        answers = layer.forward(batch)
        yield all(torch.equal(answer.output, output) for answer, output in zip(answers, alone, strict=True))


@checks.register
def _(layer: Layer) -> Iterator[bool]:
    if layer.dtype.itemsize == HALF_BYTES:
        yield from _products_keep_bits(layer)
    calls = sample_calls(layer)
    alone = []
    for call in calls:
        alone.append(layer.forward([call])[0].output)
        yield True
    batches: list[Sequence[int]] = [range(len(calls)), range(len(calls) - 1, -1, -1)]
    batches += [(i, i + 1) for i in range(0, len(calls) - 1, 2)]
    kinds = [[i for i, call in enumerate(calls) if call.is_self_attention is is_self] for is_self in (True, False)]
    # As many rows as a pass has: some kernels change with the size of the product.
    batches += [kind * (MAX_ROWS // sum(calls[i].query.shape[1] for i in kind)) for kind in kinds if kind]
    for kind in kinds if layer.is_fused else kinds[1:]:
        batches += [_repeated(calls, kind, size) for size in layer.product_sizes]
    for batch in batches:
        answers = layer.forward([calls[i] for i in batch])
        yield all(torch.equal(answer.output, alone[i]) for i, answer in zip(batch, answers, strict=True))
    for length in filter(layer.may_share, SAME_LENGTHS):
        call = Call(_rows(layer, length, layer.spec.query_width, torch.Generator().manual_seed(SEED)))
        (same,) = layer.forward([call])
        yield True
        yield all(torch.equal(answer.output, same.output) for answer in layer.forward([call, call]))
    for call, output in zip(calls[:4], alone, strict=False):
        asked = call._replace(weights=WeightsWanted("heads"))
        yield torch.equal(layer.forward([asked])[0].output, output)


def _products_keep_bits(layer: Layer) -> Iterator[bool]:
    """Yield whether a row of each of a layer's products in 16 bits has the same bits beside other rows and in another place.

    Rounding to 16 bits hides another order of a sum in all but one of 10,000 results, and attention most of the rest. So these
    products are of numbers whose sums nearly cancel, which shows it in one of 40. Their kernels depend on shapes alone.
    """
    counts = layer.product_sizes or sorted({layer.padded_rows(tokens) for tokens in PRODUCT_TOKENS}, reverse=True)
    for (out, width), has_bias in dict.fromkeys(
        (tuple(one.weight.shape), one.bias is not None) for one in layer.products
    ):
        generator = torch.Generator().manual_seed(SEED)
        half, x = (torch.randn(n, width // 2, generator=generator).to(layer.dtype) for n in (out, counts[0]))
        other = torch.where(
            torch.rand(x.shape, generator=generator) < CHANGED_SHARE, x * (1 + 2 * torch.finfo(x.dtype).eps), x
        )
        weight = torch.cat([half, -half], dim=1).to(layer.device)
        plain = Plain(weight, weight.new_zeros(out) if has_bias else None)
        product = packed(plain, layer.sizes)
        rows = torch.cat([x, other], dim=1).to(layer.device)
        expected = product(rows, layer.least_rows)
        yield torch.equal(product(rows.roll(MOVED, 0), layer.least_rows), expected.roll(MOVED, 0))
        for count in counts[1:]:
            yield torch.equal(product(rows[:count], layer.least_rows), expected[:count])


def _repeated(calls: Sequence[Call], kind: Sequence[int], rows: int) -> list[int]:
    """Repeat calls of one kind until a product has `rows` rows; each kind (self- or cross-attention) has its own matrices."""
    found: list[int] = []
    for i in sorted(kind, key=lambda i: -calls[i].query.shape[1]):
        num, rows = divmod(rows, calls[i].query.shape[1])
        found += [i] * num
    return found


def sample_calls(layer: Layer) -> list[Call]:
    """Return calls of assorted lengths: self- and cross-attention, every third causal; always the same for one layer.

    A layer with parts gets its window in each, and every fourth call gets positions and a past.
    """
    spec, rows = layer.spec, functools.partial(_rows, layer, generator=torch.Generator().manual_seed(SEED))
    is_self_possible = spec.query_width == spec.key_width == spec.value_width
    calls = []
    for i, length in enumerate(LENGTHS):
        sizes = Sizes(1, spec.num_heads, length, length)
        mask = CombinedMask(sizes, (causal(sizes, 0),)) if i % 3 == 2 else None  # noqa: PLR2004 (every third)
        key = None if is_self_possible and i % 2 else rows(length, spec.key_width)
        value = None if key is None else rows(length, spec.value_width)
        call = Call(rows(length, spec.query_width), key, value, mask)
        calls.append(_with_parts(call, spec, has_past=i % 4 == 3) if spec.has_parts else call)  # noqa: PLR2004 (every fourth)
    return calls


def _with_parts(call: Call, spec: LayerSpec, *, has_past: bool) -> Call:
    """Return the call with the layer's window and, if `has_past`, behind a past, from a position other than 0."""
    length, num_past = call.query.shape[1], PAST if has_past else 0
    if has_past:
        x = call.query.new_ones(1, spec.num_kv_heads, PAST, max(spec.head_width, spec.value_head_width)).cumsum(-1)
        places = torch.arange(length + PAST)[None] * 3
        call = call._replace(
            past_key=x[..., : spec.head_width] / x.shape[3],
            past_value=x[..., : spec.value_head_width],
            positions=places[:, PAST:],
            key_positions=places,
            has_present=True,
        )
    sizes = Sizes(1, spec.num_heads, length, length + num_past)
    masks = [] if spec.window is None else [of_positions(spec.window, *call.places)]
    if call.mask is not None:
        masks.append(causal(sizes, num_past))
    return call._replace(mask=CombinedMask(sizes, tuple(masks)) if masks else None)


def _rows(layer: Layer, length: int, width: int, generator: torch.Generator) -> torch.Tensor:
    dtype = torch.float64 if layer.dtype == torch.float64 else torch.float32
    return torch.randn(1, length, width, generator=generator, dtype=dtype)
