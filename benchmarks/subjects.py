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
BOUND, SERVICE, AGAIN, ECHO = "bound", "service", "service again", "echo"


class SubjectFailed(Exception):
    """The subject did not start, refused a correct request, answered wrongly or not at all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """`{port}`, `{layers}` (the layer directory) and `{source}` (the layer's weights) in command and environment are replaced.

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


def again() -> Subject:
    """Return this service once more: how far two equal subjects differ is the noise of a comparison."""
    return dataclasses.replace(service(AGAIN), settings="the same code, started a second time")


def _uvicorn(application: str, processes: int) -> tuple[str, ...]:
    command = (
        f"-m uvicorn {application} --port {{port}} --workers {processes} --loop uvloop --http httptools --no-access-log"
    )
    return (sys.executable, *command.split(), "--log-level", "warning")


def echo(processes: int = 0) -> Subject:
    """Return the echo, with as many processes as the service has by default."""
    num = processes or usable_cores()
    command = (*_uvicorn("benchmarks.echo:application", num), "--lifespan", "off")
    return Subject(ECHO, command, "/", echo_wires(LAYER), settings=f"{num} processes", tolerance=math.inf)


def _text(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "default"


def _naive(name: str, processes: int, settings: str = "default") -> Subject:
    command = _uvicorn("benchmarks.peers.naive_app:app", processes)
    return Subject(name, command, "/health", plain_wires(), _PEER_ENVIRONMENT, settings)


def _peer(name: str, package: str, ready_path: str, **settings: int) -> Subject:
    """Return a program of `peers/`, in the environment of its package."""
    python = str(ROOT / ".venv-peers" / name / "bin" / "python")
    command = (python, str(ROOT / "benchmarks" / "peers" / f"{name}_app.py"))
    variables = {**_PEER_ENVIRONMENT, **{key: str(value) for key, value in settings.items()}}
    return Subject(name, command, ready_path, plain_wires(), variables, _text(settings), package, one_form=True)


# One torch thread a process is the fastest for all peers.
_PEER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PORT": "{port}", "LAYER": "{source}"}
_TRITON = _peer("triton", "nvidia-pytriton", "/v2/models/attention/ready", WORKERS=2)
_FOUND = (
    _naive("naive", 1),
    _naive("naive2", 2, "2 processes"),
    _peer("mosec", "mosec", "/", WORKERS=2, BATCH=16),
    dataclasses.replace(_TRITON, wires=triton_wires("attention")),
    dataclasses.replace(_peer("litserve", "litserve", "/health"), polls=True),
)
PEERS = {subject.name: subject for subject in _FOUND}
