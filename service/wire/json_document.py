"""JSON bodies: parses them to plain Python objects, with nested lists of numbers as NumPy arrays.

simdjson parses first. Python's `json` then parses what simdjson rejects, because only it gives the position of a fault and takes
integers of any size. Invariants: The module knows no fields. It accepts only strict JSON in UTF-8, without a byte order mark or
duplicate keys, of limited depth, with an object at the top. Syntax errors come before every other error; only too many lists are
refused before their depth and the keys of objects are read. Nothing here waits. `parse_s` estimates the time, so that the caller
can choose where to parse.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, Union, cast

import numpy as np
import simdjson

from service.errors import BadJson, CostLimit, DuplicateKey, InvalidInput, JsonTooDeep, NonFinite
from service.wire.number_list import NumberList, at, nested_numbers

Json: TypeAlias = Union[bool, int, float, str, "list[Json]", "dict[str, Json]", NumberList, None]

MAX_TEXT_NUMBERS = 2**20
"""A number as text takes several times the memory and the time of one in a tensor."""
MAX_MEMBERS = 32_768
"""Members of objects, and entries of lists that hold objects."""
MAX_CHARACTERS = 2**20
"""Characters in names, in strings up to LONG_STRING, and in integers from LONG_INTEGER on."""
LONG_STRING = 1024
LONG_INTEGER = 2**256
# An answer repeats a name that the caller sent only if it has this form.
ECHOED = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
# simdjson finds a member by linear search.
_FEW_MEMBERS = 64
# Flat lists up to this length stay lists: most are a shape or a selection of heads.
_SHORT = 64
# So do flat lists of integers that float64 would round, up to as many as a request may have sequences: they may be offsets.
_MAX_EXACT = 2**16
_ROUNDED_FROM = 2**53
# Seconds per byte, and per mark of a number (in Python's slower parser), list, member and object; measured on two cores, 2026.
_BYTE_S = 1.2e-9
_MARKS_S = {",": 6e-8, "[": 4e-7, ":": 6e-7, "{": 4e-6}
# And per eight digits of a number from the 24th on: each parser takes long for such a number.
_DIGITS_S = 1.3e-7
_EIGHT_TRUE = int.from_bytes(b"\1" * 8)
_FEW_BYTES = 2**18
_COUNTED_BYTES = 4 * 2**20


class _NotForSimdjsonError(Exception):
    """The body is malformed, or has integers beyond 64 bits, unpaired surrogates, objects of many members, or NUL in names."""


class _Constant(str):
    """NaN, Infinity or -Infinity from Python's parser. JSON has no such numbers; it is kept until its place is known."""

    __slots__ = ()


class _Pairs(list[tuple[str, object]]):
    """An object from Python's parser: its members in order, including duplicates."""


def parse(body: bytes | bytearray, *, max_depth: int, max_numbers: int = MAX_TEXT_NUMBERS) -> dict[str, Json]:
    """Return the object in `body`; nested lists of numbers become NumberList, short flat ones and large integers stay lists.

    Raises BadJson, JsonTooDeep, DuplicateKey for malformed JSON; then CostLimit for more than `max_numbers` numbers or lists,
    NonFinite for a number beyond float64, InvalidInput for too many members and for a body that is not an object.
    """
    if not body or body.startswith(codecs.BOM_UTF8):
        raise BadJson("the body starts with a byte order mark" if body else "the body is empty")
    try:
        document = _by_simdjson(body, max_depth, max_numbers)
    except _NotForSimdjsonError:
        document = _by_python(body, max_depth, max_numbers)
    if not isinstance(document, dict):
        raise InvalidInput("the body must be a JSON object")
    return document


def parse_s(body: bytes | bytearray) -> float:
    """Return an upper estimate of the seconds that `parse` takes; infinite for a body whose marks take long to count."""
    if len(body) > _COUNTED_BYTES:
        return math.inf
    seconds = len(body) * _BYTE_S + sum(_count(body, mark) * seconds for mark, seconds in _MARKS_S.items())
    return seconds + _count_digits(body) * _DIGITS_S if len(body) > _FEW_BYTES else seconds


def _count_digits(body: bytes | bytearray) -> int:
    """Return how many groups of eight digits, counted from the body's start, follow two such groups."""
    are_digits = np.frombuffer(body, np.uint8, len(body) // 8 * 8) - np.uint8(ord("0")) < np.uint8(10)
    groups = are_digits.view(np.uint64) == _EIGHT_TRUE
    return int(np.count_nonzero(groups[2:] & groups[1:-1] & groups[:-2]))


def _count(body: bytes | bytearray, mark: str) -> int:
    """Like `bytes.count`, but in a third of the time if there are many."""
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == ord(mark)))


def _by_simdjson(body: bytes | bytearray, max_depth: int, max_numbers: int) -> Json:
    try:
        root = simdjson.Parser().parse(body)
    except UnicodeDecodeError:
        raise BadJson("the body is not valid UTF-8") from None
    except (ValueError, RuntimeError) as error:
        if str(error).startswith("DEPTH_ERROR"):
            raise JsonTooDeep("the body is nested too deep") from None
        raise _NotForSimdjsonError from None
    num_lists = _count(body, "[")  # brackets in strings count too; base64 has none
    _check_count(num_lists, max_numbers, "lists")
    reader = _Reader(max_depth, max_numbers)
    document = reader.value(root, 0)
    if reader.num_lists != num_lists:
        # Either the fast path missed a list among numbers, which simdjson flattens silently, or a string has a bracket.
        reader = _Reader(max_depth, max_numbers, uses_fast_path=False)
        document = reader.value(root, 0)
    _check_count(reader.num_numbers, max_numbers, "numbers")
    return document


def _check_count(found: int, most: int, what: str) -> None:
    """Raise CostLimit if a document, whose syntax is valid, has too many numbers or lists."""
    if found > most:
        raise CostLimit(
            f"the body has {found:,} {what} written as text, expected at most {most:,} (ATTENTION_MAX_TEXT_NUMBERS); "
            "tensors in base64 or safetensors may have more"
        )


def _by_python(body: bytes | bytearray, max_depth: int, max_numbers: int) -> Json:
    if max(_count(body, ","), _count(body, "[")) > max_numbers:  # so many Python objects would take hundreds of MiB
        rare = "an integer beyond 64 bits, a number beyond float64, an unpaired surrogate or an object of many members"
        raise BadJson(f"the body is not valid JSON, or has more than {max_numbers:,} commas or lists and {rare}")
    reader = _Reader(max_depth, max_numbers)
    found, constants = _decoded(body)
    document = reader.value(found, 0)
    _check_count(reader.num_numbers, max_numbers, "numbers")
    if constants:
        raise _not_a_number(found, constants[0])
    # Python reads 1e999 as infinite. Large lists of numbers are checked when their field is known.
    if (path := _path_to(lambda entry: isinstance(entry, float) and math.isinf(entry), document)) is not None:
        raise NonFinite("a number of the body is beyond the range of float64", param=_pointer(path))
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
        raise BadJson(f"the body is not valid JSON (byte {offset})") from None
    except ValueError:  # Python converts no integer of more than 4,300 digits
        raise BadJson("the body has an integer of more than 4300 digits") from None
    except RecursionError:
        raise JsonTooDeep("the body is nested too deep") from None


def _not_a_number(found: object, constant: _Constant) -> BadJson:
    path = _path_to(lambda entry: entry is constant, found) or ()
    num_indices = next((i for i, name in enumerate(reversed(path)) if isinstance(name, str)), len(path))
    index = tuple(name for name in path[len(path) - num_indices :] if isinstance(name, int))
    param = _pointer(path[: len(path) - num_indices]) or None
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


def _pointer(path: tuple[str | int, ...]) -> str | None:
    """Return the path as a JSON pointer; None if it has a name that may not be echoed."""
    if any(isinstance(name, str) and not ECHOED.fullmatch(name) for name in path):
        return None
    return "".join(f"/{name}" for name in path)


def words_of(param: str) -> str:
    """Return a JSON pointer in readable form: `/masks/0/values` becomes masks[0].values."""
    first, *rest = param.strip("/").split("/")
    return first + "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in rest)


class _Reader:
    """Converts the elements of one document, from either parser, and enforces the limits."""

    def __init__(self, max_depth: int, max_numbers: int, *, uses_fast_path: bool = True) -> None:
        self._max_depth = max_depth
        self._max_numbers = max_numbers
        self._uses_fast_path = uses_fast_path
        self._num_members = 0
        self._num_characters = 0
        self.num_numbers = 0
        self.num_lists = 0

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
        self._count_characters(found)
        return found  # type: ignore[return-value]  # a scalar of JSON

    def _object(self, pairs: list[tuple[str, object]], depth: int) -> dict[str, Json]:
        self._check_depth(depth + 1)
        self._count_members(len(pairs))
        found = {}
        for name, member in pairs:
            self._count_characters(name)
            found[name] = self.value(member, depth + 1)
        if len(found) != len(pairs):
            raise DuplicateKey("an object of the body has a duplicate key")
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
        self._count_members(len(entries))
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
            depth += 1
            self._check_depth(depth)
            level = inner
        self.num_lists += num_lists
        self.num_numbers += num_values
        if num_lists == 1 and (len(whole) <= _SHORT or _are_rounded(whole)):
            for entry in whole:
                self._count_characters(entry)
            return whole  # type: ignore[return-value]  # scalars of JSON
        return nested_numbers(whole) if self.num_numbers <= self._max_numbers else []

    def _check_depth(self, depth: int) -> None:
        if depth > self._max_depth:
            raise JsonTooDeep(f"the body is nested deeper than {self._max_depth} levels")

    def _count_members(self, num_members: int) -> None:
        self._num_members += num_members
        if self._num_members > MAX_MEMBERS:
            raise InvalidInput(f"the body has more than {MAX_MEMBERS:,} members and entries besides its numbers")

    def _count_characters(self, found: object) -> None:
        """Count the characters of a short string or a long integer: after the helper process, the worker reads them again."""
        if isinstance(found, str):
            self._num_characters += len(found) if len(found) <= LONG_STRING else 0
        elif isinstance(found, int) and not -LONG_INTEGER < found < LONG_INTEGER:
            self._num_characters += found.bit_length() * 3 // 10
        if self._num_characters > MAX_CHARACTERS:
            words = "characters in names, short strings and long integers"
            raise InvalidInput(f"the body has more than {MAX_CHARACTERS:,} {words}")


def _are_rounded(entries: list[object]) -> bool:
    """Whether all entries are integers, and float64 would round one of them."""
    are_integers = len(entries) <= _MAX_EXACT and set(map(type, entries)) == {int}
    return are_integers and max(map(abs, cast("list[int]", entries))) >= _ROUNDED_FROM


def _numbers_of(array: simdjson.Array, shape: tuple[int, ...], *, is_whole: bool) -> NumberList | None:
    """Return the numbers of a regular array, None if it has others or stays a list; `is_whole`: the first is an integer."""
    may_stay = is_whole and len(shape) == 1 and shape[0] <= _MAX_EXACT
    kinds: list[tuple[Literal["i", "d"], type[np.generic]]] = [("i", np.int64), ("d", np.float64)]
    for kind, dtype in kinds if is_whole else kinds[1:]:
        # An element that is no number, or no int64 where the kind is "i", raises.
        with contextlib.suppress(ValueError, TypeError, RuntimeError):
            values = np.frombuffer(array.as_buffer(of_type=kind), dtype).astype(np.float64, copy=False)
            if may_stay and np.abs(values).max() >= _ROUNDED_FROM:
                return None
            return NumberList(values, shape, kind == "i") if len(values) == math.prod(shape) else None
    return None
