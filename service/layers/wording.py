"""Wording of layer errors: quotes and bounds text from files, and replaces text of other libraries.

Invariants: Text of a hostile file cannot lengthen a message, change a terminal or look like our words. A name from a file is
quoted, in ASCII and cut. A list is cut and says how many names are left out. A message has at most `MAX_MESSAGE` characters. It
contains no path and no text of another library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from service.attention.spec import LayerSpec
from service.errors import LayerError

MAX_MESSAGE = 500
MAX_NAME = 60
MAX_COPIED = 200  # of a name that a caller copies into an option
MAX_NAMED = 4


def bounded(text: str, limit: int = MAX_MESSAGE) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(name: str, limit: int = MAX_NAME) -> str:
    """Return one name from a file, safe for a terminal: control and direction marks are escaped, long names cut."""
    return bounded(ascii(name[: limit * 2]), limit)


def listed(names: Iterable[str], limit: int = MAX_NAME) -> str:
    """Return the first few of `names` and how many more there are."""
    every = list(names)
    rest = f" and {len(every) - MAX_NAMED} more" if len(every) > MAX_NAMED else ""
    return ", ".join(quoted(name, limit) for name in every[:MAX_NAMED]) + rest


def shape_text(shape: Iterable[int]) -> str:
    return bounded(f"[{', '.join(map(str, shape))}]", MAX_NAME)


def parts_text(spec: LayerSpec) -> str:
    """Return the layer's parts in words, or "" if it has only projections."""
    found = [f"{spec.num_kv_heads} key/value heads"] if spec.num_kv_heads != spec.num_heads else []
    if spec.rotary is not None:
        found.append(f"rotary positions ({spec.rotary.layout}, {spec.rotary.width} of {spec.head_width} features)")
    if spec.norm is not None:
        found.append(f"{spec.norm.kind} norm of query and key over the {spec.norm.over}")
    if spec.relative_bias is not None:
        found.append(f"relative bias of {spec.relative_bias.buckets} buckets")
    if spec.window is not None:
        left, right = ("open" if side is None else side for side in (spec.window.left, spec.window.right))
        found.append(
            "causal mask" if (left, right) == ("open", 0) else f"window of {left} keys before and {right} after"
        )
    if spec.softcap is not None:
        found.append(f"softcap {spec.softcap:g}")
    found += ["sinks"] * spec.has_sinks
    return ", ".join(found)


@contextlib.contextmanager
def about(subject: str) -> Iterator[None]:
    """Prefix every LayerError raised inside with `subject`, and bound its message."""
    try:
        yield
    except LayerError as error:
        # In Python 3.13 the traceback of an error that a generator turns into another refers back to it, and it holds tensors.
        raise type(error)(bounded(f"{subject}: {error.message}")) from error.with_traceback(None)


@contextlib.contextmanager
def translated(sentence: str, kind: type[LayerError] = LayerError) -> Iterator[None]:
    """Turn any exception into a LayerError: on broken bytes zipfile, numpy and torch raise a dozen unrelated types."""
    try:
        yield
    except LayerError:
        raise
    except Exception as error:  # noqa: BLE001 (it is raised as another one)
        raise kind(sentence) from error.with_traceback(None)  # as in `about`
