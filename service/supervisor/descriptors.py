"""Descriptors: how many connections the file descriptors of a process are enough for.

Law: what a process keeps open besides connections has descriptors of its own, so that no number of callers can keep it from
telling how it is, reading a layer or taking one connection more.
"""

from __future__ import annotations

import resource

from service.settings import SettingsError

MOST_CONNECTIONS = 8192
# For connections above the number that is kept (`http/listener.py`), and for everything that is none.
OTHERS = 160


def kept_connections(asked: int) -> int:
    """As many as asked for, or (0) as the hard limit allows; raises SettingsError where it does not."""
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return asked or MOST_CONNECTIONS
    least = max(1, asked)
    if descriptors < least + OTHERS:
        needed = f"{least:,} need {least + OTHERS:,} file descriptors"
        raise SettingsError(f"ATTENTION_MAX_CONNECTIONS: {needed}, and a process may have {descriptors:,} (ulimit -Hn)")
    return asked or min(MOST_CONNECTIONS, descriptors - OTHERS)


def allow(connections: int) -> None:
    """Raises the soft limit of this process to what they need, or to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = connections + OTHERS
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (number if hard == resource.RLIM_INFINITY else min(number, hard), hard)
        )
