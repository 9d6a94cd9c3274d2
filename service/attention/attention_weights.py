"""Attention weights: the scores and weights of one sequence, block by block, and what a call requests of them.

Legend: N heads, G key/value heads, L query rows, S key rows, R rows of a block, H head width, V value head width, D out width.

Invariants: No request changes the output (P2). Small sequences compute weights anyway; for others a
second pass computes them. The rows of a block never depend on the request, and on a CPU each head is a product of its own. So any
selection of heads and rows equals the same slice of the full answer there, bit for bit. A few blocks are in memory at a time,
however many there are. Scores are float32, or float64 for float64 heads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from service.attention import top_k, transfers
from service.attention.call import AttentionCall, Call, Extras, Stage, TopK, Weights, WeightsWanted
from service.attention.kernels import Heads, attend, is_small, safe_range, small_weights
from service.attention.progress import stop_point

# Query rows whose scores are computed together. A row's bits depend on its block, so blocks are fixed.
BLOCK_ROWS = 128
# On a GPU a block costs launches and a copy that the host waits for, so shorter sequences are one block there.
GPU_BLOCK_ROWS = 1024
# Scores of a block computed together, in whole heads: 4 MiB of float32, or one head if that is larger. The limit changes no bit.
MAX_CELLS = 2**20

# A selection of rows, by index or as a slice.
Places = torch.Tensor | slice
# Computes heads, a mask and a scale to o_NLV.
Kernel = Callable[[Heads, torch.Tensor, float], torch.Tensor]


def attend_with_extras(
    heads: Heads,
    mask: torch.Tensor | None,
    scale: float,
    asked: Call | None,
    output_DK: torch.Tensor | None = None,
    *,
    is_extreme: bool = False,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Extras | None]:
    """Return the result of `attend` for one sequence, and what a call asks beside it, with a B axis of 1.

    Weights are computed in float32 (float64 for float64 heads). Rows sum to 1, or are zero where the mask allows no key.
    `output_DK` is as in Values. `is_extreme` says that values may be beyond `safe_range`. `softcap` and `sinks` are as in Scores.
    """
    if softcap is not None or sinks is not None:
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in heads)
        source = Scores(q, k, mask, scale, softcap, sinks)
        found = None if asked is None else extras(source, asked, Values(heads.v, output_DK))
        return source.attended(v, is_extreme=is_extreme), found
    small = is_small(heads, mask, len(heads.q))
    if asked is not None and small:
        w_NLS = small_weights(heads, scale)
        o_NLV = torch.bmm(w_NLS, heads.v)  # first, because selecting the largest weights overwrites w_NLS
        source = Scores(heads.q, heads.k, None, scale, weights=w_NLS)
        return o_NLV, extras(source, asked, Values(heads.v, output_DK))
    o_NLV = attend_extreme(heads, mask, scale) if is_extreme and not small else attend(heads, mask, scale)
    return o_NLV, None if asked is None else extras_alone(heads, mask, scale, asked, output_DK)


def attend_extreme(heads: Heads, mask: torch.Tensor | None, scale: float, kernel: Kernel = attend) -> torch.Tensor:
    """Return the output of `kernel` for one sequence, masked or large; it may have values beyond `safe_range`.

    To the kernel such a key is zero, which keeps the bits of each row that may not attend to it: a score of inf plus a mask of
    -inf is NaN, and so is 0 · inf. Rows that may, and rows of such queries, are computed by the definition, like their weights.
    Which rows these are depends on their own query and allowed keys alone. It takes one pass by the definition at most.
    """
    mask = heads.k.new_zeros(1, 1, heads.k.shape[1]) if mask is None else mask  # as the kernel has it
    most = safe_range(heads.q.dtype, heads.q.shape[2], scale)
    is_row, *of_keys = ((x.abs().amax(-1) < most).logical_not() for x in heads)  # NaN is not below it either
    is_key = torch.logical_or(*of_keys)
    if not bool(is_row.any() | is_key.any()):
        return kernel(heads, mask, scale)
    k, v = (x.masked_fill(is_key.unsqueeze(-1), 0.0) for x in (heads.k, heads.v))
    found = kernel(Heads(heads.q, k, v), mask, scale)
    shared = len(heads.q) // len(heads.k)
    for head, part in enumerate(mask.expand(len(heads.q), -1, -1)):
        is_row[head] |= (part[:, is_key[head // shared]] != -torch.inf).any(-1)
    if not bool(is_row.any()):
        return found
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in heads)
    return torch.where(is_row.unsqueeze(-1), Scores(q, k, mask, scale).attended(v, is_extreme=True), found)


def extras_alone(
    heads: Heads, mask: torch.Tensor | None, scale: float, asked: Call, output_DK: torch.Tensor | None
) -> Extras:
    """Return what a call asks of one sequence without its output."""
    wide = torch.promote_types(heads.q.dtype, torch.float32)
    return extras(Scores(heads.q.to(wide), heads.k.to(wide), mask, scale), asked, Values(heads.v, output_DK))


def extras(source: Scores, asked: Call | AttentionCall, values: Values) -> Extras:
    """Return what a call asks of one sequence, on its device."""
    # The entropy first, because selecting the largest weights overwrites those that are known.
    entropy = source.entropies().unsqueeze(0) if asked.has_entropy else None
    weights = None if asked.weights is None else selected(source, asked.weights, values)
    scores = None if asked.scores is None else selected(source._replace(weights=None), asked.scores)
    lse = source.log_sums().unsqueeze(0) if asked.has_lse else None
    assert scores is None or isinstance(scores, torch.Tensor)
    return Extras(weights, scores, lse, entropy)


class Values(NamedTuple):
    """The values v_GSV of one sequence, and the layer's output matrix [D, K] in any dtype: V columns belong to each head."""

    v: torch.Tensor
    output: torch.Tensor | None = None

    def lengths(self, chosen: Sequence[int], num_heads: int) -> torch.Tensor:
        """Return [N', S]: ‖v·W‖ of each key, where W is the head's part of the output matrix; ‖v‖ without one.

        A weight times this length is what Kobayashi et al. 2020 ("Attention is Not Only a Weight") measure.
        """
        v, (groups, keys, width) = self.v, self.v.shape
        wide = torch.promote_types(v.dtype, torch.float32)
        found = torch.empty(len(chosen), keys, dtype=wide, device=v.device)
        for place, head in zip(found, chosen, strict=True):
            part, v_SV = None, v[head * groups // num_heads]
            if self.output is not None:  # rounded as the layer has it, and aligned by the copy
                columns = self.output[:, head * width : (head + 1) * width]
                part = columns.to(v.device, v.dtype).to(wide, copy=True)
            for block in blocks(keys, BLOCK_ROWS if v.device.type == "cpu" else GPU_BLOCK_ROWS):
                added = v_SV[block].to(wide) if part is None else v_SV[block].to(wide) @ part.T
                # In float64, in which no square overflows or vanishes.
                place[block] = torch.linalg.vector_norm(added, dim=-1, dtype=torch.float64)
                stop_point()
        return found


class Scores(NamedTuple):
    """The scores of one sequence: q_NLH and k_GSH in the dtype of the scores; query head n uses key head n // (N / G).

    `softcap` c turns a score s into c·tanh(s/c). `sinks` [N] are logits that count only in the softmax's denominator.
    """

    q: torch.Tensor
    k: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    """The weights w_NLS of a small sequence, which are known already; `selected` may overwrite them."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.q.shape[0], self.q.shape[1], self.k.shape[1]

    @property
    def block_rows(self) -> int:
        is_large = self.q.device.type != "cpu" and GPU_BLOCK_ROWS * self.k.shape[1] <= MAX_CELLS
        return GPU_BLOCK_ROWS if is_large else BLOCK_ROWS

    def rows(self, chosen: Sequence[int], block: slice, stage: Stage | None = None) -> Iterator[torch.Tensor]:
        """Yield w_NRS of a block of rows, a few of the chosen heads at a time: the weights, or the scores at `stage`."""
        if self.weights is not None:
            rows = self.weights[:, block]
            yield _of_heads(rows, chosen)
            return
        for some, scores in self._chunks(chosen, block, is_capped=stage != "scaled"):
            mask = self._block_mask(some, block)
            if stage is None:
                yield self._softmax(scores, mask, some)
            else:
                yield _masked(scores, mask) if stage == "masked" else scores

    def log_sums(self) -> torch.Tensor:
        """Return [N, L]: the natural log-sum-exp of each row's masked scores and of its head's sink."""
        num_heads, queries, _ = self.shape
        found = self.q.new_empty(num_heads, queries)
        for block in blocks(queries, self.block_rows):
            for some, scores in self._chunks(range(num_heads), block):
                mask = self._block_mask(some, block)
                sums = torch.logsumexp(self._with_sinks(_masked(scores, mask), some), -1)
                # Where scores overflow, the weights are NaN. Only a row that may attend to nothing has -inf.
                has_overflow = sums.isinf() if mask is None else sums.isinf() & ~_is_dead(mask)[..., 0]
                found[list(some), block] = sums.masked_fill_(has_overflow, torch.nan)
        return found

    def entropies(self) -> torch.Tensor:
        """Return [N, L]: -Σ p·ln p over the weights of each row, in nats; 0 for a row that may attend to nothing."""
        num_heads, queries, _ = self.shape
        found = self.q.new_empty(num_heads, queries)
        for block in blocks(queries, self.block_rows):
            first = 0
            for part in self.rows(range(num_heads), block):
                found[first : first + len(part), block] = torch.special.entr(part).sum(-1)
                first += len(part)
        return found.add_(0.0)  # a weight of 1 gives -0.0

    def attended(self, v: torch.Tensor, *, is_extreme: bool = False) -> torch.Tensor:
        """Return softmax(scores)·v as o_NLV for v_GSV, by the definition.

        If `is_extreme`, values may be infinite or NaN, and count only where their weight is not 0.
        """
        num_heads, queries, _ = self.shape
        shared = num_heads // len(v)
        kinds = [bad for bad in (math.inf, -math.inf, math.nan) if is_extreme and bool(_is(v, bad).any())]
        parts = [torch.where(v.isfinite(), v, 0.0) if kinds else v, *(_is(v, bad).to(v.dtype) for bad in kinds)]
        sums = [self.q.new_empty(num_heads, queries, v.shape[2]) for _ in parts]
        for block in blocks(queries, self.block_rows):
            for head, w_RS in enumerate(itertools.chain.from_iterable(self.rows(range(num_heads), block))):
                for part, found in zip(parts, sums, strict=True):
                    torch.mm(w_RS, part[head // shared], out=found[head, block])
        if is_extreme:  # a mean of the largest values may round up to inf
            most = torch.finfo(v.dtype).max
            sums[0].clamp_(-most, most)
        for bad, found in zip(kinds, sums[1:], strict=True):
            sums[0] += torch.where(found > 0, bad, 0.0)
        return sums[0]

    def _chunks(
        self, chosen: Sequence[int], block: slice, *, is_capped: bool = True
    ) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        """Yield a few of the chosen heads with their scores, scaled and capped; memory does not grow with the number of heads."""
        q, k = self.q, self.k
        num_rows, keys, shared = block.stop - block.start, k.shape[1], len(q) // len(k)
        num_heads = max(1, MAX_CELLS // (num_rows * keys))
        for first in range(0, len(chosen), num_heads):
            some = chosen[first : first + num_heads]
            scores = q.new_empty(len(some), num_rows, keys)
            if q.device.type == "cpu":
                for i, head in enumerate(some):
                    torch.mm(q[head, block], k[head // shared].T, out=scores[i])
                scores.mul_(self.scale)
            else:  # one launch
                keys_of = _of_heads(k, [head // shared for head in some])
                torch.baddbmm(scores, _of_heads(q, some)[:, block], keys_of.mT, beta=0, alpha=self.scale, out=scores)
            stop_point()
            if is_capped and self.softcap is not None:
                scores.div_(self.softcap).tanh_().mul_(self.softcap)
            yield some, scores

    def _block_mask(self, heads: Sequence[int], block: slice) -> torch.Tensor | None:
        if self.mask is None:
            return None
        part = self.mask if self.mask.shape[1] == 1 else self.mask[:, block]
        return part if part.shape[0] == 1 else part[list(heads)]

    def _softmax(self, scores: torch.Tensor, mask: torch.Tensor | None, heads: Sequence[int]) -> torch.Tensor:
        """Return the softmax over the last axis; a row without an allowed key is zero, not NaN."""
        weights = self._with_sinks(_masked(scores, mask), heads).softmax(-1)[..., : scores.shape[-1]]
        if mask is None:
            return weights
        is_dead = _is_dead(mask)  # in most blocks no row is
        is_any_dead = is_dead.device.type != "cpu" or bool(is_dead.any())  # a GPU is not waited for
        return weights.masked_fill_(is_dead, 0.0) if is_any_dead else weights

    def _with_sinks(self, scores: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """Return the scores with the sink of each head as one column more."""
        if self.sinks is None:
            return scores
        sinks = self.sinks[list(heads)].view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        return torch.cat([scores, sinks], dim=-1)


def _is(x: torch.Tensor, bad: float) -> torch.Tensor:
    return x.isnan() if math.isnan(bad) else x == bad


def _of_heads(x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
    return x if list(chosen) == list(range(len(x))) else x[list(chosen)]


def _is_dead(mask: torch.Tensor) -> torch.Tensor:
    """Return which rows may attend to no key, with an S axis of 1."""
    # As bytes, because `all` of booleans over an axis takes ten times as long.
    return (mask == -torch.inf).view(torch.uint8).amin(-1, keepdim=True).bool()


def _masked(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return scores + mask, and -inf wherever the mask is -inf: adding it to a score that overflowed to inf would give NaN."""
    if mask is None:
        return scores
    scores += mask
    return torch.where(mask == -torch.inf, -torch.inf, scores)


def _contributions(weights: Iterator[torch.Tensor], lengths_NS: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yield the weights of consecutive heads, times the lengths if there are any; a weight of 0 gives 0, whatever the length."""
    first = 0
    for w_NRS in weights:
        some = slice(first, first + len(w_NRS))
        yield w_NRS if lengths_NS is None else torch.where(w_NRS == 0, 0.0, w_NRS * lengths_NS[some, None])
        first = some.stop


def selected(source: Scores, wanted: WeightsWanted, values: Values | None = None) -> Weights:
    """Return the selected rows of one sequence's weights or scores, with a B axis of 1; contributions need its values."""
    num_heads, queries, keys = source.shape
    chosen: Sequence[int] = range(num_heads) if wanted.heads is None else wanted.heads
    if wanted.form == "mean":
        chosen = sorted(chosen)  # so that the mean's bits do not depend on the order of the request
    lengths = values.lengths(chosen, num_heads) if values is not None and wanted.form == "contributions" else None
    is_one_block = queries <= source.block_rows and len(chosen) * queries * keys <= MAX_CELLS
    if wanted.form != "mean" and wanted.queries is None and (is_one_block or source.weights is not None):
        whole = next(_contributions(source.rows(chosen, slice(0, queries), wanted.stage), lengths))
        if wanted.k is None:
            return whole.to(wanted.dtype).unsqueeze(0)
        dtypes = (wanted.dtype, torch.int32, wanted.dtype)
        return TopK(
            *(x.to(dtype).unsqueeze(0) for x, dtype in zip(top_k.largest(whole, wanted.k), dtypes, strict=True))
        )
    num_rows = queries if wanted.queries is None else len(wanted.queries)
    lead = (1, num_rows) if wanted.form == "mean" else (1, len(chosen), num_rows)
    k = keys if wanted.k is None else wanted.k
    empty = functools.partial(torch.empty, device=source.q.device)
    answer = [empty(*lead, k, dtype=wanted.dtype)]
    if wanted.form == "top_k":
        answer += [empty(*lead, k, dtype=torch.int32), empty(*lead, dtype=wanted.dtype)]
    for block, places, rows in _requested_blocks(queries, source.block_rows, wanted.queries):
        parts = _contributions(source.rows(chosen, block, wanted.stage), lengths)
        if wanted.form == "mean":
            answer[0][0, places] = _mean(parts, len(chosen))[rows].to(wanted.dtype)
            continue
        first = 0
        for part in parts:
            heads = slice(first, first + len(part))
            w_NRS = part[:, rows]
            found = (w_NRS,) if wanted.k is None else top_k.largest(w_NRS, wanted.k)
            for place, new in zip(answer, found, strict=True):
                place[0, heads, places] = new.to(place.dtype)
            first = heads.stop
    return TopK(*answer) if wanted.form == "top_k" else answer[0]


def blocks(num_rows: int, block_rows: int) -> Iterator[slice]:
    """Yield the blocks of consecutive rows."""
    for start in range(0, num_rows, block_rows):
        yield slice(start, min(start + block_rows, num_rows))


def _requested_blocks(
    num_rows: int, block_rows: int, requested: Sequence[int] | None
) -> Iterator[tuple[slice, Places, Places]]:
    """Yield each block with a requested row: the block, the rows' places in the answer, and their indices in the block.

    If all rows are requested, places and indices are slices, which copy nothing.
    """
    rows = None if requested is None else torch.tensor(requested)
    for block in blocks(num_rows, block_rows):
        if rows is None:
            yield block, block, slice(None)
            continue
        places = ((rows >= block.start) & (rows < block.stop)).nonzero()[:, 0]
        if len(places):
            yield block, places, rows[places] - block.start


def _mean(parts: Iterable[torch.Tensor], num_heads: int) -> torch.Tensor:
    """Return the mean over all heads of all parts, added one by one: its bits do not depend on how heads are grouped."""
    heads: Iterator[torch.Tensor] = itertools.chain.from_iterable(part.unbind() for part in parts)
    total = next(heads).clone()
    for weights in heads:
        total += weights
    return total.div_(num_heads)


def joined(parts: Sequence[Extras]) -> Extras:
    """Join what the sequences of one call give along their B axis; a single part is not copied."""
    return parts[0] if len(parts) == 1 else Extras(*(_joined(found) for found in zip(*parts, strict=True)))


def to_host(found: Extras) -> Extras:
    """Return extras on the host; from a GPU they are complete when the host next waits for it."""
    return Extras(*map(_to_host, found))


def _to_host(one: Any) -> Any:
    if isinstance(one, TopK):
        return TopK(*map(transfers.to_host, one))
    return None if one is None else transfers.to_host(one)


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], TopK):
        return TopK(*map(torch.cat, zip(*parts, strict=True)))
    return None if parts[0] is None else torch.cat(list(parts))
