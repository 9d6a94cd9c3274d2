"""Stage: what a connection is at, which is what its next bytes are."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """What the next bytes are."""

    HEAD = enum.auto()
    BODY = enum.auto()
    EARLY = enum.auto()
    """The next request's: this one is whole and its answer is not."""
    DROP = enum.auto()
    """Nobody's: the last answer is being made, or the client has a moment to read it."""
