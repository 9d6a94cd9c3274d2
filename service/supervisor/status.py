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
from collections.abc import Mapping, Sequence
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

    `layers` and `previous` map names to digests; `changed` has the names of a change in progress. If the layers follow a source,
    `layer_set` and `previous_set` are the digests of their sets.
    """

    version: int = 0
    phase: Phase = Phase.SETTLED
    layers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    previous: Mapping[str, str] = dataclasses.field(default_factory=dict)
    changed: Sequence[str] = ()
    layer_set: str = ""
    previous_set: str = ""

    @property
    def served(self) -> Mapping[str, str]:
        return self.previous if self.phase is Phase.PREPARE else self.layers

    @property
    def served_set(self) -> str:
        return self.previous_set if self.phase is Phase.PREPARE else self.layer_set

    @property
    def loaded(self) -> set[tuple[str, str]]:
        """The names and digests that a process keeps on its engine in this state."""
        return {*self.layers.items(), *({} if self.phase is Phase.SETTLED else self.previous).items()}

    def set_of(self, layer: tuple[str, str]) -> str:
        """Return the set whose files have this layer of `loaded`."""
        return self.layer_set if layer in self.layers.items() else self.previous_set

    def prepare(self, changes: Mapping[str, str | None], layer_set: str = "") -> DesiredState:
        """Return the state that begins a change of some layers: another digest for each, or None to unload it."""
        changed = {**self.layers, **changes}
        layers = {name: digest for name, digest in changed.items() if digest is not None}
        return DesiredState(
            self.version + 1, Phase.PREPARE, layers, self.layers, tuple(changes), layer_set, self.layer_set
        )

    def serve(self) -> DesiredState:
        return dataclasses.replace(self, version=self.version + 1, phase=Phase.SERVE)

    def settle(self) -> DesiredState:
        return DesiredState(self.version + 1, Phase.SETTLED, self.layers, layer_set=self.layer_set)

    def abort(self) -> DesiredState:
        """Return the state that undoes the change in progress, or this one if there is none."""
        if self.phase is Phase.SETTLED:
            return self
        return DesiredState(self.version + 1, Phase.SETTLED, self.previous, layer_set=self.previous_set)


class State(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A layer rollout that a worker requests: by name another digest, or None to unload. `seen` has the digests that it replaces.

    The worker counts its requests with `number`. `layer_set` is the digest of the set that results, if there is one.
    """

    number: int
    layers: Mapping[str, str | None]
    seen: Mapping[str, str]
    timeout_s: float
    layer_set: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class SourceStatus:
    """What the process that follows ATTENTION_LAYERS_SOURCE found: the `fault` of its last look, empty without one.

    In seconds since the epoch: the served set is served `since`; the last look without a fault was at `checked`; 0: none yet.
    """

    fault: str = ""
    since: float = 0.0
    checked: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What one process reports of itself.

    `version` is that of the desired state that it has applied (0: none yet). `refusal` says why it cannot make the change of that
    version; `is_file_changed` says whether the reason is the layer's file. `found` has the digests of the layer directory, or of
    its set `found_set`: the first process proposes them as the desired state. `least_rows` is the result of each loaded layer's
    self-check, by digest: the least rows of its products, 0 if it is sequential. `change` is requested until its outcome arrives
    or it is withdrawn. `start_error` says why the process ends with EXIT_REFUSED. Only one process reports the `source`.
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
    found_set: str = ""
    source: SourceStatus | None = None

    @classmethod
    def parse(cls, fields: Any) -> WorkerStatus | None:
        """Return the status in a message, or None if it is malformed."""
        try:
            change = None if fields["change"] is None else Change(**fields["change"])
            texts = {name: fields[name][:MAX_REASON_CHARS] for name in ("reason", "refusal", "start_error")}
            source = None if fields["source"] is None else SourceStatus(**fields["source"])
            status = cls(**{**fields, **texts, "state": State(fields["state"]), "change": change, "source": source})
        except (ValueError, TypeError, KeyError):
            return None
        if change is not None and not (
            _fits(change, int, dict, dict, float, str)
            and math.isfinite(change.timeout_s)
            and all(isinstance(digest, str | None) for digest in (*change.layers.values(), *change.seen.values()))
        ):
            return None
        if source is not None and not _fits(source, str, float, float):
            return None
        is_sound = _fits(
            status, State, str, int, str, bool, dict | None, Change | None, str, dict, str, SourceStatus | None
        )
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
    """The whole service, as one of its processes learns it; `ready` has the pids of the ready processes.

    `source` is what the process that follows the source reported last, even if it has ended.
    """

    desired: DesiredState = dataclasses.field(default_factory=DesiredState)
    why_not_ready: str | None = "the supervisor has not reported yet"
    ready: list[int] = dataclasses.field(default_factory=list)
    outcome: RolloutOutcome | None = None
    source: SourceStatus | None = None

    @classmethod
    def parse(cls, fields: Any) -> ServiceStatus:
        """Return the status in a message of the supervisor, which is never malformed."""
        state = fields["desired"]
        desired = DesiredState(**{**state, "phase": Phase(state["phase"]), "changed": tuple(state["changed"])})
        outcome = None if fields["outcome"] is None else RolloutOutcome(**fields["outcome"])
        source = None if fields["source"] is None else SourceStatus(**fields["source"])
        return cls(**{**fields, "desired": desired, "outcome": outcome, "source": source})
