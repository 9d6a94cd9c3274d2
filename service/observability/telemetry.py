"""Telemetry: turns events of the API, batching, layers and the engine into metrics, log lines and spans of batches.

Invariants: Each request is counted once, refusals too. Health checks and scrapes come here only if they fail. A request's
line and its count come from the same record, so they agree. The time of each layer's last answer is kept here, because
readiness depends on it.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Hashable

from opentelemetry.trace import Tracer

from service import __version__
from service.api.auth.key_ring import KeyRing, KeysError, Role
from service.api.outer_middleware import LayerTotals, RequestRecord, milliseconds
from service.attention.engine import Engine, Fingerprint, LoadedLayer
from service.attention.heap import resident_bytes
from service.batching.engine_protocol import Progress
from service.batching.job import BatchInfo
from service.errors import Failed, LayerError, Refused, Rejected, raised_kinds
from service.observability.logs import get_logger, log_request, num_dropped_lines
from service.observability.metrics import Metrics
from service.observability.tracing import record_batch

_LAST_SUCCESS = 299
# The last element of a probe's lane.
PROBE = "probe"


class Telemetry:
    """Receives all events of batching and the API. With a `tracer`, batches are spans."""

    def __init__(self, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self.metrics = metrics
        self.tracer = tracer
        self._log = get_logger()
        self._answered_at: dict[str, float] = {}
        self._num_dropped = 0  # log lines that were lost before the last `sample`
        self._layers: dict[str, LayerTotals] = collections.defaultdict(LayerTotals)
        """What each layer has done that the metrics do not have yet; a request costs a few additions."""

    # Events of the API.

    def received(self, record: RequestRecord) -> None:  # noqa: ARG002 (RequestLog passes it)
        self.metrics.received.inc()
        self.metrics.in_flight.inc()

    def answered(self, record: RequestRecord, total_s: float) -> None:
        metrics = self.metrics
        metrics.in_flight.inc(-1)
        metrics.requests.labels(record.route, str(record.status)).inc()
        metrics.request_seconds.labels(record.route).observe(total_s)
        if record.code is not None:
            metrics.rejected.labels(record.code).inc()
        if record.masked_rows:
            metrics.masked_rows.inc(record.masked_rows)
        if record.layer is not None:
            if record.queue_s is not None:
                metrics.queue_seconds.labels(record.layer).observe(record.queue_s)
            _add(self._layers[record.layer], record, total_s)
        log_request(request_fields(record, total_s))

    def abandoned(self, record: RequestRecord, total_s: float) -> None:
        """Count a request whose client disconnected before the answer, by its stage (receiving, decoding, queued, sending)."""
        self.metrics.cancelled.labels(record.stage).inc()
        self.metrics.in_flight.inc(-1)
        record.code = "client_gone"
        log_request(request_fields(record, total_s))

    def faulted(self, record: RequestRecord, error: BaseException) -> None:
        self._log.error("fault", request_id=record.request_id, route=record.route, exc_info=error)

    def keys_taken(self, ring: KeyRing) -> None:
        self.metrics.keys_stale.set(0)
        self._log.info("api_keys_reloaded", infer=ring.count(Role.INFER), admin=ring.count(Role.ADMIN))

    def keys_refused(self, error: KeysError) -> None:
        self.metrics.keys_stale.set(1)
        self._log.error("api_keys_refused", reason=error.message, effect="the earlier keys stay in force")

    # Events of batching.

    def queue_changed(self, num_jobs: int, num_bytes: int) -> None:
        self.metrics.queued_requests.set(num_jobs)
        self.metrics.queued_bytes.set(num_bytes)

    def overload_changed(self, *, is_overloaded: bool) -> None:
        self.metrics.queue_standing.set(is_overloaded)

    def computed(self, progress: Progress) -> None:
        self.metrics.compute_busy.inc(progress.seconds)
        self.metrics.filler_rows.inc(progress.filler_rows)

    def batch_done(self, lane: Hashable, batch: BatchInfo, compute_s: float) -> None:
        layer, metrics = _layer_of(lane), self.metrics
        self._answered_at[layer] = time.monotonic()
        if isinstance(lane, tuple) and lane[-1] == PROBE:
            return  # no client requested it, so no metric may count it
        self._layers[layer].batches += 1
        self._layers[layer].sequences += batch.sequences
        metrics.compute_seconds.labels(layer).observe(compute_s)
        metrics.batch_requests.observe(batch.requests)
        metrics.batch_sequences.observe(batch.sequences)
        metrics.batch_tokens.observe(batch.tokens)
        if batch.weights_bytes:
            metrics.weights_bytes.inc(batch.weights_bytes)
        if self.tracer is not None:
            record_batch(self.tracer, layer, batch, compute_s)

    def retried_apart(self, lane: Hashable, num_jobs: int, reason: str) -> None:
        self.metrics.batch_retries.inc()
        self._log.warning("batch_retried", layer=_layer_of(lane), requests=num_jobs, reason=reason)

    def batch_split(self, lane: Hashable, num_jobs: int) -> None:
        self.metrics.batch_splits.inc()
        self._log.warning("batch_split", layer=_layer_of(lane), requests=num_jobs, reason="out of memory")

    def died(self, num_jobs: int, error: BaseException | None) -> None:
        self._log.critical("engine_down", requests=num_jobs, exc_info=error)

    # Events of layers, the engine and the process.

    def built(self, numerics: Fingerprint, queue_capacity: int, queue_bytes: int, processes: int) -> None:
        """Report the queue's limits, the number of processes and the build.

        The series of all error codes start at zero, so that rates see the first event.
        """
        metrics = self.metrics
        for kind in raised_kinds(Rejected, Refused, Failed):
            metrics.rejected.labels(kind.code)
        for kind in raised_kinds(LayerError):
            metrics.load_failures.labels(kind.code)
        metrics.capacity_requests.set(queue_capacity)
        metrics.capacity_bytes.set(queue_bytes)
        metrics.expected_processes.set(processes)
        metrics.build.labels(__version__, numerics.torch, numerics.device, numerics.dtype).set(1)

    def routes_known(self, routes: list[str]) -> None:
        """Start the duration series of these routes, which the objectives cover, at zero, so that rates see the first request."""
        for route in routes:
            self.metrics.request_seconds.labels(route)

    def layer_loaded(self, name: str, loaded: LoadedLayer) -> None:
        self._answered_at[name] = time.monotonic()
        self.metrics.load_seconds.labels(name).set(loaded.seconds)
        for series in (self.metrics.queue_seconds, self.metrics.compute_seconds):
            series.labels(name)  # begins at zero, so that rates see the first event
        self.metrics.add_layer_totals({name: LayerTotals()})  # likewise
        if loaded.is_sequential:
            self._log.warning("layer_runs_sequentially", layer=name, reason="the self-check found bits that differ")
        self._log.info("layer_loaded", layer=name, seconds=round(loaded.seconds, 3), least_rows=loaded.least_rows)

    def layer_refused(self, name: str, error: LayerError) -> None:
        """Report that a layer's file cannot be served; an admin's request for the layer also fails, with its own error."""
        self.metrics.load_failures.labels(error.code).inc()
        self._log.error("layer_refused", layer=name, reason=error.message)

    def layer_not_loaded(self, reason: str, code: str) -> None:
        """Report a desired layer that this process cannot load; `code` is that of its LayerError."""
        self.metrics.load_failures.labels(code).inc()
        self._log.error("layer_not_loaded", reason=reason)

    def serving(self, names: list[str], num_layers: int, layer_set: str = "") -> None:
        """Report what is served from now on: `num_layers` layers, whose `names` also include attention without a layer.

        Series of other names are no longer shown.
        """
        self.metrics.served = frozenset(names)
        now = time.monotonic()
        self._answered_at |= {name: self._answered_at.get(name, now) for name in names}
        self._log.info("layers_served", layers=num_layers, **({"layer_set": layer_set} if layer_set else {}))

    def source_checked(self, *, is_recovered: bool) -> None:
        """Report a look at the source without a fault; after one, log that it is over."""
        self.metrics.source_checked.set(time.time())
        if is_recovered:
            self._log.info("layers_source_recovered")

    def source_failed(self, reason: str) -> None:
        """Report a look at the source that changed nothing, because of a fault that the one before did not have."""
        self._log.error("layers_source_failed", reason=reason, effect="what is served stays")

    def layers_changed(self, action: str, name: str) -> None:
        self._log.info("layers_changed", action=action, layer=name)

    def task_failed(self, error: BaseException) -> None:
        self._log.critical("main_task_failed", exc_info=error)

    def heartbeat_failed(self, reason: str) -> None:
        self._log.error("heartbeat_not_written", reason=reason)

    def heartbeat_recovered(self) -> None:
        self._log.info("heartbeat_recovered")

    def run_directory_recreated(self) -> None:
        self._log.warning("run_directory_recreated", effect="counters of ended processes start again at zero")

    def readiness_changed(self, *, is_ready: bool, num_ready: int) -> None:
        """Report this process's readiness, and how many ready processes it knows of."""
        self.metrics.ready.set(is_ready)
        self.metrics.ready_processes.set(num_ready)

    def seconds_since_answer(self, name: str) -> float:
        """Return the seconds since the layer's last answer; its load, with the self-check, counts as one."""
        return time.monotonic() - self._answered_at.get(name, float("-inf"))

    def sample(self, engine: Engine) -> None:
        """Add what no event reports (memory and the lost log lines) and the sums of the layers, and write."""
        metrics = self.metrics
        num_dropped = num_dropped_lines()
        metrics.dropped_lines.inc(num_dropped - self._num_dropped)
        self._num_dropped = num_dropped
        metrics.add_layer_totals(self._layers)
        self._layers.clear()
        metrics.resident_bytes.set(resident_bytes())
        metrics.device_bytes.labels(engine.options.device.type).set(engine.device_bytes)
        metrics.values.write()


def _layer_of(lane: Hashable) -> str:
    assert isinstance(lane, tuple), "a lane begins with its layer. This is a bug."
    return str(lane[0])


def _add(done: LayerTotals, record: RequestRecord, total_s: float) -> None:
    """Add an answered request to what its layer has done; successes and failures are separate."""
    if record.status > _LAST_SUCCESS:
        done.failures += 1
        done.failure_s += total_s
        return
    done.successes += 1
    done.success_s += total_s
    done.decode_s += record.decode_s or 0.0
    done.queue_s += record.queue_s or 0.0
    done.compute_s += record.compute_s or 0.0
    done.encode_s += record.encode_s or 0.0
    done.last_answer_s = time.time()


def request_fields(record: RequestRecord, total_s: float) -> dict[str, str | float | None]:
    """Return the fields of a request's line; None is left out of it. Times in milliseconds, sizes in bytes."""
    decode_s, queue_s, compute_s = record.decode_s, record.queue_s, record.compute_s
    return {
        "request_id": record.request_id,
        "route": record.route,
        "method": record.method,
        "status": record.status,
        "peer": record.peer,
        "key": record.key,
        "code": record.code,
        "layer": record.layer,
        "batch_requests": None if record.batch is None else record.batch.requests,
        "tokens": record.tokens,
        "decode_ms": None if decode_s is None else milliseconds(decode_s),
        "queue_ms": None if queue_s is None else milliseconds(queue_s),
        "compute_ms": None if compute_s is None else milliseconds(compute_s),
        "total_ms": milliseconds(total_s),
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "detail": record.detail,
    }
