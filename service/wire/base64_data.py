"""Strict base64 decoding (RFC 4648): standard alphabet, no white space, exact padding, no stray bits.

Invariants: Exactly one text is accepted for each byte string.
"""

from __future__ import annotations

import binascii

import pybase64

from service.errors import BadEncoding

_QUAD = 4


def decode_base64(text: str, *, words: str, param: str) -> bytearray:
    """Return the bytes of `text`; raises BadEncoding. `words` and `param` name the field."""
    if len(text) % _QUAD:
        raise BadEncoding(f"{words} has {len(text)} base64 characters, expected a multiple of 4", param=param)
    try:
        data = pybase64.b64decode_as_bytearray(text, validate=True)
    except (binascii.Error, ValueError):  # ValueError: not ASCII
        raise BadEncoding(f"{words} is not base64 (standard alphabet, no white space)", param=param) from None
    # The last quad of padded text carries 2 or 4 bits that belong to no byte and must be zero.
    tail = len(data) % 3
    if tail and pybase64.b64encode(data[-tail:]) != text[-_QUAD:].encode("ascii"):
        raise BadEncoding(f"{words} is not base64: bits behind the last byte are not zero", param=param)
    return data
