"""Limits: the settings as the small frozen values that the rooms take.

Law: rooms receive these, never `Settings` itself; a unit is converted here and nowhere else.
"""

from __future__ import annotations

from service.api.body import BodyLimits
from service.api.exchange import ExchangeLimits
from service.batching.admission import CostCeilings, QueueLimits
from service.batching.policy import BatchLimits
from service.settings import Settings
from service.wire.request import RequestLimits


def batch_limits(settings: Settings) -> BatchLimits:
    return BatchLimits(
        max_requests=settings.max_batch_requests,
        max_tokens=settings.max_batch_tokens,
        max_cells=settings.max_batch_cells,
        max_weights_bytes=settings.max_weights_bytes,
    )


def queue_limits(settings: Settings) -> QueueLimits:
    ceilings = CostCeilings(
        max_tokens=settings.max_request_tokens,
        max_cells=settings.max_request_cells,
        max_weights_bytes=settings.max_weights_bytes,
    )
    return QueueLimits(
        capacity=settings.queue_capacity,
        max_bytes=settings.queue_bytes,
        max_wait_s=settings.max_wait_ms / 1000,
        max_cost=ceilings,
        max_compute_s=settings.stuck_s,
    )


def exchange_limits(settings: Settings) -> ExchangeLimits:
    return ExchangeLimits(
        body=BodyLimits(settings.max_body_bytes, settings.body_timeout_s),
        request=RequestLimits(
            max_sequences=settings.max_sequences,
            max_tokens=settings.max_request_tokens,
            max_cells=settings.max_request_cells,
            max_weights_bytes=settings.max_weights_bytes,
        ),
        max_json_depth=settings.max_json_depth,
        timeout_s=settings.request_timeout_ms / 1000,
        max_shared=batch_limits(settings),
        off_loop_bytes=settings.decode_off_loop_bytes,
        undecoded_bytes=settings.queue_bytes,
        take_offers=settings.compress_offers,
    )
