"""The slow, exact JSON parser: Python's `json` without its leniency. What it takes and gives defines our JSON.

Not here: duplicate keys and depth of large bodies, which need the whole document (`json_document.py`). Its law: only
ServiceErrors leave, and none of them carries a library's text or a piece of the input.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import NoReturn

from service.errors import BadJson, JsonTooDeep


def strict_loads(text: bytes, *, locate: Callable[[int], int]) -> object:
    """Parse UTF-8 `text`; `locate` turns an offset in it into one in the body, for the message."""
    characters = text.decode("utf-8")
    try:
        return _DECODER.decode(characters)
    except json.JSONDecodeError as error:
        offset = error.pos if characters.isascii() else len(characters[: error.pos].encode())
        raise BadJson(f"the body is not valid JSON (byte {locate(offset)})") from None
    except ValueError:  # Python refuses to convert integers of more than 4,300 digits
        raise BadJson("the body has an integer of more than 4300 digits") from None
    except RecursionError:
        raise JsonTooDeep("the body is nested too deep") from None


def parse_small(text: bytes, *, max_depth: int) -> dict[str, object] | None:
    """The object that a small body plainly is; None where the long way must find out what, if anything, is wrong.

    Small: without arrays and strings that would be cut out, so that every key goes through a hook of ours.
    """
    if text.count(b"[") + text.count(b"{") > max_depth:
        return None
    try:
        value = _PLAIN_DECODER.decode(text.decode("utf-8"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _plain_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _plain_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("beyond float64")
    return number


def _plain_constant(_name: str) -> NoReturn:
    raise ValueError("no number of JSON")


def _refuse_constant(_name: str) -> NoReturn:
    raise BadJson("the body is not valid JSON: NaN and Infinity are not numbers of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_PLAIN_DECODER = json.JSONDecoder(
    object_pairs_hook=_plain_object, parse_float=_plain_float, parse_constant=_plain_constant
)
