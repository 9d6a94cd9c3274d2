"""Status: what a worker reports to the supervisor, and what the supervisor reports to each worker, with the desired state.

Must not know: layers, engines, HTTP, processes.
Invariants: Each message is the whole status of its sender, so only the latest counts and any earlier one may be lost. A malformed
message of a worker parses to None and raises nothing, so nothing that a worker sends ends the supervisor. A desired state names
digests, so a file that has changed since does not match.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

MAX_REASON_CHARS = 256


class Phase(enum.StrEnum):
    """A step of a change of layers.

    PREPARE: processes serve `previous` and load `layers`. SERVE: they serve `layers` and keep `previous` loaded. SETTLED: they
    serve `layers` and release everything else. An abort of the first two leads to SETTLED with `previous` as `layers`.
    """

    PREPARE = "prepare"
    SERVE = "serve"
    SETTLED = "settled"


@dataclasses.dataclass(frozen=True, slots=True)
class DesiredState:
    """One version of which layers every process serves; 0 until the first process has loaded the directory, then growing.

    `layers` and `previous` map names to digests; `changed_layer` is the name of one layer.
    """

    version: int = 0
    phase: Phase = Phase.SETTLED
    layers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    previous: Mapping[str, str] = dataclasses.field(default_factory=dict)
    changed_layer: str = ""

    @property
    def served(self) -> Mapping[str, str]:
        return self.previous if self.phase is Phase.PREPARE else self.layers

    @property
    def loaded(self) -> set[tuple[str, str]]:
        """The names and digests that a process keeps on its engine in this state."""
        return {*self.layers.items(), *({} if self.phase is Phase.SETTLED else self.previous).items()}

    def prepare(self, name: str, digest: str | None) -> DesiredState:
        """Return the state that begins a change of one layer: another digest, or None to unload it."""
        layers = {other: known for other, known in self.layers.items() if other != name}
        layers |= {} if digest is None else {name: digest}
        return DesiredState(self.version + 1, Phase.PREPARE, layers, self.layers, name)

    def serve(self) -> DesiredState:
        return DesiredState(self.version + 1, Phase.SERVE, self.layers, self.previous, self.changed_layer)

    def settle(self) -> DesiredState:
        return DesiredState(self.version + 1, Phase.SETTLED, self.layers)

    def abort(self) -> DesiredState:
        """Return the state that undoes the change in progress, or this one if there is none."""
        if self.phase is Phase.SETTLED:
            return self
        return DesiredState(self.version + 1, Phase.SETTLED, self.previous)


class State(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A layer rollout that a worker requests: another `digest`, or None to unload. `seen` is the digest that it replaces.

    The worker counts its requests with `number`.
    """

    number: int
    name: str
    digest: str | None
    seen: str | None
    timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What one process reports of itself.

    `version` is that of the desired state that it has applied (0: none yet). `refusal` says why it cannot make the change of that
    version; `is_file_changed` says whether the reason is the layer's file. `found` has the digests of the layer directory: the
    first process proposes them as the desired state. `least_rows` is the result of each loaded layer's self-check, by digest: the
    least rows of its products, 0 if it is sequential. `change` is requested until its outcome arrives or it is withdrawn.
    `start_error` says why the process ends with EXIT_REFUSED.
    """

    state: State = State.STARTING
    reason: str = ""
    version: int = 0
    refusal: str = ""
    is_file_changed: bool = False
    found: dict[str, str] | None = None
    change: Change | None = None
    start_error: str = ""
    least_rows: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, fields: Any) -> WorkerStatus | None:
        """Return the status in a message, or None if it is malformed."""
        try:
            change = None if fields["change"] is None else Change(**fields["change"])
            texts = {name: fields[name][:MAX_REASON_CHARS] for name in ("reason", "refusal", "start_error")}
            status = cls(**{**fields, **texts, "state": State(fields["state"]), "change": change})
        except (ValueError, TypeError, KeyError):
            return None
        types = (int, str, str | None, str | None, float)
        if change is not None and not (_fits(change, *types) and math.isfinite(change.timeout_s)):
            return None
        is_sound = _fits(status, State, str, int, str, bool, dict | None, Change | None, str, dict)
        is_sound = is_sound and all(isinstance(digest, str) for digest in (status.found or {}).values())
        return status if is_sound and all(isinstance(rows, int) for rows in status.least_rows.values()) else None


def _fits(message: Any, *types: Any) -> bool:
    """Return whether each field of a dataclass has its type."""
    return all(map(isinstance, [getattr(message, field.name) for field in dataclasses.fields(message)], types))


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """How the change of that number ended; `code` is that of the error, and empty after a success."""

    number: int
    is_new: bool = False
    code: str = ""
    message: str = ""
    retry_after_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The whole service, as one of its processes learns it; `ready` has the pids of the ready processes."""

    desired: DesiredState = dataclasses.field(default_factory=DesiredState)
    why_not_ready: str | None = "the supervisor has not reported yet"
    ready: list[int] = dataclasses.field(default_factory=list)
    outcome: RolloutOutcome | None = None

    @classmethod
    def parse(cls, fields: Any) -> ServiceStatus:
        """Return the status in a message of the supervisor, which is never malformed."""
        desired = DesiredState(**{**fields["desired"], "phase": Phase(fields["desired"]["phase"])})
        outcome = None if fields["outcome"] is None else RolloutOutcome(**fields["outcome"])
        return cls(**{**fields, "desired": desired, "outcome": outcome})
