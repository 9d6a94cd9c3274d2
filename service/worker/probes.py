"""Probes: runs real forward passes for layers without recent requests; readiness follows their answers.

Invariants: A probe waits in the queue like any request, in a lane of its own. A failed probe has one effect: the last answer of
its layer gets older. No request metric counts probes, because no caller sent them.
"""

from __future__ import annotations

import contextlib
import time

import torch

from service.attention.call import Answer, AttentionCall, Call
from service.attention.cost import flops
from service.attention.engine import LayerCall
from service.attention.masks import Sizes
from service.batching.batcher import Batcher
from service.batching.job import Cost
from service.errors import ServiceError
from service.layers.catalog import Catalog, Served, ServedAttention, ServedLayer
from service.observability.telemetry import PROBE, Telemetry

# If a layer has answered nothing for this many probe intervals, the process is not ready.
STALE_INTERVALS = 3


class Probes:
    """Probes a layer that has answered nothing for `interval_s`; a probe may take `timeout_s`."""

    def __init__(
        self, batcher: Batcher[LayerCall, Answer], telemetry: Telemetry, interval_s: float, timeout_s: float
    ) -> None:
        self._batcher = batcher
        self._telemetry = telemetry
        self._interval_s = interval_s
        self._timeout_s = timeout_s

    async def run(self, catalog: Catalog) -> None:
        """Probe every layer that is due; a probe that fails raises nothing."""
        for model in catalog.models():
            if self._telemetry.seconds_since_answer(model.name) >= self._interval_s:
                with contextlib.suppress(ServiceError):
                    await self._probe(model)

    def why_not_ready(self, catalog: Catalog) -> str | None:
        """Return which layer has not answered for STALE_INTERVALS, or None."""
        for model in catalog.models():
            age = self._telemetry.seconds_since_answer(model.name)
            if age > STALE_INTERVALS * self._interval_s:
                return f'layer "{model.name}" has not answered for {age:.0f} s'
        return None

    async def _probe(self, model: Served) -> None:
        lane = (model.name, model.digest, PROBE)
        call, cost = _attention_probe() if isinstance(model, ServedAttention) else _layer_probe(model)
        until = time.monotonic() + self._timeout_s
        await self._batcher.submit(LayerCall(model.loaded, call), lane, cost, until)


def _layer_probe(layer: ServedLayer) -> tuple[Call, Cost]:
    spec = layer.spec
    query, key, value = (torch.zeros(1, 1, width) for width in (spec.query_width, spec.key_width, spec.value_width))
    work = flops(spec, Sizes(1, spec.num_heads, 1, 1), None, None)
    return Call(layer.name, query, key, value), _COST._replace(cells=spec.num_heads, flops=work)


def _attention_probe() -> tuple[AttentionCall, Cost]:
    row = torch.zeros(1, 1, 1, 1)
    return AttentionCall(row, row, row, scale=1.0), _COST


_COST = Cost(sequences=1, tokens=2, cells=1, weights_bytes=0, input_bytes=0, flops=1)
