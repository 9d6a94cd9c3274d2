"""Metrics: every series with its name, unit, labels and buckets.

Holds which series there are; `observability/telemetry.py` updates them, and `observability/series.py` gives the text form.
Independent of HTTP and layers.
Invariants: One prefix and base units. Labels are bounded (route templates, statuses, codes, names of served layers), so callers
cannot make a series. At rest received = requests + cancelled.

The values belong to a slot, not to a pid: a replacement goes on counting where the dead process stopped. So totals never fall and
files do not pile up. A dead process's live gauges are removed (`RunDirectory.clean_up`).
"""

from __future__ import annotations

from collections.abc import Mapping

from service.layer_totals import LayerTotals
from service.observability.series import PREFIX, SIZE_BUCKETS, TIME_BUCKETS, Series, left_in
from service.observability.shared_values import Shared

# The `stage` of requests that were in flight in a process that died.
KILLED = "killed"

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


def _left_unanswered(shared: Shared) -> int:
    """Return how many requests the last process of this slot received and did not finish."""
    counted = left_in(shared)
    ends = {"attention_received_total": 1, "attention_requests_total": -1, "attention_cancelled_total": -1}
    return max(0, int(sum(sign * counted.get(name, 0.0) for name, sign in ends.items())))


class Metrics(Series):
    """The series of one process as attributes; with `shared`, `render` gives the whole service's."""

    def __init__(self, shared: Shared | None = None) -> None:
        is_replacement = shared is not None and shared.file("counter").exists()  # of another process that had the slot
        unanswered = 0 if shared is None else _left_unanswered(shared)
        super().__init__(shared)
        self._make_request_series()
        self._make_batch_series()
        self._make_layer_series()
        self._make_process_series()
        self.cancelled.labels(KILLED).inc(unanswered)
        self.replacements.inc(is_replacement)

    def _make_request_series(self) -> None:
        self.received = self.counter("received", "Requests received, except health checks and metrics scrapes")
        self.requests = self.counter("requests", "Requests answered, by route and status", ("route", "status"))
        self.rejected = self.counter("rejected", "Requests answered with an error, by error code", ("reason",))
        self.cancelled = self.counter(
            "cancelled",
            "Requests whose client disconnected before the answer, by stage; killed: the process died",
            ("stage",),
        )
        self.request_seconds = self.histogram(
            "request_seconds",
            "Time from the complete headers to the end of the answer, refusals included",
            TIME_BUCKETS,
            ("route",),
        )
        self.queue_seconds = self.histogram(
            "queue_seconds", "Time a request waits for its batch", TIME_BUCKETS, ("layer",)
        )
        self.in_flight = self.gauge("in_flight_requests", "Requests being received, served or answered")
        self.masked_rows = self.counter(
            "masked_rows", "Query rows in answers that may attend to no key in at least one head"
        )

    def _make_batch_series(self) -> None:
        self.compute_seconds = self.histogram(
            "compute_seconds", "Duration of a batch's forward pass", TIME_BUCKETS, ("layer",)
        )
        self.compute_busy = self.counter(
            "compute_busy_seconds", "Time spent in forward passes, failed passes and probes included"
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
        self.queued_requests = self.gauge("queued_requests", "Requests waiting for a batch")
        self.queued_bytes = self.gauge("queued_bytes", "Bytes of the tensors of waiting requests")
        self.queue_standing = self.gauge(
            "queue_standing", "1 while a process sheds load because its queue stays long", "livemax"
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
            name: self.counter(name, text, ("layer", *labels)) for name, (text, *labels) in texts.items()
        }
        self._last_answer = self.gauge(
            _LAST_ANSWER, "Time of a layer's last successful answer, in seconds since the epoch", "max", ("layer",)
        )

    def _make_process_series(self) -> None:
        self.ready = self.gauge("ready", "1 while every live process is ready", "livemin")
        self.ready_processes = self.gauge(
            "ready_processes", "Ready processes (the smallest number that a process knows of)", "livemin"
        )
        self.expected_processes = self.gauge("expected_processes", "Processes that the service should have", "livemax")
        self.replacements = self.counter("process_replacements", "Processes started to replace one that ended")
        self.keys_stale = self.gauge(
            "api_keys_stale", "1 while the API keys file is unusable and the earlier keys stay in force", "livemax"
        )
        self.load_seconds = self.gauge(
            "layer_load_seconds", "Duration of a layer's last load, self-check included", "livemax", ("layer",)
        )
        self.load_failures = self.counter("layer_load_failures", "Failed loads of layers, by error code", ("reason",))
        self.dropped_lines = self.counter(
            "log_lines_dropped", "Log lines that workers dropped because stdout did not take them"
        )
        self.device_bytes = self.gauge(
            "device_memory_bytes",
            "Bytes that torch holds on a GPU; on a CPU, bytes of the layers' matrices",
            labels=("device",),
        )
        self.resident_bytes = self.gauge("process_resident_bytes", "Resident memory of all processes")
        self.build = self.gauge(
            "build_info",
            "Always 1; the labels name the running version, torch, device and dtype",
            "livemax",
            ("version", "torch", "device", "dtype"),
        )

    def add_layer_totals(self, sums: Mapping[str, LayerTotals]) -> None:
        """Add what layers have done since the last call."""
        for layer, done in sums.items():
            for field, (name, *label) in _COUNTERS.items():
                if amount := getattr(done, field):
                    self._layer_counters[name].labels(layer, *label).inc(amount)
            if done.last_answer_s:
                self._last_answer.labels(layer).set(done.last_answer_s)

    def layer_totals(self) -> dict[str, LayerTotals]:
        """Return what layers have done since the start, over all processes, from their first answer on.

        It reads the files of all processes, so call it in a thread.
        """
        samples = [sample for family in self.families() for sample in family.samples]
        answered = f"{PREFIX}_layer_requests_total"
        totals = {sample.labels["layer"]: LayerTotals() for sample in samples if sample.name == answered}
        for sample in samples:
            labels = dict(sample.labels)
            done = totals.get(labels.pop("layer", ""))
            if done is not None and (field := _FIELDS.get((sample.name, *labels.values()))):
                kind = type(getattr(done, field))  # int or float
                setattr(done, field, kind(sample.value))
        return totals
