"""The service with faults planted in it, for what cannot be made from outside: `python -m tests.torture.planted serve …`.

Invariants: the service itself has no hook for any of this; what is planted stands in one variable, as JSON, and read here only:
`cost_s` (each request costs this much engine time, on whichever thread computes it), `executed` (a file that gets a line for
every request that an engine runs: its mark and when), `threads` (a file that gets a line for every batch: the name of the
thread that computes it), `inline` (false: the event loop's thread computes nothing), `raising` (requests with this mark raise),
`leak_bytes` (kept for ever, a request) and `leak_descriptors` (one for a hundred requests); `modules` (each one's `plant()` is
called in every worker before it starts: it puts back a fault that was mended, so that a figure can show that it would find it).
A request's mark is the first number of its query.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.torture.report import Row, at_least

VARIABLE = "TORTURE_PLANTS"
# The row that says that a figure took the path that most batches take, and the percent that show it on a busy machine.
INLINE, LEAST_INLINE = "batches computed on the event loop's thread", 5.0
# Percent of the clients that left in the queue whose request no engine runs.
LEAST_SPARED = 95
_KEPT: list[object] = []
_FILES: list[object] = []
# Slowly and to an end: found by the check, and never so many that nothing can be opened any more.
EACH, MAX_FILES = 100, 800
_NUMBER = itertools.count()


def main() -> None:
    from service.cli import main as command_line
    from service.supervisor import supervisor
    from service.supervisor.supervisor import Plan

    exec_supervisor = supervisor.exec_supervisor

    def exec_planted(plan: Plan, environment: Mapping[str, str]) -> NoReturn:
        python, _, _, *rest = plan.command
        exec_supervisor(dataclasses.replace(plan, command=(python, "-m", "tests.torture.planted", *rest)), environment)

    supervisor.exec_supervisor = exec_planted
    if "worker" in sys.argv[1:2]:
        _plant(json.loads(os.environ[VARIABLE]))
    command_line()


def _plant(plants: dict[str, Any]) -> None:
    for name in plants.get("modules", ()):
        importlib.import_module(name).plant()
    from service.attention.engine import Engine
    from service.attention.progress import current
    from service.batching.admission import QueueLimits

    if "cost_s" in plants:  # each request costs that, and a batch nothing besides
        defaults: Any = QueueLimits.__init__.__kwdefaults__
        defaults["overhead_flops"] = 0
    run, run_in_thread = Engine._run, Engine.run
    write, write_thread = _writer(plants.get("executed")), _writer(plants.get("threads"))

    def run_planted(engine: Engine, batch: Any) -> Any:
        marks = [float(work.call.query[(0,) * work.call.query.dim()]) for work in batch]
        now = time.monotonic()
        write("".join(f"{mark:g} {now:.6f}\n" for mark in marks))
        write_thread(f"{threading.current_thread().name}\n")
        if any(mark == plants.get("raising") for mark in marks):
            raise RuntimeError("a planted fault")
        cost_s = plants.get("cost_s", 0.0) * len(batch)
        time.sleep(cost_s)
        if (progress := current()) is not None:
            progress.seconds += cost_s  # processor time, which the engine measures, has no sleep in it
        for _ in batch:
            if plants.get("leak_bytes"):
                _KEPT.append(bytearray(os.urandom(16) * (plants["leak_bytes"] // 16)))
            if plants.get("leak_descriptors") and next(_NUMBER) % EACH == 0 and len(_FILES) < MAX_FILES:
                _FILES.append(Path("/dev/null").open("rb"))  # noqa: SIM115 (that is the leak)
        return run(engine, batch)

    Engine._run = run_planted  # type: ignore[method-assign, assignment]
    if not plants.get("inline", True):
        Engine.run = lambda engine, batch, **_: run_in_thread(engine, batch)  # type: ignore[method-assign]


def when_begun(executed: Path) -> dict[int, float]:
    """When an engine first began the request of each mark in an `executed` file."""
    begun: dict[int, float] = {}
    for line in executed.read_text(encoding="ascii").splitlines():
        mark, at = line.split()
        begun.setdefault(int(float(mark)), float(at))
    return begun


def never_executed(figure: int, what: str, executed: Path, left_at: dict[int, float], news_s: float) -> Row:
    """Of the clients that left before their batch began, and whose leaving was known by then, those that no engine ran."""
    begun = when_begun(executed)
    queued = [mark for mark, left in left_at.items() if begun.get(mark, float("inf")) > left + news_s]
    share = 100 * sum(mark not in begun for mark in queued) / len(queued) if queued else float("nan")
    what = f"of {len(queued):,} clients {what} before their batch began, never executed"
    return at_least(figure, what, share, LEAST_SPARED, " %")


def inline_share(path: Path) -> float:
    """Percent of the batches in a `threads` file that the event loop's thread computed."""
    names = path.read_text(encoding="ascii").split()
    return 100 * names.count(threading.main_thread().name) / max(1, len(names))


def _writer(path: str | None) -> Callable[[str], object]:
    if path is None:
        return lambda _: None
    return Path(path).open("a", encoding="ascii", buffering=1).write


if __name__ == "__main__":
    main()
