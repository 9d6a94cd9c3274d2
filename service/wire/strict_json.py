"""The slow, exact JSON parser: Python's `json` without its leniency. What it takes and gives defines our JSON.

Not here: duplicate keys and depth of large bodies, which need the whole document (`json_document.py`). Its law: only
ServiceErrors leave, and none of them carries a library's text or a piece of the input.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

from service.errors import BadJson, JsonTooDeep
from service.json_object import parse_object


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

    Small: without arrays and strings that would be cut out. What is refused here may still be right (large integers).
    """
    if text.count(b"[") + text.count(b"{") > max_depth:
        return None
    try:
        return parse_object(text, "the body", BadJson)
    except BadJson:
        return None


def _refuse_constant(_name: str) -> NoReturn:
    raise BadJson("the body is not valid JSON: NaN and Infinity are not numbers of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
