"""Content types: names the media types of bodies and answers, and checks the Content-Type of a body.

Invariants: a body whose type is checked is read as its Content-Type says, or not at all. Text is UTF-8.
"""

from __future__ import annotations

import re

from service.errors import UnsupportedMediaType
from service.http.header_fields import HeaderFields

JSON = b"application/json"
SAFETENSORS = b"application/vnd.safetensors"
OCTET_STREAM = b"application/octet-stream"
_UTF8_NAMES = (b"utf-8", b"utf8")
# A parameter: a token, then a token or a quoted string (RFC 9110, section 5.6.6).
_PARAMETER = re.compile(rb';[ \t]*([^\s;="]+)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|[^\s;"]*)')


def body_type(fields: HeaderFields, taken: tuple[bytes, ...]) -> bytes:
    """Return the type in `taken` that the body has; raise UnsupportedMediaType if it has none of them."""
    values = fields[b"content-type"]
    value = values[0] if len(values) == 1 else b""
    if value in taken:
        return value
    media = value.partition(b";")[0].strip().lower()
    charsets = [text.strip(b'"').lower() for name, text in _PARAMETER.findall(value) if name.lower() == b"charset"]
    if media not in taken or any(charset not in _UTF8_NAMES for charset in charsets):
        named = " or ".join(name.decode("ascii") for name in taken)
        raise UnsupportedMediaType(f"the body must be {named}, and text in UTF-8")
    return media
