"""Request path: prints the files of service/ that one request of each form enters, in order (`make path`).

A real service with one worker runs under a profile function in all threads. A request's section
begins when its connection is accepted. Each form is sent several times with different lengths; a file counts if every
section has it, which leaves out heartbeats and other background work.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import numpy as np
from safetensors.numpy import save

import service
from tests.integration.running import LAYERS
from tests.torture.planted import VARIABLE
from tests.torture.subject import Subject

SERVICE = str(Path(service.__file__).parent)
LOG = "request_path_log"
SECTIONS = 4
WIDTH = 16
BEGIN = ("http/listener.py", "_take")
# Text enough for the thread that checks large bodies.
KEY_ROWS = 15_000


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """One form of a request; `rows` positions, so that no two sections are equal."""

    name: str
    path: str
    media_type: str
    is_large: bool = False

    def body(self, rows: int) -> bytes:
        query = np.full((rows, WIDTH), 0.5, np.float32)
        if self.media_type != "application/json":
            return save({"query": query})
        if self.path.startswith("/v2"):
            tensor = {"name": "query", "shape": [1, *query.shape], "datatype": "FP32", "data": query.ravel().tolist()}
            return json.dumps({"inputs": [tensor]}).encode()
        if self.is_large:
            key = np.full((KEY_ROWS, WIDTH), 0.5)
            return json.dumps(
                {"query": query.tolist(), "key": key.tolist(), "masks": [{"kind": "lengths", "values": 9}]}
            ).encode()
        return json.dumps(
            {"query": query.tolist(), "masks": [{"kind": "causal"}], "weights": {"form": "mean"}}
        ).encode()


FORMS = (
    Form("JSON", "/v1/layers/small/attend", "application/json"),
    Form("safetensors", "/v1/layers/small/attend", "application/vnd.safetensors"),
    Form("Open Inference", "/v2/models/small/infer", "application/json"),
    Form("large JSON", "/v1/layers/small/attend", "application/json", is_large=True),
)


def plant() -> None:
    """Profile every thread of a worker from here on."""
    log = os.open(json.loads(os.environ[VARIABLE])[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @functools.cache
    def named(code_file: str) -> str | None:
        return code_file.removeprefix(SERVICE + "/") if code_file.startswith(SERVICE + "/") else None

    last: dict[int, str] = {}

    def entered(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (name := named(frame.f_code.co_filename)) is None:
            return
        if (name, frame.f_code.co_name) == BEGIN:
            os.write(log, b"-\n")
        thread = threading.get_ident()
        if last.get(thread) != name:
            last[thread] = name
            os.write(log, f"{name}\n".encode())

    threading.setprofile(entered)
    sys.setprofile(entered)


def sections(log: Path) -> list[list[str]]:
    """For each accepted connection the files in the order in which they were entered first."""
    found: list[list[str]] = []
    for line in log.read_text(encoding="ascii").splitlines():
        if line == "-":
            found.append([])
        elif found and line not in found[-1]:
            found[-1].append(line)
    return found


def common(found: list[list[str]]) -> list[str]:
    """Files of all sections, in the order of the last one."""
    return [name for name in found[-1] if all(name in other for other in found)]


def paths() -> dict[str, list[str]]:
    """The files that one request of each form enters, in order."""
    found = {}
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        log = directory / "log"
        plants = {"modules": ["tests.request_path"], LOG: str(log)}
        with Subject(directory / "service", layers=LAYERS, workers=1, plants=plants) as subject:
            for form in FORMS:
                log.write_bytes(b"")
                for rows in range(3, 3 + SECTIONS + 1):
                    # A connection for each request: accepting it begins a section.
                    headers = {"content-type": form.media_type, "connection": "close"}
                    url = f"http://127.0.0.1:{subject.port}{form.path}"
                    httpx2.post(url, content=form.body(rows), headers=headers, timeout=60).raise_for_status()
                    time.sleep(0.1)  # the end of a request: its count and its log line
                found[form.name] = common(sections(log)[1:])  # the first one fills caches
    return found


def main() -> None:
    for name, files in paths().items():
        sys.stdout.write(f"\n{name}: {len(files)} files\n" + "".join(f"  {file}\n" for file in files))


if __name__ == "__main__":
    main()
