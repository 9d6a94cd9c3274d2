"""Machine: what was measured on and with, without which figures mean little."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.subjects import ROOT, Subject
from service.settings import usable_cores

# Above this somebody else was at work when the run began.
QUIET_LOAD = 0.5


def described() -> dict[str, Any]:
    """CPU, cores, memory, system, versions, and how busy it is before anything is measured."""
    names = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line]
    packages = ("torch", "numpy", "uvicorn", "starlette", "fastapi", "safetensors")
    return {
        "cpu": names[0].split(":", 1)[1].strip() if names else platform.machine(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "wrk": _first_line("wrk", "-v"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """Short, with a + where what is measured differs from it."""
    head = _first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    changed = _first_line("git", "-C", str(ROOT), "status", "--porcelain", "--", "service", "benchmarks/*.py")
    return (head or "unknown") + ("+" if changed else "")


def package_version(subject: Subject) -> str | None:
    """Of a peer, in its own environment."""
    if subject.package is None:
        return None
    ask = f"import importlib.metadata as m; print(m.version({subject.package!r}))"
    return _first_line(subject.python, "-c", ask) or None


def _first_line(*command: str) -> str:
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return ""
    return (told.stdout.splitlines() or [""])[0].strip()
