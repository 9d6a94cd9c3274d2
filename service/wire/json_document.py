"""A JSON body as plain Python objects, with its large arrays decoded and its long strings set aside.

Knows nothing of fields. Large arrays and long strings are cut out and read by themselves (`skeleton.py`,
`array_text.py`, `number_text.py`, `long_string.py`); Python's strict parser reads what remains, and here the pieces
are put back.

Laws: what is taken and what it means is Python's strict `json` plus: UTF-8 without BOM, no duplicate keys, no NaN or
Infinity, a limit on depth, an object at the top; no step holds the event loop for long, whatever the body, and a small
body takes one step; everything wrong with the syntax anywhere in the body is raised here, before anybody looks at what
the fields mean.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterator
from typing import TypeAlias, Union, cast

import numpy as np

from service.errors import BadJson, CostLimit, DuplicateKey, InvalidInput, JsonTooDeep, NonFinite, ServiceError
from service.wire.long_string import LongString
from service.wire.number_list import NumberList
from service.wire.pace import Pace
from service.wire.skeleton import MAX_TEXT_NUMBERS, MIN_ARRAY_BYTES, Skeleton
from service.wire.strict_json import parse_small, strict_loads

Json: TypeAlias = Union[bool, int, float, str, "list[Json]", "dict[str, Json]", NumberList, LongString, None]
_Path: TypeAlias = "tuple[_Path, str | int] | None"  # from the innermost key outwards

_CHUNK_BYTES = 1024 * 1024
_MIN_ARRAY_BYTES = 16 * 1024  # from here on NumPy is the faster way to see that all bytes are ASCII
_ITEMS_A_SLICE = 1000
_FIELD_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


async def parse(body: bytes, *, max_depth: int) -> dict[str, Json]:
    """The object that `body` is; arrays of more than 512 bytes come as NumberList, strings of more than 1024 as
    LongString.

    Raises BadJson, JsonTooDeep, DuplicateKey for what does not parse; then CostLimit for more than MAX_TEXT_NUMBERS in its
    arrays, NonFinite for a number beyond float64 and InvalidInput where the body is no object. More than 256 KiB besides
    the cut pieces are InvalidInput whatever follows them.
    """
    if len(body) < MIN_ARRAY_BYTES and (small := parse_small(body, max_depth=max_depth)) is not None:
        return cast("dict[str, Json]", small)
    if not body:
        raise BadJson("the body is empty")
    if body.startswith(codecs.BOM_UTF8):
        raise BadJson("the body starts with a byte order mark")
    pace = Pace()
    skeleton = Skeleton(body, max_depth=max_depth, pace=pace)
    try:
        await skeleton.cut()
    except (ServiceError, UnicodeDecodeError):
        await _check_utf8(body, 0, len(body), pace)  # told before anything else that may be wrong
        raise
    at = 0
    for start, end in (*skeleton.ascii_spans, (len(body), len(body))):
        await _check_utf8(body, at, start, pace)
        at = end
    parsed = strict_loads(skeleton.text, locate=skeleton.locate)
    await pace.give_way()
    document = await _Assembly(skeleton, max_depth, pace).run(cast("Json", parsed))
    if not isinstance(document, dict):
        raise InvalidInput("the body must be a JSON object")
    return document


async def _check_utf8(body: bytes, at: int, stop: int, pace: Pace) -> None:
    if _is_ascii(body, at, stop):
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(at, stop, _CHUNK_BYTES):
        end = min(start + _CHUNK_BYTES, stop)
        try:
            decoder.decode(body[start:end], final=end == stop)
        except UnicodeDecodeError:
            raise BadJson("the body is not valid UTF-8") from None
        await pace.give_way()


def _is_ascii(body: bytes, start: int, end: int) -> bool:
    if end - start < _MIN_ARRAY_BYTES:
        return body[start:end].isascii()
    return bool(np.minimum.reduce(np.frombuffer(body, dtype=np.int8, count=end - start, offset=start)) >= 0)


class _Assembly:
    """Puts the pieces back and checks what only the whole tells: duplicate keys, depth, numbers beyond float64."""

    def __init__(self, skeleton: Skeleton, max_depth: int, pace: Pace) -> None:
        self._skeleton = skeleton
        self._max_depth = max_depth
        self._pace = pace
        self._num_members = 0
        self._num_pieces = 0
        self._beyond: NonFinite | None = None

    async def run(self, parsed: Json) -> Json:
        root: list[Json] = [parsed]
        for _ in self._visit(root):
            await self._pace.give_way()
        # Every string before a colon is a key, so a key that is missing now was there twice.
        if self._num_members != self._skeleton.num_keys:
            raise DuplicateKey("an object of the body has the same key twice")
        if self._num_pieces != self._skeleton.num_pieces:  # no value has gone missing in a way nobody has thought of
            raise BadJson("the body is not valid JSON")
        if self._skeleton.num_numbers > MAX_TEXT_NUMBERS:
            raise CostLimit(
                f"the body has more than {MAX_TEXT_NUMBERS:,} numbers written as text; base64 data and safetensors may have more"
            )
        if self._beyond is not None:
            raise self._beyond
        return root[0]

    def _visit(self, root: list[Json]) -> Iterator[None]:
        """Visit everything, with a stop now and then."""
        stack: list[tuple[list[Json] | dict[str, Json], int, _Path]] = [(root, 0, None)]
        num_visited = 0
        while stack:
            container, depth, path = stack.pop()
            self._num_members += len(container) if isinstance(container, dict) else 0
            for key, item in enumerate(container) if isinstance(container, list) else container.items():
                num_visited += 1
                if num_visited % _ITEMS_A_SLICE == 0:
                    yield
                if isinstance(item, float):
                    if math.isinf(item):
                        self._beyond = NonFinite(
                            "a number of the body is beyond the range of float64", param=_pointer((path, key))
                        )
                elif isinstance(item, str):
                    self._put_back(container, key, item, depth)
                elif isinstance(item, list | dict):
                    stack.append((item, depth + 1, path if container is root else (path, key)))

    def _put_back(self, container: list[Json] | dict[str, Json], key: str | int, string: str, depth: int) -> None:
        piece = self._skeleton.piece(string)
        if piece is None:
            return
        self._num_pieces += 1
        if isinstance(piece, NumberList) and depth + piece.depth > self._max_depth:
            raise JsonTooDeep(f"the body is nested deeper than {self._max_depth} levels")
        container[key] = piece  # type: ignore[index]  # the key comes from this very container


def _pointer(path: _Path) -> str | None:
    """A JSON pointer along field names as ours are, and None where a caller's own words would come in."""
    tokens: list[str] = []
    while path is not None:
        path, key = path
        if isinstance(key, str) and not _FIELD_NAME.fullmatch(key):
            return None
        tokens.append(str(key))
    return "".join(f"/{token}" for token in reversed(tokens))
