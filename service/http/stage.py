"""Stage: the state of a connection, which decides what its next bytes are."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """What the next bytes are."""

    HEAD = enum.auto()
    BODY = enum.auto()
    EARLY = enum.auto()
    """The next request's: this one is complete, its response is not."""
    DROP = enum.auto()
    """Dropped: the last response is under way, or the client has a moment to read it."""
