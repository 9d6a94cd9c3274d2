"""Console: prints text to the terminal as it is; brackets and colons in the names of files are no markup.

Invariant: A name that is not UTF-8 is printed with backslash escapes, on stdout as Python does on stderr.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console  # it takes 0.1 s to import

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
