"""Terminal: the console to which commands print."""

from __future__ import annotations

from rich.console import Console


def console() -> Console:
    """Return a console that prints text as it is: brackets and colons in the names of files are no markup."""
    return Console(markup=False, emoji=False, highlight=False)
