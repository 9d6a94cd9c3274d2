"""JSON bodies: parses them to plain Python objects, with nested lists of numbers as NumPy arrays.

simdjson parses first. Python's `json` then parses short bodies that simdjson rejects, because only it gives the position of a
fault and takes integers of any size. Invariants: The module knows no fields. It accepts only strict JSON in UTF-8, without a byte
order mark or duplicate keys, of limited depth, with an object at the top. The limits on text are counted before a
body is parsed, so that no body, legal or not, takes longer than 20 ms. Syntax errors come before every other error. Nothing here
waits.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, Union, cast

import numpy as np
import numpy.typing as npt
import simdjson

from service.errors import BadJson, CostLimit, InvalidInput, JsonTooDeep, NonFinite, ServiceError
from service.wire.body_faults import duplicate_key, json_fault, unless_compressed
from service.wire.field_names import kind_of, pointer, words_of
from service.wire.number_list import NumberList, at, nested_numbers

Json: TypeAlias = Union[bool, int, float, str, "LongText", "list[Json]", "dict[str, Json]", NumberList, None]
Text: TypeAlias = npt.NDArray[np.uint8]

MAX_TEXT_NUMBERS = 2**18
"""The default of ATTENTION_MAX_TEXT_NUMBERS. Numbers in rows take 35 ns each; one body may take 20 ms of the event loop."""
# simdjson finds a member by linear search.
_FEW_MEMBERS = 64
# Flat lists up to this length stay lists: most are a shape or a selection of heads.
_SHORT = 64
# So do flat lists of integers, up to as many as a request may have sequences, where float64 would round one or the second parser
# reads them: they may be offsets. Strings may be tokens.
_MAX_OFFSETS = 2**16
_ROUNDED_FROM = 2**53
# A longer string is not copied: base64 of 16 MiB would take 16 and 13 ms to copy in simdjson and in Python, in new memory.
_LONG_STRING = 2**16
# Python's parser takes 20 times as long as simdjson: it reads bodies of at most one byte for two numbers that are allowed.
_LEAST_SECOND_BYTES = 2**16
# One that does not end is at the end of the bytes that are searched.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
# Where a body begins to nest too deep, if it does: 4 KiB are many times the deepest limit.
_FIRST_BYTES = 2**12
# A body of at most this size is not counted: the slowest one, `{"a":{},…`, takes 6 ms.
_FEW_BYTES = 2**14
# One mark outside strings for so many numbers that are allowed, at least the third value; with the time that each takes.
_MARKS = (
    ("lists", "[", 16, 8192),  # 0.3 µs
    ("objects", "{", 64, 1024),  # 1.7 µs
    ("members of objects", ":", 32, 8192),  # 1 µs
    ("values", ",", 0.9, 2**16),  # an element that is no number costs as much as one; `_Reader` counts the numbers
)
# Text of fewer bytes has too few numbers of 19 digits, which take 180 ns each.
_FEW_DIGITS_BYTES = 5 * 2**18
# A string costs 1 µs, where the mask of all bytes costs 0.4 ns a byte.
_FEW_QUOTES = 64
_BLOCK = 2**20
_NO_QUOTES = np.empty(0, np.intp)


class LongText(NamedTuple):
    """The string of a tensor's `data`, in ASCII, where it lies in its body: two copies of 16 MiB would hold the interpreter."""

    text: memoryview


class _NotForSimdjsonError(Exception):
    """The body is malformed, or has integers beyond 64 bits, unpaired surrogates, objects of many members, or NUL in names."""


class _Constant(str):
    """NaN, Infinity or -Infinity from Python's parser. JSON has no such numbers; it is kept until its place is known."""

    __slots__ = ()


class _Pairs(list[tuple[str, object]]):
    """An object from Python's parser: its members in order, including duplicates."""


def parse(body: bytes | bytearray, *, max_depth: int, max_numbers: int = MAX_TEXT_NUMBERS) -> dict[str, Json]:
    """Return the object in `body`; nested lists of numbers become NumberList, short flat ones and large integers stay lists.

    Raises CostLimit for text above a limit, each of which grows with `max_numbers`; BadJson, JsonTooDeep, DuplicateKey for
    malformed JSON; NonFinite for a number beyond float64; InvalidInput for a body that is not an object.
    """
    try:
        document = _parsed(body, max_depth, max_numbers)
    except ServiceError as error:
        raise unless_compressed(body, error) from None
    if not isinstance(document, dict):
        raise InvalidInput(f'the body must be a JSON object, such as {{"query": [[0.5]]}}, got {kind_of(document)}')
    return document


def _parsed(body: bytes | bytearray, max_depth: int, max_numbers: int) -> Json:
    if not body or body.startswith(codecs.BOM_UTF8):
        raise BadJson("the body starts with a byte order mark" if body else "the body is empty")
    try:
        num_lists, quotes = _check_text(body, max_numbers)
    except CostLimit:
        _check_first_depth(body, max_depth)
        raise
    text, strings = _without_long_strings(body, quotes)
    try:
        return _by_simdjson(text, strings, max_depth, max_numbers, num_lists)
    except _NotForSimdjsonError:
        return _by_python(body, max_depth, max_numbers)


def _check(found: int, what: str, most: int, max_numbers: int) -> None:
    if found > most:
        setting = f"ATTENTION_MAX_TEXT_NUMBERS is {max_numbers:,}"
        cheaper = "tensors in base64 or safetensors have no such limit"
        raise CostLimit(f"the body has {found:,} {what}, expected at most {most:,} ({setting}); {cheaper}")


def _check_text(body: bytes | bytearray, max_numbers: int) -> tuple[int, npt.NDArray[np.intp]]:
    """Raise CostLimit for text that would hold the event loop for long.

    Return the number of lists, and where quotation marks are (not of a short body, which is not checked).
    """
    if len(body) <= _FEW_BYTES:
        return body.count(b"["), _NO_QUOTES  # those in strings count too
    quotes = np.flatnonzero(_bytes_of(body) == ord('"'))
    _check(len(quotes), "quotation marks", max(2**14, max_numbers // 3), max_numbers)
    is_clear = True
    if b"\\" in body or not body.isascii():
        text = _bytes_of(body)
        num_escapes = int(np.count_nonzero((text == ord("\\")) | (text >= 128)))  # noqa: PLR2004 (not ASCII)
        _check(num_escapes, "escaped or non-ASCII characters", max(2**16, 2 * max_numbers), max_numbers)
        # Not by `in`, which takes 15 ms for two bytes in 16 MiB of base64.
        is_clear = not np.any((text[:-1] == ord("\\")) & (text[1:] == ord('"')))
    # With a quotation mark in a string, what is outside of strings is not clear, so everything counts.
    outside = _outside_strings(body, quotes) if is_clear else _bytes_of(body)
    _check(len(outside), "bytes outside strings", max(2**20, 24 * max_numbers), max_numbers)
    found = {}
    for what, mark, numbers, least in _MARKS:
        found[what] = _count(outside, mark)
        _check(found[what], what, max(least, int(max_numbers / numbers)), max_numbers)
    if len(outside) > _FEW_DIGITS_BYTES:
        what, most = "digits beyond the 18th of a number", max(2**14, max_numbers // 8)
        _check(_count_long_digits(outside), what, most, max_numbers)
    return found["lists"], quotes


def _without_long_strings(
    body: bytes | bytearray, quotes: npt.NDArray[np.intp]
) -> tuple[bytes | bytearray, list[memoryview]]:
    """Return the body with a mark in the place of each long string, and these strings; a body with escapes stays whole.

    `quotes` is where its quotation marks are. No other string has such a mark, because it begins with an escaped NUL.
    """
    if len(body) < _LONG_STRING or b"\\" in body:
        return body, []
    text, view = _bytes_of(body), memoryview(body)
    parts: list[bytes | memoryview] = []
    strings: list[memoryview] = []
    end = 0
    pairs = quotes[: len(quotes) // 2 * 2].reshape(-1, 2)
    for first, last in pairs[pairs[:, 1] - pairs[:, 0] > _LONG_STRING].tolist():
        string = text[first + 1 : last]
        if string.min() >= ord(" ") and string.max() < 128:  # noqa: PLR2004 (ASCII)
            parts += [view[end : first + 1], b"\\u0000%d" % len(strings)]
            strings.append(view[first + 1 : last])
            end = last
    return (b"".join([*parts, view[end:]]), strings) if strings else (body, [])


def _check_first_depth(body: bytes | bytearray, max_depth: int) -> None:
    """Raise JsonTooDeep if the start of a body that has too many marks nests too deep: then that is its fault."""
    text = _bytes_of(_STRING.sub(b"", body[:_FIRST_BYTES]))
    opened = (text == ord("[")) | (text == ord("{"))
    closed = (text == ord("]")) | (text == ord("}"))
    if np.cumsum(opened.astype(np.int8) - closed, dtype=np.int16).max(initial=0) > max_depth:
        raise JsonTooDeep(f"the body is nested deeper than {max_depth} levels")


def _bytes_of(body: bytes | bytearray) -> Text:
    return np.frombuffer(body, np.uint8)


def _outside_strings(body: bytes | bytearray, quotes: npt.NDArray[np.intp]) -> Text:
    """Return the bytes of `body` that are in no string, given where its quotation marks are; each string leaves one of two."""
    text = _bytes_of(body)
    if len(quotes) <= _FEW_QUOTES:
        return np.concatenate(np.split(text, quotes)[::2])
    spans = np.diff(quotes, prepend=0, append=len(text))
    outside: Text = text[np.repeat(np.arange(len(spans)) % 2 == 0, spans)]
    return outside


def _count(text: Text, mark: str) -> int:
    """Like `bytes.count`, but in a third of the time if there are many."""
    return int(np.count_nonzero(text == ord(mark)))


def _count_long_digits(text: Text) -> int:
    """Return how many digits from 1 to 9 begin 19 digits or dots, which is about how many follow the 18th of a number.

    simdjson takes five times as long for a number of 19 digits as for others, whose shortest form has at most 17.
    """
    found = 0
    for start in range(0, len(text), _BLOCK):  # blocks, so that the arrays stay small
        block = text[start : start + _BLOCK]
        begins = (block - ord("0") < 10) | (block == ord("."))  # noqa: PLR2004
        for step in (1, 2, 4, 8, 2, 1):  # 2, 4, 8, 16, 18, 19 in a row
            begins = begins[:-step] & begins[step:]
        found += int(np.count_nonzero(begins & (block[: len(begins)] - ord("1") < 9)))  # noqa: PLR2004
    return found


def _by_simdjson(
    body: bytes | bytearray, strings: Sequence[memoryview], max_depth: int, max_numbers: int, num_lists: int
) -> Json:
    try:
        root = simdjson.Parser().parse(body)
    except UnicodeDecodeError:
        raise BadJson("the body is not valid UTF-8") from None
    except (ValueError, RuntimeError) as error:
        if str(error).startswith("DEPTH_ERROR"):
            raise JsonTooDeep("the body is nested too deep") from None
        raise _NotForSimdjsonError from None
    reader = _Reader(max_depth, max_numbers, strings)
    document = reader.value(root, 0)
    if reader.num_lists != num_lists:
        # Either the fast path missed a list among numbers, which simdjson flattens silently, or a string has a bracket.
        reader = _Reader(max_depth, max_numbers, strings, uses_fast_path=False)
        document = reader.value(root, 0)
    reader.check_numbers()
    return document


def _by_python(body: bytes | bytearray, max_depth: int, max_numbers: int) -> Json:
    if len(body) > max(_LEAST_SECOND_BYTES, max_numbers // 2):
        rare = "an integer beyond 64 bits, a number beyond float64, an unpaired surrogate or an object of many members"
        size = f"{len(body):,} bytes, which allow neither NaN nor {rare}"
        raise BadJson(f"the body is not valid JSON, or has what only a shorter one may have: {size}")
    reader = _Reader(max_depth, max_numbers)
    found, constants = _decoded(body)
    document = reader.value(found, 0)
    reader.check_numbers()
    if constants:
        raise _not_a_number(found, constants[0])
    # Python reads 1e999 as infinite. Large lists of numbers are checked when their field is known.
    if (path := _path_to(lambda entry: isinstance(entry, float) and math.isinf(entry), document)) is not None:
        raise NonFinite("a number of the body is beyond the range of float64", param=pointer(path))
    return document


def _decoded(body: bytes | bytearray) -> tuple[object, list[_Constant]]:
    """Return the document of Python's parser, and a list of its first NaN or Infinity, which also replaces any later ones."""
    constants: list[_Constant] = []

    def keep(name: str) -> _Constant:
        if not constants:
            constants.append(_Constant(name))
        return constants[0]

    decoder = json.JSONDecoder(object_pairs_hook=_Pairs, parse_constant=keep)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise BadJson("the body is not valid UTF-8") from None
    try:
        return decoder.decode(text), constants
    except json.JSONDecodeError as error:
        offset = error.pos if text.isascii() else len(text[: error.pos].encode("utf-8", "surrogatepass"))
        words, shown = json_fault(error)
        raise BadJson(f"the body is not valid JSON (byte {offset}): {words}", shown=shown) from None
    except ValueError:  # Python converts no integer of more than 4,300 digits
        raise BadJson("the body has an integer of more than 4300 digits") from None
    except RecursionError:
        raise JsonTooDeep("the body is nested too deep") from None


def _not_a_number(found: object, constant: _Constant) -> BadJson:
    path = _path_to(lambda entry: entry is constant, found) or ()
    num_indices = next((i for i, name in enumerate(reversed(path)) if isinstance(name, str)), len(path))
    index = tuple(name for name in path[len(path) - num_indices :] if isinstance(name, int))
    param = pointer(path[: len(path) - num_indices]) or None
    where = f"{words_of(param) if param else 'the body'} has {constant}{at(index)}"
    is_minus = constant.startswith("-")
    remedy = 'only a bias may have -inf, as the string "-inf"' if is_minus else "it is no number of JSON"
    return BadJson(f"the body is not valid JSON: {where}; {remedy}", param=param)


def _path_to(is_wanted: Callable[[object], bool], found: object) -> tuple[str | int, ...] | None:
    """Return the names and indices that lead to the first wanted entry, None if there is none."""
    if is_wanted(found):
        return ()
    if isinstance(found, dict):
        found = _Pairs(found.items())
    entries = found if isinstance(found, _Pairs) else enumerate(found) if isinstance(found, list) else ()
    for name, entry in entries:
        path = _path_to(is_wanted, entry)
        if path is not None:
            return name, *path
    return None


class _Reader:
    """Converts the elements of one document, from either parser, and enforces the limits."""

    def __init__(
        self, max_depth: int, max_numbers: int, strings: Sequence[memoryview] = (), *, uses_fast_path: bool = True
    ) -> None:
        self._strings = strings
        self._max_depth = max_depth
        self._max_numbers = max_numbers
        self._uses_fast_path = uses_fast_path
        self._num_entries = 0
        self._num_slow = 0
        self.num_numbers = 0
        self.num_lists = 0

    def check_numbers(self) -> None:
        """Raise CostLimit if the document, whose syntax is valid, has too many numbers."""
        _check(self.num_numbers, "numbers written as text", self._max_numbers, self._max_numbers)

    def value(self, found: object, depth: int) -> Json:
        """Convert `found`; `depth` counts the lists and objects around it."""
        if isinstance(found, simdjson.Object):
            names = list(found.keys())
            if len(names) > _FEW_MEMBERS or any("\0" in name for name in names):  # simdjson's lookup ends a name there
                raise _NotForSimdjsonError
            return self._object([(name, found[name]) for name in names], depth)
        if isinstance(found, _Pairs):
            return self._object(found, depth)
        if isinstance(found, simdjson.Array | list):
            return self._list(found, depth)
        return found  # type: ignore[return-value]  # a scalar of JSON

    def _object(self, pairs: list[tuple[str, object]], depth: int) -> dict[str, Json]:
        self._check_depth(depth + 1)
        found = {name: self.value(member, depth + 1) for name, member in pairs}
        if len(found) != len(pairs):
            raise duplicate_key(name for name, _ in pairs)
        if self._strings:
            for name, member in found.items():
                if isinstance(member, str) and member.startswith("\0"):
                    text = self._strings[int(member[1:])]
                    found[name] = LongText(text) if name == "data" else str(text, "ascii")
        return found

    def _list(self, entries: simdjson.Array | list[object], depth: int) -> Json:
        self._check_depth(depth + 1)
        if not len(entries) or isinstance(entries[0], simdjson.Object | _Pairs):
            return self._list_of_objects(entries, depth)
        numbers = self._array(entries, depth) if self._uses_fast_path and isinstance(entries, simdjson.Array) else None
        if numbers is None:
            numbers = self._nested(entries, depth)
        return self._list_of_objects(entries, depth) if numbers is None else numbers

    def _list_of_objects(self, entries: simdjson.Array | list[object], depth: int) -> list[Json]:
        self.num_lists += 1
        self._num_entries += len(entries)
        most = max(8192, self._max_numbers // 32)
        _check(self._num_entries, "entries in lists of objects", most, self._max_numbers)
        return [self.value(entry, depth + 1) for entry in entries]

    def _array(self, array: simdjson.Array, depth: int) -> Json:
        """Fast path: read the numbers from simdjson into NumPy. Returns None if it stays a list, is irregular or not numbers."""
        shape, num_lists = [len(array)], 1
        rows: list[Any] = [array]
        first: Any = array[0]
        while isinstance(first, simdjson.Array):
            width, inner = len(first), list(itertools.chain.from_iterable(rows))
            if not width or not all(isinstance(entry, simdjson.Array) and len(entry) == width for entry in inner):
                return None
            num_lists += len(inner)
            self._check_depth(depth + 1 + len(shape))
            shape.append(width)
            rows, first = inner, first[0]
        if type(first) not in (int, float) or (shape[0] <= _SHORT and len(shape) == 1):
            return None
        count = math.prod(shape)
        numbers: Json = []  # if there are too many, the body is rejected, so copy no values
        if self.num_numbers + count <= self._max_numbers:
            numbers = _numbers_of(array, tuple(shape), is_whole=isinstance(first, int))
        if numbers is not None:
            self.num_numbers += count
            self.num_lists += num_lists
        return numbers

    def _nested(self, entries: simdjson.Array | list[object], depth: int) -> Json:
        """Exact path, over Python lists: return a NumberList, or a flat list that stays one; None if it holds objects."""
        whole = cast("list[object]", entries.as_list() if isinstance(entries, simdjson.Array) else entries)
        level, num_lists, num_values = [whole], 0, 0
        while level:
            num_lists += len(level)
            inner: list[list[object]] = []
            for row in level:
                kinds = set(map(type, row))
                if not kinds.isdisjoint({dict, _Pairs}):
                    return None
                if list in kinds:
                    inner += [entry for entry in row if type(entry) is list]
            num_values += sum(map(len, level)) - len(inner)
            what = "elements of lists that do not have only numbers, in rows of one length"
            _check(self._num_slow + num_values, what, max(2**14, self._max_numbers // 4), self._max_numbers)
            depth += 1
            self._check_depth(depth)
            level = inner
        self.num_lists += num_lists
        self.num_numbers += num_values
        self._num_slow += num_values
        are_texts = kinds == {str} and "-inf" not in whole
        if num_lists == 1 and (are_texts or len(whole) <= (_MAX_OFFSETS if kinds == {int} else _SHORT)):
            return whole  # type: ignore[return-value]  # scalars of JSON
        return nested_numbers(whole) if self.num_numbers <= self._max_numbers else []

    def _check_depth(self, depth: int) -> None:
        if depth > self._max_depth:
            raise JsonTooDeep(f"the body is nested deeper than {self._max_depth} levels")


def _numbers_of(array: simdjson.Array, shape: tuple[int, ...], *, is_whole: bool) -> NumberList | None:
    """Return the numbers of a regular array, None if it has others or stays a list; `is_whole`: the first is an integer."""
    may_stay = is_whole and len(shape) == 1 and shape[0] <= _MAX_OFFSETS
    kinds: list[tuple[Literal["i", "d"], type[np.generic]]] = [("i", np.int64), ("d", np.float64)]
    for kind, dtype in kinds if is_whole else kinds[1:]:
        # An element that is no number, or no int64 where the kind is "i", raises.
        with contextlib.suppress(ValueError, TypeError, RuntimeError):
            values = np.frombuffer(array.as_buffer(of_type=kind), dtype).astype(np.float64, copy=False)
            if may_stay and np.abs(values).max() >= _ROUNDED_FROM:
                return None
            return NumberList(values, shape, kind == "i") if len(values) == math.prod(shape) else None
    return None
