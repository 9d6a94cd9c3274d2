"""Report: the verdict as one JSON object and as lines to read.

Laws: a report tells what it was measured on and with which options, without the key; it appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from attention_load.plan import Plan
from attention_load.tally import Tally
from attention_load.verdict import Verdict, rounded


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What the verdict does not know: `prepared` is what `Load.prepare` told, None where it failed."""

    url: str
    workers: int
    generator: str
    is_generator_busy: bool
    prepared: Mapping[str, Any] | None


def generator_machine() -> dict[str, Any]:
    """Of the process that judges; workers may be elsewhere."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        told = []
    names = [line.split(":", 1)[1].strip() for line in told if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def full_report(plan: Plan, verdict: Verdict, tally: Tally, facts: Facts) -> dict[str, Any]:
    prepared = facts.prepared or {}
    return {
        "verdict": verdict.word,
        "missed": verdict.missed,
        "objectives": [dataclasses.asdict(objective) for objective in verdict.objectives],
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "shape": plan.shape,
        "judged": verdict.judged.to_report(),
        "whole": verdict.whole.to_report(),
        "phases": [
            {"name": window.phase.name, "users": window.phase.users, "is_judged": window.phase.is_judged}
            | measured.to_report()
            for window, measured in verdict.phases
        ],
        "knee": _knee(verdict),
        "pacing": _pacing(plan, verdict),
        "statuses": dict(sorted(tally.statuses.items())),
        "requests": dict(sorted(tally.names.items())),
        "bits": {"compared": tally.checked, "wrong": tally.wrong, "references": prepared.get("references")},
        "float64": prepared.get("float64"),
        "examples": tally.examples,
        "target": {"url": facts.url, "layers": prepared.get("layers"), "numerics": prepared.get("numerics")},
        "machine": generator_machine(),
        "generator": facts.generator,
        "workers": facts.workers,
        "is_generator_busy": facts.is_generator_busy,
        "options": plan.to_report(),
    }


def _knee(verdict: Verdict) -> dict[str, Any] | None:
    if verdict.knee is None:
        return None
    window, measured = verdict.phases[verdict.knee.number]
    return {"users": window.phase.users, "is_passed": verdict.knee.is_passed, **measured.to_report()}


def _pacing(plan: Plan, verdict: Verdict) -> dict[str, Any] | None:
    """How much of what paced users should have sent they did send: less than all is latency that no percentile shows."""
    if not plan.pace:
        return None
    judged = [(window, measured) for window, measured in verdict.phases if window.phase.is_judged]
    planned = sum(window.phase.users * plan.pace * measured.seconds for window, measured in judged)
    sent = sum(measured.slot.total for _, measured in judged)
    return {"planned": round(planned), "sent": sent, "ratio": rounded(sent / planned) if planned else None}


def lines(report: Mapping[str, Any]) -> list[str]:
    """The verdict to read; the first word of the last line is it."""
    judged, bits = report["judged"], report["bits"]
    told = [
        f"{report['shape']} against {report['target']['url']}: {judged['requests']} requests judged in {judged['seconds']:g} s",
        f"{judged['goodput_per_s']:g} good/s, p50 {judged['p50_ms']} ms, p95 {judged['p95_ms']} ms, p99 {judged['p99_ms']} ms",
        f"bits: {bits['compared']} answers compared with {bits['references']} references, {bits['wrong']} wrong",
    ]
    if (check := report["float64"]) and (check["checked"] or check["not_checked"]):
        told.append(f"float64: {check['checked']} references checked, worst at {check['worst']:.2g} of the tolerance")
        told += [f"  not checked: {layer}" for layer in check["not_checked"]]
    if knee := report["knee"]:
        beyond = "" if knee["is_passed"] else " (the ramp ended before it bent: raise --peak-users)"
        told.append(f"knee: {knee['users']} users, {knee['goodput_per_s']:g} good/s, p99 {knee['p99_ms']} ms{beyond}")
    if report["is_generator_busy"]:
        told.append("the generator was busy above 90 % of a core: latencies are partly its own, use more workers")
    told += [
        f"  {'met   ' if objective['is_met'] else 'MISSED'} {objective['name']}: {objective['measured']} "
        f"(wanted {objective['wanted']})"
        for objective in report["objectives"]
    ]
    told += [f"  example: {example}" for example in report["examples"]]
    told.append(f"{report['verdict']}{': ' + ', '.join(report['missed']) if report['missed'] else ''}")
    return told


def write_report(report: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    beside.replace(path)
