"""JSON objects from files and headers: parses them strictly, or raises the error type that the caller names.

Invariants: Text is UTF-8. Duplicate keys, NaN, Infinity, integers beyond 64 bits and endless depth are refused, because two
parsers would disagree on them. The message names the text by `what` and repeats nothing of it.
"""

from __future__ import annotations

import json
import math

import orjson

from service.errors import ServiceError

_LEAST, _MOST = -(2**63), 2**64 - 1


class _RefusedJsonError(ValueError):
    """Raised inside the parser's hooks; the message says why the text is refused."""


def parse_object(raw: bytes | bytearray, what: str, failure: type[ServiceError]) -> dict[str, object]:
    """Return the object in `raw`; raise `failure` with a sentence that begins with `what`."""
    found = _parse_canonical(raw)
    return _parse_strictly(raw, what, failure) if found is None else found


def _parse_canonical(raw: bytes | bytearray) -> dict[str, object] | None:
    """Return the object by the fast path: text that serialises to the same bytes has no duplicate key or other refused part."""
    try:
        value = orjson.loads(raw)
        is_canonical = orjson.dumps(value) == raw.rstrip(b" ")
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # orjson reads deeper than it writes
        return None
    return value if is_canonical and isinstance(value, dict) else None


def _parse_strictly(raw: bytes | bytearray, what: str, failure: type[ServiceError]) -> dict[str, object]:
    try:
        value = _DECODER.decode(raw.decode("utf-8"))
    except _RefusedJsonError as error:
        raise failure(f"{what} {error}") from error
    except RecursionError as error:  # the C scanner counts its own depth, so this is a clean stop
        raise failure(f"{what} is nested too deeply") from error
    except ValueError as error:  # bad UTF-8 or bad syntax
        raise failure(f"{what} is not valid JSON in UTF-8") from error
    if not isinstance(value, dict):
        raise failure(f"{what} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _RefusedJsonError("has a key twice")
    return found


def _no_constant(_: str) -> float:
    raise _RefusedJsonError("has a number that is not finite")


def _finite(digits: str) -> float:
    number = float(digits)
    return _no_constant(digits) if math.isinf(number) else number


def _small_integer(digits: str) -> int:
    number = int(digits) if len(digits) <= len(str(_LEAST)) else _MOST + 1
    if not _LEAST <= number <= _MOST:
        raise _RefusedJsonError("has an integer that is too large")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=_small_integer
)
