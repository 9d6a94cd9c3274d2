"""LongString: a string of a JSON text that is worth keeping out of the parser (base64 data), checked like any other.

Laws: no raw control characters, only JSON's escapes; a string without escapes is not copied; a string that is base64 is
decoded here at once, because that one pass over it also proves that it has no quote, no escape and nothing beyond ASCII.
"""

from __future__ import annotations

import binascii
import dataclasses
import re

import numpy as np
import pybase64

from service.errors import BadJson
from service.wire.pace import Pace
from service.wire.strict_json import strict_loads

_CHUNK_BYTES = 128 * 1024
_QUAD = 4
# Decoded in one call of 1 to 8 ms; more in parts, whose copies cost half as much again.
_WHOLE_CHARACTERS = 16 * 1024 * 1024
_PART_CHARACTERS = 4 * 1024 * 1024
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_WHOLE_ESCAPES = re.compile(rb"[^\\]*+(?:\\(?:u[0-9a-fA-F]{4}|[^u])[^\\]*+)*+", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class LongString:
    """The content of a string, escapes resolved, as UTF-8 (in which an escaped surrogate pair may stay two
    surrogates), and what it decodes to where it is base64 (bits behind the last byte not looked at).
    """

    text: memoryview
    decoded: bytearray | None = None

    def beginning(self, num_characters: int) -> str:
        """These characters and maybe more, surrogate pairs joined; a half of one stays what it is."""
        bytes_each = 6  # two surrogates of three
        end = min(len(self.text), num_characters * bytes_each)
        while end < len(self.text) and _continues(self.text[end]):
            end -= 1
        text = bytes(self.text[:end]).decode("utf-8", "surrogatepass")
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


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


async def read_base64(body: bytes, start: int, pace: Pace) -> LongString | None:
    """The string whose content starts at `start` if all of it is base64, else None: only that is told here."""
    end = body.find(b'"', start)
    if end < 0 or (end - start) % _QUAD:
        return None
    text = memoryview(body)[start:end]
    try:
        if len(text) <= _WHOLE_CHARACTERS:
            return LongString(text, pybase64.b64decode_as_bytearray(text, validate=True))
        decoded = bytearray()
        for at in range(0, len(text), _PART_CHARACTERS):
            if len(decoded) != at // _QUAD * 3:  # the part before was padded
                return None
            decoded += pybase64.b64decode(text[at : at + _PART_CHARACTERS], validate=True)
            await pace.give_way()
    except (binascii.Error, ValueError):
        return None
    return LongString(text, decoded)


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
        while stop < end and _continues(body[stop]):  # never split a character
            stop -= 1
        if stop <= at:
            raise BadJson(f"the body is not valid JSON: a wrong escape in a string (byte {at})")
        resolved.append(_resolve(body, at, stop))
        await pace.give_way()
        at = stop
    return LongString(memoryview(b"".join(resolved)))


def _continues(byte: int) -> bool:
    """Whether it is a continuation byte of UTF-8."""
    return byte & 0xC0 == 0x80  # noqa: PLR2004


def _resolve(body: bytes, start: int, end: int) -> bytes:
    content = strict_loads(b'"' + body[start:end] + b'"', locate=lambda offset: start + offset - 1)
    return str(content).encode("utf-8", "surrogatepass")
