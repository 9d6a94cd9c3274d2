"""python -m benchmarks.plots: draw `docs/plots` from the results, in the environment with matplotlib (`make report`).

Invariants: the same figures give the same bytes; a picture names its processor and code, and whether they are not those of the
newest table; it carries the digest of what it shows, so a test finds an outdated one.
Only `main` needs matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import LATEST, Part, difference, load
from benchmarks.summary import rows

DIRECTORY = Path(__file__).parents[1] / "docs" / "plots"
COLOURS = {"w1": "tab:blue", "w2": "tab:orange"}
TITLES = {"w1": "W1: lengths 8 to 256", "w2": "W2: 16 tokens"}
Rows = list[dict[str, Any]]


def _line(axes: Any, found: Rows, x: str, y: str, **style: Any) -> None:
    """Draw medians with the quartiles as error bars."""
    medians = [row[y][0] for row in found]
    errors = [[row[y][0] - row[y][1] for row in found], [row[y][2] - row[y][0] for row in found]]
    across = [row[x] if x == "point" else row[x][0] for row in found]
    axes.errorbar(across, medians, yerr=errors, marker="o", markersize=4, capsize=2, **style)


def _offered(found: Rows, axes: Any, colour: str) -> None:
    for label, style in (("p50", "-"), ("p99", "--")):
        _line(axes, found, "offered_rps", f"{label}_ms", color=colour, linestyle=style, label=label)
    axes.set(xlabel="offered requests/s", ylabel="latency, ms", yscale="log")
    axes.legend()


def _batch(found: Rows, axes: Any, colour: str) -> None:
    _line(axes, found, "point", "tok_s", color=colour)
    _points(axes, found, xlabel="max_batch_requests", ylabel="tokens/s")


def _concurrency(found: Rows, axes: Any, colour: str) -> None:
    _line(axes, found, "point", "rps", color=colour, label="requests/s")
    _points(axes, found, xlabel="callers", ylabel="requests/s")
    other = axes.twinx()
    _line(other, found, "point", "p99_ms", color="tab:gray", linestyle="--")
    other.set(ylabel="p99, ms (dashed)", yscale="log")


def _points(axes: Any, found: Rows, **labels: str) -> None:
    axes.set(xscale="log", ylim=(0, None), **labels)
    axes.set_xticks([row["point"] for row in found], [str(row["point"]) for row in found])
    axes.minorticks_off()


class Plot(NamedTuple):
    """`draw` takes the rows of one workload, the axes and the colour."""

    file: str
    figures: tuple[str, ...]
    draw: Callable[[Rows, Any, str], None]


PLOTS = {
    "offered": Plot("latency-over-load.svg", ("offered_rps", "p50_ms", "p99_ms"), _offered),
    "batch": Plot("throughput-by-batch.svg", ("tok_s",), _batch),
    "concurrency": Plot("throughput-by-callers.svg", ("rps", "p99_ms"), _concurrency),
}


def drawn(parts: Mapping[str, Part], name: str) -> Rows:
    """Return the rows of one plot with the figures that it draws."""
    wanted = ("workload", "point", *PLOTS[name].figures)
    found = [row for row in rows(parts[name].samples) if row["subject"] == "service"] if name in parts else []
    return [{key: row[key] for key in wanted} for row in found if all(key in row for key in wanted)]


def heading(parts: Mapping[str, Part], name: str) -> str:
    """Return what stands above one plot: whether it may not be compared with the newest table, then processor, code and day."""
    return " · ".join(filter(None, [difference(parts[name], parts).upper(), parts[name].origin]))


def digest(found: Rows, above: str) -> str:
    return hashlib.sha256(json.dumps([above, found], sort_keys=True).encode()).hexdigest()[:16]


def main() -> None:
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("svg")
    style = {"svg.hashsalt": "attention-service", "svg.fonttype": "none", "axes.grid": True, "font.size": 9}
    mpl.rcParams.update(style)
    parts = load(LATEST)
    for name, plot in PLOTS.items():
        if not (found := drawn(parts, name)):
            (DIRECTORY / plot.file).unlink(missing_ok=True)
            continue
        above = heading(parts, name)
        figure, panels = plt.subplots(1, len(COLOURS), figsize=(9, 3.2), layout="constrained")
        for axes, (work, colour) in zip(panels, COLOURS.items(), strict=True):
            axes.set(title=TITLES[work])
            plot.draw([row for row in found if row["workload"] == work], axes, colour)
        figure.suptitle(above, fontsize="medium", color="tab:red" if difference(parts[name], parts) else "black")
        source = f"figures {digest(found, above)}"
        figure.savefig(DIRECTORY / plot.file, metadata={"Date": None, "Creator": None, "Source": source})
        print(plot.file)


if __name__ == "__main__":
    main()
