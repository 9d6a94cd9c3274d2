"""Metrics: every series with its name, unit, labels and buckets.

Holds which series there are; `observability/telemetry.py` updates them, and `observability/series.py` gives the text form.
Independent of HTTP and layers.
Invariants: One prefix and base units. Labels are bounded (route templates, statuses, codes, names of served layers), so callers
cannot make a series. At rest received = requests + cancelled.

The values belong to a slot, not to a pid: a replacement goes on counting where the dead process stopped. So totals never fall and
files do not pile up. A dead process's live gauges are removed (`RunDirectory.clean_up`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.samples import Sample

from service.layer_totals import LayerTotals
from service.observability.series import PREFIX, SIZE_BUCKETS, TIME_BUCKETS, Series, left_in
from service.observability.shared_values import Children, Shared

# The `stage` of requests that were in flight in a process that died.
KILLED = "killed"

# For each field of LayerTotals, its series and the label that it has besides `layer`.
_SUMS: dict[str, tuple[str, dict[str, str]]] = {
    "successes": ("layer_requests", {"outcome": "success"}),
    "failures": ("layer_requests", {"outcome": "failure"}),
    "success_s": ("layer_request_seconds", {"outcome": "success"}),
    "failure_s": ("layer_request_seconds", {"outcome": "failure"}),
    "decode_s": ("layer_phase_seconds", {"phase": "decode"}),
    "queue_s": ("layer_phase_seconds", {"phase": "queue"}),
    "compute_s": ("layer_phase_seconds", {"phase": "compute"}),
    "encode_s": ("layer_phase_seconds", {"phase": "encode"}),
    "sequences": ("layer_sequences", {}),
    "batches": ("layer_batches", {}),
}


class LayerSeries:
    """Series of what each layer has done, updated at every heartbeat and before they are read for Open Inference's statistics."""

    def __init__(self, make: Series) -> None:
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
        self._sums = {
            name: Children(make.counter(name, text, ("layer", *labels))) for name, (text, *labels) in texts.items()
        }
        self._last_answer = Children(
            make.gauge(
                "layer_last_answer_timestamp_seconds",
                "Time of a layer's last successful answer, in seconds since the epoch",
                "max",
                ("layer",),
            )
        )

    def add(self, sums: Mapping[str, LayerTotals]) -> None:
        """Add what layers have done since the last call."""
        for layer, done in sums.items():
            for field, (series, labels) in _SUMS.items():
                if amount := getattr(done, field):
                    self._sums[series][layer, *labels.values()].inc(amount)
            if done.last_answer_s:
                self._last_answer[layer,].set(done.last_answer_s)

    def totals(self, samples: Iterable[Sample]) -> dict[str, LayerTotals]:
        """Return what layers have done since the start, from the samples of all processes."""
        values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
        begin = f"{PREFIX}_layer_requests"
        layers = {dict(labels)["layer"] for name, labels in values if name.startswith(begin)}
        return {layer: self._totals(layer, values) for layer in layers}

    def _totals(self, layer: str, values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]) -> LayerTotals:
        def value(name: str, labels: Mapping[str, str]) -> float:
            return values.get((f"{PREFIX}_{name}", frozenset({"layer": layer, **labels}.items())), 0.0)

        sums = {field: value(f"{series}_total", labels) for field, (series, labels) in _SUMS.items()}
        counts = {field: int(sums[field]) for field in ("successes", "failures", "sequences", "batches")}
        last = value("layer_last_answer_timestamp_seconds", {})
        return LayerTotals(**{**sums, **counts, "last_answer_s": last})  # type: ignore[arg-type]  # counts are ints


def _left_unanswered(shared: Shared) -> int:
    """Return how many requests the last process of this slot received and did not finish."""
    counted = left_in(shared)
    ends = {"attention_received_total": 1, "attention_requests_total": -1, "attention_cancelled_total": -1}
    return max(0, int(sum(sign * counted.get(name, 0.0) for name, sign in ends.items())))


class Metrics:
    """The series of one process as attributes; with `shared`, `render` gives the whole service's."""

    def __init__(self, shared: Shared | None = None) -> None:
        is_replacement = shared is not None and shared.file("counter").exists()  # of another process that had the slot
        unanswered = 0 if shared is None else _left_unanswered(shared)
        self._series = Series(shared)
        self.values = self._series.values
        """This process's values, which are in files; None without `shared`."""
        self.served: frozenset[str] | None = None
        """Layers whose series are shown; None: all. Other layers keep their values, and continue if they are served again."""
        self._make_request_series(self._series)
        self._make_batch_series(self._series)
        self.layers = LayerSeries(self._series)
        self._make_process_series(self._series)
        self.cancelled.labels(KILLED).inc(unanswered)
        self.replacements.inc(is_replacement)

    def _make_request_series(self, make: Series) -> None:
        self.received = make.counter("received", "Requests received, except health checks and metrics scrapes")
        self.requests = Children(
            make.counter("requests", "Requests answered, by route and status", ("route", "status"))
        )
        self.rejected = make.counter("rejected", "Requests answered with an error, by error code", ("reason",))
        self.cancelled = make.counter(
            "cancelled",
            "Requests whose client disconnected before the answer, by stage; killed: the process died",
            ("stage",),
        )
        self.request_seconds = Children(
            make.histogram(
                "request_seconds",
                "Time from the complete headers to the end of the answer, refusals included",
                TIME_BUCKETS,
                ("route",),
            )
        )
        self.queue_seconds = Children(
            make.histogram("queue_seconds", "Time a request waits for its batch", TIME_BUCKETS, ("layer",))
        )
        self.in_flight = make.gauge("in_flight_requests", "Requests being received, served or answered")
        self.masked_rows = make.counter(
            "masked_rows", "Query rows in answers that may attend to no key in at least one head"
        )

    def _make_batch_series(self, make: Series) -> None:
        self.compute_seconds = Children(
            make.histogram("compute_seconds", "Duration of a batch's forward pass", TIME_BUCKETS, ("layer",))
        )
        self.compute_busy = make.counter(
            "compute_busy_seconds", "Time spent in forward passes, failed passes and probes included"
        )
        self.batch_requests = make.histogram("batch_requests", "Requests in a batch", SIZE_BUCKETS[:9])
        self.batch_sequences = make.histogram("batch_sequences", "Sequences in a batch", SIZE_BUCKETS[:15])
        self.batch_tokens = make.histogram(
            "batch_tokens", "Query rows in a batch, plus key rows of requests that send keys", SIZE_BUCKETS
        )
        self.batch_retries = make.counter(
            "batch_retries", "Batches that failed and whose requests were retried one by one"
        )
        self.batch_splits = make.counter("batch_split", "Batches that ran out of memory and were retried in two halves")
        self.filler_rows = make.counter(
            "filler_rows", "Rows of zeros added so that the bits of a row do not depend on the number of rows"
        )
        self.weights_bytes = make.counter("returned_weights_bytes", "Bytes of attention weights computed for answers")
        self.queued_requests = make.gauge("queued_requests", "Requests waiting for a batch")
        self.queued_bytes = make.gauge("queued_bytes", "Bytes of the tensors of waiting requests")
        self.queue_standing = make.gauge(
            "queue_standing",
            "1 while a process sheds load because its queue stays long",
            "livemax",
        )
        self.capacity_requests = make.gauge(
            "queue_capacity_requests", "Requests that may wait for a batch (the sum over all processes)"
        )
        self.capacity_bytes = make.gauge(
            "queue_capacity_bytes", "Bytes of tensors that may wait for a batch (the sum over all processes)"
        )

    def _make_process_series(self, make: Series) -> None:
        self.ready = make.gauge("ready", "1 while every live process is ready", "livemin")
        self.ready_processes = make.gauge(
            "ready_processes", "Ready processes (the smallest number that a process knows of)", "livemin"
        )
        self.expected_processes = make.gauge("expected_processes", "Processes that the service should have", "livemax")
        self.replacements = make.counter("process_replacements", "Processes started to replace one that ended")
        self.keys_stale = make.gauge(
            "api_keys_stale", "1 while the API keys file is unusable and the earlier keys stay in force", "livemax"
        )
        self.load_seconds = make.gauge(
            "layer_load_seconds", "Duration of a layer's last load, self-check included", "livemax", ("layer",)
        )
        self.load_failures = make.counter("layer_load_failures", "Failed loads of layers, by error code", ("reason",))
        self.dropped_lines = make.counter(
            "log_lines_dropped", "Log lines that workers dropped because stdout did not take them"
        )
        self.device_bytes = make.gauge(
            "device_memory_bytes",
            "Bytes that torch holds on a GPU; on a CPU, bytes of the layers' matrices",
            labels=("device",),
        )
        self.resident_bytes = make.gauge("process_resident_bytes", "Resident memory of all processes")
        self.build = make.gauge(
            "build_info",
            "Always 1; the labels name the running version, torch, device and dtype",
            "livemax",
            ("version", "torch", "device", "dtype"),
        )

    def layer_totals(self) -> dict[str, LayerTotals]:
        """Return what layers have done since the start, over all processes; reads their files, so call it in a thread."""
        return self.layers.totals(self._series.samples())

    def render(self) -> bytes:
        """Return all series in Prometheus' text form; with `shared` it reads all processes' files, so call it in a thread."""
        return self._series.render(self.served)

    def restore(self) -> bool:
        """Make this process's lost files again; return whether any was lost. Raise OSError if there is no space."""
        return self.values is not None and self.values.restore()

    def close(self) -> None:
        """Write all changes and close the files; the counts stay in them."""
        if self.values is not None:
            self.values.close()
