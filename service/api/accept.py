"""Accept: whether the caller takes what we write (RFC 9110, section 12.5.1).

Law: no Accept header means everything; a header that names nothing we write is a NotAcceptable, never a guess.
"""

from __future__ import annotations

from service.api.asgi import Scope, headers
from service.errors import NotAcceptable

_JSON = (b"application/json", b"application/*", b"*/*")


def check_accepts_json(scope: Scope) -> None:
    """Raises NotAcceptable unless `application/json` may be answered; the most specific range decides."""
    values = [value for value in headers(scope, b"accept") if value.strip()]
    if not values:
        return
    weights: dict[bytes, float] = {}
    for entry in b",".join(values).split(b","):
        media, *parameters = (part.strip().lower() for part in entry.split(b";"))
        weights[media] = _quality(parameters)
    best = next((weights[media] for media in _JSON if media in weights), 0.0)
    if not best > 0:  # also where q is "nan"
        raise NotAcceptable("answers are application/json")


def _quality(parameters: list[bytes]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
