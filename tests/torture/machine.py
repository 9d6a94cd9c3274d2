"""Machine: what the figures were measured on, without which they mean little."""

from __future__ import annotations

import platform
from importlib.metadata import version

from benchmarks.machine import hardware


def described() -> str:
    """CPU, usable cores, memory, system and versions in one line."""
    found = hardware()
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "uvicorn", "starlette"))
    return (
        f"{found['cpu']}, {found['cores']} usable cores, {found['memory_gib']} GiB, {platform.system()} {platform.release()}, "
        f"Python {found['python']}, {packages}"
    )
