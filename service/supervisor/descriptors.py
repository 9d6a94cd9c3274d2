"""Descriptors: computes how many connections a process may keep with its file descriptors.

Invariant: What a process keeps open besides connections has descriptors of its own. So no number of connections keeps it from
reporting its state, reading a layer or accepting one connection more.
"""

from __future__ import annotations

import resource

from service.settings import SettingsError

MOST_CONNECTIONS = 8192
# For overflow connections (`http/listener.py`), and for everything that is not a connection.
OTHERS = 160


def kept_connections(asked: int) -> int:
    """Return the number asked for, or for 0 what the hard limit allows; raise SettingsError if it allows too few."""
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return asked or MOST_CONNECTIONS
    least = max(1, asked)
    if descriptors < least + OTHERS:
        needed = f"{least:,} need {least + OTHERS:,} file descriptors"
        raise SettingsError(f"ATTENTION_MAX_CONNECTIONS: {needed}, and a process may have {descriptors:,} (ulimit -Hn)")
    return asked or min(MOST_CONNECTIONS, descriptors - OTHERS)


def allow(connections: int) -> None:
    """Raise the soft limit of this process to what the connections need, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = connections + OTHERS
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (number if hard == resource.RLIM_INFINITY else min(number, hard), hard)
        )
