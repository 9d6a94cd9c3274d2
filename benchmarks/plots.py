"""python -m benchmarks.plots: the pictures of `docs/plots`, from the results (in an environment of its own: `make report`).

Laws: the same figures give the same bytes; each picture carries the digest of what it draws.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.plotted import PLOTS, digest, drawn
from benchmarks.results import LATEST, load

DIRECTORY = Path(__file__).parents[1] / "docs" / "plots"
COLOURS = {"w1": "tab:blue", "w2": "tab:orange"}
TITLES = {"w1": "W1: lengths 8 to 256", "w2": "W2: 16 tokens"}
Rows = list[dict[str, Any]]


def _of(rows: Rows, work: str) -> Rows:
    return [row for row in rows if row["workload"] == work]


def _line(axes: Any, x: list[float], spreads: list[list[float]], **style: Any) -> None:
    """Medians, with the range over the rounds."""
    medians = [spread[0] for spread in spreads]
    below = [spread[0] - spread[1] for spread in spreads]
    above = [spread[2] - spread[0] for spread in spreads]
    axes.errorbar(x, medians, yerr=[below, above], marker="o", markersize=4, capsize=2, **style)


def offered(rows: Rows, panels: Any) -> None:
    for axes, work in zip(panels, COLOURS, strict=True):
        own = _of(rows, work)
        for figure, style in (("p50_ms", "-"), ("p99_ms", "--")):
            x = [row["offered_rps"][0] for row in own]
            label = figure.removesuffix("_ms")
            _line(axes, x, [row[figure] for row in own], color=COLOURS[work], linestyle=style, label=label)
        axes.set(title=TITLES[work], xlabel="offered requests/s", ylabel="latency, ms", yscale="log")
        axes.legend()


def batch(rows: Rows, panels: Any) -> None:
    for axes, work in zip(panels, COLOURS, strict=True):
        own = _of(rows, work)
        _line(axes, [row["point"] for row in own], [row["tok_s"] for row in own], color=COLOURS[work])
        axes.set(title=TITLES[work], xlabel="max_batch_requests", ylabel="tokens/s", xscale="log", ylim=(0, None))
        axes.set_xticks([row["point"] for row in own], [str(row["point"]) for row in own])
        axes.minorticks_off()


def concurrency(rows: Rows, panels: Any) -> None:
    for axes, work in zip(panels, COLOURS, strict=True):
        own = _of(rows, work)
        x = [row["point"] for row in own]
        _line(axes, x, [row["rps"] for row in own], color=COLOURS[work], label="requests/s")
        axes.set(title=TITLES[work], xlabel="callers", ylabel="requests/s", xscale="log", ylim=(0, None))
        other = axes.twinx()
        _line(other, x, [row["p99_ms"] for row in own], color="tab:gray", linestyle="--")
        other.set(ylabel="p99, ms (dashed)", yscale="log")
        axes.set_xticks(x, [str(point) for point in x])
        axes.minorticks_off()


DRAWERS: dict[str, Callable[[Rows, Any], None]] = {"offered": offered, "batch": batch, "concurrency": concurrency}


def main() -> None:
    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.hashsalt": "attention-service", "svg.fonttype": "none", "axes.grid": True, "font.size": 9}
    )
    parts = load(LATEST)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWERS.items():
        rows = drawn(parts, name)
        path = DIRECTORY / PLOTS[name].file
        if not rows:
            path.unlink(missing_ok=True)
            continue
        figure, panels = plt.subplots(1, len(COLOURS), figsize=(9, 3.2), layout="constrained")
        draw(rows, panels)
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Source": f"figures {digest(rows)}"})
        print(path.name)


if __name__ == "__main__":
    main()
