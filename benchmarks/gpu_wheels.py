"""python -m benchmarks.gpu_wheels: gather the wheels that `make gpu` installs on a machine without a network.

Invariants: the folder holds what the service, its benchmark and the tests marked `gpu` need besides torch and NumPy, at the
versions of this environment, for Python 3.12 on x86-64 Linux; it stays under MAX_MIB, else the program fails.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu_start import PYTHON, WHEELS, needed_packages

MAX_MIB = 64
# What is imported there besides the service's own needs; the service is not installed, because it runs from the checkout.
TESTING = frozenset({"pytest-timeout", "hypothesis"})
# The machine has torch and NumPy, and torch brings the rest of them.
LEFT_OUT = frozenset({"torch", "numpy"})
# pip takes each of these for what it says and not for older ones.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
_MARKERS = {"python_version": "{}.{}".format(*PYTHON), "python_full_version": "{}.{}.0".format(*PYTHON), "extra": ""}


def pins() -> list[str]:
    """Return `name==version` of all wheels, by the metadata of what is installed here."""
    found = set[str]()
    # Not the metadata of the installed service, which an editable install leaves as it was when pyproject.toml gets a dependency.
    waiting = list(needed_packages() | TESTING)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found | LEFT_OUT:
            found.add(name)
            waiting += _needs(name)
    return [f"{name}=={distribution(name).version}" for name in sorted(found)]


def _needs(name: str) -> Iterator[str]:
    for text in distribution(name).requires or ():
        need = Requirement(text)
        if need.marker is None or need.marker.evaluate(_MARKERS):
            yield need.name


def gather(folder: Path) -> float:
    """Download the wheels into the folder, which is emptied before; return their size in MiB."""
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    options += ["--python-version", "{}.{}".format(*PYTHON), *platforms, "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *pins()], check=True)
    return sum(file.stat().st_size for file in folder.iterdir()) / 2**20


def main() -> int:
    size = gather(WHEELS)
    print(f"{WHEELS.name}: {len(list(WHEELS.iterdir()))} wheels, {size:.1f} MiB")
    if size > MAX_MIB:
        print(f"{WHEELS.name} has more than {MAX_MIB} MiB", file=sys.stderr)
    return 1 if size > MAX_MIB else 0


if __name__ == "__main__":
    sys.exit(main())
