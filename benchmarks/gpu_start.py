"""python benchmarks/gpu_start.py: say what this machine lacks for `make gpu`, or make an environment and run `benchmarks.gpu`.

Invariants: it imports the standard library alone, because the machine may lack the rest; it needs no network; the
environment sees the packages of the Python that starts it, so torch and NumPy are the machine's own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".gpu-wheels"
ENVIRONMENT = ROOT / ".venv-gpu"
# The wheels are compiled for this Python alone.
PYTHON = (3, 12)
TORCH = (2, 11)
# Eight workers, the load generator and the tests; on the device the layers, and a context a worker.
MEMORY_GIB, DEVICE_GIB = 24, 8


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What the start needs to know; `torch` None = not installed, `device_gib` None = torch finds no CUDA device."""

    python: tuple[int, int]
    has_pip: bool
    has_numpy: bool
    torch: tuple[int, int] | None
    device_gib: float | None
    memory_gib: float
    wheels: frozenset[str]
    """Names of the packages that have a wheel."""


# In a process of its own, because it opens the device.
_PROBE = """
import torch
print(*torch.__version__.split(".")[:2], torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else "")
"""


def this_machine(wheels: Path) -> Machine:
    told = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False).stdout.split()
    memory = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    return Machine(
        python=sys.version_info[:2],
        has_pip=importlib.util.find_spec("pip") is not None,
        has_numpy=importlib.util.find_spec("numpy") is not None,
        torch=(int(told[0]), int(told[1])) if told else None,
        device_gib=int(told[2]) / 2**30 if told[2:] else None,
        memory_gib=int(memory[1]) / 2**20 if memory else 0.0,
        wheels=frozenset(_name(file.name.split("-")[0]) for file in wheels.glob("*.whl")),
    )


def lacks(machine: Machine, needed: frozenset[str]) -> list[str]:
    """Return one sentence for each thing that the machine lacks; `needed` are the packages that the wheels must bring."""
    found = []
    if machine.python != PYTHON:
        found.append(
            "Python {}.{} is needed, because the wheels are for it; this is {}.{}.".format(*PYTHON, *machine.python)
        )
    found += ["pip is needed, to install the wheels."] * (not machine.has_pip)
    found += ["NumPy is needed."] * (not machine.has_numpy)
    if machine.torch is None or machine.torch < TORCH:
        has = "none" if machine.torch is None else "{}.{}".format(*machine.torch)
        found.append("torch {}.{} or newer with CUDA is needed; this Python has {}.".format(*TORCH, has))
    if machine.device_gib is None:
        found.append("A CUDA device is needed; torch finds none.")
    elif machine.device_gib < DEVICE_GIB:
        found.append(f"{DEVICE_GIB} GiB of the device's memory are needed; {machine.device_gib:.1f} are free.")
    if machine.memory_gib < MEMORY_GIB:
        found.append(f"{MEMORY_GIB} GiB of memory are needed; {machine.memory_gib:.1f} are free.")
    if missing := sorted(needed - machine.wheels):
        found.append(
            f"Wheels are missing ({', '.join(missing)}): `make gpu-wheels` gathers them where there is a network."
        )
    return found


def needed_packages() -> frozenset[str]:
    """Return what the service imports besides torch and NumPy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {_name(re.split(r"[^\w.-]", line)[0]) for line in project["dependencies"]}
    return frozenset(names | {"pytest", "httpx2"}) - {"torch", "numpy"}


def make_environment(directory: Path, wheels: Path) -> Path:
    """Make an environment of these wheels above the packages of this Python; return its Python.

    This Python may be one of an environment itself, whose packages `--system-site-packages` would leave out. So a .pth file names
    where they are; wheels of the new environment come first.
    """
    venv.EnvBuilder(clear=True, symlinks=True).create(directory)
    python, files = directory / "bin" / "python", sorted(map(str, wheels.glob("*.whl")))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-index", "--no-deps", *files], check=True)
    (site,) = directory.glob("lib/python*/site-packages")
    above = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "machine.pth").write_text("".join(f"{path}\n" for path in above), encoding="utf-8")
    return python


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    if missing := lacks(this_machine(WHEELS), needed_packages()):
        print("`make gpu` cannot go on here (`make gpu DRY=1` needs no GPU):", *missing, sep="\n- ", file=sys.stderr)
        return 2
    command = [str(make_environment(ENVIRONMENT, WHEELS)), "-m", "benchmarks.gpu", *sys.argv[1:]]
    os.chdir(ROOT)
    return os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
