"""Metrics: every series with its name, unit, labels and buckets, and the text form of those of all processes.

`observability/telemetry.py` updates the series.
Invariants: One prefix and base units. Labels are bounded (route templates, statuses, codes, names of served layers), so callers
cannot make a series. At rest received = requests + cancelled. A process shows the sums over all processes, and of the series with
a layer only those of served layers.

The values belong to a slot, not to a pid: a replacement goes on counting where the dead process stopped. So totals never fall and
files do not pile up. A dead process's live gauges are removed (`RunDirectory.clean_up`).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar, cast

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, values
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from service.api.outer_middleware import LayerTotals
from service.observability.shared_values import Histogram, SharedValues, Value

MODELS = "models/"
"""How the label of a model among layers begins."""
T = TypeVar("T", bound=MetricWrapperBase)
Mode = Literal["livesum", "livemin", "livemax", "max"]
"""How the values of several processes combine; `live` ones are of live processes only."""

PREFIX = "attention"
# A request takes from 0.1 ms (one token) to seconds (the largest request, a full queue): 100 µs to 13.1 s by doubling.
TIME_BUCKETS = tuple(1e-4 * 2**power for power in range(18))
SIZE_BUCKETS = tuple(float(2**power) for power in range(18))

# The counter of each field of LayerTotals and, beside the layer, the value of its label.
_COUNTERS: dict[str, tuple[str, ...]] = {
    "successes": ("layer_requests", "success"),
    "failures": ("layer_requests", "failure"),
    "success_s": ("layer_request_seconds", "success"),
    "failure_s": ("layer_request_seconds", "failure"),
    "decode_s": ("layer_phase_seconds", "decode"),
    "queue_s": ("layer_phase_seconds", "queue"),
    "compute_s": ("layer_phase_seconds", "compute"),
    "encode_s": ("layer_phase_seconds", "encode"),
    "sequences": ("layer_sequences",),
    "batches": ("layer_batches",),
}
_LAST_ANSWER = "layer_last_answer_timestamp_seconds"
# The field of each sample, by its name and the value of its label beside the layer.
_FIELDS = {(f"{PREFIX}_{name}_total", *label): field for field, (name, *label) in _COUNTERS.items()}
_FIELDS[f"{PREFIX}_{_LAST_ANSWER}",] = "last_answer_s"


class Metrics(Collector):
    """The series of one process as attributes; `render` gives the whole service's.

    The processes of one service share the `directory`. Each has a `slot`.
    """

    def __init__(self, directory: Path, slot: int) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        # At its import the library chooses by an environment variable; this replaces its choice.
        values.ValueClass = self.values = SharedValues(directory, slot)
        self.served: frozenset[str] | None = None
        """Layers whose series are shown; None: all. Other layers keep their values, and continue if they are served again."""
        self._registry = CollectorRegistry()
        self._make_request_series()
        self._make_batch_series()
        self._make_layer_series()
        self._make_process_series()
        left = self.values.left
        ended = left["attention_requests_total"] + left["attention_cancelled_total"]
        # What the slot's last process has not answered, if it was killed.
        self.cancelled.labels("killed").inc(max(0, int(left["attention_received_total"] - ended)))
        self.replacements.inc(self.values.is_replacement)

    def _make_request_series(self) -> None:
        self.received = _value_of(
            self.counter("received", "Requests received, except health checks and scrapes that do not fail")
        )
        self.requests = self.counter("requests", "Requests answered, by route and status", "route", "status")
        self.rejected = self.counter("rejected", "Requests answered with an error, by error code", "reason")
        self.cancelled = self.counter(
            "cancelled",
            "Requests whose client disconnected before the answer, by stage; killed: the process died",
            "stage",
        )
        self.request_seconds = self.histogram(
            "request_seconds",
            "Time from the complete headers to the end of the answer, refusals included",
            TIME_BUCKETS,
            "route",
        )
        self.queue_seconds = self.histogram(
            "queue_seconds", "Time a request waits for its batch", TIME_BUCKETS, "layer"
        )
        self.in_flight = _value_of(self.gauge("in_flight_requests", "Requests being received, served or answered"))
        self.masked_rows = self.counter(
            "masked_rows", "Query rows in answers that may attend to no key in at least one head"
        )

    def _make_batch_series(self) -> None:
        self.compute_seconds = self.histogram(
            "compute_seconds", "Duration of a batch's forward pass", TIME_BUCKETS, "layer"
        )
        self.compute_busy = self.counter(
            "compute_busy_seconds",
            "Processor time of forward passes, failed ones and probes included (on a GPU clock time)",
        )
        self.batch_requests = self.histogram("batch_requests", "Requests in a batch", SIZE_BUCKETS[:9])
        self.batch_sequences = self.histogram("batch_sequences", "Sequences in a batch", SIZE_BUCKETS[:15])
        self.batch_tokens = self.histogram(
            "batch_tokens", "Query rows in a batch, plus key rows of requests that send keys", SIZE_BUCKETS
        )
        self.batch_retries = self.counter(
            "batch_retries", "Batches that failed and whose requests were retried one by one"
        )
        self.batch_splits = self.counter("batch_split", "Batches that ran out of memory and were retried in two halves")
        self.filler_rows = self.counter(
            "filler_rows", "Rows of zeros added so that the bits of a row do not depend on the number of rows"
        )
        self.weights_bytes = self.counter("returned_weights_bytes", "Bytes of attention weights computed for answers")
        self.queued_requests = _value_of(self.gauge("queued_requests", "Requests waiting for a batch"))
        self.queued_bytes = _value_of(self.gauge("queued_bytes", "Bytes of the tensors of waiting requests"))
        self.queue_standing = self.gauge(
            "queue_standing", "1 while a process sheds load because its queue stays long", mode="livemax"
        )
        self.capacity_requests = self.gauge(
            "queue_capacity_requests", "Requests that may wait for a batch (the sum over all processes)"
        )
        self.capacity_bytes = self.gauge(
            "queue_capacity_bytes", "Bytes of tensors that may wait for a batch (the sum over all processes)"
        )

    def _make_layer_series(self) -> None:
        """Make what each layer has done, updated at every heartbeat and before it is read for Open Inference's statistics."""
        texts = {
            "layer_requests": ("Requests to a layer that were answered, by outcome", "outcome"),
            "layer_request_seconds": (
                "Time of a layer's requests from the complete headers to the end of the answer, by outcome",
                "outcome",
            ),
            "layer_phase_seconds": ("Time that successful requests spent in each phase", "phase"),
            "layer_sequences": ("Sequences in successful forward passes of a layer, probes excluded",),
            "layer_batches": ("Successful forward passes of a layer, probes excluded",),
        }
        self._layer_counters = {
            name: self.counter(name, text, "layer", *labels) for name, (text, *labels) in texts.items()
        }
        self._last_answer = self.gauge(
            _LAST_ANSWER, "Time of a layer's last successful answer, in seconds since the epoch", "layer", mode="max"
        )

    def _make_process_series(self) -> None:
        self.ready = self.gauge("ready", "1 while every live process is ready", mode="livemin")
        self.ready_processes = self.gauge(
            "ready_processes", "Ready processes (the smallest number that a process knows of)", mode="livemin"
        )
        self.expected_processes = self.gauge(
            "expected_processes", "Processes that the service should have", mode="livemax"
        )
        self.replacements = self.counter("process_replacements", "Processes started to replace one that ended")
        self.keys_stale = self.gauge(
            "api_keys_stale", "1 while the API keys file is unusable and the earlier keys stay in force", mode="livemax"
        )
        self.load_seconds = self.gauge(
            "layer_load_seconds", "Duration of a layer's last load, self-check included", "layer", mode="livemax"
        )
        self.load_failures = self.counter("layer_load_failures", "Failed loads of layers, by error code", "reason")
        self.source_checked = self.gauge(
            "layers_source_success_timestamp_seconds",
            "Time of the last look at ATTENTION_LAYERS_SOURCE without a fault, in seconds since the epoch; 0: none",
            mode="max",
        )
        self.dropped_lines = self.counter(
            "log_lines_dropped", "Log lines that workers dropped because stdout did not take them"
        )
        self.device_bytes = self.gauge(
            "device_memory_bytes", "Bytes that torch holds on a GPU; on a CPU, bytes of the layers' matrices", "device"
        )
        self.resident_bytes = self.gauge("process_resident_bytes", "Resident memory of all processes")
        self.build = self.gauge(
            "build_info",
            "Always 1; the labels name the running version, torch, device and dtype",
            "version",
            "torch",
            "device",
            "dtype",
            mode="livemax",
        )

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return _cached(Counter(name, text, labels, namespace=PREFIX, registry=self._registry))

    def gauge(self, name: str, text: str, *labels: str, mode: Mode = "livesum") -> Gauge:
        """Make a gauge, which begins at 0 if it has no labels."""
        series = Gauge(name, text, labels, namespace=PREFIX, registry=self._registry, multiprocess_mode=mode)
        if not labels:
            series.set(0)
        return _cached(series)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return _cached(Histogram(name, text, labels, namespace=PREFIX, registry=self._registry, buckets=buckets))

    def render(self) -> bytes:
        """Return `collect` in Prometheus' text form."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the shown series of all processes; reads their files, so call it in a thread."""
        shown = None if self.served is None else {None, *self.served}
        for family in self.families():
            if shown is not None:
                family.samples = [
                    one for one in family.samples if one.labels.get("layer") in shown or _is_of_model(one)
                ]
            yield family

    def families(self) -> Iterable[Metric]:
        """Return all series of all processes, or of this one if files are lost or change faster than they are read."""
        found = self.values.of_all_processes()
        return self._registry.collect() if found is None else found

    def add_layer_totals(self, sums: Mapping[str, LayerTotals]) -> None:
        """Add what layers have done since the last call; the counters of a layer that has done nothing begin at zero."""
        for layer, done in sums.items():
            for field, (name, *label) in _COUNTERS.items():
                self._layer_counters[name].labels(layer, *label).inc(getattr(done, field))
            if done.last_answer_s:
                self._last_answer.labels(layer).set(done.last_answer_s)

    def layer_totals(self) -> dict[str, LayerTotals]:
        """Return what each layer has done since the start of the service, over all processes.

        Other processes' are as old as their last heartbeat. It reads the files of all processes, so call it in a thread.
        """
        totals = collections.defaultdict[str, LayerTotals](LayerTotals)
        for sample in (sample for family in self.families() for sample in family.samples):
            labels = dict(sample.labels)
            layer = labels.pop("layer", "")
            if field := _FIELDS.get((sample.name, *labels.values())):
                kind = type(getattr(totals[layer], field))  # int or float
                setattr(totals[layer], field, kind(sample.value))
        return totals


def _value_of(series: Counter | Gauge) -> Value:
    """Return the one value of a series without labels; the library's own calls take five times as long as the value's."""
    return cast("Value", series._value)  # noqa: SLF001


def _is_of_model(sample: Sample) -> bool:
    """Return whether a sample is of a model that some process has read; which models are used differs between them."""
    return sample.labels.get("layer", "").startswith(MODELS)


def _cached(series: T) -> T:
    """Cache the children by their labels, which are bounded; the library's `labels` locks and converts at every event."""
    series.labels = functools.cache(series.labels)  # type: ignore[method-assign]
    return series
