"""Descriptors: computes how many connections a process may keep with its file descriptors.

Invariant: Files, pipes and overflow connections have reserved descriptors. So with every connection in use a process can still
report its state, read a layer and accept one more connection.
"""

from __future__ import annotations

import resource

from service.settings import SettingsError

DEFAULT_MAX_CONNECTIONS = 8192
# For overflow connections (`http/listener.py`) and for everything that is not a connection.
RESERVED_DESCRIPTORS = 160


def max_connections(asked: int) -> int:
    """Return the number asked for, or for 0 what the hard limit allows; raise SettingsError if it allows too few."""
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return asked or DEFAULT_MAX_CONNECTIONS
    least = max(1, asked)
    if descriptors < least + RESERVED_DESCRIPTORS:
        needed = f"{least:,} need {least + RESERVED_DESCRIPTORS:,} file descriptors"
        raise SettingsError(f"ATTENTION_MAX_CONNECTIONS: {needed}, and a process may have {descriptors:,} (ulimit -Hn)")
    return asked or min(DEFAULT_MAX_CONNECTIONS, descriptors - RESERVED_DESCRIPTORS)


def raise_descriptor_limit(connections: int) -> None:
    """Raise the soft limit of this process to what the connections need, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = connections + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (number if hard == resource.RLIM_INFINITY else min(number, hard), hard)
        )
