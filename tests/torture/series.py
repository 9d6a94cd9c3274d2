"""Series: which metric series callers could have made; there are none if labels come from our own few words only.

Invariants: a route is one of the OpenAPI page's or `unmatched`, a status and a code are the contract's, a layer is served; a
series that appears late is no growth if all its labels are such words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tests.torture.answer_rules import CODES
from tests.torture.subject import Subject

_LABEL = re.compile(r'(\w+)="([^"]*)"')
_PAGES = ("unmatched", "/", "/docs", "/docs/errors", "/docs/{asset}", "/openapi.json")
_OURS = {
    "status": {"200", "204", *map(str, CODES)},
    "reason": set().union(*CODES.values()),
    "stage": {"receiving", "decoding", "queued", "running", "sending", "killed"},
    "outcome": {"success", "failure"},
    "phase": {"decode", "queue", "compute", "encode"},
}


def made_by_callers(subject: Subject, names: Iterable[str]) -> list[str]:
    """Those of the series that carry a word which is not ours."""
    # The page does not tell of itself.
    routes = {*_PAGES, *json.loads(subject.get("/openapi.json")[1])["paths"]}
    layers = {layer["name"] for layer in json.loads(subject.get("/v1/layers")[1])["layers"]}
    words = {**_OURS, "route": routes, "layer": layers}
    return [
        name
        for name in names
        if any(label in words and value not in words[label] for label, value in _LABEL.findall(name))
    ]
