"""Plan: what the supervisor is to run, as a value that survives an exec of its program.

Independent of settings, signals and how anything is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

# A worker's command-line arguments; the supervisor fills in the values.
TOLD = (
    "--port", "{port}", "--slot", "{slot}", "--lifeline", "{lifeline}", "--pulse", "{pulse}", "--run-dir", "{run_dir}",
    "--peers", "{peers}",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to run. The supervisor fills in the elements of `command` that are placeholders of TOLD, in braces.

    `slot` counts from 0 and outlives the process in it. `lifeline` and `pulse` are numbers of open descriptors. `peers` is how
    many other processes send watchdog pings. `silence_s` is how long a process may send none.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    host: str
    port: int
    workers: int
    drain_delay_s: float
    shutdown_grace_s: float
    silence_s: float
    run_dir: Path | None = None

    @property
    def arguments(self) -> list[str]:
        """All fields but the environment, which exec passes separately."""
        numbers = (self.port, self.workers, self.drain_delay_s, self.shutdown_grace_s, self.silence_s)
        return [self.host, *map(repr, numbers), "" if self.run_dir is None else str(self.run_dir), *self.command]

    @classmethod
    def of_arguments(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Plan:
        host, port, workers, delay_s, grace_s, silence_s, run_dir, *command = arguments
        directory = Path(run_dir) if run_dir else None
        times = float(delay_s), float(grace_s), float(silence_s)
        return cls(tuple(command), environment, host, int(port), int(workers), *times, directory)
