"""Console: prints text to the terminal as it is; brackets and colons in the names of files are no markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console  # it takes 0.1 s to import

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
