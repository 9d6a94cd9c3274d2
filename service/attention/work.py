"""Work: what one call takes besides its inputs and its products, to first order: tables in bytes, their work in flops.

Legend: B sequences, N heads, L query rows, S key rows.

Laws: no tensor is touched, so that a call can be refused before anything is allocated; sizes are Python integers. The flops of
work that moves memory instead of multiplying are those that the same time would have done in the products; measured on one
core with 12 heads of 32 (docs/performance.md), they hold within a factor of two.
"""

from __future__ import annotations

from service.attention.attention_weights import BLOCK_ROWS, MAX_CELLS
from service.attention.call import WeightsWanted
from service.attention.masks import CombinedMask, Sizes
from service.attention.spec import LayerSpec

# Per element of the table of a sequence's masks: for the table itself, and for each mask that goes into it.
TABLE_FLOPS = 100
MASK_FLOPS = 15
# Per weight computed: scale, mask and softmax; and per weight returned.
SOFTMAX_FLOPS = 100
RETURNED_FLOPS = 300
# Per weight that top_k looks at, and how much more for a k of all keys; from half of them on all are sorted.
TOP_K_FLOPS = 250
TOP_K_SHARE_FLOPS = 8000
# Tables as large as a block of weights that exist at once: scores, weights, the asked rows, and what compares them.
WORKSPACE_TABLES = 4


def flops(spec: LayerSpec, sizes: Sizes, mask: CombinedMask | None, wanted: WeightsWanted | None) -> int:
    """Floating-point operations of one call, masks and weights included; `sizes` are the caller's."""
    b, _, queries, keys = sizes
    columns = keys + spec.extra_keys
    products = spec.flops(b * queries, b * keys, b * queries * columns)
    return products + b * (_mask_flops(mask) + _weights_flops(spec, sizes, wanted))


def table_bytes(
    spec: LayerSpec, sizes: Sizes, mask: CombinedMask | None, wanted: WeightsWanted | None, size: int
) -> int:
    """The most that tables of one sequence take while it is computed, with numbers of `size` bytes: one is done at a time."""
    columns = sizes.keys + spec.extra_keys
    cells = 0
    if mask is not None:
        heads, rows, _ = mask.table_shape
        cells = heads * rows * columns
    if wanted is not None:
        head_cells = min(BLOCK_ROWS, sizes.queries) * columns
        cells += WORKSPACE_TABLES * min(max(MAX_CELLS, head_cells), _num_heads(sizes, wanted) * head_cells)
    return cells * size


def _mask_flops(mask: CombinedMask | None) -> int:
    if mask is None:
        return 0
    heads, rows, keys = mask.table_shape
    return heads * rows * keys * (TABLE_FLOPS + MASK_FLOPS * len(mask.masks))


def _weights_flops(spec: LayerSpec, sizes: Sizes, wanted: WeightsWanted | None) -> int:
    """Of the second pass over one sequence: blocks of rows of the asked heads, then what the form makes of the asked rows.

    Small sequences need no second pass (`kernels.is_small`) and are charged for one: within the factor that holds anyway.
    """
    if wanted is None:
        return 0
    heads, columns = _num_heads(sizes, wanted), sizes.keys + spec.extra_keys
    asked = heads * columns * (sizes.queries if wanted.queries is None else len(wanted.queries))
    work = heads * columns * _num_block_rows(sizes, wanted) * (2 * spec.head_width + SOFTMAX_FLOPS)
    if wanted.form == "heads":
        return work + asked * RETURNED_FLOPS
    if wanted.k is not None:
        return work + asked * TOP_K_FLOPS + asked * TOP_K_SHARE_FLOPS * min(2 * wanted.k, columns) // (2 * columns)
    return work


def _num_heads(sizes: Sizes, wanted: WeightsWanted) -> int:
    return sizes.heads if wanted.heads is None else len(wanted.heads)


def _num_block_rows(sizes: Sizes, wanted: WeightsWanted) -> int:
    """Rows of all blocks that have an asked row."""
    if wanted.queries is None:
        return sizes.queries
    blocks = {row // BLOCK_ROWS for row in wanted.queries}
    return sum(min(BLOCK_ROWS, sizes.queries - block * BLOCK_ROWS) for block in blocks)
