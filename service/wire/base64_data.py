"""base64 to bytes, strictly (RFC 4648): standard alphabet, no white space, exact padding, no stray bits, in short
steps.

Its law: every byte string has exactly one text that is accepted here.
"""

from __future__ import annotations

import binascii

import pybase64

from service.errors import BadEncoding
from service.wire.pace import Pace

SLICE_CHARACTERS = 1024 * 1024  # a multiple of 4
_QUAD = 4


async def decode_base64(text: bytes | memoryview, *, words: str, param: str, pace: Pace) -> bytearray:
    """The bytes of `text`; raises BadEncoding. `words` and `param` name the field."""
    if len(text) % _QUAD:
        raise BadEncoding(f"{words} has {len(text)} base64 characters, expected a multiple of 4", param=param)
    if len(text) <= SLICE_CHARACTERS:
        data = _decode(text, words, param)
    else:
        data = bytearray()
        for start in range(0, len(text), SLICE_CHARACTERS):
            part = _decode(text[start : start + SLICE_CHARACTERS], words, param)
            if start + SLICE_CHARACTERS < len(text) and len(part) != SLICE_CHARACTERS // _QUAD * 3:
                raise BadEncoding(f"{words} has base64 padding before its end", param=param)
            data += part
            await pace.give_way()
    check_tail(data, text, words=words, param=param)
    return data


def check_tail(data: bytearray, text: bytes | memoryview, *, words: str, param: str) -> None:
    """The last quad of padded text carries 2 or 4 bits that belong to no byte and must be zero; raises BadEncoding."""
    tail = len(data) % 3
    if tail and pybase64.b64encode(data[-tail:]) != bytes(text[-_QUAD:]):
        raise BadEncoding(f"{words} is not base64: bits behind the last byte are not zero", param=param)


def _decode(text: bytes | memoryview, words: str, param: str) -> bytearray:
    try:
        return pybase64.b64decode_as_bytearray(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadEncoding(f"{words} is not base64 (standard alphabet, no white space)", param=param) from None
