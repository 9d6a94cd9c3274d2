"""Machine: what was measured and on what, without which figures mean little."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.subjects import ROOT, Subject
from service.settings import usable_cores

# Above this load average other programs were running when the measurement began.
QUIET_LOAD = 0.5
_PACKAGES = ("torch", "numpy", "uvicorn", "starlette", "fastapi", "safetensors")


def described() -> dict[str, Any]:
    """Return CPU, cores, memory, system, versions, and the load average before the measurement."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line]
    return {
        "cpu": cpus[0].split(":", 1)[1].strip() if cpus else platform.machine(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
        "wrk": _first_line("wrk", "-v"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """Return the short commit, with a + if what is measured differs from it."""
    git = ("git", "-C", str(ROOT))
    changed = _first_line(*git, "status", "--porcelain", "--", "service", "benchmarks", ":!benchmarks/results")
    return (_first_line(*git, "rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def package_version(subject: Subject) -> str | None:
    """Return the version of a peer's package in its own environment."""
    program = f"import importlib.metadata as m; print(m.version({subject.package!r}))"
    return _first_line(subject.command[0], "-c", program) if subject.package else None


def _first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return (done.stdout.splitlines() or [""])[0].strip()
