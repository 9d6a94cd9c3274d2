"""Subjects: what is measured, and how each of them is started.

Laws: a subject is a value; the service is started as a user does, with default settings; peers are given the settings they
were fastest with; `forms` says which wire it takes for which form of request, so what it cannot do is left out.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.wires import Wire, plain_wires, service_wires, triton_wires
from service.settings import usable_cores

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "benchmarks" / "peers"
ENVIRONMENTS = ROOT / ".venv-peers"
LAYER = "bench"
BOUND, SERVICE, ECHO = "bound", "service", "echo"


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """In `command` the texts `{port}`, `{layers}` (our directory of layers) and `{source}` (its file of weights) are filled in.

    `by_form` is what one form of request needs besides, in a start of its own; one that `polls` takes time while it has
    nothing to do.
    """

    name: str
    command: tuple[str, ...]
    ready_path: str
    forms: Mapping[str, Wire]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    by_form: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    polls: bool = False
    settings: str = "default"
    package: str | None = None  # whose version is told

    @property
    def python(self) -> str:
        return self.command[0]


def service(name: str = SERVICE, **settings: object) -> Subject:
    """This service; settings by their names in `service/settings.py`, none but where the measurement is of them."""
    return Subject(
        name,
        (sys.executable, "-m", "service", "serve", "--port", "{port}", "--layers-dir", "{layers}"),
        "/readyz",
        service_wires(LAYER),
        {f"ATTENTION_{key.upper()}": str(value) for key, value in settings.items()},
        settings=", ".join(f"{key}={value}" for key, value in settings.items()) or "default",
    )


def echo(processes: int = 0) -> Subject:
    """As many processes as the service has by default."""
    num = processes or usable_cores()
    command = (sys.executable, "-m", "benchmarks.echo", "{port}", str(num))
    return Subject(ECHO, command, "/", service_wires(LAYER), settings=f"{num} processes")


def _peer(name: str, program: str, package: str | None, **environment: object) -> Subject:
    """A program of `peers/`; one torch thread a process, the fastest for all of them."""
    environ = ENVIRONMENTS / program
    python = sys.executable if package is None else str(environ / "bin" / "python")
    given = {key: str(value) for key, value in environment.items()}
    return Subject(
        name,
        (python, str(PEERS / f"{program}_app.py"), "{port}", "{source}"),
        "/health",
        plain_wires(),
        {"OMP_NUM_THREADS": "1", **given},
        settings=", ".join(f"{key}={value}" for key, value in given.items()) or "default",
        package=package,
    )


def peers() -> dict[str, Subject]:
    """Every peer by its name."""
    mosec = dataclasses.replace(
        _peer("mosec", "mosec", "mosec", WORKERS=2, BATCH=16),
        ready_path="/",
        # A route has processes of its own: only the one that is measured is served.
        by_form={form: {"ROUTE": wire.path} for form, wire in plain_wires().items()},
    )
    triton = dataclasses.replace(
        _peer("triton", "triton", "nvidia-pytriton", WORKERS=2),
        ready_path="/v2/models/numbers/ready",
        forms=triton_wires(),
        by_form={"weights": {"WITH_WEIGHTS": "1"}, "lists": {"WORKERS": "1", "OMP_NUM_THREADS": "2"}},
    )
    litserve = dataclasses.replace(
        _peer("litserve", "litserve", "litserve"),
        polls=True,
        by_form={form: {"ROUTE": wire.path} for form, wire in plain_wires().items()},
    )
    found = (_peer("naive", "naive", None), _peer("naive2", "naive", None, WORKERS=2), mosec, triton, litserve)
    return {subject.name: subject for subject in found}
