"""Subjects: what is measured, and how each is started.

Invariants: a subject is a value; the service starts as users start it, with default settings; a peer has the settings with
which it was fastest; a subject is left out where `wires` lacks the form of a workload.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.wires import Wire, echo_wires, plain_wires, service_wires, triton_wires
from benchmarks.workloads import TOLERANCE
from service.settings import usable_cores

ROOT = Path(__file__).parents[1]
LAYER = "bench"
BOUND, SERVICE, ECHO = "bound", "service", "echo"


class SubjectFailed(Exception):
    """The subject did not start, refused a correct request, answered wrongly or not at all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """In `command`, `{port}`, `{layers}` (the layer directory) and `{source}` (the layer's weights) are replaced.

    A subject with `one_form` serves the form that the environment variable FORM names, so each form has its own start. One with
    `polls` takes CPU time while idle. `package` is the one whose version is recorded.
    """

    name: str
    command: tuple[str, ...]
    ready_path: str
    wires: Mapping[str, Wire]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: str = "default"
    package: str | None = None
    one_form: bool = False
    polls: bool = False
    tolerance: float = TOLERANCE


def service(name: str = SERVICE, tolerance: float = TOLERANCE, **settings: object) -> Subject:
    """Return this service, with settings by their names in `service/settings.py`."""
    return Subject(
        name,
        (sys.executable, "-m", "service", "serve", "--port", "{port}", "--layers-dir", "{layers}"),
        "/readyz",
        service_wires(LAYER),
        {f"ATTENTION_{key.upper()}": str(value) for key, value in settings.items()},
        _text(settings),
        tolerance=tolerance,
    )


def echo(processes: int = 0) -> Subject:
    """Return the echo, with as many processes as the service has by default."""
    num = processes or usable_cores()
    command = (sys.executable, "-m", "benchmarks.echo", "{port}", str(num))
    return Subject(ECHO, command, "/", echo_wires(LAYER), settings=f"{num} processes", tolerance=math.inf)


def _peer(name: str, program: str, package: str | None, **environment: object) -> Subject:
    """Return a program of `peers/`, with one torch thread a process, which is the fastest for all of them."""
    python = str(ROOT / ".venv-peers" / program / "bin" / "python") if package else sys.executable
    command = (python, str(ROOT / "benchmarks" / "peers" / f"{program}_app.py"), "{port}", "{source}")
    variables = {"OMP_NUM_THREADS": "1", **{key: str(value) for key, value in environment.items()}}
    return Subject(name, command, "/health", plain_wires(), variables, _text(environment), package, bool(package))


def _text(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "default"


_TRITON = _peer("triton", "triton", "nvidia-pytriton", WORKERS=2)
_FOUND = (
    _peer("naive", "naive", None),
    _peer("naive2", "naive", None, WORKERS=2),
    dataclasses.replace(_peer("mosec", "mosec", "mosec", WORKERS=2, BATCH=16), ready_path="/"),
    dataclasses.replace(_TRITON, ready_path="/v2/models/attention/ready", wires=triton_wires("attention")),
    dataclasses.replace(_peer("litserve", "litserve", "litserve"), polls=True),
)
PEERS = {subject.name: subject for subject in _FOUND}
