"""Series: makes metrics in this process's registry, merges those of all processes, and renders them.

Holds the prefix, the buckets, and how to read what the slot's last process left. Independent of which series there are.
Invariants: The caller that makes a series bounds its labels. A process shows the sums over all processes, and of the series with
a layer only those of served layers.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, values
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from service.observability.shared_values import Histogram, Shared, SharedValues

T = TypeVar("T", bound=MetricWrapperBase)

PREFIX = "attention"
# A request takes from 0.1 ms (one token) to seconds (the largest request, a full queue): 100 µs to 13.1 s by doubling.
TIME_BUCKETS = tuple(1e-4 * 2**power for power in range(18))
SIZE_BUCKETS = tuple(float(2**power) for power in range(18))


class Series(Collector):
    """Makes the series of one process; with `shared` their values are in files, and `render` adds up all processes'."""

    def __init__(self, shared: Shared | None = None) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        # At its import the library chooses by an environment variable; this replaces its choice.
        self.values = None if shared is None else SharedValues(shared)
        """This process's values, which are in files; None without `shared`."""
        values.ValueClass = self.values or values.MutexValue
        self.served: frozenset[str] | None = None
        """Layers whose series are shown; None: all. Other layers keep their values, and continue if they are served again."""
        self._registry = CollectorRegistry()
        self._shared = shared

    def counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return _cached(Counter(name, text, tuple(labels), namespace=PREFIX, registry=self._registry))

    def gauge(self, name: str, text: str, mode: str = "livesum", labels: Iterable[str] = ()) -> Gauge:
        """Make a gauge; `mode` says how the values of several processes combine. Without labels it begins at 0."""
        series = Gauge(
            name,
            text,
            tuple(labels),
            namespace=PREFIX,
            registry=self._registry,
            multiprocess_mode=mode,  # type: ignore[arg-type]
        )
        if not labels:
            series.set(0)
        return _cached(series)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: Iterable[str] = ()) -> Histogram:
        return _cached(Histogram(name, text, tuple(labels), namespace=PREFIX, registry=self._registry, buckets=buckets))

    def render(self) -> bytes:
        """Return `collect` in Prometheus' text form."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the shown series of all processes; reads their files, so call it in a thread."""
        shown = None if self.served is None else {None, *self.served}
        for family in self.families():
            if shown is not None:
                family.samples = [sample for sample in family.samples if sample.labels.get("layer") in shown]
            yield family

    def families(self) -> Iterable[Metric]:
        """Return all series of all processes, or of this one if files are lost or change faster than they are read."""
        if self._shared is not None and self.values is not None and self.values.is_shared:
            files = [str(path) for path in self._shared.directory.glob("*.db")]
            for _ in range(2):
                try:
                    return _merged(files)
                except Exception:  # noqa: BLE001 (a file was removed, cut or overwritten meanwhile: show the others)
                    files = [file for file in files if _is_whole(file)]
        return self._registry.collect()

    def restore(self) -> bool:
        """Make this process's lost files again; return whether any was lost. Raise OSError if there is no space."""
        return self.values is not None and self.values.restore()

    def close(self) -> None:
        """Write all changes and close the files; the counts stay in them."""
        if self.values is not None:
            self.values.close()


def _cached(series: T) -> T:
    """Cache the children by their labels, which are bounded; the library's `labels` locks and converts at every event."""
    series.labels = functools.cache(series.labels)  # type: ignore[method-assign]
    return series


def _merged(files: list[str]) -> Iterable[Metric]:
    merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
    return merged


def _is_whole(file: str) -> bool:
    try:
        _merged([file])
    except Exception:  # noqa: BLE001 (a broken file may raise anything)
        return False
    return True


def left_in(shared: Shared) -> dict[str, float]:
    """Return what the slot's last process counted, by sample, over all labels; remove files that cannot be read."""
    files = list(shared.directory.glob(f"*_{shared.slot}.db"))
    sums: dict[str, float] = {}
    try:
        for family in _merged([str(file) for file in files]):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        if not all(map(math.isfinite, sums.values())):
            raise ValueError("a sum is not finite")  # noqa: TRY301 (one exit for any fault)
    except Exception:  # noqa: BLE001 (a page half written by a killed process may raise anything)
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()
        return {}
    return sums
