"""ArrayText: where an array stands in a body, where it may be cut into slices, and its outline of brackets and commas.

Knows text, not numbers. Its law: for every valid document the end found here is the true end of the array; an invalid
document may give any end, because whatever is cut out must still parse as an array by itself, and the rest without it.

An array that holds no objects ends before the first `:` or `}` outside its strings: a `:` belongs to the next key, a
`}` closes the object around. While its only strings are `"-inf"`, that is two memchr searches; other strings are
stepped over by a regular expression, in slices. No number, string or bracket is ever split: slices end at commas
outside strings.
"""

from __future__ import annotations

import bisect
import dataclasses
import re

from service.errors import BadJson, InvalidInput, JsonTooDeep
from service.wire.outline import MAX_RANK, counted_outline, few_brackets
from service.wire.pace import Pace

MAX_NUMBER_DIGITS = 4300
"""Python's own limit for integers; no parser holds more."""
SLICE_BYTES = 128 * 1024
"""simdjson's tables for it stay in the cache."""
REGION_BYTES = 256 * 1024
MAX_GAP_BYTES = 128 * 1024
"""White space between two elements."""
STRING_SLICE_BYTES = 32 * 1024

STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_ELEMENT_TEXT = rb'[^",{}:]*+(?:' + STRING + rb'[^",{}:]*+)?+'
_ELEMENT = re.compile(_ELEMENT_TEXT, re.DOTALL)
_ELEMENTS = re.compile(rb"(?:" + _ELEMENT_TEXT + rb",)*+", re.DOTALL)
_STRINGS = re.compile(STRING, re.DOTALL)
_OPENING = re.compile(rb"\[[\[ \t\n\r]*+")
_SPACE = b" \t\n\r"
_NO_ELEMENT = {b"{", b"", b" ", b"\t", b"\n", b"\r"}  # white space: the window ended before any element
_NOT_OUTLINE = bytes(byte for byte in range(256) if byte not in b"[],")
_MIN_COUNTED_BYTES = 8 * 1024
_NOT_NUMBER = b"[] \t\n\r"
_WINDOW_BYTES = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """`body[start:end]`, a run of elements; `depth` and `end_depth` tell how many brackets are open before and behind
    it.
    """

    start: int
    end: int
    depth: int
    end_depth: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayText:
    """An array in a body; `has_strings` means any string, `has_words` strings other than `"-inf"`."""

    end: int
    slices: tuple[Slice, ...]
    outline: bytes
    has_strings: bool
    has_words: bool


async def find_array(body: bytes, start: int, *, min_bytes: int, max_depth: int, pace: Pace) -> ArrayText | None:
    """The array that opens at `start` as the value of a key, or None where it is short, empty, deep or holds objects.

    Raises BadJson where no valid document can go on like this.
    """
    opening = _OPENING.match(body, start, start + _WINDOW_BYTES)
    if opening is None or opening.group().count(b"[") > MAX_RANK:
        return None
    if body[opening.end() : opening.end() + 1] in _NO_ELEMENT:
        return None
    end = _plain_end(body, start)
    if end is not None:
        if end - start <= min_bytes or body.find(b"{", start, end) >= 0:
            return None
        has_strings = body.find(b'"', start, end) >= 0
        outlining = _Outlining(body, start, max_depth, pace)
        if await outlining.take_plain(end, has_strings=has_strings):
            return outlining.finish(end, has_strings=has_strings, has_words=False)
    outlining = _Outlining(body, start, max_depth, pace)
    end = await outlining.take_words()
    if end is None or end - start <= min_bytes:
        return None
    return outlining.finish(end, has_strings=True, has_words=True)


def _plain_end(body: bytes, start: int) -> int | None:
    """The end of the array if it holds no strings but `"-inf"`; None where strings must be stepped over to know."""
    colon = body.find(b":", start)
    brace = body.find(b"}", start, colon if colon >= 0 else len(body))
    if brace >= 0:
        return brace
    if colon < 0:
        raise BadJson(f"the body is not valid JSON: it ends inside an array that starts at byte {start}")
    key_end = _before(body, colon, start)
    if key_end is None or body[key_end] != ord('"') or body[key_end - 1] == ord("\\"):
        return None
    key_start = body.rfind(b'"', start, key_end)
    comma = _before(body, key_start, start) if key_start >= 0 else None
    return comma if comma is not None and body[comma] == ord(",") else None


def _before(body: bytes, end: int, start: int) -> int | None:
    """Position of the last byte before `end` that is not white space, or None where that is not near."""
    window = body[max(start, end - _WINDOW_BYTES) : end]
    trimmed = len(window.rstrip(_SPACE))
    return end - len(window) + trimmed - 1 if trimmed else None


class _Outlining:
    """Collects slices and outline of one array."""

    def __init__(self, body: bytes, start: int, max_depth: int, pace: Pace) -> None:
        self._body = body
        self._next = start
        self._max_depth = max_depth
        self._pace = pace
        self._depth = 0
        self._slices: list[Slice] = []
        self._outlines: list[bytes] = []

    async def take_plain(self, end: int, *, has_strings: bool) -> bool:
        """Slices up to `end`; false where a string other than `"-inf"` turns up, so that `end` may be wrong."""
        body = self._body
        while True:
            if not has_strings and self._take_region(end):
                await self._pace.give_way()
                if self._next > end:
                    return True
                continue
            start = self._next
            stop = self._plain_stop(start, end)
            text = body[start : stop if stop >= 0 else start + MAX_GAP_BYTES]
            if has_strings:
                text = text.replace(b'"-inf"', b"")
                if b'"' in text:
                    return False
            if stop < 0:
                self._refuse_endless()
            self._append(stop, text)
            await self._pace.give_way()
            if stop == end:
                return True

    def _take_region(self, end: int) -> bool:
        """Several slices at once; false where they are not worth it."""
        start = self._next
        stop = end if end - start <= REGION_BYTES else self._body.rfind(b",", start, start + REGION_BYTES)
        if stop - start < _MIN_COUNTED_BYTES:
            return False
        text = self._body[start:stop]
        positions = few_brackets(text)
        if positions is None:
            return False
        self._outlines.append(counted_outline(text, positions))
        brackets = bytes([text[at] for at in positions])
        depth_before = self._depth
        while self._next <= stop:
            slice_stop = self._plain_stop(self._next, stop)
            if slice_stop < 0:
                self._refuse_endless()
            seen = bisect.bisect_left(positions, slice_stop - start)
            self._append_slice(slice_stop, depth_before + 2 * brackets.count(b"[", 0, seen) - seen)
        return True

    def _plain_stop(self, start: int, end: int) -> int:
        if end - start <= SLICE_BYTES:
            return end
        stop = self._body.rfind(b",", start, start + SLICE_BYTES)
        if stop >= 0:
            return stop
        return end if end - start <= MAX_GAP_BYTES else self._body.rfind(b",", start, start + MAX_GAP_BYTES)

    async def take_words(self) -> int | None:
        """Slices up to the end of the array, which is returned; None where it holds objects or very long strings."""
        body = self._body
        while True:
            start = self._next
            window_end = min(start + STRING_SLICE_BYTES, len(body))
            elements = _ELEMENTS.match(body, start, window_end)
            stop = elements.end() if elements else start
            if stop > start:
                self._append(stop - 1, _STRINGS.sub(b"", body[start : stop - 1]))
                await self._pace.give_way()
                continue
            last = _ELEMENT.match(body, start, window_end)
            stop = last.end() if last else start
            follows = body[stop : stop + 1]
            if follows == b"}":
                self._append(stop, _STRINGS.sub(b"", body[start:stop]))
                return stop
            if not follows or (follows == b":" and not self._slices) or self._is_broken_string(start, stop):
                raise BadJson(f"the body is not valid JSON (byte {stop})")
            # After a comma, `"word":` is the next key: the array ended before that comma.
            return self._slices[-1].end if follows == b":" else None

    def _is_broken_string(self, start: int, stop: int) -> bool:
        """Whether the quote at `stop`, if there is one, follows another string or opens one that never ends."""
        body = self._body
        return body[stop : stop + 1] == b'"' and (body.find(b'"', start, stop) >= 0 or body.find(b'"', stop + 1) < 0)

    def finish(self, end: int, *, has_strings: bool, has_words: bool) -> ArrayText:
        return ArrayText(end, tuple(self._slices), b",".join(self._outlines), has_strings, has_words)

    def _append(self, stop: int, text: bytes) -> None:
        outline = text.translate(None, _NOT_OUTLINE)
        self._outlines.append(outline)
        self._append_slice(stop, self._depth + outline.count(b"[") - outline.count(b"]"))

    def _append_slice(self, stop: int, depth: int) -> None:
        self._slices.append(Slice(self._next, stop, self._depth, depth))
        self._depth = depth
        self._next = stop + 1

    def _refuse_endless(self) -> None:
        """A whole slice without a comma: an endless number, endless brackets, or endless white space."""
        window = self._body[self._next : self._next + MAX_GAP_BYTES]
        if window.count(b"[") > self._max_depth:
            raise JsonTooDeep(f"the body is nested deeper than {self._max_depth} levels")
        if len(window.translate(None, _NOT_NUMBER)) > MAX_NUMBER_DIGITS:
            raise BadJson(f"the body has a number of more than {MAX_NUMBER_DIGITS} digits (byte {self._next})")
        raise InvalidInput(f"the body has more than {MAX_GAP_BYTES} bytes between two elements of an array")
