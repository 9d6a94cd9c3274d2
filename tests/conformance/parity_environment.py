"""The environment of the other systems (`make install-parity`), whose programs the conformance tests start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = ROOT / ".venv-parity" / "bin" / "python"
PYTHON = str(OWN) if OWN.exists() else sys.executable


def package(name: str) -> Path | None:
    """The directory of an installed package."""
    if OWN.exists():
        return next((ROOT / ".venv-parity").glob(f"lib/*/site-packages/{name}"), None)
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def run_program(name: str, directory: Path, **variables: str) -> None:
    """Run a program of this directory, which writes its answers into `directory`."""
    environment = {
        **os.environ,
        "KERAS_HOME": str(directory),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    command = [PYTHON, str(ROOT / "tests" / "conformance" / name), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
