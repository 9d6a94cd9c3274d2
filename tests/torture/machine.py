"""Machine: what the figures were measured on, without which they mean little."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from service.settings import usable_cores


def described() -> str:
    """CPU, usable cores, memory, system and versions in one line."""
    names = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line]
    cpu = names[0].split(":", 1)[1].strip() if names else platform.machine()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "uvicorn", "starlette"))
    return (
        f"{cpu}, {usable_cores()} usable cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {packages}"
    )
