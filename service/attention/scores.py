"""Scores: the attention scores of one sequence, block by block, with their softmax and their log-sum-exp.

Legend: N heads, G key/value heads, L query rows, S key rows, R rows of a block, H head width, V value head width.

Invariants: A block is always whole: its rows and its head do not depend on the request, so any selection of heads and rows has
the bits of the full answer. Memory grows with a few blocks, not with their number. Scores are float32, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from service.attention.call import Stage
from service.attention.preemption import preemption_point

# Query rows whose scores are computed together. A row's bits depend on its block, so blocks are fixed.
BLOCK_ROWS = 128
# Scores computed together, in whole heads: 4 MiB of float32 unless one head is larger. Heads do not depend on each other.
MAX_CELLS = 2**20


class Scores(NamedTuple):
    """One sequence: q_NLH and k_GSH, already in the dtype of the scores; query head n uses key head n // (N / G).

    `softcap` c turns a score s into c·tanh(s/c). `sinks` [N] are logits that only count in the softmax's denominator.
    """

    q: torch.Tensor
    k: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.q.shape[0], self.q.shape[1], self.k.shape[1]

    def fit_at_once(self, num_heads: int) -> bool:
        """Return whether all rows of `num_heads` heads are one block, computed together."""
        num_rows, keys = self.q.shape[1], self.k.shape[1]
        return num_rows <= BLOCK_ROWS and num_heads * num_rows * keys <= MAX_CELLS

    def rows(self, chosen: Sequence[int], block: slice) -> Iterator[torch.Tensor]:
        """Yield the weights w_NRS of a block of rows, for a few chosen heads at a time."""
        for some, scores in self.chunks(chosen, block):
            yield self._softmax(scores, _block_mask(self.mask, some, block), some)

    def at(self, stage: Stage) -> ScoresAt:
        """Return the source of the scores themselves."""
        return ScoresAt(self, stage)

    def stages(self, chosen: Sequence[int], block: slice, stage: Stage) -> Iterator[torch.Tensor]:
        """Yield the scores s_NRS of a block of rows at one stage, for a few chosen heads at a time."""
        uncapped = self._replace(softcap=None) if stage == "scaled" else self
        for some, scores in uncapped.chunks(chosen, block):
            mask = _block_mask(self.mask, some, block) if stage == "masked" else None
            yield scores if mask is None else _masked(scores, mask)

    def log_sums(self) -> torch.Tensor:
        """Return the natural log-sum-exp of the masked scores, and of the sink, for every row: [N, L]."""
        num_heads, queries, _ = self.shape
        found = self.q.new_empty(num_heads, queries)
        for block in blocks(queries):
            first = 0
            for scores in self.stages(range(num_heads), block, "masked"):
                some = slice(first, first + len(scores))
                found[some, block] = torch.logsumexp(self._with_sinks(scores, range(num_heads)[some]), -1)
                first = some.stop
        return found

    def attended(self, v: torch.Tensor) -> torch.Tensor:
        """Return softmax(scores)·v as o_NLV for v_GSV, by the definition."""
        num_heads, queries, _ = self.shape
        shared = num_heads // len(v)
        found = self.q.new_empty(num_heads, queries, v.shape[2])
        for block in blocks(queries):
            heads = iter(range(num_heads))
            for weights in self.rows(range(num_heads), block):
                for w_RS, head in zip(weights, heads, strict=False):
                    torch.mm(w_RS, v[head // shared], out=found[head, block])
        return found

    def chunks(self, chosen: Sequence[int], block: slice) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        """Yield a few of the chosen heads with their capped scores; memory does not grow with the number of heads."""
        q, k = self.q, self.k
        num_rows, keys, shared = block.stop - block.start, k.shape[1], len(q) // len(k)
        num_heads = max(1, MAX_CELLS // (num_rows * keys))
        for first in range(0, len(chosen), num_heads):
            some = chosen[first : first + num_heads]
            scores = q.new_empty(len(some), num_rows, keys)
            for i, head in enumerate(some):
                torch.mm(q[head, block], k[head // shared].T, out=scores[i])
            preemption_point()
            scores.mul_(self.scale)
            yield some, scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def _softmax(self, scores: torch.Tensor, mask: torch.Tensor | None, heads: Sequence[int]) -> torch.Tensor:
        """Return the softmax over the last axis; a row without an allowed key is zero, not NaN."""
        if mask is None:
            return self._with_sinks(scores, heads).softmax(-1)[..., : scores.shape[-1]]
        forbidden = mask == -torch.inf
        weights = self._with_sinks(_masked(scores, mask), heads).softmax(-1)[..., : scores.shape[-1]]
        # As bytes, because `all` of booleans over an axis takes ten times as long. Most blocks have no such row.
        is_dead = forbidden.view(torch.uint8).amin(-1, keepdim=True).bool()
        return weights.masked_fill_(is_dead, 0.0) if bool(is_dead.any()) else weights

    def _with_sinks(self, scores: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """Return the scores with the sink of each head as one column more."""
        if self.sinks is None:
            return scores
        sinks = self.sinks[list(heads)].view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        return torch.cat([scores, sinks], dim=-1)


class ScoresAt(NamedTuple):
    """The scores of one sequence at one stage, as a source of selected rows (`attention_weights.selected`)."""

    scores: Scores
    stage: Stage

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.scores.shape

    def fit_at_once(self, num_heads: int) -> bool:
        return self.scores.fit_at_once(num_heads)

    def rows(self, chosen: Sequence[int], block: slice) -> Iterator[torch.Tensor]:
        return self.scores.stages(chosen, block, self.stage)


def blocks(num_rows: int) -> Iterator[slice]:
    """Yield the blocks of consecutive rows."""
    for start in range(0, num_rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, num_rows))


def _block_mask(mask: torch.Tensor | None, heads: Sequence[int], block: slice) -> torch.Tensor | None:
    if mask is None:
        return None
    part = mask if mask.shape[1] == 1 else mask[:, block]
    return part if part.shape[0] == 1 else part[list(heads)]


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Add the mask; -inf also replaces a score that overflowed, which would give NaN."""
    scores += mask
    return torch.where(mask == -torch.inf, -torch.inf, scores)
