"""JSON out of files and headers: an object or the caller's own failure, nothing in between.

Laws: UTF-8 only; duplicate keys, NaN, Infinity, integers beyond 64 bits and endless depth are refused, because two
readers would disagree on them; the message names the text by `what` and repeats nothing of it.
"""

from __future__ import annotations

import json

from service.errors import ServiceError

MAX_DIGITS = 19


class _RefusedJsonError(ValueError):
    """Raised inside the parser's hooks: what about the text is refused."""


def parse_object(raw: bytes | bytearray, what: str, failure: type[ServiceError]) -> dict[str, object]:
    """The object that `raw` is; raises `failure` with a sentence that begins with `what`."""
    try:
        value = _DECODER.decode(raw.decode("utf-8"))
    except _RefusedJsonError as error:
        raise failure(f"{what} {error}") from error
    except RecursionError as error:  # the C scanner counts its own depth, so this is a clean stop
        raise failure(f"{what} is nested too deeply") from error
    except ValueError as error:  # bad UTF-8 and bad syntax alike
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


def _small_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _RefusedJsonError("has an integer that is too large")
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_small_integer)
