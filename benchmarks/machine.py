"""Machine: the hardware and the code that figures are of."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from service.settings import usable_cores

ROOT = Path(__file__).parents[1]
# Instruction sets that decide how fast torch multiplies, as Linux names them.
_ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")


def hardware() -> dict[str, Any]:
    """Return CPU, instruction sets, cores, memory, and the version of Python.

    The name of a virtual machine's CPU may be that of several generations, so its family and model stand behind it.
    """
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    about = {name.strip(): value.strip() for name, _, value in lines}
    which = [f"{key.split()[-1]} {about[key]}" for key in ("cpu family", "model") if key in about]
    return {
        "cpu": " ".join([about.get("model name", platform.machine()), *which]),
        "isa": " ".join(name for name in _ISA if name in about.get("flags", "").split()),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Return the last commit that changed what is measured, with a + if the files differ from it; "unknown" without git."""
    git, code = ("git", "-C", str(ROOT)), ("--", "service", "benchmarks", ":!benchmarks/results")
    try:
        changed = first_line(*git, "status", "--porcelain", *code)
        return (first_line(*git, "log", "-1", "--format=%h", *code) or "unknown") + ("+" if changed else "")
    except OSError:
        return "unknown"


def first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return (done.stdout.splitlines() or [""])[0].strip()
