"""Figure 10: mutated checkpoints given to the loader: of our own stored form, and of a foreign one given to the importer.

Laws: the loader runs in a process of its own (`load_mutants.py`), so that a crash or a hang is seen for what it is; each file
is refused with a LayerError that has our own words, or loads as the very layer that it was before.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

from tests.torture.figure import Form
from tests.torture.report import Row, none_of, not_yet

FILES = 20_000
PROCESS_S = 1800


def measure(form: Form) -> Iterator[Row]:
    room = form.room("checkpoints")
    num = form.count(FILES, 200)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.torture.load_mutants", str(room), str(form.seed), str(num)],
        stdout=subprocess.PIPE,
    )
    told = json.loads(process.communicate(timeout=PROCESS_S)[0] or "{}")
    died = [] if process.returncode == 0 else [f"the loader ended with {_how(process.returncode)}; the file is {room}"]
    yield none_of(10, f"{num:,} mutated checkpoints: deaths, hangs over 5 s", died + told.get("hangs", []))
    yield none_of(
        10, "errors other than LayerError, foreign words, layers that changed", told.get("wrong", ["no answer"])
    )
    counts = told.get("counts", {})
    yield Row(
        10, "what became of them", "", ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items())), is_met=True
    )
    yield not_yet(10, "the old layer keeps serving when its reload fails (F14)", "needs the admin routes")


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else str(code)
