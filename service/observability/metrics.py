"""Metrics: every series with its name, unit, labels and buckets, and one method per event.

Holds which series there are; `observability/series.py` makes them and gives the text form. Independent of HTTP and layers: it
gets frozen values and names.
Invariants: One prefix and base units. Labels are bounded (route templates, statuses, codes, names of served layers), so callers
cannot make a series. Each request is counted once when it arrives and once at its end (`answered` or `cancelled`), refusals too.
So at rest received = requests + cancelled. What `is_counted` excludes is counted nowhere.

Processes share by slot, not by pid: a replaced process goes on counting where the dead one stopped, so totals never fall and
files do not pile up. A dead process's live gauges are removed (`RunDirectory.clean_up`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from service.attention.heap import resident_bytes
from service.batching.engine_protocol import BatchEvent
from service.events import Answered, Capacity, LayerTotals
from service.loop_time import LoopTick
from service.observability.layer_series import LayerSeries
from service.observability.series import SIZE_BUCKETS, TIME_BUCKETS, Series, left_in
from service.observability.shared_values import Children, Shared

# The stage of requests that were in flight in a process that died.
KILLED = "killed"
_UNCOUNTED = frozenset({"/metrics", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})


def _left_unanswered(shared: Shared) -> int:
    """Return how many requests the last process of this slot received and did not finish."""
    counted = left_in(shared)
    ends = {"attention_received_total": 1, "attention_requests_total": -1, "attention_cancelled_total": -1}
    return max(0, int(sum(sign * counted.get(name, 0.0) for name, sign in ends.items())))


def is_counted(path: str) -> bool:
    """Return whether requests to this path are counted; health checks and scrapes, which come every few seconds, are not."""
    return path not in _UNCOUNTED


class Metrics:
    """The series of one process; with `shared`, `render` gives the whole service's."""

    def __init__(self, shared: Shared | None = None) -> None:
        is_replacement = shared is not None and shared.counters.exists()
        unanswered = 0 if shared is None else _left_unanswered(shared)
        self._series = Series(shared)
        self._values = self._series.values
        self._served: frozenset[str] | None = None  # None: not known yet, so all layers are shown
        self._make_request_series(self._series)
        self._make_batch_series(self._series)
        self._layers = LayerSeries(self._series)
        self._num_received = 0
        self._ended: list[Answered] = []
        self._gone: list[str] = []
        self._num_in_flight = 0
        self._queued = (0, 0)
        self._tick = LoopTick(self.tell_now)
        self._make_process_series(self._series)
        self._cancelled.labels(KILLED).inc(unanswered)
        self._replacements.inc(is_replacement)

    def _make_request_series(self, make: Series) -> None:
        self._received = make.counter("received", "Requests received, except health checks and metrics scrapes")
        self._requests = Children(
            make.counter("requests", "Requests answered, by route and status", ("route", "status"))
        )
        self._rejected = make.counter("rejected", "Requests answered with an error, by error code", ("reason",))
        self._cancelled = make.counter(
            "cancelled",
            "Requests whose client disconnected before the answer, by stage; killed: the process died",
            ("stage",),
        )
        self._request_seconds = Children(
            make.histogram(
                "request_seconds",
                "Time from the complete headers to the answer, refusals included",
                TIME_BUCKETS,
                ("route",),
            )
        )
        self._queue_seconds = Children(
            make.histogram("queue_seconds", "Time a request waits for its batch", TIME_BUCKETS, ("layer",))
        )
        self._in_flight = make.gauge("in_flight_requests", "Requests being received, served or answered")
        self._masked_rows = make.counter(
            "masked_rows", "Query rows in answers that may attend to no key in at least one head"
        )

    def _make_batch_series(self, make: Series) -> None:
        self._compute_seconds = Children(
            make.histogram("compute_seconds", "Duration of a batch's forward pass", TIME_BUCKETS, ("layer",))
        )
        self._compute_busy = make.counter(
            "compute_busy_seconds", "Time spent in forward passes, failed passes and probes included"
        )
        self._batch_requests = make.histogram("batch_requests", "Requests in a batch", SIZE_BUCKETS[:9])
        self._batch_sequences = make.histogram("batch_sequences", "Sequences in a batch", SIZE_BUCKETS[:15])
        self._batch_tokens = make.histogram(
            "batch_tokens", "Query rows in a batch, plus key rows of requests that send keys", SIZE_BUCKETS
        )
        self._batch_retries = make.counter(
            "batch_retries", "Batches that failed and whose requests were retried one by one"
        )
        self._batch_splits = make.counter(
            "batch_split", "Batches that ran out of memory and were retried in two halves"
        )
        self._filler_rows = make.counter(
            "filler_rows", "Rows of zeros added so that the bits of a row do not depend on the number of rows"
        )
        self._weights_bytes = make.counter("returned_weights_bytes", "Bytes of attention weights computed for answers")
        self._queued_requests = make.gauge("queued_requests", "Requests waiting for a batch")
        self._queued_bytes = make.gauge("queued_bytes", "Bytes of the tensors of waiting requests")
        self._standing = make.gauge(
            "queue_standing",
            "1 while a process sheds load because its queue stays long",
            "livemax",
        )
        self._capacity_requests = make.gauge(
            "queue_capacity_requests", "Requests that may wait for a batch (the sum over all processes)"
        )
        self._capacity_bytes = make.gauge(
            "queue_capacity_bytes", "Bytes of tensors that may wait for a batch (the sum over all processes)"
        )

    def _make_process_series(self, make: Series) -> None:
        self._ready = make.gauge("ready", "1 while every live process is ready", "livemin")
        self._ready_processes = make.gauge(
            "ready_processes", "Ready processes (the minimum over all processes' views)", "livemin"
        )
        self._expected_processes = make.gauge("expected_processes", "Processes that the service should have", "livemax")
        self._replacements = make.counter("process_replacements", "Processes started to replace one that ended")
        self._keys_stale = make.gauge(
            "api_keys_stale", "1 while the API keys file is unusable and the earlier keys stay in force", "livemax"
        )
        self._load_seconds = make.gauge(
            "layer_load_seconds", "Duration of a layer's last load, self-check included", "livemax", ("layer",)
        )
        self._load_failures = make.counter("layer_load_failures", "Failed loads of layers, by error code", ("reason",))
        self._dropped_lines = make.counter(
            "log_lines_dropped", "Log lines that workers dropped because stdout did not take them"
        )
        self._device_bytes = make.gauge(
            "device_memory_bytes",
            "Memory that torch holds on a GPU; on a CPU, the bytes of the layers' matrices",
            labels=("device",),
        )
        self._resident_bytes = make.gauge("process_resident_bytes", "Resident memory of all processes")
        self._build = make.gauge(
            "build_info",
            "Always 1; the labels name the running version, torch, device and dtype",
            "livemax",
            ("version", "torch", "device", "dtype"),
        )

    def received(self) -> None:
        self._num_received += 1
        self._num_in_flight += 1
        self._tick.ask()

    def answered(self, end: Answered) -> None:
        self._ended.append(end)
        self._num_in_flight -= 1
        self._tick.ask()

    def cancelled(self, stage: str) -> None:
        """Count a request whose caller left; `stage` is one of the few words for its progress (queued, running, …)."""
        self._gone.append(stage)
        self._num_in_flight -= 1
        self._tick.ask()

    def batch_done(self, layer: str, batch: BatchEvent) -> None:
        self._compute_seconds[layer,].observe_all([batch.compute_s])
        self._batch_requests.observe_all([batch.requests])
        self._batch_sequences.observe_all([batch.sequences])
        self._batch_tokens.observe_all([batch.tokens])
        if batch.weights_bytes:
            self._weights_bytes.inc(batch.weights_bytes)

    def batch_retried(self) -> None:
        self._batch_retries.inc()

    def batch_split(self) -> None:
        self._batch_splits.inc()

    def engine_worked(self, busy_s: float, filler_rows: int) -> None:
        """Add the engine's time and filler rows, those of failed passes and probes included."""
        self._compute_busy.inc(busy_s)
        self._filler_rows.inc(filler_rows)

    def log_lines_dropped(self, number: int) -> None:
        self._dropped_lines.inc(number)

    def queue_stands(self, *, is_so: bool) -> None:
        self._standing.set(is_so)

    def queue_changed(self, num_requests: int, num_bytes: int) -> None:
        self._queued = num_requests, num_bytes
        self._tick.ask()

    def tell_now(self) -> None:
        """Write what was deferred to the end of the loop tick, into the files as well.

        Every request changes these series, so one update serves all requests of a tick: a call of the library costs ten of ours.
        """
        self._received.inc(self._num_received)
        self._num_received = 0
        ended, self._ended = self._ended, []
        if ended:
            self._count_ends(ended)
        gone, self._gone = self._gone, []
        for stage in gone:
            self._cancelled.labels(stage).inc()
        self._in_flight.set(self._num_in_flight)
        num_requests, num_bytes = self._queued
        self._queued_requests.set(num_requests)
        self._queued_bytes.set(num_bytes)
        if self._values is not None:
            self._values.write()

    def _count_ends(self, ended: Sequence[Answered]) -> None:
        numbers: dict[tuple[str, int], int] = {}
        total_s: dict[str, list[float]] = {}
        queue_s: dict[str, list[float]] = {}
        masked_rows, refused = 0, []
        for end in ended:
            status = end.route, end.status
            numbers[status] = numbers.get(status, 0) + 1
            total_s.setdefault(end.route, []).append(end.total_s)
            if end.layer is not None and end.queue_s is not None:
                queue_s.setdefault(end.layer, []).append(end.queue_s)
            if end.code is not None:
                refused.append(end.code)
            masked_rows += end.masked_rows
        for (route, code), number in numbers.items():
            self._requests[route, str(code)].inc(number)
        for route, seconds in total_s.items():
            self._request_seconds[route,].observe_all(seconds)
        for layer, seconds in queue_s.items():
            self._queue_seconds[layer,].observe_all(seconds)
        for reason in refused:
            self._rejected.labels(reason).inc()
        if masked_rows:
            self._masked_rows.inc(masked_rows)

    def readiness_changed(self, *, is_ready: bool, num_ready: int) -> None:
        """Set readiness; `num_ready` is the number of ready processes that this one knows of."""
        self._ready.set(is_ready)
        self._ready_processes.set(num_ready)

    def keys_read(self, *, is_usable: bool) -> None:
        self._keys_stale.set(not is_usable)

    def layer_loaded(self, layer: str, seconds: float) -> None:
        """Make `layer` a label; its series begin at zero, so that rates see the first event."""
        self._load_seconds.labels(layer).set(seconds)
        self._queue_seconds[layer,]
        self._compute_seconds[layer,]

    def layers_served(self, names: Iterable[str]) -> None:
        """Hide series of other layers and restore their values: they go on where they were if the layer comes back."""
        self._served = frozenset(names)

    def layers_worked(self, sums: Mapping[str, LayerTotals]) -> None:
        """Add what layers have done since the last call."""
        self._layers.worked(sums)

    def layer_totals(self) -> dict[str, LayerTotals]:
        """Return what layers have done since the start, over all processes; reads their files, so call it in a thread."""
        return self._layers.totals(self._series.samples())

    def layer_load_failed(self, reason: str) -> None:
        self._load_failures.labels(reason).inc()

    def sized(self, capacity: Capacity) -> None:
        self._capacity_requests.set(capacity.queued_requests)
        self._capacity_bytes.set(capacity.queued_bytes)
        self._expected_processes.set(capacity.processes)

    def reasons_known(self, refusals: Iterable[str], load_failures: Iterable[str]) -> None:
        """Start the series of these reasons at zero, so that rates and alerts see the first event."""
        for reason in refusals:
            self._rejected.labels(reason)
        for reason in load_failures:
            self._load_failures.labels(reason)

    def routes_known(self, routes: Iterable[str]) -> None:
        """Start the times of these routes, which objectives cover, at zero for the same reason."""
        for route in routes:
            self._request_seconds[route,]

    def built(self, version: str, torch: str, device: str, dtype: str) -> None:
        self._build.labels(version, torch, device, dtype).set(1)

    def device_memory_measured(self, device: str, num_bytes: int) -> None:
        self._device_bytes.labels(device).set(num_bytes)

    def memory_measured(self) -> None:
        self._resident_bytes.set(resident_bytes())

    def render(self) -> bytes:
        """Return everything in Prometheus' text form; with several processes it reads their files, so call it in a thread."""
        return self._series.render(self._served)

    def restore(self) -> bool:
        """Make this process's lost files again; return whether any was lost. Raise OSError if there is no space."""
        return self._values is not None and self._values.restore()

    def close(self) -> None:
        """Write what was deferred and close the files; the counts stay in them."""
        self.tell_now()
        if self._values is not None:
            self._values.close()
