"""Bodies: the requests of a workload as one subject wants them, in files that both load generators read.

Laws: request i is `<i>.head` (a header a line) and `<i>.body`; the directory holds nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks.echo import SIZE_HEADER
from benchmarks.wires import Wire
from benchmarks.workloads import Workload


@dataclasses.dataclass(frozen=True, slots=True)
class Bodies:
    """The written requests of one workload; `path` is the target that they go to."""

    directory: Path
    path: str
    num: int

    def request(self, i: int) -> tuple[dict[str, str], bytes]:
        lines = (self.directory / f"{i}.head").read_text(encoding="ascii").splitlines()
        headers = dict(line.split(": ", 1) for line in lines)
        return headers, (self.directory / f"{i}.body").read_bytes()

    def put(self, i: int, headers: dict[str, str], body: bytes) -> None:
        lines = "".join(f"{name}: {value}\n" for name, value in headers.items())
        (self.directory / f"{i}.head").write_text(lines, encoding="ascii")
        (self.directory / f"{i}.body").write_bytes(body)

    def asking_for(self, sizes: Sequence[int], directory: Path) -> Bodies:
        """The same requests to the echo, each with the size of the answer that it is to have."""
        directory.mkdir(parents=True)
        copy = Bodies(directory, "/", self.num)
        for i, size in enumerate(sizes):
            headers, body = self.request(i)
            copy.put(i, {**headers, SIZE_HEADER: str(size)}, body)
        return copy


def write_bodies(directory: Path, wire: Wire, work: Workload) -> Bodies:
    directory.mkdir(parents=True)
    bodies = Bodies(directory, wire.path, len(work.lengths))
    for i, x in enumerate(work.inputs()):
        bodies.put(i, *wire.write(x))
    return bodies
