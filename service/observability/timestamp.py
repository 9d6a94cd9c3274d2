"""Timestamp: formats the time of a log line as ISO 8601 in UTC to the microsecond.

A module of its own because the supervisor must not load what `logs.py` imports. `datetime` takes three times as long.
"""

from __future__ import annotations

import functools
import time


def timestamp(at_ns: int) -> str:
    """Return the text for a time in nanoseconds since the epoch."""
    second, micros = divmod(at_ns // 1000, 10**6)
    return f"{_second(second)}.{micros:06d}Z"


@functools.lru_cache(2)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
