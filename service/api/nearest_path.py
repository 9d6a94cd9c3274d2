"""Nearest path: finds the route that a path which no route takes probably means.

Invariants: it runs only after the routing has failed, in about a millisecond for a path of any length. It returns templates of
our own routes, never a part of the caller's path.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Sequence

# What is compared of a path.
_MAX_PATH = 512
_MAX_SEGMENTS = 8
_MAX_SEGMENT = 24
_LEAST_RATIO = 0.65
_PREFERENCE = 0.15
_WITHOUT_START = 0.9


def nearest_path(path: str, templates: Iterable[str], preferred: Container[str] = ()) -> str | None:
    """Return the template that differs least from `path`: in case, slashes, a prefix, or some letters; None if none is near.

    A template that goes on where the path ends is near too. Of two that are about as near, a preferred one wins.
    """
    found = [part[:_MAX_SEGMENT] for part in path[:_MAX_PATH].lower().split("/") if part][:_MAX_SEGMENTS]
    parts = {template: template.strip("/").split("/") for template in templates if template.strip("/")}
    firsts = {first for first, *_ in parts.values()}
    found = found[next((i for i, part in enumerate(found) if part in firsts), int(found[:1] == ["api"])) :]
    matcher, best = difflib.SequenceMatcher(autojunk=False), (0.0, 0, "")
    for template, wanted in parts.items():
        # A shorter path lacks its end, or its start: then the end must not be a parameter, which takes anything.
        lacking = len(wanted) - len(found) if found and wanted[-1][0] != "{" else 0
        for start in {0, max(lacking, 0)}:
            matcher.set_seqs(*_as_texts(found, wanted[start:]))
            if matcher.quick_ratio() > _LEAST_RATIO and (ratio := matcher.ratio()) > _LEAST_RATIO:
                score = ratio * (_WITHOUT_START if start else 1) + _PREFERENCE * (template in preferred)
                best = max(best, (score, -len(template), template))
    going_on = (template for template, wanted in parts.items() if found and wanted[: len(found)] == found)
    return best[2] or min(going_on, key=len, default=None)


def _as_texts(found: Sequence[str], wanted: Sequence[str]) -> tuple[str, str]:
    """Return both paths with a mark in the place of each parameter of `wanted`."""
    places = {i for i, part in enumerate(wanted) if part[0] == "{"}
    marked = ["*" if i in places else part for i, part in enumerate(found)]
    return "/".join(marked), "/".join("*" if i in places else part for i, part in enumerate(wanted))
