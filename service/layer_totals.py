"""LayerTotals: counts and times of the requests to one layer, summed; they become metrics and Open Inference's statistics."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class LayerTotals:
    """Times in seconds. `sequences` and `batches` count forward passes; `last_answer_s` is since the epoch."""

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
