"""ConnectionLimits: size and time limits of a request, which hold before the application reads it.

Limits that have a setting are fields of the class; the others are constants.
"""

from __future__ import annotations

import dataclasses

# Closing with unread bytes would reset the connection, and the client might lose its response.
LINGER_S = 2.0
MAX_LINGER_BYTES = 64 * 2**20
# The unused rest of a body is read and dropped up to this size, so that the connection can be reused.
MAX_DROPPED_BYTES = 64 * 1024
MAX_EARLY_BYTES = 64 * 1024
# Body bytes read ahead of the application: as many as most bodies have and as one read may return.
MAX_AHEAD_BYTES = 256 * 1024
# After a half-close the loop reads nothing more, so it does not notice a reset.
RESET_CHECK_S = 0.05
# Between two loop ticks that parse many small chunks: other threads get the interpreter only while the loop sleeps.
PAUSE_S = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """All header fields have at most `max_header_bytes` together, the request target `max_target_bytes`.

    The headers are complete `header_timeout_s` after the connection opened, or after the first byte of a later request. The
    client reads each piece of a long response, or all of a short one, within `write_timeout_s`. All waits of a response for
    its client take at most `write_timeout_s` plus the time of its bytes at `min_response_bytes_per_s` (0: any time). A process
    keeps at most `max_connections` connections.
    """

    max_header_bytes: int
    max_target_bytes: int
    max_headers: int
    header_timeout_s: float
    write_timeout_s: float
    max_connections: int
    min_response_bytes_per_s: int = 0
