"""Limits: converts the settings into the small frozen values that other packages receive.

Invariants: api, batching, http and wire receive these values, never `Settings` itself. Units are converted only here.
"""

from __future__ import annotations

import math
import time

from service.api.auth.access import Hosts, Limiter
from service.api.request_context import RequestContextLimits
from service.batching.admission import QueueLimits
from service.batching.policy import BatchLimits
from service.http.connection import ConnectionLimits
from service.http.request_parser import HeadLimits
from service.settings import Settings, is_loopback, listed
from service.supervisor.processes import max_connections
from service.wire.attend_request import RequestLimits

# The default of ATTENTION_STANDING_WAIT_MS.
STANDING_WAIT_S = 0.1
# How long inline batches may block the loop together. A health check may wait two or three times as long
# (docs/internals/decisions.md).
INLINE_S = 0.015
# On a CPU a request that likely takes longer computes on the thread of long batches, and a short batch ends within this time. A
# short request of another lane waits for this time at most, so its p99 can stay below 25 ms. Batches of 2,000 rows at a width of
# 512 are cut into passes of about 1,024 rows, 20 ms each, which costs nothing: their requests, 512 rows or fewer, stay short.
LONG_S = 0.020


# Requests, rows and scores of a batch by default. A CPU computes 2,048 rows in 40 ms. On a GPU a batch costs its launches, some
# tenths of a millisecond, however many rows share them: 16,384 rows at a width of 512 are 34 GFLOP, a millisecond of an H100.
CPU_BATCH = (16, 2**11, 2**24)
GPU_BATCH = (128, 2**14, 2**28)


# Work charged to a lane and a caller for every sequence on a GPU besides its flops. One with masks or weights has launches of its
# own, ten of 5 µs, in which a GPU multiplies a GFLOP: by its flops alone a caller of many short sequences would pay nothing.
SEQUENCE_FLOPS = 2**30


def batch_limits(settings: Settings, *, is_gpu: bool = False) -> BatchLimits:
    """Return the settings, or the device's own limits where they are not set."""
    given = settings.max_batch_requests, settings.max_batch_tokens, settings.max_batch_cells
    requests, tokens, cells = (a or b for a, b in zip(given, GPU_BATCH if is_gpu else CPU_BATCH, strict=True))
    return BatchLimits(
        max_requests=requests, max_tokens=tokens, max_cells=cells, max_weights_bytes=settings.max_weights_bytes
    )


def queue_limits(settings: Settings, *, is_gpu: bool = False) -> QueueLimits:
    """Return the limits of the queues. A GPU has one thread, so no request is long there."""
    if settings.standing_wait_ms is not None:
        standing_wait_s = settings.standing_wait_ms / 1000
    else:  # a capacity that is set bounds the queue
        standing_wait_s = 0.0 if "queue_capacity" in settings.model_fields_set else STANDING_WAIT_S
    return QueueLimits(
        capacity=settings.queue_capacity,
        max_bytes=settings.queue_bytes,
        max_cells=settings.queue_cells,
        max_wait_s=settings.max_wait_ms / 1000,
        standing_wait_s=standing_wait_s,
        stuck_s=settings.stuck_s,
        inline_s=INLINE_S,
        long_s=math.inf if is_gpu else LONG_S,
        flops_per_sequence=SEQUENCE_FLOPS if is_gpu else 0,
    )


def rate_limiter(settings: Settings) -> Limiter | None:
    """Return None if there is no limit."""
    rate_per_s = settings.rate_limit_per_s
    return Limiter(rate_per_s, settings.rate_burst or math.ceil(rate_per_s), time.monotonic) if rate_per_s else None


def hosts(settings: Settings) -> Hosts | None:
    """Return None if a request may name any host."""
    names = listed(settings.allowed_hosts)
    if names:
        return None if "*" in names else Hosts(names)
    return Hosts() if settings.api_keys_file is None and is_loopback(settings.host) else None


def context_limits(settings: Settings, *, is_gpu: bool = False) -> RequestContextLimits:
    return RequestContextLimits(
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        request=RequestLimits(
            max_sequences=settings.max_sequences,
            max_tokens=settings.max_request_tokens,
            max_cells=settings.max_request_cells,
            max_weights_bytes=settings.max_weights_bytes,
            max_table_bytes=settings.max_table_bytes,
        ),
        max_json_depth=settings.max_json_depth,
        max_text_numbers=settings.max_text_numbers,
        timeout_s=settings.request_timeout_ms / 1000,
        max_shared=batch_limits(settings, is_gpu=is_gpu),
        off_loop_bytes=settings.decode_off_loop_bytes,
        intake_bytes=_intake_bytes(settings),
        # The largest response must fit too: the most weights that a request may have, and an output as large as its body. A layer
        # whose output rows are much wider than its input rows may exceed this; such a request gets a 413.
        answer_bytes=max(settings.queue_bytes, 4 * (settings.max_weights_bytes + settings.max_body_bytes)),
        take_offers=settings.compress_offers,
    )


def _intake_bytes(settings: Settings) -> int:
    """Return the bytes of bodies that may be received and not decoded yet."""
    # Bodies are decoded as fast as they arrive, or refused. Four of the largest size must fit, and smaller ones beside them.
    return max(settings.queue_bytes // 4, 5 * settings.max_body_bytes)


def transport_limits(settings: Settings) -> ConnectionLimits:
    return ConnectionLimits(
        head=HeadLimits(
            settings.max_header_bytes,
            settings.max_target_bytes,
            settings.max_headers,
            is_tls=settings.tls_cert_file is not None,
        ),
        header_timeout_s=settings.header_timeout_s,
        write_timeout_s=settings.write_timeout_s,
        max_connections=max_connections(settings.max_connections),
        max_read_ahead_bytes=_intake_bytes(settings),
        min_response_bytes_per_s=settings.min_response_bytes_per_s,
        max_age_s=settings.connection_max_age_s or math.inf,
    )
