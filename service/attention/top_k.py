"""Top k: selects the k largest weights of each row in the order of a stable descending sort.

Legend: R rows, S keys.

Invariants: Weights descend; of ties the lower index comes first. Weights that are not returned are summed in key order. A
row's bits depend on the row alone, not on other requested rows. A row is all numbers or all NaN, as a softmax leaves it.
"""

from __future__ import annotations

import torch

from service.attention.call import TopK
from service.attention.progress import stop_point

# Above this share of the keys, selecting and ordering costs more than sorting all keys.
MAX_CHOSEN_SHARE = 0.25
# Weights of one step: half a MiB of float32 and its temporaries stay in the cache.
SORTED_CELLS = 2**17


def largest(weights: torch.Tensor, k: int) -> TopK:
    """Return the k largest weights of each row of [..., S], which may become zero in `weights`.

    Values and int64 indices are [..., k], the sum of the other weights [...].
    """
    rows = weights.flatten(0, -2)
    found = []
    step = max(1, SORTED_CELLS // rows.shape[-1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        # A GPU sorts, because to look for ties the host would wait for it.
        if k > MAX_CHOSEN_SHARE * rows.shape[-1] or rows.device.type != "cpu":
            values, indices = (x[:, :k].contiguous() for x in part.sort(dim=-1, descending=True, stable=True))
        else:
            values, indices = _chosen(part, k)
        part.scatter_(-1, indices, 0.0)
        found.append((values, indices))
        stop_point()
    values, indices = map(torch.cat, zip(*found, strict=True)) if len(found) > 1 else found[0]
    # Never a sum of one row alone: torch splits a sum with a single result by its number of threads.
    rest = rows.sum(-1) if len(rows) > 1 else rows.expand(2, -1).sum(-1)[:1]
    return TopK(*(x.unflatten(0, weights.shape[:-1]) for x in (values, indices, rest)))


def _chosen(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select by a partial sort. It lists ties in any order, so rows with ties among the first k + 1 go through `_by_index`."""
    values, indices = rows.topk(k + 1)
    has_ties = (values[:, 1:] == values[:, :-1]).any(-1) | values[:, 0].isnan()
    values, indices = values[:, :k], indices[:, :k]
    if bool(has_ties.any()):
        tied = has_ties.nonzero()[:, 0]
        indices[tied] = _by_index(rows[tied], values[tied], indices[tied])
        values = rows.gather(-1, indices)
    return values, indices


def _by_index(rows: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the indices of `values`, ties in ascending order: all keys above the least value, then the first equal to it."""
    keys, least = rows.shape[-1], values[:, -1:]
    descending = torch.arange(keys, 0, -1, dtype=torch.int32, device=rows.device)
    # Distinct ranks: values above the least first, then its equals by ascending index.
    # This multiplies, because `where` branches for each element and takes three times as long.
    ranks = (rows < least).logical_not_().to(torch.int32).mul_(descending)
    ranks.scatter_(-1, indices, descending[indices].add_((values > least).to(torch.int32), alpha=keys))
    chosen = ranks.topk(values.shape[-1]).indices
    order = rows.gather(-1, chosen).sort(dim=-1, descending=True, stable=True).indices
    return chosen.gather(-1, order)
