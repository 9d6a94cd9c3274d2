"""Reading a NumberList from the text of an array, in slices.

simdjson reads a slice where it can; where it cannot (integers beyond 64 bits, strings, null, wrong syntax), Python's
strict `json` reads it, in shorter slices, and decides. Laws: both give the same values; a slice is read in the context
in which it stands, so that the array is valid exactly if all its slices are; where simdjson is stricter it only costs
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import simdjson

from service.wire.array_text import ArrayText, Slice
from service.wire.number_list import OTHER_SHAPE, TOO_MANY, Fault, Float64s, NumberList, NumberTaker
from service.wire.outline import examine_outline, infer_shape
from service.wire.pace import Pace
from service.wire.strict_json import strict_loads

_SLOW_SLICE_BYTES = 32 * 1024
_MINUS_INF = b'"-inf"'
# Stand-ins are as long as what they stand for, and between spaces, so that no neighbour can merge with them.
_MINUS_INF_STAND_INS = ((b" -7e9 ", -7e9), (b" -6e8 ", -6e8), (b" -9e7 ", -9e7))
_UNPARSED = (ValueError, TypeError, RuntimeError)  # syntax; not a number; an integer beyond 64 bits


async def read_numbers(body: bytes, text: ArrayText, *, max_depth: int, most: int, pace: Pace) -> NumberList:
    """Decode the array at `text`; raises BadJson or JsonTooDeep, and nothing for what is only not a number.

    Of an array of more than `most` numbers only the syntax is read: it has a fault, and no values.
    """
    shape = await infer_shape(text.outline, pace)
    is_kept = shape is not None and math.prod(shape) <= most
    reader = _Reader(body, (shape or ()) if is_kept else (), has_strings=text.has_strings)
    depth = len(shape or ())
    if shape is not None and not is_kept:
        reader.fault = Fault((), TOO_MANY)
    if shape is None:
        depth, entry = await examine_outline(text.outline, max_depth=max_depth, pace=pace)
        reader.fault = Fault((entry,), OTHER_SHAPE)
    for piece in text.slices:
        if not text.has_words and reader.read_fast(piece):
            await pace.give_way()
            continue
        for part in [piece] if text.has_words else _shorter(body, piece):
            reader.read_slow(part)
            await pace.give_way()
    return reader.finish(depth)


class _Reader(NumberTaker):
    """Fills them from slices of a text."""

    def __init__(self, body: bytes, shape: tuple[int, ...], *, has_strings: bool) -> None:
        super().__init__(shape)
        self._body = body
        self._has_strings = has_strings
        self._has_literals = False
        self._parser = simdjson.Parser()  # one for each array: a parser must not be shared while it is in use

    def read_fast(self, piece: Slice) -> bool:
        """Read numbers, booleans and "-inf" with simdjson; false where it takes Python to know."""
        text = self._body[piece.start : piece.end]
        if self.fault is not None:  # only the syntax still matters, and what simdjson takes Python takes
            return self._parses(text, piece)
        spelled = _spell_out(text) if self._has_literals else text
        taken = self._put_floats(spelled, piece)
        if not taken and not self._has_literals:
            spelled = _spell_out(text)
            self._has_literals = spelled != text
            taken = self._has_literals and self._put_floats(spelled, piece)
        if taken and self.first_boolean is None and spelled != text:
            literal = min(at for at in (text.find(b"t"), text.find(b"fa")) if at >= 0)
            self.first_boolean = self.filled - spelled.count(b",", literal) - 1
        if taken and self.is_whole:
            self.is_whole = not (b"." in spelled or b"e" in spelled or b"E" in spelled)
        return taken

    def read_slow(self, piece: Slice) -> None:
        """The same with Python's json, for whatever it takes."""
        prefix, suffix = _context(piece)
        text = b"".join((prefix, self._body[piece.start : piece.end], suffix))
        nested = strict_loads(
            text, locate=lambda offset: min(max(piece.start, piece.start + offset - len(prefix)), piece.end)
        )
        if self.fault is not None or not isinstance(nested, list):
            return
        flat: list[object] = []
        _flatten(nested or [nested], flat)
        self.take(flat[int(piece.depth > 0) : len(flat) - int(piece.end_depth > 0)])

    def _parses(self, text: bytes, piece: Slice) -> bool:
        prefix, suffix = _context(piece)
        try:
            self._parser.parse(b"".join((prefix, text, suffix)))
        except _UNPARSED:
            return False
        return True

    def _floats(self, text: bytes, piece: Slice) -> Float64s | None:
        prefix, suffix = _context(piece)
        document = b"".join((prefix, text, suffix)) if prefix or suffix else text
        try:
            array = self._parser.parse(document)
            floats = array.as_buffer(of_type="d") if isinstance(array, simdjson.Array) else b""
        except _UNPARSED:
            return None
        values: Float64s = np.frombuffer(floats, dtype=np.float64)
        values = values[int(piece.depth > 0) : len(values) - int(piece.end_depth > 0)]
        # Only `[x]` and `[]` have the same outline, so only there a value may be missing without being seen.
        is_full = self.shape[-1] > 1 or len(values) == text.count(b",") + 1
        return values if is_full else None

    def _put_floats(self, text: bytes, piece: Slice) -> bool:
        count = text.count(_MINUS_INF) if self._has_strings else 0
        for stand_in, number in _MINUS_INF_STAND_INS:
            values = self._floats(text.replace(_MINUS_INF, stand_in) if count else text, piece)
            if values is None:
                return False
            stands_in = values == number if count else None
            if stands_in is None:
                self.put(values)
                return True
            if np.count_nonzero(stands_in) == count:  # otherwise the caller uses that very number: try the next
                if self.first_minus_inf is None:
                    self.first_minus_inf = self.filled + int(stands_in.argmax())
                self.put(np.where(stands_in, -math.inf, values))
                return True
        return False


def _spell_out(text: bytes) -> bytes:
    return text.replace(b"true", b" 1  ").replace(b"false", b" 0   ")


def _context(piece: Slice) -> tuple[bytes, bytes]:
    """What makes a slice a document: brackets, and a zero on either side, since `1,` and `,1` need a neighbour to be
    wrong.
    """
    prefix = b"[" * piece.depth + b"0," if piece.depth else b""
    return prefix, b",0" + b"]" * piece.end_depth if piece.end_depth else b""


def _flatten(nested: list[object], flat: list[object]) -> None:
    for item in nested:
        if isinstance(item, list) and item:
            _flatten(item, flat)
        else:
            flat.append(item)  # an empty list stands where a number should


def _shorter(body: bytes, piece: Slice) -> Iterator[Slice]:
    """The same elements in slices that Python can parse in a turn."""
    start, depth = piece.start, piece.depth
    while piece.end - start > _SLOW_SLICE_BYTES:
        stop = body.rfind(b",", start, start + _SLOW_SLICE_BYTES)
        stop = stop if stop >= 0 else body.find(b",", start, piece.end)
        if stop < 0:
            break
        end_depth = depth + body.count(b"[", start, stop) - body.count(b"]", start, stop)
        yield Slice(start, stop, depth, end_depth)
        start, depth = stop + 1, end_depth
    yield Slice(start, piece.end, depth, piece.end_depth)
