"""The skeleton of a body: what remains when large arrays and long strings are cut out and a short string stands for
each.

Laws: a value is replaced by a value, so the body is valid exactly if the skeleton and every piece are; the walk looks
at the strings of the skeleton only, and a skeleton that grows beyond its limit ends the walk: work is linear in the
body with a small factor and bounded by the limit in what Python does one by one.
"""

from __future__ import annotations

import bisect
import re
import secrets

import numpy as np

from service.errors import BadJson, InvalidInput, JsonTooDeep
from service.wire.array_text import MAX_NUMBER_DIGITS, STRING, find_array
from service.wire.long_string import LongString, find_string_end, read_base64, read_string
from service.wire.number_list import TOO_MANY, NumberList
from service.wire.number_text import read_numbers
from service.wire.pace import Pace
from service.wire.strict_json import strict_loads

MAX_SKELETON_BYTES = 256 * 1024
MAX_CONTAINERS = 20_000
# In all large arrays of a body together: as text a number takes three times the memory that it takes as a tensor.
MAX_TEXT_NUMBERS = 2**20
MIN_ARRAY_BYTES = 512
MIN_STRING_BYTES = 1024

_STRINGS = re.compile(STRING, re.DOTALL)
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{%d}" % (MAX_NUMBER_DIGITS + 1))
_AFTER_STRING = re.compile(rb"[ \t\n\r]*+(?:(:)[ \t\n\r]*+(\[)?)?")
_NOT_BRACKET = bytes(byte for byte in range(256) if byte not in b"[]{}")
_FIRST_CHECK_BYTES = 4096
_TOKEN_BYTES = 8  # what a prefix may break off: longer than any word of JSON


class Skeleton:
    """Cuts one body; afterwards `text` is valid JSON if the body is, with `pieces` to be put back by `piece`."""

    def __init__(self, body: bytes, *, max_depth: int, pace: Pace) -> None:
        self.text = b""
        self.num_keys = 0
        self.num_pieces = 0
        self.num_numbers = 0
        self.ascii_spans: list[tuple[int, int]] = []  # of the body, in order: found to be ASCII on the way
        self._pieces: list[NumberList | LongString] = []
        self._nonce = secrets.token_hex(8)  # no caller can write a string that stands for a piece
        self._body = body
        self._max_depth = max_depth
        self._pace = pace
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._kept_until = 0
        self._last_checked = 0
        self._next_check = _FIRST_CHECK_BYTES
        self._origins: list[tuple[int, int]] = [(0, 0)]  # where a kept part starts, in the skeleton and in the body

    async def cut(self) -> None:
        """Walk the body; raises for every cut array and string whose syntax is wrong, and for what is too large or
        deep.
        """
        body, at = self._body, 0
        while (opening := body.find(b'"', at)) >= 0:
            if self._kept_bytes + opening - self._kept_until > self._next_check:
                await self._check_size(at, opening)
            self._last_checked = opening
            at = await self._walk_string(opening)
            await self._pace.give_way()
        await self._check_size(at, len(body))
        self._keep(len(body))
        self.text = b"".join(self._kept)
        check_nesting(self.text, self._max_depth)

    async def _walk_string(self, opening: int) -> int:
        """Counts the string if it is a key, cuts it if it is long, cuts the array behind it; tells where to go on."""
        body, found = self._body, None
        closing = body.find(b'"', opening + 1, opening + MIN_STRING_BYTES)
        if closing < 0 and (found := await read_base64(body, opening + 1, self._pace)):
            closing = opening + 1 + len(found.text)
        elif closing < 0 or body[closing - 1] == ord("\\"):
            closing = await find_string_end(body, opening, self._pace)
        at = closing + 1
        after = _AFTER_STRING.match(body, at, at + MAX_SKELETON_BYTES)
        is_key = after is not None and after.group(1) is not None
        self.num_keys += is_key
        if after is not None and after.group(2):
            return await self._cut_array(after.start(2)) or at
        if not is_key and at - opening > MIN_STRING_BYTES:
            self._replace(opening, at, found or await read_string(body, opening + 1, closing, self._pace))
        if found:
            self.ascii_spans.append((opening, at))
        return at

    def piece(self, string: str) -> NumberList | LongString | None:
        """The piece for which a string of the skeleton stands, or None for a string that is just a string."""
        if not string.startswith(self._nonce):
            return None
        return self._pieces[int(string[len(self._nonce) :])]

    def locate(self, offset: int) -> int:
        """The place in the body of a place in the skeleton."""
        part = bisect.bisect_right(self._origins, (offset, len(self._body))) - 1
        skeleton_start, body_start = self._origins[part]
        return min(body_start + offset - skeleton_start, len(self._body))

    async def _cut_array(self, start: int) -> int | None:
        body, max_depth, pace = self._body, self._max_depth, self._pace
        text = await find_array(body, start, min_bytes=MIN_ARRAY_BYTES, max_depth=max_depth, pace=pace)
        if text is None:
            return None
        most = MAX_TEXT_NUMBERS - self.num_numbers
        numbers = await read_numbers(body, text, max_depth=max_depth, most=most, pace=pace)
        self.num_numbers += MAX_TEXT_NUMBERS + 1 if _is_too_many(numbers) else len(numbers.values)
        self._replace(start, text.end, numbers)
        return text.end

    def _replace(self, start: int, end: int, piece: NumberList | LongString) -> None:
        self._keep(start)
        stand_in = f'"{self._nonce}{self.num_pieces}"'.encode()
        self.num_pieces += 1
        self._pieces.append(piece)
        self._kept.append(stand_in)
        self._kept_bytes += len(stand_in)
        self._kept_until = end
        self._origins.append((self._kept_bytes, end))

    def _keep(self, end: int) -> None:
        self._kept.append(self._body[self._kept_until : end])
        self._kept_bytes += end - self._kept_until

    async def _check_size(self, start: int, end: int) -> None:
        """All up to `end` is cut or belongs to the skeleton; from `start` to `end` there are no strings."""
        size = self._kept_bytes + end - self._kept_until
        if size > MAX_SKELETON_BYTES:
            await self._refuse_size(start, end)
        if size > self._next_check:  # a deep body is seen through long before its end
            self._next_check = min(self._next_check * 4, MAX_SKELETON_BYTES)
            check_nesting(b"".join((*self._kept, self._body[self._kept_until : end])), self._max_depth)

    async def _refuse_size(self, start: int, end: int) -> None:
        allowed = self._kept_until + max(MAX_SKELETON_BYTES - self._kept_bytes, 0)
        # The prefix must not end inside a string, so where the last one is what is too long, it ends before that.
        self._keep(min(end, allowed) if allowed >= start else self._last_checked)
        prefix = b"".join(self._kept)
        check_nesting(prefix, self._max_depth)
        await self._pace.give_way()
        _check_prefix(prefix)
        raise InvalidInput(f"the body has more than {MAX_SKELETON_BYTES} bytes besides its large arrays and strings")


def _is_too_many(numbers: NumberList) -> bool:
    return numbers.fault is not None and numbers.fault.what == TOO_MANY


def check_nesting(skeleton: bytes, max_depth: int) -> None:
    """Before the parser sees it, which recurses, and which takes long over very many lists and objects."""
    num_opened = skeleton.count(b"[") + skeleton.count(b"{")
    if num_opened <= max_depth:
        return
    brackets = np.frombuffer(_STRINGS.sub(b"", skeleton).translate(None, _NOT_BRACKET), dtype=np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    if len(brackets) and np.cumsum(np.where(opens, 1, -1)).max() > max_depth:
        raise JsonTooDeep(f"the body is nested deeper than {max_depth} levels")
    if num_opened > MAX_CONTAINERS:
        raise InvalidInput(f"the body has more than {MAX_CONTAINERS} lists and objects besides its large arrays")


def _check_prefix(prefix: bytes) -> None:
    """Of a skeleton that is too large only the start is read, so that what is no JSON at all is still called so."""
    if _LONG_NUMBER.search(prefix) and _LONG_NUMBER.search(_STRINGS.sub(b'""', prefix)):
        raise BadJson(f"the body has an integer of more than {MAX_NUMBER_DIGITS} digits")
    failures: list[int] = []

    def note(offset: int) -> int:
        failures.append(offset)
        return offset

    try:
        strict_loads(prefix, locate=note)
    except BadJson:
        if not failures or failures[0] < len(prefix) - _TOKEN_BYTES:
            raise
