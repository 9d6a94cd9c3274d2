"""ConnectionLimits: what a request may be before anybody reads it, and how long its caller may take.

The settings are in the class; what nobody needs to set stands beside it.
"""

from __future__ import annotations

import dataclasses

# Closing with unread bytes would reset the connection, and the client might never read its answer.
LINGER_S = 2.0
MAX_LINGER_BYTES = 64 * 2**20
# The rest of a body that nobody wants is read and dropped up to here, so that the connection can be used again.
MAX_DROPPED_BYTES = 64 * 1024
MAX_EARLY_BYTES = 64 * 1024
# Of a body that nobody has received yet, so much is read: what most bodies have and what a read may bring at once.
MAX_AHEAD_BYTES = 256 * 1024
# Of a client that has ended its sending the loop reads nothing, so it does not hear of a reset.
RESET_CHECK_S = 0.05
# Between two turns of reading many small chunks: other threads get the interpreter only while the loop sleeps.
PAUSE_S = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The header fields together have at most `max_header_bytes`, the request target `max_target_bytes`.

    They are complete `header_timeout_s` after the connection opened, or after the first byte of a later request. What is
    written is taken within `write_timeout_s`: each piece of a long answer, all of a short one. All waits of one answer for its
    client take at most `write_timeout_s` and what its bytes take at `min_response_bytes_per_s` (0: any time). Of a process's
    connections `max_connections` may be kept.
    """

    max_header_bytes: int
    max_target_bytes: int
    max_headers: int
    header_timeout_s: float
    write_timeout_s: float
    max_connections: int
    min_response_bytes_per_s: int = 0
