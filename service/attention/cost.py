"""Cost: estimates the floating-point operations of a call and the bytes of its mask and weight tables.

Legend: B sequences, N heads, L query rows, S key rows.

Invariants: Only shapes are read, so that a call can be refused before its tables are allocated. Sizes are Python integers.
Work that moves memory instead of multiplying counts as the flops that products do in the same time. These figures, measured
on one core with 12 heads of 32 (docs/internals/performance.md), hold within a factor of two.
"""

from __future__ import annotations

import math

import torch

from service.attention.attention_weights import BLOCK_ROWS, MAX_CELLS
from service.attention.call import AttentionCall, Call, WeightsWanted
from service.attention.masks import CombinedMask, Sizes
from service.attention.spec import LayerSpec

# Per element of a sequence's mask table: for the table itself, and for each mask in it.
TABLE_FLOPS = 100
MASK_FLOPS = 15
# Per product of a single head, whatever its size: about 5 µs.
PRODUCT_FLOPS = 2**18
# Per computed weight: scale, mask and softmax; then per returned weight.
SOFTMAX_FLOPS = 100
RETURNED_FLOPS = 300
# Per number of a query or key that is normalised, and that is rotated.
NORM_FLOPS = ROTATION_FLOPS = 80
# Per number of a key's projected value, for its square in float64.
LENGTH_FLOPS = 20
# Per weight that top_k reads: a fixed part, and a part times k / keys or, where that is more, 1/2: then all keys are sorted.
TOP_K_FLOPS = 250
TOP_K_SHARE_FLOPS = 8000
# Tables of a block's size that exist at once: scores, weights, the requested rows, and the table in which `top_k` ranks them.
WORKSPACE_TABLES = 4


def flops(
    spec: LayerSpec,
    sizes: Sizes,
    mask: CombinedMask | None,
    *selections: WeightsWanted | None,
    num_passes: int = 0,
    num_past: int = 0,
) -> int:
    """Return the floating-point operations of one call; `sizes` exclude appended columns, and include `num_past` keys.

    Two per multiply-add in the projections and in both attention products, in which every head visits each pair of rows.
    `selections` are the weights and scores that it requests, `num_passes` counts lse and entropy, which visit all pairs again.
    """
    b, heads, queries, keys = sizes
    whole = sizes._replace(keys=keys + spec.extra_keys) if spec.extra_keys else sizes
    query_width, value_width = heads * spec.head_width, heads * spec.value_head_width
    per_query = query_width * spec.query_width + (spec.out_width * value_width if spec.has_output else 0)
    per_key = spec.num_kv_heads * (spec.head_width * spec.key_width + spec.value_head_width * spec.value_width)
    products = queries * per_query + (keys - num_past) * per_key + queries * whole.keys * (query_width + value_width)
    out_width = spec.out_width if spec.has_output else 0
    more = sum(_weights_flops(spec.head_width, whole, one, spec.value_head_width, out_width) for one in selections)
    more += num_passes * heads * queries * whole.keys * (2 * spec.head_width + SOFTMAX_FLOPS)
    more += _part_flops(spec, whole, keys - num_past) if spec.has_parts else 0
    return b * (2 * products + _mask_flops(mask) + more)


def _part_flops(spec: LayerSpec, sizes: Sizes, new_keys: int) -> int:
    """Return the flops of a layer's parts for one sequence; softcap and sinks are computed by the definition, as for a call."""
    numbers = spec.head_width * (sizes.heads * sizes.queries + spec.num_kv_heads * new_keys)
    work = numbers * (NORM_FLOPS * (spec.norm is not None) + ROTATION_FLOPS * (spec.rotary is not None))
    cells = sizes.heads * sizes.queries * sizes.keys
    if spec.relative_bias is not None:
        work += cells * (TABLE_FLOPS + MASK_FLOPS)
    if spec.is_explicit:
        work += cells * SOFTMAX_FLOPS + 2 * sizes.heads * -(-sizes.queries // BLOCK_ROWS) * PRODUCT_FLOPS
    return work


def attention_flops(call: AttentionCall, sizes: Sizes) -> int:
    """Return the floating-point operations of attention without a layer; every query head visits each key row."""
    cells, width, value_width = math.prod(sizes), call.query.shape[3], call.value.shape[3]
    selections = sum(_weights_flops(width, sizes, wanted, value_width) for wanted in (call.weights, call.scores))
    passes = (call.has_lse + call.has_entropy) * (2 * width + SOFTMAX_FLOPS) + int(call.is_explicit) * SOFTMAX_FLOPS
    per_sequence = _mask_flops(call.mask) + selections + _num_products(call, sizes) * PRODUCT_FLOPS
    return 2 * cells * (width + value_width) + cells * passes + sizes.sequences * per_sequence


def _num_products(call: AttentionCall, sizes: Sizes) -> int:
    """Return how many products of one sequence are calls of their own: one per head and block, or four per shared key head."""
    groups, explicit = call.key.shape[1], call.is_explicit
    by_head = 2 * explicit + call.has_lse + call.has_entropy + (call.weights is not None) + (call.scores is not None)
    shared = groups if 1 < groups < sizes.heads and not explicit else 0
    return by_head * sizes.heads * -(-sizes.queries // BLOCK_ROWS) + 4 * shared


def table_bytes(call: Call | AttentionCall, sizes: Sizes, spec: LayerSpec | None = None) -> int:
    """Return the most bytes that the tables of one sequence take: its mask, and the scores of a block. One runs at a time.

    `sizes` include the past, and the columns that the layer of `spec` appends. Tables are float32, or float64 for a float64
    query.
    """
    if spec is not None:
        is_explicit, out_width = spec.is_explicit, spec.out_width
    else:
        is_explicit, out_width = isinstance(call, AttentionCall) and call.is_explicit, 0
    wanted = [one for one in (call.weights, call.scores) if one is not None]
    num_heads = max([_num_heads(sizes, one) for one in wanted], default=0)
    num_heads = sizes.heads if call.has_lse or call.has_entropy or is_explicit else num_heads
    head_cells = min(BLOCK_ROWS, sizes.queries) * sizes.keys
    mask_cells = 0 if call.mask is None else math.prod(call.mask.table_shape[:2]) * sizes.keys
    if spec is not None and spec.relative_bias is not None:
        mask_cells = math.prod(sizes[1:])
    cells = mask_cells + WORKSPACE_TABLES * min(max(MAX_CELLS, head_cells), num_heads * head_cells)
    if call.weights is not None and call.weights.form == "contributions":
        # A length for each head and key, and a block of projected values, also in float64.
        cells += sizes.keys * num_heads + min(BLOCK_ROWS, sizes.keys) * 3 * out_width
    return cells * torch.promote_types(call.query.dtype, torch.float32).itemsize


def _mask_flops(mask: CombinedMask | None) -> int:
    return 0 if mask is None else math.prod(mask.table_shape) * (TABLE_FLOPS + MASK_FLOPS * len(mask.masks))


def _weights_flops(
    head_width: int, sizes: Sizes, wanted: WeightsWanted | None, value_width: int, out_width: int = 0
) -> int:
    """Return the flops of the second pass over one sequence: blocks of the requested heads, then the form's own work.

    Small sequences need no second pass (`kernels.is_small`) but are charged for one; the error is within the factor of two.
    """
    if wanted is None:
        return 0
    heads, columns = _num_heads(sizes, wanted), sizes.keys
    values = heads * columns * (sizes.queries if wanted.queries is None else len(wanted.queries))
    work = heads * columns * _num_block_rows(sizes, wanted) * (2 * head_width + SOFTMAX_FLOPS)
    if wanted.form == "contributions":
        width = out_width or value_width
        work += heads * (columns * (2 * value_width * out_width + width * LENGTH_FLOPS) + PRODUCT_FLOPS)
    if wanted.form in ("heads", "contributions"):
        return work + values * RETURNED_FLOPS
    if wanted.k is not None:
        return work + values * TOP_K_FLOPS + values * TOP_K_SHARE_FLOPS * min(2 * wanted.k, columns) // (2 * columns)
    return work


def _num_heads(sizes: Sizes, wanted: WeightsWanted) -> int:
    return sizes.heads if wanted.heads is None else len(wanted.heads)


def _num_block_rows(sizes: Sizes, wanted: WeightsWanted) -> int:
    """Return the number of rows of all blocks that have a requested row."""
    if wanted.queries is None:
        return sizes.queries
    blocks = {row // BLOCK_ROWS for row in wanted.queries}
    return sum(min(BLOCK_ROWS, sizes.queries - block * BLOCK_ROWS) for block in blocks)
