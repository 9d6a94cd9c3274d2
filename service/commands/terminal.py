"""Terminal: every line that commands print, with foreign text escaped, and the progress of what takes seconds.

Invariants: Nothing else in the commands prints. Progress is drawn on stderr, and only where that is a terminal.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from service.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


def say(line: str, *, err: bool = False) -> None:
    """Print one line."""
    typer.echo(printable(line), err=err)


def console() -> Console:
    """Return a console that prints text as it is: brackets and colons in the names of files are no markup."""
    from rich.console import Console  # it takes 0.1 s to import

    return Console(markup=False, emoji=False, highlight=False)


@contextlib.contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what the command does now; the next step replaces it."""
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, force_terminal=sys.stderr.isatty()).status("") as status:
        yield lambda text: status.update(Text(printable(text)))
