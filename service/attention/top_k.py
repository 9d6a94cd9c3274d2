"""Top k: the k largest weights of each row, exactly as a stable descending sort would list them, without the sort.

Legend: R rows, S keys.

Laws: descending, ties by the lower index; what is not returned is summed in the order of the keys; a row's bits depend on
the row alone, not on which rows it is asked with. A row is all numbers or all NaN, as a softmax leaves it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from service.attention.preemption import preemption_point

# From this share of the keys on, choosing and then ordering costs more than sorting them all.
MAX_CHOSEN_SHARE = 0.25
# Weights that are looked at together: half a MiB of float32 and its temporaries stay in the cache.
STEP_CELLS = 2**17


class Largest(NamedTuple):
    """values and int64 indices [R, k], and the sum of the others [R]."""

    values: torch.Tensor
    indices: torch.Tensor
    rest: torch.Tensor


def largest(rows: torch.Tensor, k: int) -> Largest:
    """Of each row of w_RS, which is used up: what is returned is zero in it afterwards."""
    find = _sorted if k > MAX_CHOSEN_SHARE * rows.shape[-1] else _chosen
    values, indices = rows.new_empty(len(rows), k), rows.new_empty(len(rows), k, dtype=torch.int64)
    step = max(1, STEP_CELLS // rows.shape[-1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        values[part], indices[part] = find(rows[part], k)
        rows[part].scatter_(-1, indices[part], 0.0)
        preemption_point()
    return Largest(values, indices, _sums(rows))


def _sorted(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = rows.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], indices[:, :k]


def _chosen(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By a partial sort, which lists ties in any order; a row that has some among the first k + 1 is looked at again."""
    values, indices = rows.topk(k + 1)
    has_ties = (values[:, 1:] == values[:, :-1]).any(-1) | values[:, 0].isnan()
    values, indices = values[:, :k], indices[:, :k]
    if bool(has_ties.any()):
        places = has_ties.nonzero()[:, 0]
        indices[places] = _by_index(rows[places], values[places], indices[places])
        values = rows.gather(-1, indices)
    return values, indices


def _by_index(rows: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The indices of rows with ties, from a choice of the right values: all above the least one, then its first equals."""
    keys, least = rows.shape[-1], values[:, -1:]
    falling = torch.arange(keys, 0, -1, dtype=torch.int32, device=rows.device)
    # Ranks that differ: lower indices first among the equals of the least, and whatever is above it before them.
    # Multiplied, since `where` takes a branch for each element: three times as long.
    ranks = (rows < least).logical_not_().to(torch.int32).mul_(falling)
    ranks.scatter_(-1, indices, falling[indices].add_((values > least).to(torch.int32), alpha=keys))
    chosen = ranks.topk(values.shape[-1]).indices
    order = rows.gather(-1, chosen).sort(dim=-1, descending=True, stable=True).indices
    return chosen.gather(-1, order)


def _sums(rows: torch.Tensor) -> torch.Tensor:
    """Over the last axis. Never of one row alone: torch cuts a sum with a single result in as many parts as it has threads."""
    return rows.sum(-1) if len(rows) > 1 else rows.expand(2, -1).sum(-1)[:1]
