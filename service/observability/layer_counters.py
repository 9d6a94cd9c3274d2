"""Layer counters: sums of what each layer has done since the metrics last took them.

Invariants: A request costs a few additions here and no metric. Nothing is counted twice: `take` returns the sums and starts anew.
Only whole requests count, successes and failures apart.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from service.api.request_record import RequestRecord
from service.events import LayerTotals

_LAST_SUCCESS = 299


class LayerCounters:
    """One process's sums by layer; `wall_clock` is seconds since the epoch."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._sums: dict[str, LayerTotals] = collections.defaultdict(LayerTotals)

    def answered(self, trace: RequestRecord, total_s: float) -> None:
        """Count an answered request to a served layer, as a success or a failure."""
        if trace.layer is None:
            return
        done = self._sums[trace.layer]
        if trace.status > _LAST_SUCCESS:
            done.failures += 1
            done.failure_s += total_s
            return
        done.successes += 1
        done.success_s += total_s
        done.decode_s += trace.decode_s or 0.0
        done.queue_s += trace.queue_s or 0.0
        done.compute_s += trace.compute_s or 0.0
        done.encode_s += trace.encode_s or 0.0
        done.last_answer_s = self._wall_clock()

    def computed(self, layer: str, sequences: int) -> None:
        """Count one forward pass of a layer."""
        done = self._sums[layer]
        done.batches += 1
        done.sequences += sequences

    def take(self) -> dict[str, LayerTotals]:
        """Return the sums since the last `take` and start anew."""
        sums, self._sums = self._sums, collections.defaultdict(LayerTotals)
        return sums
