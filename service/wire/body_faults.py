"""Body faults: says why the bytes of a body, or the base64 of a tensor, do not parse.

Invariants: everything here runs after the parser has failed, and never raises. Messages have no text of a caller, except a
duplicate key. The characters around a fault are apart from them, because a log line must not have them.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable

from service.errors import BadBinary, BadJson, DuplicateKey, ServiceError
from service.wire.field_names import ECHOED

_NUM_AROUND = 10
_SHOWN = re.compile(r"[ !#-&(-@\[\]^_{-~]+")  # printable ASCII without letters, quotation marks and escapes, so no text
# The first bytes of what is neither JSON nor safetensors.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x78\x9c": "deflate"}
CUT = "the body ends too early (is it cut off?)"
# What JSON has at the fault, by the beginning of the message of Python's parser.
_EXPECTED = {
    "Expecting value": "expected a value: a number such as 0.5, a list, an object, a string, true, false or null",
    "Expecting property name": "expected a name in double quotes",
    "Expecting ':'": "expected a colon",
    "Expecting ','": "expected a comma or the end of the list or object",
    "Extra data": "expected nothing after the object",
    "Illegal trailing comma": "expected no comma before the end of a list or object",
    "Unterminated": "the string that begins there has no end (is the body cut off?)",
    "Invalid": "expected a string without line breaks, control characters and escapes that JSON does not have",
}
_BASE64_FAULTS = {
    rb"(?i)\Adata:": 'leave out the "data:" and what follows it up to the comma',
    rb"\s": "it has line breaks or other white space: leave them out",
    rb"[-_]": 'it is in the URL-safe alphabet: write "+" for "-" and "/" for "_"',
}


def unless_compressed(body: bytes | bytearray, error: ServiceError) -> ServiceError:
    """Return `error`, or one that says so if the body is compressed and no header said that."""
    name = next((name for first_bytes, name in _COMPRESSED.items() if body.startswith(first_bytes)), None)
    if name is None:
        return error
    kind = BadBinary if isinstance(error, BadBinary) else BadJson
    return kind(f"the body is compressed with {name}, which Content-Encoding must say")


def json_fault(error: json.JSONDecodeError) -> tuple[str, str]:
    """Return what is wrong at the fault that Python's parser has found, and the characters around it that an answer may show."""
    text, place = error.doc, error.pos
    words = next((words for begin, words in _EXPECTED.items() if error.msg.startswith(begin)), "")
    shown = text[max(place - _NUM_AROUND, 0) : place + _NUM_AROUND]
    around = f"; around it: {shown}" if _SHOWN.fullmatch(shown) else ""
    return words if text[place:].strip() else CUT, around


def duplicate_key(names: Iterable[str]) -> DuplicateKey:
    name, _ = collections.Counter(names).most_common(1)[0]
    key = f'the key "{name}" twice' if ECHOED.fullmatch(name) else "a duplicate key"
    return DuplicateKey(f"an object of the body has {key}")


def base64_fault(damaged: memoryview) -> str:
    """Return why this piece of base64 does not decode, as the end of an error message; or nothing."""
    return next((f"; {words}" for pattern, words in _BASE64_FAULTS.items() if re.search(pattern, damaged)), "")
