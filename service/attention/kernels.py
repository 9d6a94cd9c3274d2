"""Kernels: scaled dot-product attention of one sequence, or of several of one length with the same bits.

Legend: B sequences, N heads of each, M = B·N, L query rows, S key rows, H head width, V value head width.

Invariants: How `attend` computes a sequence depends only on its shape, dtype and mask, so its bits do not depend on other
sequences (P1). Small sequences are computed by the definition: weights, then output. Others take 4-D
scaled_dot_product_attention calls on contiguous, 64-byte aligned q, k, v (the 3-D call is another kernel); a large sequence
takes several calls, each for some heads or rows. `attend_same_length` computes several sequences in one call where each keeps the
bits it has alone (`may_share`). Behind a mask the kernel is right for values within `safe_range`; `attention_weights.py` attends
to others. On a GPU unmasked sequences of any lengths take one launch, alone too (`takes_any_lengths`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from service.attention.progress import stop_point

# Up to this many scores, 2 MiB of float32, the definition takes as long as torch's fused kernel and gives the weights as well.
# With a mask it is 10 % slower (with a bias per head 30 %), and in 16 bits 10 %, because its scores are wider: never used there.
MAX_SMALL_SCORES = 2**19
_SMALL_DTYPES = frozenset({torch.float32, torch.float64})
# Most work of one call of torch's fused kernel on a CPU, in multiplications of float32: about 5 ms. A larger sequence takes
# several calls, each for some heads or, if one head has more work, for some of its rows. A batch may stop between two calls.
MAX_WORK = 2**28
# The softmax of one score takes as long as this many multiplications; in float64 everything takes four times as long.
SOFTMAX_WORK = 64
WIDE_WORK = 4
# torch's kernel takes rows in blocks of 256.
KERNEL_ROWS = 256
# The memory-efficient kernel of CUDA, which computes sequences of any lengths in one launch. It is not public, so code checks
# that it exists. Its rows of heads begin at multiples of 16 bytes, and it knows no float64.
_any_lengths = getattr(torch.ops.aten, "_efficient_attention_forward", None)
GPU_ALIGNMENT = 16


class Heads(NamedTuple):
    """Projections of B sequences of one shape, M = B·N heads: q_MLH, k_MSH, v_MSV; kernels take those of `copied`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def safe_range(dtype: torch.dtype, head_width: int, scale: float) -> float:
    """Return a magnitude: no score of smaller queries and keys overflows, with any bias, and no sum of smaller values."""
    wide = torch.finfo(torch.promote_types(dtype, torch.float32))
    # Half a unit in the last place of the largest bias is 16 times as much as such a score.
    most_score = wide.max * wide.eps / 32
    return min(torch.finfo(dtype).max, math.sqrt(most_score / head_width / max(1.0, abs(scale))))


def are_within(tensors: Iterable[torch.Tensor], most: float) -> bool:
    """Return whether each value is of a smaller magnitude than `most`."""
    return all(largest(x) < most for x in tensors)


def largest(x: torch.Tensor) -> float:
    """Return the largest magnitude of the values, of which none is NaN."""
    low, high = x.aminmax()
    return max(-low.item(), high.item())


def attend(heads: Heads, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Return softmax(q·kᵀ·scale + mask)·v (Vaswani et al. 2017, eq. 1) of a sequence as o_NLV; a fully masked row is zero."""
    return _attend(heads, mask, scale, heads.q.shape[0])[0]


def _attend(heads: Heads, mask: torch.Tensor | None, scale: float, num_heads: int) -> torch.Tensor:
    """Return the same for B sequences as o_BNLV.

    The fused kernel gets a zero mask instead of None: without a mask, scores that overflow to inf give zeros instead of NaN.
    The bits of finite results are the same; the zero mask costs 1 to 4 %.
    """
    if is_small(heads, mask, num_heads):
        o_MLV = torch.bmm(small_weights(heads, scale), heads.v)
        return o_MLV.view(-1, num_heads, *o_MLV.shape[1:])
    is_alone = heads.q.shape[0] == num_heads
    if mask is None and is_alone and takes_any_lengths(heads.q, heads.q.shape[2], heads.v.shape[2]):
        rows = Heads(*(x.transpose(0, 1) for x in heads))
        return attend_any_lengths(rows, [len(rows.q)], [len(rows.k)], scale).transpose(0, 1).unsqueeze(0)
    mask = heads.q.new_zeros(1, 1, heads.k.shape[1]) if mask is None else mask
    if is_alone and len(pieces := _pieces(heads)) > 1:
        return _in_pieces(heads, mask, scale, pieces).unsqueeze(0)
    return _fused(heads, mask, scale, num_heads)


def _fused(heads: Heads, mask: torch.Tensor, scale: float, num_heads: int) -> torch.Tensor:
    # Sequences lie on the batch axis: CUDA's kernels take at most 65,535 on the head axis.
    q, k, v = (x.view(-1, num_heads, *x.shape[1:]) for x in heads)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(0), scale=scale)


def _in_pieces(heads: Heads, mask: torch.Tensor, scale: float, pieces: Sequence[tuple[slice, slice]]) -> torch.Tensor:
    """Return `_fused` of one sequence as o_NLV, computed for some heads and some rows at a time."""
    o_NLV = heads.q.new_empty(*heads.q.shape[:2], heads.v.shape[2])
    for some, rows in pieces:
        part = Heads(heads.q[some, rows], heads.k[some], heads.v[some])
        masked = mask if mask.shape[0] == 1 else mask[some]
        masked = masked if masked.shape[1] == 1 else masked[:, rows]
        o_NLV[some, rows] = _fused(part, masked, scale, len(part.q))[0]
        stop_point()
    return o_NLV


def _pieces(heads: Heads) -> list[tuple[slice, slice]]:
    """Return the heads and rows of each fused-kernel call for one sequence; only its shape, dtype and device decide."""
    num, queries, width = heads.q.shape
    work = _work(queries * heads.k.shape[1], width + heads.v.shape[2], heads.q.dtype)  # of one head
    if heads.q.device.type != "cpu" or num * work <= MAX_WORK:
        return [(slice(0, num), slice(0, queries))]
    if work <= MAX_WORK:
        step = MAX_WORK // work
        return [(slice(first, first + step), slice(0, queries)) for first in range(0, num, step)]
    step = max(1, queries * MAX_WORK // work // KERNEL_ROWS) * KERNEL_ROWS
    rows = [slice(first, first + step) for first in range(0, queries, step)]
    return [(slice(head, head + 1), some) for head in range(num) for some in rows]


def _work(scores: int, widths: int, dtype: torch.dtype) -> int:
    """Return the work of `scores`, in multiplications of float32; `widths` is the head width plus the value head width."""
    return scores * (widths + SOFTMAX_WORK) * (WIDE_WORK if dtype == torch.float64 else 1)


def is_small(heads: Heads, mask: torch.Tensor | None, num_heads: int) -> bool:
    """Return whether each of these sequences is computed by the definition."""
    return mask is None and is_plain_small(heads.q, num_heads * heads.q.shape[1] * heads.k.shape[1])


def is_plain_small(like: torch.Tensor, scores: int) -> bool:
    """Return whether an unmasked sequence with so many scores, in the dtype and device of `like`, is small."""
    return like.device.type == "cpu" and like.dtype in _SMALL_DTYPES and scores <= MAX_SMALL_SCORES


def small_weights(heads: Heads, scale: float) -> torch.Tensor:
    """Return softmax(q·kᵀ·scale) of small unmasked sequences as w_MLS."""
    scores = heads.q.new_empty(*heads.q.shape[:2], heads.k.shape[1])
    torch.baddbmm(scores, heads.q, heads.k.transpose(1, 2), beta=0, alpha=scale, out=scores)
    return torch.softmax(scores, -1, out=scores)


ALIGNMENT = 64


def may_share(shape: tuple[int, int, int], like: torch.Tensor) -> bool:
    """Return whether sequences of `shape` N, L, H in the dtype and device of `like` may share one call and keep their bits.

    Several threads split the rows of all sequences of a call, and one sequence alone at other rows. A sequence that is
    not 64-byte aligned is read by other instructions. With a head width of 1 a single head is multiplied as a
    vector, several as matrices (docs/internals/performance.md). A GPU promises only a tolerance.
    """
    if like.device.type != "cpu":
        return True
    begins_aligned = math.prod(shape) * like.element_size() % ALIGNMENT == 0
    num_heads, length, width = shape
    is_one_call = num_heads * _work(length * length, 2 * width, like.dtype) <= MAX_WORK
    return torch.get_num_threads() == 1 and begins_aligned and width > 1 and is_one_call


def attend_same_length(
    columns: Sequence[torch.Tensor], num_heads: int, length: int, scale: float, output: torch.Tensor
) -> None:
    """Compute `attend` for unmasked sequences of one `length`: consecutive rows of q, k, v [T, N·H] and of the output."""
    rows = output.shape[0]
    if output.device.type == "cpu":  # the scores of one group fit into the cache
        rows = length * max(1, MAX_SMALL_SCORES // (num_heads * length**2))
    for start in range(0, output.shape[0], rows):
        q, k, v, target = (_by_sequence(x[start : start + rows], length, num_heads) for x in (*columns, output))
        # One copy of all three: each begins aligned, because each sequence does.
        heads = Heads(*torch.stack((q, k, v)).flatten(1, 2).unbind())
        target.copy_(_attend(heads, None, scale, num_heads))
        stop_point()


def takes_any_lengths(like: torch.Tensor, *widths: int) -> bool:
    """Return whether unmasked sequences with heads of these widths go through `attend_any_lengths`."""
    is_aligned = all(width * like.element_size() % GPU_ALIGNMENT == 0 for width in widths)
    return like.device.type != "cpu" and like.dtype != torch.float64 and _any_lengths is not None and is_aligned


def attend_any_lengths(
    heads: Heads, query_lengths: Sequence[int], key_lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """Return `attend` of consecutive unmasked sequences as o_TNV, in one launch; q_TNH, k_TNH and v_TNV lie on a GPU."""
    ends = [[0, *itertools.accumulate(lengths)] for lengths in (query_lengths, key_lengths)]
    both = torch.tensor([*ends[0], *ends[1]], dtype=torch.int32, pin_memory=heads.q.is_cuda)
    of_query, of_key = both.to(heads.q.device, non_blocking=True).split_with_sizes([len(one) for one in ends])
    most = max(query_lengths), max(key_lengths)
    q, k, v = (x.unsqueeze(0) for x in heads)
    found: torch.Tensor = _any_lengths.default(q, k, v, None, of_query, of_key, *most, 0.0, 0, scale=scale)[0]  # type: ignore[union-attr]
    return found[0]


def copied(views: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return fresh copies in any case: a view that happens to be contiguous may be unaligned. A GPU's kernels take views."""
    return [x.clone(memory_format=torch.contiguous_format) if x.device.type == "cpu" else x for x in views]


def _by_sequence(x_TD: torch.Tensor, length: int, num_heads: int) -> torch.Tensor:
    """Return rows of [T, N·H] as a view [B, N, L, H]."""
    return x_TD.view(-1, length, num_heads, x_TD.shape[1] // num_heads).transpose(1, 2)
