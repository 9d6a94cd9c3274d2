"""Series: finds metric series with a label value that a caller chose; there are none if every label has fixed values.

Invariants: A route is one of openapi.json, one that it does not list, or `unmatched`. A status and a code are the contract's. A
layer is served, or `sdpa`. A label of any other name is reported, whatever its value. So a series that appears late and has
only allowed labels is no growth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tests.torture.answer_rules import CODES
from tests.torture.subject import Subject

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Routes that openapi.json does not list.
_UNLISTED_ROUTES = ("unmatched", "/", "/docs", "/docs/errors", "/docs/{asset}", "/openapi.json")
# The name of attention without a layer; no stored layer may have it.
_SDPA = "sdpa"
# The buckets of histograms, and what describes a process: the service chooses the values of these labels at its start.
_CHOSEN_AT_START = frozenset({"le", "version", "torch", "device", "dtype"})
_FIXED_VALUES = {
    "status": {"200", "204", *map(str, CODES)},
    "reason": set().union(*CODES.values()),
    "stage": {"receiving", "decoding", "queued", "running", "sending", "killed"},
    "outcome": {"success", "failure"},
    "phase": {"decode", "queue", "compute", "encode"},
}


def made_by_callers(subject: Subject, names: Iterable[str]) -> list[str]:
    """Return the series that have a label of another name, or a label value that is not fixed."""
    routes = {*_UNLISTED_ROUTES, *json.loads(subject.get("/openapi.json")[1])["paths"]}
    layers = {_SDPA, *(layer["name"] for layer in json.loads(subject.get("/v1/layers")[1])["layers"])}
    allowed = {**_FIXED_VALUES, "route": routes, "layer": layers}

    def is_fixed(label: str, value: str) -> bool:
        return label in _CHOSEN_AT_START or value in allowed.get(label, ())

    return [name for name in names if not all(is_fixed(*label) for label in _LABEL.findall(name))]
