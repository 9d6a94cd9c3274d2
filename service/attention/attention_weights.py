"""Attention weights: the selection that a call requests, computed for one sequence beside its output.

Legend: N heads, L query rows, S key rows, R rows of a block, H head width.

Invariants: Requesting weights does not change the output (P2). Small sequences compute weights anyway; for others a second
pass computes them, per head and in whole blocks of query rows. So any selection of heads and rows equals the same slice of
the full answer, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from service.attention import top_k
from service.attention.call import TopK, Weights, WeightsWanted
from service.attention.kernels import Heads, attend, is_small, small_weights
from service.attention.preemption import preemption_point

# Query rows whose weights are computed together. A row's bits depend on its block, so blocks are fixed.
BLOCK_ROWS = 128
# Weights computed together, in whole heads: 4 MiB of float32 unless one head is larger. Heads do not depend on each other.
MAX_CELLS = 2**20

# A selection of rows, by index or as a slice.
Places = torch.Tensor | slice


def explain(
    heads: Heads, mask: torch.Tensor | None, scale: float, wanted: WeightsWanted
) -> tuple[torch.Tensor, Weights]:
    """Attend with weights: return the result of `attend` for one sequence and its `attention_weights`."""
    if not is_small(heads, mask, len(heads.q)):
        return attend(heads, mask, scale), attention_weights(heads, mask, scale, wanted)
    w_NLS = small_weights(heads, scale)
    o_NLV = torch.bmm(w_NLS, heads.v)  # first, because selecting the largest weights overwrites w_NLS
    return o_NLV, _selected(_Known(w_NLS), wanted)


def attention_weights(heads: Heads, mask: torch.Tensor | None, scale: float, wanted: WeightsWanted) -> Weights:
    """Return the requested weights of one sequence: w_NLS, w_LS (form "mean") or TopK without the B axis.

    They are computed in float32 (float64 for float64 heads). Rows sum to 1, or are zero where the mask allows no key.
    """
    if is_small(heads, mask, len(heads.q)):
        return _selected(_Known(small_weights(heads, scale)), wanted)
    wide = torch.promote_types(heads.q.dtype, torch.float32)
    return _selected(_Scores(heads.q.to(wide), heads.k.to(wide), mask, scale), wanted)


def _selected(source: _Known | _Scores, wanted: WeightsWanted) -> Weights:
    num_heads, queries, keys = source.shape
    chosen: Sequence[int] = range(num_heads) if wanted.heads is None else wanted.heads
    if wanted.form == "mean":
        chosen = sorted(chosen)  # so that the mean's bits do not depend on the order of the request
    if wanted.form == "heads" and wanted.queries is None and source.fit_at_once(len(chosen)):
        return next(source.weights(chosen, slice(0, queries))).to("cpu", wanted.dtype)
    num_rows = queries if wanted.queries is None else len(wanted.queries)
    out = _Collected(wanted, len(chosen), num_rows, keys)
    for block, places, rows in _blocks(queries, wanted.queries):
        out.put(places, source.weights(chosen, block), rows)
    return out.weights()


def _blocks(num_rows: int, asked: Sequence[int] | None) -> Iterator[tuple[slice, Places, Places]]:
    """Yield each block with a requested row: the block, the rows' places in the answer, and their indices in the block.

    If all rows are requested, places and indices are slices, which copy nothing.
    """
    rows = None if asked is None else torch.tensor(asked)
    for start in range(0, num_rows, BLOCK_ROWS):
        block = slice(start, min(start + BLOCK_ROWS, num_rows))
        if rows is None:
            yield block, block, slice(None)
            continue
        places = ((rows >= block.start) & (rows < block.stop)).nonzero()[:, 0]
        if len(places):
            yield block, places, rows[places] - start


class _Known(NamedTuple):
    """The weights of one small sequence, w_NLS; a consumer may overwrite them."""

    w: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        heads, queries, keys = self.w.shape
        return heads, queries, keys

    def fit_at_once(self, _: int) -> bool:
        return True

    def weights(self, chosen: Sequence[int], block: slice) -> Iterator[torch.Tensor]:
        """Yield w_NRS of a block of rows of the chosen heads."""
        rows = self.w[:, block]
        yield rows if len(chosen) == len(rows) and list(chosen) == list(range(len(rows))) else rows[list(chosen)]


class _Scores(NamedTuple):
    """Inputs to the weights of one sequence: q_NLH and k_NSH, already in the dtype of the weights."""

    q: torch.Tensor
    k: torch.Tensor
    mask: torch.Tensor | None
    scale: float

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.q.shape[0], self.q.shape[1], self.k.shape[1]

    def fit_at_once(self, num_heads: int) -> bool:
        """Return whether all rows of `num_heads` heads are one block, computed together."""
        num_rows, keys = self.q.shape[1], self.k.shape[1]
        return num_rows <= BLOCK_ROWS and num_heads * num_rows * keys <= MAX_CELLS

    def weights(self, chosen: Sequence[int], block: slice) -> Iterator[torch.Tensor]:
        """Yield w_NRS of a block of rows for a few chosen heads at a time, so that memory does not grow with their number."""
        q, k = self.q, self.k
        num_rows, keys = block.stop - block.start, k.shape[1]
        num_heads = max(1, MAX_CELLS // (num_rows * keys))
        for first in range(0, len(chosen), num_heads):
            some = chosen[first : first + num_heads]
            scores = q.new_empty(len(some), num_rows, keys)
            for i, head in enumerate(some):
                torch.mm(q[head, block], k[head].T, out=scores[i])
            preemption_point()
            yield _softmax(scores.mul_(self.scale), _block_mask(self.mask, some, block))


def _block_mask(mask: torch.Tensor | None, heads: Sequence[int], block: slice) -> torch.Tensor | None:
    if mask is None:
        return None
    part = mask if mask.shape[1] == 1 else mask[:, block]
    return part if part.shape[0] == 1 else part[list(heads)]


def _softmax(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax over the last axis; a row without an allowed key is zero, not NaN."""
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:
        forbidden = ~mask
    else:
        forbidden = mask == -torch.inf
        scores += mask
    weights = torch.where(forbidden, -torch.inf, scores).softmax(-1)
    # As bytes, because `all` of booleans over an axis takes ten times as long. Most blocks have no such row.
    is_dead = forbidden.view(torch.uint8).amin(-1, keepdim=True).bool()
    return weights.masked_fill_(is_dead, 0.0) if bool(is_dead.any()) else weights


class _Collected:
    """Gathers the requested rows of each block in the requested order, in the form and dtype of the answer."""

    def __init__(self, wanted: WeightsWanted, num_heads: int, num_rows: int, num_keys: int) -> None:
        self._wanted = wanted
        k = num_keys if wanted.k is None else wanted.k
        lead = (num_rows,) if wanted.form == "mean" else (num_heads, num_rows)
        self._values = torch.empty(*lead, k, dtype=wanted.dtype)
        if wanted.form == "top_k":
            self._indices = torch.empty(*lead, k, dtype=torch.int32)
            self._rest = torch.empty(*lead, dtype=wanted.dtype)

    def put(self, places: Places, parts: Iterable[torch.Tensor], rows: Places) -> None:
        """Copy `rows` of a block to `places` of the answer; each of `parts` w_NRS holds the whole block for some heads."""
        if self._wanted.form == "mean":
            self._values[places] = _mean(parts)[rows].to("cpu", self._wanted.dtype)
            return
        first = 0
        for part in parts:
            self._put_heads(slice(first, first + len(part)), places, part[:, rows])
            first += len(part)

    def _put_heads(self, heads: slice, places: Places, weights: torch.Tensor) -> None:
        if self._wanted.form == "heads":
            self._values[heads, places] = weights.to("cpu", self._wanted.dtype)
            return
        top = top_k.largest(weights.flatten(0, 1), self._values.shape[-1])
        lead = weights.shape[:2]
        self._values[heads, places] = top.values.unflatten(0, lead).to("cpu", self._wanted.dtype)
        self._indices[heads, places] = top.indices.unflatten(0, lead).to("cpu", torch.int32)
        self._rest[heads, places] = top.rest.unflatten(0, lead).to("cpu", self._wanted.dtype)

    def weights(self) -> Weights:
        if self._wanted.form == "top_k":
            return TopK(self._values, self._indices, self._rest)
        return self._values


def _mean(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the mean over all heads of all parts, added one by one: its bits do not depend on how heads are grouped."""
    heads: Iterator[torch.Tensor] = itertools.chain.from_iterable(part.unbind() for part in parts)
    total = next(heads).clone()
    count = 1
    for weights in heads:
        total += weights
        count += 1
    return total.div_(count)
