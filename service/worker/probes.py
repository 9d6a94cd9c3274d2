"""Probes: runs real forward passes for layers without recent requests; readiness follows their answers.

Invariants: A probe waits in the queue like any request, in a lane of its own. A failed probe shows only in the age of its
layer's last answer. No request metric counts probes, because no caller sent them.
"""

from __future__ import annotations

import contextlib
import time
from typing import Protocol

import torch

from service.attention.call import Answer, Call
from service.attention.loaded_layer import Work
from service.batching.batcher import Batcher
from service.batching.job import Cost
from service.errors import ServiceError
from service.layers.catalog import Catalog, ServedLayer
from service.observability.telemetry import PROBE

# If a layer's probes fail for this many probe intervals, the process is not ready.
STALE_INTERVALS = 3


class Ages(Protocol):
    """Knows when each layer last answered (`observability/telemetry.py`)."""

    def seconds_since_answer(self, name: str) -> float: ...


class Probes:
    """Probes a layer that has answered nothing for `every_s`; a probe may take `patience_s`."""

    def __init__(self, batcher: Batcher[Work, Answer], ages: Ages, every_s: float, patience_s: float) -> None:
        self._batcher = batcher
        self._ages = ages
        self._every_s = every_s
        self._patience_s = patience_s

    async def ask(self, catalog: Catalog) -> None:
        for name in catalog.names():
            if self._ages.seconds_since_answer(name) >= self._every_s:
                with contextlib.suppress(ServiceError):
                    await self._ask(catalog.get(name))

    def why_not_ready(self, catalog: Catalog) -> str | None:
        for name in catalog.names():
            age = self._ages.seconds_since_answer(name)
            if age > STALE_INTERVALS * self._every_s:
                return f'layer "{name}" has not answered for {age:.0f} s'
        return None

    async def _ask(self, layer: ServedLayer) -> None:
        spec = layer.spec
        query, key, value = (torch.zeros(1, 1, width) for width in (spec.query_width, spec.key_width, spec.value_width))
        cost = Cost(
            sequences=1, tokens=2, cells=spec.num_heads, weights_bytes=0, input_bytes=0, flops=spec.flops(1, 1, 1)
        )
        work = Work(layer.loaded, Call(layer.name, query, key, value))
        lane = (layer.name, layer.digest, PROBE)
        await self._batcher.submit(work, lane, cost, time.monotonic() + self._patience_s)
