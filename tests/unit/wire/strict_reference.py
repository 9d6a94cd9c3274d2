"""A slow second implementation of what JSON bodies mean, written without looking at the fast one: the oracle of its tests."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from service.errors import BadJson, DuplicateKey, JsonTooDeep, Malformed

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def strict(body: bytes, *, max_depth: int) -> Any:
    """Python's value of a body, or Malformed raised for what strict JSON is not."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise BadJson("not UTF-8") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except Malformed:
        raise
    except (ValueError, RecursionError):
        raise BadJson("not JSON") from None
    depth = 0
    for character in _STRING.sub("", text):
        depth += (character in "[{") - (character in "]}")
        if depth > max_depth:
            raise JsonTooDeep("too deep")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise DuplicateKey("twice")
    return dict(pairs)


def _refuse(_: str) -> NoReturn:
    raise BadJson("a constant")


def has_infinity(value: Any) -> bool:
    """Whether a number of the document was beyond float64."""
    if isinstance(value, dict | list):
        return any(map(has_infinity, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and math.isinf(value)


def regular(value: Any) -> tuple[np.ndarray, tuple[int, ...]] | None:
    """Flat float64 values and shape of a regular nested list of numbers, booleans and "-inf", else None."""
    try:
        shape = _shape(value)
        items = list(_leaves(value))
        if any(not isinstance(item, int | float) and item != "-inf" for item in items):
            return None
        flat = np.array([float(item) for item in items], dtype=np.float64)
    except (ValueError, OverflowError):
        return None
    beyond = any(item != "-inf" and math.isinf(item) for item in items)
    return None if beyond else (flat, shape)


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        return ()
    shapes = {_shape(item) for item in value}
    if len(shapes) > 1:
        raise ValueError("ragged")
    return (len(value), *(shapes.pop() if shapes else ()))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


class Documents:
    """Random bodies, seeded: regular, odd and broken ones, with everything that could mislead a cutter of text."""

    NUMBERS = (
        *("0", "1", "-1", "2.5", "-0.0", "-0", "1e5", "1E-7", "3.5e38", "-7e9", "-6e8", "0.1", "1e-400", "4.9e-324"),
        *("9007199254740993", "12345678901234567890123", "18446744073709551615", "1e999"),
    )
    ODD = (
        *("true", "false", "null", '"-inf"', '"1.5"', '"a:b"', '"]"', '"}"', '"[,"', '"\\""', '"\\u002dinf"'),
        *('"é"', '""', "{}", '{"a":1}', '"x y"'),
    )
    PIECES = (
        *("a", ":", "}", "{", "[", "]", ",", '\\"', "\\/", "\\u00e9", "\\\\", "é", "-inf", "\\n", "😀", " "),
        "\\ud83d\\ude00",
    )
    KEYS = ('"query"', '"k"', '"data"', '"masks"', '"a\\"b"', '"x:y"', '"é"', '"}"', '"[1,"')
    CUTS = (
        *("[", "]", "{", "}", '"', ",", ":", "0", "9", "e", "E", ".", "+", "-", "t", "f", "n", "\\", "/", " ", "\n"),
        *("true", "null", '"-inf"', "-inf", "[[", "]]", "],[", "NaN", "Infinity", "0,", "/*"),
        *("\x00", "\x0b", "\ufeff", "\x1f"),
    )

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def document(self, depth: int = 0) -> str:
        members = []
        for _ in range(self._random.randrange(5)):
            key = self._random.choice(self.KEYS) if self._random.random() < 0.9 else self._string()
            members.append(
                self._space() + key + self._space() + ":" + self._space() + self._value(depth) + self._space()
            )
        return "{" + ",".join(members) + "}"

    def broken(self, document: str) -> str:
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            start = self._random.randrange(len(document) + 1)
            end = start + self._random.choice((0, 0, 1, 1, 2, 5))
            put = self._random.choice((*self.CUTS, *("",) * 12))
            document = document[:start] + put + document[end:]
            if self._random.random() < 0.05:
                document = document[: self._random.randrange(len(document) + 1)]
        return document

    def tensor(self) -> str:
        choose = self._random.choice
        shape = [choose((1, 1, 2, 3, 5, 9)) for _ in range(choose((1, 2, 2, 3, 4)))]
        kinds = (
            self.NUMBERS,
            ("true", "false", "0", "1"),
            ('"-inf"', "0.5", "-7e9", "-6e8", "1"),
            ("0", "1", "2", "3"),
            (*self.NUMBERS, *self.ODD),
            (*("1",) * 60, *self.ODD),
        )
        text = self._array(shape, choose(kinds))
        if self._random.random() < 0.15:
            at = self._random.randrange(len(text))
            text = text[:at] + choose(("[1]", ",", "[", "]", "[]", ",2", " ", "[1,2],")) + text[at:]
        return text

    def _array(self, shape: list[int], choices: tuple[str, ...]) -> str:
        if not shape:
            return self._random.choice(choices)
        entries = [self._array(shape[1:], choices) for _ in range(shape[0])]
        return "[" + self._space() + f"{self._space()},{self._space()}".join(entries) + self._space() + "]"

    def _value(self, depth: int) -> str:
        draw = self._random.random()
        if depth > 4 or draw < 0.25:
            return self._random.choice((*self.NUMBERS, *self.ODD))
        if draw < 0.6:
            return self.tensor()
        if draw < 0.7:
            return self._string()
        if draw < 0.85:
            return self.document(depth + 1)
        return "[" + ",".join(self._value(depth + 1) for _ in range(self._random.randrange(4))) + "]"

    def _string(self) -> str:
        count = self._random.choice((0, 1, 2, 5, 20, 40))
        return '"' + "".join(self._random.choice(self.PIECES) for _ in range(count)) + '"'

    def _space(self) -> str:
        return self._random.choice(("", "", "", "", " ", "\n", "\t ", "  "))
