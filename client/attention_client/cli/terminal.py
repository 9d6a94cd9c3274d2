"""Terminal: what the commands print, and the progress that a person sees.

Invariant: foreign text (a server's, the name or the metadata of a file, an argument) reaches the terminal only through
`printable`: `Screen` and `complain` apply it to text; who makes a Text or a Table for a Screen applies it first.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import typer
from rich.console import Console
from rich.live import Live

# Controls (C0, C1), what reorders text, line and paragraph separators, halves of characters, and what XML cannot hold.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
PATIENCE_S = 2.0
Counted: TypeAlias = Callable[[Iterable[Any]], Iterator[Any]]


def printable(text: str) -> str:
    r"""Return the text on one line, its control characters as `\\u001b`, which JSON reads as the same text."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Screen(Console):
    """Prints text as it is, but for control characters: brackets and colons in the names of files are no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(x) if isinstance(x, str) else x for x in objects), **options)


def complain(message: str) -> None:
    """Print one line on stderr."""
    typer.echo(printable(f"attention: {message}"), err=True)


@contextlib.contextmanager
def progress(what: str, screen: Screen, clock: Callable[[], float] = time.monotonic) -> Iterator[Counted]:
    """Yield a function that passes items on; after two seconds a line counts them, only on a terminal, and in the end it goes."""
    began, done = clock(), 0

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        nonlocal done
        for item in items:
            yield item
            done += 1

    def shown() -> str:
        waited_s = clock() - began
        return f"{done} {what}, {waited_s:.0f} s" if waited_s > PATIENCE_S else ""

    # On the screen that is printed to, if a person sees it: lines are then printed above the count.
    watched = screen if screen.file.isatty() else Screen(stderr=True)
    live = Live(console=watched, get_renderable=shown, transient=True, redirect_stdout=False, redirect_stderr=False)
    with live if watched.file.isatty() else contextlib.nullcontext():
        yield counted
