"""Progress: a bar on stderr, for whoever asks for one.

Laws: rich is imported only here and only then; stdout stays the caller's; a bar without a known total still counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def progress_bar(layer: str, items: Any, *, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """Gives what to call for each item that is done; the total is the length of `items` where it has one."""
    if not is_wanted:
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(layer, total=len(items) if hasattr(items, "__len__") else None)
        yield lambda: bar.advance(task)
