"""Content negotiation: the type of a body, and the type and coding of its answer (RFC 9110, section 12.5).

Invariants: no Accept header means any type. A header that names no type we write raises NotAcceptable; nothing is guessed. Of
equal weights the first offered wins. A list of several codings is only an offer, because libraries add it by themselves. A
caller that wants a compressed answer names one coding, or gives `identity` a lower weight.

Content types: names the media types of bodies and answers, and checks the Content-Type of a body.
Invariants: a body whose type is checked is read as its Content-Type says, or not at all. Text is UTF-8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from service.errors import NotAcceptable, UnsupportedMediaType
from service.http.head import HeaderFields

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
        raise UnsupportedMediaType(f"Content-Type must be {named}, with text in UTF-8")
    return media


def answer_type(fields: HeaderFields, offered: tuple[bytes, ...]) -> bytes:
    """Return the type in `offered` that the caller weighs highest; raise NotAcceptable if it accepts none."""
    values = fields[b"accept"]
    if not values or values == (b"*/*",):
        return offered[0]
    wishes = _wishes(values)
    if not wishes:
        return offered[0]
    best = max(offered, key=lambda media: _quality_of(media, wishes))  # max keeps the first of equals
    if not _quality_of(best, wishes) > 0:
        raise NotAcceptable(f"Accept must allow {' or '.join(media.decode('ascii') for media in offered)}")
    return best


def answer_coding(fields: HeaderFields, offered: tuple[bytes, ...], *, take_offers: bool) -> bytes | None:
    """Return the content coding in `offered` that the caller asks for, or None for a plain answer.

    With `take_offers`, a list of several codings counts as asking. Raises NotAcceptable if the caller accepts neither a
    coding in `offered` nor the plain answer.
    """
    values = fields[b"accept-encoding"]
    if not values:
        return None
    wishes = _wishes(values)
    everything = wishes.pop(b"*", None)
    anything = everything or 0.0
    plain = wishes.pop(b"identity", everything)
    best = max(offered, key=lambda coding: wishes.get(coding, anything))
    quality = wishes.get(best, anything)
    is_asked = len(wishes) == 1 or take_offers
    if plain == quality == 0:
        raise NotAcceptable(
            f"Accept-Encoding must allow identity or {' or '.join(coding.decode('ascii') for coding in offered)}"
        )
    if plain is not None:
        return best if quality > plain else None
    return best if quality > 0 and is_asked else None


def _wishes(values: Sequence[bytes]) -> dict[bytes, float]:
    """Map the entries of a header, in lower case, to their weights."""
    found: dict[bytes, float] = {}
    for entry in b",".join(values).split(b","):
        name, *parameters = (part.strip().lower() for part in entry.split(b";"))
        if name:
            found[name] = _weight(parameters)
    return found


def _quality_of(media: bytes, wishes: dict[bytes, float]) -> float:
    """Return the weight of the most specific range that matches, 0 if none does."""
    ranges = (media, media.partition(b"/")[0] + b"/*", b"*/*")
    return next((wishes[name] for name in ranges if name in wishes), 0.0)


def _weight(parameters: list[bytes]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"q":
            try:
                weight = float(value)
            except ValueError:
                return 0.0
            return weight if math.isfinite(weight) else 0.0
    return 1.0
