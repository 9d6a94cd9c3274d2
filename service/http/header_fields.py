"""HeaderFields: header fields of one request by name, and a cache of what readers parse from them.

Invariants: Names are lower-case bytes. Blanks around a value are removed (RFC 9110, section 5.5). No value is trusted.
Clients repeat their heads, and the transport caches them (`http/head.py`). So a value that depends only on the fields is cached
as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Options = TypeVarTuple("Options")

BLANKS = b" \t"


class HeaderFields(dict[bytes, tuple[bytes, ...]]):
    """All values of a name, in order; an empty tuple for a missing name. Requests may share an instance: never change it."""

    __slots__ = ("_made",)

    def __init__(self, fields: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__()
        self._made: dict[object, Any] = {}
        for name, value in fields:
            self[name] = (*self[name], value.strip(BLANKS))

    def __missing__(self, name: bytes) -> tuple[bytes, ...]:
        return ()

    def make(self, reader: Callable[[HeaderFields, *Options], T], *options: *Options) -> T:
        """Return the cached result of `reader`, which uses only these fields and `options`. Its errors are raised every time."""
        key = (reader, options)
        try:
            found: T = self._made[key]
        except KeyError:
            found = self._made[key] = reader(self, *options)
        return found
