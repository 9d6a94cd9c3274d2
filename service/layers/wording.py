"""Wording of layer errors: quotes and bounds text from files, and replaces text of other libraries.

Invariants: Text of a hostile file cannot lengthen a message, change a terminal or look like our words. A name from a file is
quoted, in ASCII and cut. A list is cut and says how many names are left out. A message has at most `MAX_MESSAGE` characters. It
contains no path and no text of another library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from service.attention.spec import LayerSpec, Window
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
    rotary, norm, table, window = spec.rotary, spec.norm, spec.relative_bias, spec.window
    is_causal = window == Window(None, 0)
    found = (
        spec.num_kv_heads != spec.num_heads and f"{spec.num_kv_heads} key/value heads",
        rotary and f"rotary positions ({rotary.layout}, {rotary.width} of {spec.head_width} features)",
        norm and f"{norm.kind} norm of query and key over the {norm.over}",
        table and f"relative bias of {table.buckets} buckets",
        window and ("causal mask" if is_causal else f"window of {window.left} keys before and {window.right} after"),
        spec.softcap and f"softcap {spec.softcap:g}",
        spec.has_sinks and "sinks",
    )
    return ", ".join(str(text) for text in found if text)


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
