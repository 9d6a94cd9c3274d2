"""LongString: a string of a JSON text that is worth keeping out of the parser (base64 data), checked like any other.

Laws: no raw control characters, only JSON's escapes; a string without escapes is not copied.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from service.errors import BadJson
from service.wire.pace import Pace
from service.wire.strict_json import strict_loads

_CHUNK_BYTES = 128 * 1024
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_WHOLE_ESCAPES = re.compile(rb"[^\\]*+(?:\\(?:u[0-9a-fA-F]{4}|[^u])[^\\]*+)*+", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class LongString:
    """The content of a string, escapes resolved, as UTF-8 (in which an escaped surrogate pair may stay two
    surrogates).
    """

    text: memoryview


async def find_string_end(body: bytes, opening: int, pace: Pace) -> int:
    """Position of the quote that closes the string opened at `opening`."""
    at = opening + 1
    closing = body.find(b'"', at)
    if closing >= 0 and body[closing - 1] != ord("\\"):
        return closing
    while closing >= 0:  # else no quote follows at all
        inside = _INSIDE.match(body, at, min(at + _CHUNK_BYTES, len(body)))
        if inside is None or inside.end() == at:
            if body[at : at + 1] == b'"':
                return at
            break
        await pace.give_way()
        at = inside.end()
    raise BadJson(f"the body is not valid JSON: a string that starts at byte {opening} does not end")


async def read_string(body: bytes, start: int, end: int, pace: Pace) -> LongString:
    """The string between two quotes; `start` is behind the first, `end` at the second."""
    text = memoryview(body)[start:end]
    if np.frombuffer(text, dtype=np.uint8).min() < ord(" "):
        raise BadJson(f"the body is not valid JSON: control characters in a string that starts at byte {start}")
    if body.find(b"\\", start, end) < 0:
        return LongString(text)
    resolved: list[bytes] = []
    at = start
    while at < end:
        whole = _WHOLE_ESCAPES.match(body, at, min(at + _CHUNK_BYTES, end))
        stop = whole.end() if whole else at
        while stop < end and body[stop] & 0xC0 == 0x80:  # noqa: PLR2004  (a UTF-8 continuation byte: never split a character)
            stop -= 1
        if stop <= at:
            raise BadJson(f"the body is not valid JSON: a wrong escape in a string (byte {at})")
        resolved.append(_resolve(body, at, stop))
        await pace.give_way()
        at = stop
    return LongString(memoryview(b"".join(resolved)))


def _resolve(body: bytes, start: int, end: int) -> bytes:
    content = strict_loads(b'"' + body[start:end] + b'"', locate=lambda offset: start + offset - 1)
    return str(content).encode("utf-8", "surrogatepass")
