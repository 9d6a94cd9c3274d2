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
from service.attention.scores import Scores, ScoresAt, blocks

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
    return o_NLV, selected(_Known(w_NLS), wanted)


def attention_weights(heads: Heads, mask: torch.Tensor | None, scale: float, wanted: WeightsWanted) -> Weights:
    """Return the requested weights of one sequence: w_NLS, w_LS (form "mean") or TopK without the B axis.

    They are computed in float32 (float64 for float64 heads). Rows sum to 1, or are zero where the mask allows no key.
    """
    if is_small(heads, mask, len(heads.q)):
        return selected(_Known(small_weights(heads, scale)), wanted)
    wide = torch.promote_types(heads.q.dtype, torch.float32)
    return selected(Scores(heads.q.to(wide), heads.k.to(wide), mask, scale), wanted)


def selected(source: Rows, wanted: WeightsWanted) -> Weights:
    """Return the selected rows of one sequence's weights or scores, without the B axis."""
    num_heads, queries, keys = source.shape
    chosen: Sequence[int] = range(num_heads) if wanted.heads is None else wanted.heads
    if wanted.form == "mean":
        chosen = sorted(chosen)  # so that the mean's bits do not depend on the order of the request
    if wanted.form == "heads" and wanted.queries is None and source.fit_at_once(len(chosen)):
        return next(source.rows(chosen, slice(0, queries))).to("cpu", wanted.dtype)
    num_rows = queries if wanted.queries is None else len(wanted.queries)
    out = _Collected(wanted, len(chosen), num_rows, keys)
    for block, places, rows in _blocks(queries, wanted.queries):
        out.put(places, source.rows(chosen, block), rows)
    return out.weights()


def _blocks(num_rows: int, asked: Sequence[int] | None) -> Iterator[tuple[slice, Places, Places]]:
    """Yield each block with a requested row: the block, the rows' places in the answer, and their indices in the block.

    If all rows are requested, places and indices are slices, which copy nothing.
    """
    rows = None if asked is None else torch.tensor(asked)
    for block in blocks(num_rows):
        if rows is None:
            yield block, block, slice(None)
            continue
        places = ((rows >= block.start) & (rows < block.stop)).nonzero()[:, 0]
        if len(places):
            yield block, places, rows[places] - block.start


class _Known(NamedTuple):
    """The weights of one small sequence, w_NLS; a consumer may overwrite them."""

    w: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        heads, queries, keys = self.w.shape
        return heads, queries, keys

    def fit_at_once(self, _: int) -> bool:
        return True

    def rows(self, chosen: Sequence[int], block: slice) -> Iterator[torch.Tensor]:
        """Yield w_NRS of a block of rows of the chosen heads."""
        rows = self.w[:, block]
        yield rows if len(chosen) == len(rows) and list(chosen) == list(range(len(rows))) else rows[list(chosen)]


Rows = _Known | Scores | ScoresAt


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


def stacked(parts: Sequence[Weights]) -> Weights:
    """Stack the weights of single sequences along a new B axis in front."""
    if len(parts) == 1 and isinstance(parts[0], torch.Tensor):
        return parts[0].unsqueeze(0)
    if isinstance(parts[0], TopK):
        tops = [part for part in parts if isinstance(part, TopK)]
        return TopK(*(torch.stack([getattr(top, name) for top in tops]) for name in ("values", "indices", "rest")))
    return torch.stack([part for part in parts if isinstance(part, torch.Tensor)])
