"""Series: makes metrics in this process's registry, merges those of all processes, and renders them.

Holds the prefix, the buckets, and how to read what the slot's last process left. Independent of which series there are.
Invariants: The caller that makes a series bounds its labels. A process shows the sums over all processes, and of the series with
a layer only those of served layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from service.observability.shared_values import Histogram, Shared, SharedValues

PREFIX = "attention"
# A request takes from 0.1 ms (one token) to seconds (the largest request, a full queue): 100 µs to 13.1 s by doubling.
TIME_BUCKETS = tuple(1e-4 * 2**power for power in range(18))
SIZE_BUCKETS = tuple(float(2**power) for power in range(18))


class Series:
    """Makes the series of one process; with `shared` their values are in files, and `render` adds up all processes'."""

    def __init__(self, shared: Shared | None = None) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        # At its import the library chooses by an environment variable; this replaces its choice.
        self.values = None if shared is None else SharedValues(shared)
        values.ValueClass = self.values or values.MutexValue
        self._registry = CollectorRegistry()
        self._shared = shared

    def counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, text, tuple(labels), namespace=PREFIX, registry=self._registry)

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
        return series

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: Iterable[str] = ()) -> Histogram:
        return Histogram(name, text, tuple(labels), namespace=PREFIX, registry=self._registry, buckets=buckets)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of all processes; reads their files, so call it in a thread."""
        return (sample for family in self._all_processes().collect() for sample in family.samples)

    def render(self, served: frozenset[str] | None) -> bytes:
        """Return Prometheus' text form with only the layers `served` (None: all); it reads the files too: call it in a thread."""
        shown = CollectorRegistry()
        shown.register(_Shown(self._all_processes(), served))
        return generate_latest(shown)

    def _all_processes(self) -> CollectorRegistry:
        if self._shared is None or self.values is None or not self.values.is_shared:
            return self._registry
        registry = CollectorRegistry()
        registry.register(_AllProcesses(self._shared.directory, self._registry))
        return registry


class _AllProcesses(Collector):
    """The series in the files of a directory; if a second attempt to read them fails too, those of this process only."""

    def __init__(self, directory: Path, own: CollectorRegistry) -> None:
        self._directory = directory
        self._own = own

    def collect(self) -> Iterable[Metric]:
        files = [str(path) for path in self._directory.glob("*.db")]
        for _ in range(2):
            try:
                return _merged(files)
            except Exception:  # noqa: BLE001 (a file was removed, cut or overwritten meanwhile: show the others)
                files = [file for file in files if _is_whole(file)]
        return self._own.collect()


def _merged(files: list[str]) -> Iterable[Metric]:
    merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
    return merged


def _is_whole(file: str) -> bool:
    try:
        _merged([file])
    except Exception:  # noqa: BLE001 (a broken file may raise anything)
        return False
    return True


class _Shown(Collector):
    """A registry's series without those of layers that are not served."""

    def __init__(self, registry: CollectorRegistry, served: frozenset[str] | None) -> None:
        self._registry = registry
        self._served = served

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if self._served is not None:
                family.samples = [x for x in family.samples if x.labels.get("layer", None) in {None, *self._served}]
            yield family


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
