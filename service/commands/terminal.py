"""Terminal: every line that commands print, with foreign text escaped, and the progress of what takes seconds.

Invariants: Nothing else in the commands prints. Progress is drawn on stderr, and only where that is a terminal.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from service.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


def say(line: str, *, err: bool = False) -> None:
    """Print one line."""
    typer.echo(printable(line), err=err)


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: brackets and colons in the names of files are no markup."""
    from rich.console import Console  # it takes 0.1 s to import

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


@contextlib.contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what the command does now and since when; the next step replaces it."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    where: Any = dict(console=console(stderr=True), redirect_stdout=False, redirect_stderr=False)
    with Progress(*columns, **where, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("")
        yield lambda text: progress.update(task, description=printable(text), refresh=True)
