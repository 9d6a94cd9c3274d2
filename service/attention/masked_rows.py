"""Masked rows: finds the query rows that may attend to no key, from the masks alone, never from scores.

Legend: N heads, L query rows, S key rows; an axis written `N|1` broadcasts.

Invariants: Work and memory grow with the masks' own shapes, not with the scores that they cover. A mask that is the same for
all keys allows or blocks whole rows; one that is the same for all rows is read once. Only masks that differ by row and key
are read row by row, in steps, so that an event loop can run other tasks in between.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F

from service.attention import masks
from service.attention.masks import CombinedMask

Run = tuple[torch.Tensor, torch.Tensor]


def masked_rows(mask: CombinedMask) -> Iterator[torch.Tensor]:
    """Yield, step by step, which query rows may attend to no key in at least one head: bool, B·L values in all.

    A step covers about STEP_CELLS scores; without masks nothing is yielded.
    """
    if not mask.masks:
        return
    for sequence in range(mask.sizes.sequences):
        yield from _of_sequence(mask, sequence)


def _of_sequence(mask: CombinedMask, sequence: int) -> Iterator[torch.Tensor]:
    queries, keys = mask.sizes.queries, mask.sizes.keys
    every = mask.allowed_values(sequence)
    opened = _all_of(values for values in every if values.shape[-1] == 1)
    columns = _all_of(values for values in every if values.shape[-1] > 1 and values.shape[-2] == 1)
    tables = [values for values in every if values.shape[-1] > 1 and values.shape[-2] > 1]
    run = mask.run(sequence)
    counts = None if tables else _counts(columns, keys)
    step = max(1, masks.STEP_CELLS // (mask.table_shape[0] * (keys if tables else 1)))
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        alive = _has_key(tables, columns, run, rows) if counts is None else _has_key_in_run(counts, run, rows)
        if opened is not None:
            alive = alive & masks.of_rows(opened, rows)[..., 0]
        yield (~alive).any(0).expand(rows.stop - rows.start)


def _all_of(values: Iterable[torch.Tensor]) -> torch.Tensor | None:
    found = list(values)
    return functools.reduce(operator.and_, found) if found else None


def _counts(columns: torch.Tensor | None, keys: int) -> torch.Tensor:
    """Return how many of the first j keys are allowed, j = 0 … S: int32 [N|1, S + 1]."""
    if columns is None:
        return torch.arange(keys + 1, dtype=torch.int32).unsqueeze(0)
    return F.pad(columns[:, 0].cumsum(-1, dtype=torch.int32), (1, 0))


def _has_key_in_run(counts: torch.Tensor, run: Run | None, rows: slice) -> torch.Tensor:
    """Return which rows have an allowed key in their run if all rows allow the same keys: bool [N|1, L|1]."""
    if run is None:
        return counts[:, -1:] > 0
    low, high = (masks.of_rows(bound.unsqueeze(-1), rows)[:, 0] for bound in run)
    return counts[:, high] > counts[:, low]


def _has_key(tables: list[torch.Tensor], columns: torch.Tensor | None, run: Run | None, rows: slice) -> torch.Tensor:
    """Return which rows have an allowed key if rows allow different keys: bool [N|1, L]."""
    parts = [masks.of_rows(table, rows) for table in tables]
    if columns is not None:
        parts.append(columns)
    if run is not None:
        parts.append(masks.in_run(run, rows, tables[0].shape[-1]))
    # As bytes, because `any` of booleans over an axis takes ten times as long.
    return functools.reduce(operator.and_, parts).view(torch.uint8).amax(-1).bool()
