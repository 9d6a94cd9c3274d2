"""Readiness: decides whether this process is ready, and reports that to the supervisor; probes layers without recent requests.

Invariants: Readiness follows the latest answers of the layers, never a flag alone. No process is ready before it listens. A
process listens while it loads, unless other processes ran before it started or are ready. A probe is a real forward pass that
waits in the queue like any request, in a lane of its own. A failed probe has one effect: the last answer of its layer gets older.
No request metric counts probes, because no caller sent them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable

import torch

from service.attention.call import Answer, AttentionCall, Call
from service.attention.cost import flops
from service.attention.engine import LayerCall
from service.attention.masks import Sizes
from service.batching.batcher import Batcher
from service.batching.job import Cost
from service.errors import LayerNotLoaded, ServiceError
from service.layers.catalog import Served, ServedAttention
from service.models.served_model import ServedModel, sample_call
from service.observability.telemetry import PROBE, Telemetry
from service.supervisor.status import State
from service.worker.control_channel import ControlChannel
from service.worker.layer_registry import LayerRegistry
from service.worker.model_registry import ModelRegistry

# If a layer has answered nothing for this many probe intervals, the process is not ready.
STALE_INTERVALS = 3
# How many heartbeat intervals a probe may take.
PROBE_HEARTBEATS = 2
LOADING = "layers are being loaded"
NOT_LISTENING = "the port is not open yet"
DRAINING = "draining"
ENGINE_DOWN = "the engine is down"


@dataclasses.dataclass(eq=False, repr=False)
class Readiness:
    """One for each process; made inside the event loop it runs on.

    `restore` makes the missing parts of the run directory and returns whether any were missing; it may raise OSError. A layer
    that has answered nothing for `probe_s` is probed at the next heartbeat. `joined` is called when another process becomes
    ready after the first.
    """

    channel: ControlChannel
    batcher: Batcher[LayerCall, Answer]
    registry: LayerRegistry
    models: ModelRegistry
    telemetry: Telemetry
    restore: Callable[[], bool]
    probe_s: float
    heartbeat_s: float
    joined: Callable[[], object] = bool
    _given_up: str | None = None  # why this process is not ready for good
    _write_error: str | None = None  # why the run directory cannot be written
    # Set when the layers are loaded, or never will be.
    _has_loaded: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _is_listening: bool = False
    _ready_before: set[int] = dataclasses.field(default_factory=set)  # pids of processes that have been ready

    @property
    def _probe_timeout_s(self) -> float:
        return PROBE_HEARTBEATS * self.heartbeat_s

    @property
    def _stale_s(self) -> float:
        # With rare heartbeats: a layer becomes due just after one, is probed at the next, and the probe takes its time.
        return max(STALE_INTERVALS * self.probe_s, self.probe_s + self.heartbeat_s + self._probe_timeout_s)

    @property
    def reason(self) -> str:
        """Why no layer can be served."""
        source = self.channel.service.source
        fault = source and source.fault and f"no layers yet; ATTENTION_LAYERS_SOURCE: {source.fault}"
        return self._given_up or self.registry.fault or fault or LOADING

    async def may_listen(self) -> None:
        """Return when the port may open. If other processes serve, that is after the load: the kernel sends connections to every
        listener.
        """
        if self.channel.has_peers or self.channel.service.ready:
            await self._has_loaded.wait()

    def port_opened(self) -> None:
        """Record that the port is open: a client can now reach this process once it reports ready."""
        self._is_listening = True
        self.report()

    def state_applied(self) -> None:
        """Acknowledge the desired state that the registry has applied."""
        self._has_loaded.set()
        self.report()

    def drain(self) -> None:
        """Report this process as draining from now on, or as failed if `give_up` was called before."""
        self.give_up(DRAINING)
        self.report()

    def give_up(self, reason: str) -> None:
        """Make this process not ready for good; the first reason stays, and the next heartbeat reports it."""
        self._given_up = self._given_up or reason
        self._has_loaded.set()

    def why_not_ready(self) -> str | None:
        """Return this process's own reason if it has one, else that of the service; None if all are ready."""
        return self._own_reason() or self.channel.why_not_ready

    def _own_reason(self) -> str | None:
        catalog = self.registry.catalog
        if self._given_up is not None or catalog is None or not self._has_loaded.is_set():
            return self.reason
        if not self._is_listening:
            return NOT_LISTENING
        if not self.batcher.is_alive:
            return ENGINE_DOWN
        if catalog.awaited:
            return self.registry.fault or "a layer is missing"
        for model in catalog.models():
            age = self.telemetry.seconds_since_answer(model.name)
            if age > self._stale_s:
                return f'layer "{model.name}" has not answered for {age:.0f} s'
        return self._write_error

    async def probe(self) -> None:
        """Probe every layer that is due, all together, for at most `PROBE_HEARTBEATS`; a probe that fails raises nothing.

        A model that has answered nothing for too long is released: the next request reads and checks it again.
        """
        layers = () if self.registry.catalog is None else self.registry.catalog.models()
        for model in self.models.in_use():
            if self.telemetry.seconds_since_answer(model.name) > self._stale_s:
                self.models.release(model.about.name)
        models = self.models.in_use()
        due = [one for one in (*layers, *models) if self.telemetry.seconds_since_answer(one.name) >= self.probe_s]
        await asyncio.gather(*map(self._probe_layer, due))

    async def _probe_layer(self, model: Served | ServedModel) -> None:
        call, cost = _probe(model)
        lane, until = (model.name, model.digest, PROBE), time.monotonic() + self._probe_timeout_s
        with contextlib.suppress(ServiceError):
            await self.batcher.submit(call, lane, cost, until)

    def report(self) -> None:
        """Make the missing parts of the run directory, and report the current state to the supervisor."""
        before, self._write_error = self._write_error, None
        try:
            if self.restore():
                self.telemetry.run_directory_recreated()
        except OSError as error:
            self._write_error = f"the run directory (ATTENTION_RUN_DIR) cannot be written: {error.strerror}"
            if self._write_error != before:
                self.telemetry.heartbeat_failed(self._write_error)
        if self._write_error is None and before is not None:
            self.telemetry.heartbeat_recovered()
        reason = self._own_reason()
        refusal = self.registry.refusal
        self.channel.report(
            state=self._state(reason),
            reason=reason or "",
            version=self.registry.applied.version,
            refusal="" if refusal is None else refusal.message,
            is_file_changed=refusal is not None and not isinstance(refusal, LayerNotLoaded),
            least_rows=self.registry.least_rows,
        )
        self.check()

    def check(self) -> None:
        """Record in the log and the metrics which processes are ready now; call `joined` if another one is new."""
        ready = set(self.channel.service.ready)
        self.telemetry.readiness_changed(is_ready=self._own_reason() is None, num_ready=len(ready))
        # A process that starts late counts too: it looks the same as the replacement of one that died between two reports.
        has_joined = bool(self._ready_before) and not ready <= self._ready_before | {os.getpid()}
        self._ready_before |= ready
        if has_joined:
            self.joined()

    def _state(self, reason: str | None) -> State:
        has_served = self.registry.catalog is not None
        if reason is None:
            return State.READY
        # DRAINING tells the supervisor that the slot has served, so a process that refused to start must not report it.
        if reason == DRAINING and has_served:
            return State.DRAINING
        return State.FAILED if has_served and self._is_listening else State.STARTING


def _probe(model: Served | ServedModel) -> tuple[LayerCall, Cost]:
    """Return the smallest call and its cost."""
    cost = Cost(sequences=1, tokens=2, cells=1, weights_bytes=0, input_bytes=0, flops=1)
    if isinstance(model, ServedAttention):
        row = torch.zeros(1, 1, 1, 1)
        return LayerCall(model.loaded, AttentionCall(row, row, row, scale=1.0)), cost
    if isinstance(model, ServedModel):
        encoder = model.encoder
        return LayerCall(model.loaded, sample_call(encoder, 1)), cost._replace(flops=encoder.flops(1, encoder.depth))
    spec = model.spec
    query, key, value = (torch.zeros(1, 1, width) for width in (spec.query_width, spec.key_width, spec.value_width))
    work = flops(spec, Sizes(1, spec.num_heads, 1, 1), None, None)
    return LayerCall(model.loaded, Call(query, key, value)), cost._replace(cells=spec.num_heads, flops=work)
