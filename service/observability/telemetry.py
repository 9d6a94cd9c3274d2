"""Telemetry: turns events of the API, batching, layers and the engine into metrics, layer counters and log lines.

Invariants: Each event is reported once and counted once. A request's line and its count come from the same record, so they agree.
The time of each layer's last answer is kept here, because readiness depends on it.

Layer counters: sums of what each layer has done since the metrics last took them.
Invariants: A request costs a few additions here and no metric. Nothing is counted twice: `take` returns the sums and starts anew.
Only whole requests count, successes and failures apart.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Hashable

from service import __version__
from service.api.auth.key_ring import KeyRing, KeysError, Role
from service.api.outer_middleware import RequestRecord, milliseconds
from service.attention.engine import Engine, Fingerprint, LoadedLayer
from service.batching.engine_protocol import BatchEvent, CancelEvent, DeathEvent, RetryEvent, SplitEvent
from service.errors import Failed, LayerError, Refused, Rejected, ServiceError, codes_of
from service.events import Answered, Capacity, LayerTotals
from service.observability.logs import RequestLine, get_logger, log_request, num_dropped_lines
from service.observability.metrics import Metrics, is_counted

_LAST_SUCCESS = 299


class LayerCounters:
    """One process's sums by layer; `wall_clock` is seconds since the epoch."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._sums: dict[str, LayerTotals] = collections.defaultdict(LayerTotals)

    def answered(self, record: RequestRecord, total_s: float) -> None:
        """Count an answered request to a served layer, as a success or a failure."""
        if record.layer is None:
            return
        done = self._sums[record.layer]
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


# The last part of the lane in which readiness probes wait.
PROBE = "probe"


class Telemetry:
    """The one listener of batching and of the API; `now` is monotonic seconds."""

    def __init__(self, metrics: Metrics, now: Callable[[], float]) -> None:
        self._metrics = metrics
        self._now = now
        self._log = get_logger()
        self._answered_at: dict[str, float] = {}
        self._busy_seconds = 0.0
        self._filler_rows = 0
        self._dropped_lines = 0
        self._counters = LayerCounters()

    # Events of the API.

    def received(self, record: RequestRecord) -> None:
        if is_counted(record.path):
            self._metrics.received()

    def answered(self, record: RequestRecord, total_s: float) -> None:
        if not is_counted(record.path):
            return
        self._metrics.answered(
            Answered(
                route=record.route,
                status=record.status,
                total_s=total_s,
                code=record.code,
                layer=record.layer,
                queue_s=record.queue_s,
                masked_rows=record.masked_rows,
            )
        )
        self._counters.answered(record, total_s)
        log_request(_line(record, total_s))

    def abandoned(self, record: RequestRecord, total_s: float) -> None:
        """Report a caller that left before the answer."""
        if not is_counted(record.path):
            return
        self._metrics.cancelled(record.stage)
        record.code = "client_gone"
        log_request(_line(record, total_s))

    def faulted(self, record: RequestRecord, error: BaseException) -> None:
        self._log.error("fault", request_id=record.request_id, route=record.route, exc_info=error)

    def keys_taken(self, ring: KeyRing) -> None:
        self._metrics.keys_read(is_usable=True)
        self._log.info("api_keys_reloaded", infer=ring.count(Role.INFER), admin=ring.count(Role.ADMIN))

    def keys_refused(self, error: KeysError) -> None:
        self._metrics.keys_read(is_usable=False)
        self._log.error("api_keys_refused", reason=error.message, effect="the earlier keys stay in force")

    # Events of batching.

    def queue_changed(self, num_jobs: int, num_bytes: int) -> None:
        self._metrics.queue_changed(num_jobs, num_bytes)

    def overload_changed(self, *, is_overloaded: bool) -> None:
        self._metrics.queue_stands(is_so=is_overloaded)

    def batch_done(self, event: BatchEvent) -> None:
        layer = layer_of(event.lane)
        self._answered_at[layer] = self._now()
        if is_probe(event.lane):
            return  # no client requested it, so no metric may count it
        self._counters.computed(layer, event.sequences)
        self._metrics.batch_done(layer, event)

    def retried_apart(self, event: RetryEvent) -> None:
        self._metrics.batch_retried()
        self._log.warning("batch_retried", layer=layer_of(event.lane), requests=event.num_jobs, reason=event.reason)

    def batch_split(self, event: SplitEvent) -> None:
        self._metrics.batch_split()
        self._log.warning("batch_split", layer=layer_of(event.lane), requests=event.num_jobs, reason="out of memory")

    def job_cancelled(self, event: CancelEvent) -> None:
        """Do nothing: the request is counted by the stage that its record reached."""

    def died(self, event: DeathEvent) -> None:
        self._log.critical("engine_down", requests=event.num_jobs, exc_info=event.error)

    # Events of layers and the engine.

    def built(self, numerics: Fingerprint, capacity: Capacity) -> None:
        self._metrics.reasons_known(codes_of(Rejected, Refused, Failed), codes_of(LayerError))
        self._metrics.sized(capacity)
        self._metrics.built(__version__, numerics.torch, numerics.device, numerics.dtype)

    def routes_known(self, routes: list[str]) -> None:
        self._metrics.routes_known(routes)

    def layer_loaded(self, name: str, loaded: LoadedLayer) -> None:
        self._answered_at[name] = self._now()
        self._metrics.layer_loaded(name, loaded.seconds)
        if loaded.is_sequential:
            self._log.warning("layer_runs_sequentially", layer=name, reason="the self-check found bits that differ")
        self._log.info("layer_loaded", layer=name, seconds=round(loaded.seconds, 3))

    def layer_refused(self, name: str, error: ServiceError) -> None:
        """Report that a layer's file cannot be served; an admin's request for it fails with an error of its own."""
        self._metrics.layer_load_failed(error.code if isinstance(error, LayerError) else LayerError.code)
        self._log.error("layer_refused", layer=name, reason=error.message)

    def layer_not_loaded(self, error: LayerError) -> None:
        """Report a layer that all processes are to serve and this one cannot."""
        self._metrics.layer_load_failed(error.code)
        self._log.error("layer_not_loaded", reason=error.message)

    def serving(self, names: list[str], num_layers: int) -> None:
        """Report what is served from now on, attention without a layer included; series of other names are no longer shown."""
        self._metrics.layers_served(names)
        now = self._now()
        self._answered_at = {name: self._answered_at.get(name, now) for name in names}
        self._log.info("serving", layers=num_layers)

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

    def desired_state_not_found(self, reason: str) -> None:
        self._log.error("desired_state_not_found", reason=reason)

    def readiness_changed(self, *, is_ready: bool, num_ready: int) -> None:
        self._metrics.readiness_changed(is_ready=is_ready, num_ready=num_ready)

    def seconds_since_answer(self, name: str) -> float:
        """Return the seconds since the layer last gave an answer (its check at load counts)."""
        return self._now() - self._answered_at.get(name, float("-inf"))

    def sample(self, engine: Engine) -> None:
        """Update what no event reports: memory, and what the engine has done and the log has lost since the last call."""
        busy, filled = engine.busy_seconds, engine.filler_rows
        self._metrics.engine_worked(busy - self._busy_seconds, filled - self._filler_rows)
        self._busy_seconds, self._filler_rows = busy, filled
        dropped = num_dropped_lines()
        self._metrics.log_lines_dropped(dropped - self._dropped_lines)
        self._dropped_lines = dropped
        self.flush_layer_counters()
        self._metrics.memory_measured()
        self._metrics.device_memory_measured(engine.options.device.type, engine.device_bytes)

    def render(self) -> bytes:
        return self._metrics.render()

    def flush(self) -> None:
        """Write what this loop tick has counted so far, so that the next reader sees it."""
        self._metrics.tell_now()

    def flush_layer_counters(self) -> None:
        """Add the layers' counters to the metrics now, not at the next heartbeat."""
        self._metrics.layers_worked(self._counters.take())

    def layer_totals(self) -> dict[str, LayerTotals]:
        """Return the totals of all processes; the others' are as old as their last heartbeat."""
        return self._metrics.layer_totals()


def is_probe(lane: Hashable) -> bool:
    return isinstance(lane, tuple) and lane[-1] == PROBE


def layer_of(lane: Hashable) -> str:
    assert isinstance(lane, tuple), "a lane begins with its layer. This is a bug."
    return str(lane[0])


def _line(record: RequestRecord, total_s: float) -> RequestLine:
    decode_s, queue_s, compute_s = record.decode_s, record.queue_s, record.compute_s
    return RequestLine(
        request_id=record.request_id,
        route=record.route,
        method=record.method,
        status=record.status,
        code=record.code,
        layer=record.layer,
        batch_requests=record.batch_requests,
        tokens=record.tokens,
        decode_ms=None if decode_s is None else milliseconds(decode_s),
        queue_ms=None if queue_s is None else milliseconds(queue_s),
        compute_ms=None if compute_s is None else milliseconds(compute_s),
        total_ms=milliseconds(total_s),
        bytes_in=record.bytes_in,
        bytes_out=record.bytes_out,
    )
