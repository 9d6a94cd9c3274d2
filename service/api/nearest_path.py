"""Nearest path: finds the route that a path which no route takes probably means.

Invariants: it runs only after the routing has failed. It returns templates of our own routes, never a part of the caller's path.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_MAX_COMPARED = 128


def nearest_path(path: str, templates: Iterable[str], least_ratio: float) -> str | None:
    """Return the shortest template that goes on from `path`, whatever its case and the slashes between its segments.

    If none does, return the template of the nearest spelling, whose ratio of equal letters is at least `least_ratio`, or else
    one that ends like `path`; None if there is none.
    """
    parts = [part for part in path[:_MAX_COMPARED].lower().split("/") if part]
    parts = parts[parts[:1] == ["api"] :]
    found, texts = "/".join(parts), {_filled(template, parts): template for template in templates}
    longer = [text for text in texts if f"{text}/".startswith(f"{found}/")]
    same_end = [text for text in texts if text.endswith(f"/{found}")]
    near = longer or difflib.get_close_matches(found, texts, 1, least_ratio) or same_end
    return texts[min(near, key=len)] if near else None


def _filled(template: str, parts: Sequence[str]) -> str:
    """Return the template with what the path has in the places of its parameters."""
    wanted = template.strip("/").split("/")
    return "/".join(parts[i] if part[:1] == "{" and i < len(parts) else part for i, part in enumerate(wanted))
