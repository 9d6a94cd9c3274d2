"""TransportLimits: what a request may be before anybody reads it, and how long its caller may take."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class TransportLimits:
    """The header fields together have at most `max_header_bytes`, the request target `max_target_bytes`.

    They are complete `header_timeout_s` after the connection opened, or after the first byte of a later request. What is
    written is taken within `write_timeout_s`: each piece of a long answer, all of a short one.
    """

    max_header_bytes: int
    max_target_bytes: int
    max_headers: int
    header_timeout_s: float
    write_timeout_s: float
