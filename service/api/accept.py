"""Accept and Accept-Encoding: how the caller wants the answer (RFC 9110, sections 12.5.1 and 12.5.3).

Laws: no Accept header means everything; one that names nothing we write is a NotAcceptable, never a guess; of equal
wishes the first that we offer is taken. A header that a library adds by itself lists several codings: that is an offer;
a caller who wants an answer compressed names one coding, or weighs `identity` down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from service.errors import NotAcceptable
from service.http.header_fields import HeaderFields


def answer_type(fields: HeaderFields, offered: tuple[bytes, ...]) -> bytes:
    """Which of `offered` the answer is to be, the caller's favourite; raises NotAcceptable."""
    values = fields[b"accept"]
    if not values or values == (b"*/*",):
        return offered[0]
    wishes = _wishes(values)
    if not wishes:
        return offered[0]
    best = max(offered, key=lambda media: _quality_of(media, wishes))  # the first of equals
    if not _quality_of(best, wishes) > 0:
        raise NotAcceptable(f"answers are {' or '.join(media.decode('ascii') for media in offered)}")
    return best


def answer_coding(fields: HeaderFields, offered: tuple[bytes, ...], *, take_offers: bool) -> bytes | None:
    """The content coding that the caller asks for, of `offered`; None for none.

    With `take_offers` a list of several codings counts as asking. Raises NotAcceptable for whoever takes neither any of
    them nor the plain answer.
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
        raise NotAcceptable(f"answers are plain, or {' or '.join(coding.decode('ascii') for coding in offered)}")
    if plain is not None:
        return best if quality > plain else None
    return best if quality > 0 and is_asked else None


def _wishes(values: Sequence[bytes]) -> dict[bytes, float]:
    """What the entries of a header name, with their weights."""
    found: dict[bytes, float] = {}
    for entry in b",".join(values).split(b","):
        name, *parameters = (part.strip().lower() for part in entry.split(b";"))
        if name:
            found[name] = _weight(parameters)
    return found


def _quality_of(media: bytes, wishes: dict[bytes, float]) -> float:
    """The most specific range decides."""
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
