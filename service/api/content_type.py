"""Content types: what a body says it is, and what an answer is written as.

Laws: a body is read as what its Content-Type says or not at all; text is UTF-8.
"""

from __future__ import annotations

from service.api.asgi import Scope, headers
from service.errors import UnsupportedMediaType

JSON = b"application/json"
SAFETENSORS = b"application/vnd.safetensors"
OCTET_STREAM = b"application/octet-stream"
_UTF8_NAMES = (b"utf-8", b"utf8")


def body_type(scope: Scope, taken: tuple[bytes, ...]) -> bytes:
    """Which of `taken` the body is; raises UnsupportedMediaType."""
    values = headers(scope, b"content-type")
    value = values[0] if len(values) == 1 else b""
    if value in taken:
        return value
    media, *parameters = (part.strip().lower() for part in value.split(b";"))
    charsets = [part.partition(b"=")[2].strip(b'" ') for part in parameters if part.startswith(b"charset")]
    if media not in taken or any(charset not in _UTF8_NAMES for charset in charsets):
        named = " or ".join(name.decode("ascii") for name in taken)
        raise UnsupportedMediaType(f"the body must be {named}, and text in UTF-8")
    return media
