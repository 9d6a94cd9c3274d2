"""`python -m tests.torture`: measures the figures of docs/internals/reliability.md and prints them beside their targets.

    --figures 1,5      some of them
    --short            some five minutes in all; else an hour and a half, on a machine that does nothing else
    --soak-s 3600      a longer soak
    --write            keep the table in docs/internals/reliability.md (the full form does)

Exit code 1 if a target is missed; what broke a rule lies in the directory that is named at the end.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.torture import machine
from tests.torture.figure import Form
from tests.torture.report import Row, none_of, table, write_page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "reliability.md"
FIGURES = {
    1: "fuzz", 2: "sigterm", 3: "overload", 4: "soak", 5: "isolation", 6: "disconnects", 7: "trickle", 8: "bombs",
    9: "large_bodies", 10: "checkpoints", 11: "layer_race", 12: "large_text", 13: "unread_log", 14: "run_directory",
    15: "documents", 16: "half_close", 17: "whales", 18: "one_key", 19: "slow_readers", 20: "new_worker", 21: "log_flood",
}  # fmt: skip
SHORT_SHARE = 0.02


def main() -> int:
    asked = _arguments()
    directory = Path(tempfile.mkdtemp(prefix="torture-"))
    tool = shutil.which("schemathesis", path=ROOT / ".venv-fuzz" / "bin")
    form = Form(
        share=SHORT_SHARE if asked.short else asked.share,
        soak_s=asked.soak_s or (40 if asked.short else 600),
        seed=asked.seed,
        directory=directory,
        schema_tool=None if tool is None else Path(tool),
    )
    run = f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}, {'short' if asked.short else 'full'}"
    rows: list[Row] = []
    for number in asked.figures:
        rows += _measured(number, form)
    _say("\n".join(["", *table(rows, run)]))
    if asked.write or not (asked.short or asked.figures_chosen):
        write_page(PAGE, rows, run, machine.described())
    is_missed = any(row.is_met is False for row in rows)
    if is_missed:
        _say(f"\nwhat broke a rule lies in {directory}")
    else:
        shutil.rmtree(directory)
    return int(is_missed)


def _measured(number: int, form: Form) -> list[Row]:
    started = time.monotonic()
    rows: list[Row] = []

    def told(row: Row) -> None:
        rows.append(row)
        _say(row.told(f"{time.monotonic() - started:.0f} s"))

    try:
        for row in importlib.import_module(f"tests.torture.figures.{FIGURES[number]}").measure(form):
            told(row)
    except Exception as error:  # noqa: BLE001 (a service that is gone must not keep the other figures from being measured)
        traceback.print_exc()
        told(none_of(number, "what kept the figure from being measured", [f"{type(error).__name__}: {error}"]))
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__.splitlines()[0])
    parser.add_argument("--figures", type=_numbers, default=None, help="for example 1,5")
    parser.add_argument("--short", action="store_true", help="a form of a few minutes in all")
    parser.add_argument("--share", type=float, default=1.0, help="of every count (1)")
    parser.add_argument("--soak-s", type=float, default=None, help="length of the soak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"keep the table in {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    asked.figures_chosen = asked.figures is not None
    asked.figures = asked.figures or list(FIGURES)
    return asked


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if unknown := set(numbers) - set(FIGURES):
        raise argparse.ArgumentTypeError(f"there is no figure {sorted(unknown)}")
    return numbers


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
