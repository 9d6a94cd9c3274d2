"""Desired state: which layers every process serves.

Must not know: layers, engines, HTTP, processes.
Invariants: A state names digests, so a file that has changed since does not match. Versions only grow. The version is 0 until
the first process has loaded the layer directory.

A change has three phases: PREPARE (serve `previous`, have `layers` ready), SERVE (serve `layers`, keep `previous` ready), SETTLED
(serve `layers`, release everything else). The first two can be aborted, to SETTLED with `previous`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping


class Phase(enum.StrEnum):
    PREPARE = "prepare"
    SERVE = "serve"
    SETTLED = "settled"


@dataclasses.dataclass(frozen=True, slots=True)
class DesiredState:
    """One version of the state. `layers` and `previous` map names to digests; `changed_layer` is the name of one layer."""

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
        assert self.phase is not Phase.SETTLED, "no change is in progress. This is a bug."
        return DesiredState(self.version + 1, Phase.SETTLED, self.previous)
