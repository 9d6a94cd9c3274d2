"""Header fields of one request, by their names, and what readers have made of them.

Laws: names are lower-case bytes; the blanks around a value are no part of it (RFC 9110, section 5.5); no value is trusted.
Clients send the same head again and again, and the transport finds it again (`http/head.py`): what depends on the fields
alone is then found again as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Options = TypeVarTuple("Options")

BLANKS = b" \t"


class HeaderFields(dict[bytes, tuple[bytes, ...]]):
    """All values of a name, in their order; none for one that is not there. They may be another request's as well, so nobody
    changes them.
    """

    __slots__ = ("_made",)

    def __init__(self, fields: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__()
        self._made: dict[object, Any] = {}
        for name, value in fields:
            self[name] = (*self[name], value.strip(BLANKS))

    def __missing__(self, name: bytes) -> tuple[bytes, ...]:
        return ()

    def make(self, reader: Callable[[HeaderFields, *Options], T], *options: *Options) -> T:
        """What `reader` makes of these fields with `options`, and of nothing else; raises what it raises, every time."""
        key = (reader, options)
        try:
            found: T = self._made[key]
        except KeyError:
            found = self._made[key] = reader(self, *options)
        return found
