"""Body faults: says why the bytes of a body, or the base64 of a tensor, do not parse.

Invariants: everything here runs after the parser has failed, reads at most 2 MiB and never raises. Messages have no text of a
caller, except a duplicate key. The characters around a fault are apart from them, because a log line must not have them.
"""

from __future__ import annotations

import collections
import json
import re

from service.errors import DuplicateKey
from service.wire.field_names import ECHOED

NUM_SHOWN = 20
_SHOWN = re.compile(r"[ !#-&(-@\[-_{-~]*")  # printable ASCII without letters and quotation marks
# The first bytes of what is no JSON, and what they are. No JSON and no safetensors file begins with any of them.
_NEITHER = "send its numbers as JSON or as safetensors"
_COMPRESSED = "compress the body at most once, and name that in Content-Encoding"
_UTF_16 = "is UTF-16 or UTF-32; JSON is UTF-8"
_BEGINNINGS = {
    b"\x1f\x8b\x08": f"is compressed with gzip; {_COMPRESSED}",
    b"\x28\xb5\x2f\xfd": f"is compressed with zstd; {_COMPRESSED}",
    **dict.fromkeys((b"\x78\x01", b"\x78\x9c", b"\x78\xda"), f"is compressed with deflate; {_COMPRESSED}"),
    b"\x93NUMPY": f"is a .npy file; {_NEITHER}",
    b"PK\x03\x04": f"is a zip, .npz or .pt file; {_NEITHER}",
    **dict.fromkeys((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), f"is a pickle; {_NEITHER}"),
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{", b"\0\0\0{"), _UTF_16),
}
_LENGTH_BYTES = 8
_LAST_BYTES = 64
CUT = "the body ends too early (is it cut off?)"
_TRAILING = "a comma before the end of a list or object is one too many"
_NO_CONSTANTS = 'JSON has no NaN and no Infinity; a bias may have "-inf", in quotes'
# What stands at the fault, and what is wrong with it.
_AT_FAULT = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\s*\Z", CUT),
        (r"'", "strings and names take double quotes"),
        (r"(?:True|False|None|undefined)\b", "JSON writes true, false and null"),
        (r"[+-]?(?i:nan|inf)", _NO_CONSTANTS),
        (r"//|/\*|#", "JSON has no comments"),
        (r"(?:np\.)?(?:array|tensor)\b", "that is Python's print of an array; send its tolist()"),
        (r"\.\.\.", "dots stand for no numbers; send all of them"),
        (r"\(", "a list takes square brackets"),
        (r",\s{0,64}[\]}]", _TRAILING),
        (r",", "a comma has no value before it"),
        (r"[.+]|(?<=0)[\dxX]", "a number is written as 0.5, -1.0 or 1e-3"),
    )
)
# What Python's parser expects there, by the beginning of its message.
_EXPECTED = {
    "Expecting value": "expected a value",
    "Expecting property name": "expected a name in double quotes",
    "Expecting ':'": "expected a colon",
    "Expecting ','": "expected a comma or the end of the list or object",
    "Extra data": "expected nothing after the object",
    "Unterminated": "the string that begins there has no end (is the body cut off?)",
    "Invalid control": "a string has a line break or a control character, which must be escaped",
    "Invalid \\": "a string has an escape that JSON does not have",
}


def foreign(body: bytes | bytearray | memoryview) -> str | None:
    """Return what the beginning of a body says that it is instead of JSON or safetensors, and the remedy; None if nothing."""
    start = bytes(body[: _LENGTH_BYTES + 1])
    if len(start) > _LENGTH_BYTES and start.endswith(b"{") and int.from_bytes(start[:_LENGTH_BYTES], "little") < 2**32:
        return "is a safetensors file; its Content-Type is application/vnd.safetensors"
    return next((words for beginning, words in _BEGINNINGS.items() if start.startswith(beginning)), None)


def json_fault(error: json.JSONDecodeError) -> tuple[str, str]:
    """Return what is wrong at the fault that Python's parser has found, and the characters around it that an answer may show."""
    text, place = error.doc, error.pos
    words = next((words for begin, words in _EXPECTED.items() if error.msg.startswith(begin)), "")
    if error.msg.startswith(("Unterminated", "Invalid")):  # in a string, which is text
        return words, ""
    if text[place : place + 1] in ("]", "}") and text[max(place - _LAST_BYTES, 0) : place].rstrip().endswith(","):
        words = _TRAILING
    words = next((found for pattern, found in _AT_FAULT if pattern.match(text, place)), words)
    shown = text[max(place - NUM_SHOWN // 2, 0) : place + NUM_SHOWN // 2]
    return words, f"; around it: {shown}" if shown.strip() and _SHOWN.fullmatch(shown) else ""


def is_cut(body: bytes | bytearray) -> bool:
    """Return whether a body that is no JSON object ends before its end, as far as its last bytes tell."""
    end = bytes(body[-_LAST_BYTES:]).strip()
    return bool(end) and not end.endswith(b"}")


def duplicate_key(names: list[str]) -> DuplicateKey:
    name, _ = collections.Counter(names).most_common(1)[0]
    key = f'the key "{name}" twice' if ECHOED.fullmatch(name) else "a duplicate key"
    return DuplicateKey(f"an object of the body has {key}")


def base64_fault(text: memoryview, first: int, end: int) -> str:
    """Return why base64 does not decode, whose fault is from `first` to `end`, as the end of an error message; or nothing."""
    start, piece = bytes(text[:5]), text[first:end]
    if start == b"data:":
        return '; leave out the "data:" and what follows it up to the comma'
    if start.startswith((b"b'", b'b"')):
        return "; it is Python's print of bytes: decode them to a string first"
    if (odd := re.search(rb"[^A-Za-z0-9+/=]", piece)) is None:
        return "; padding belongs to its end" if b"=" in bytes(piece[:-2]) else ""
    place = first + odd.start()
    if odd[0].isspace():
        return f"; it has a line break or white space at character {place}: leave them out"
    if odd[0] in (b"-", b"_"):
        return '; it is in the URL-safe alphabet: write "+" for "-" and "/" for "_"'
    return f"; character {place} is none of its alphabet"
