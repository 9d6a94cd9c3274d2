"""Events of requests, layers and processes: the values that metrics are made from.

Must not know: the modules that emit events, the modules that receive them.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Answered(NamedTuple):
    """The end of a request. `code` is set only if the request was refused or failed, `queue_s` only if a batch took it."""

    route: str
    status: int
    total_s: float
    code: str | None = None
    layer: str | None = None
    queue_s: float | None = None
    masked_rows: int = 0


@dataclasses.dataclass(slots=True)
class LayerTotals:
    """Sums over the requests to one layer. `sequences` and `batches` count forward passes; `last_answer_s` is since the epoch."""

    successes: int = 0
    success_s: float = 0.0
    failures: int = 0
    failure_s: float = 0.0
    decode_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    encode_s: float = 0.0
    sequences: int = 0
    batches: int = 0
    last_answer_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """Queue limits of one process, and the number of processes that the service expects."""

    queued_requests: int
    queued_bytes: int
    processes: int
