"""Coordinator: knows the status of every process, decides whether the service is ready, and runs layer rollouts.

It is synchronous and does no I/O. Its caller reports what happens. Each process gets the status of the whole service at every
change, and after each of its own reports.
Invariants: One rollout runs at a time. No process serves the new layers before every process has them ready. A rollout succeeds
only when every process serves them. After a refusal, a death during PREPARE, a timeout, a withdrawal or the death of the author
(the process that asked) it is rolled back; until then some processes may serve the new layer. A process counts only while its
last report is younger than MAX_AGE_S. The service is not ready, and no rollout succeeds, while the self-checks of two processes
differ: one layer would give other bits in each (P1). The first process that has loaded the layer directory decides the first
desired state. Nothing needs a timer, because every process reports once a second, and each report is answered. Time in which no
process reports counts against no process and no deadline, because the coordinator itself was paused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from service.errors import LayerChanged, NotReady, ServiceError
from service.supervisor.status import (
    Change,
    DesiredState,
    Phase,
    RolloutOutcome,
    ServiceStatus,
    SourceStatus,
    State,
    WorkerStatus,
)

# Six missed pings.
MAX_AGE_S = 6.0
# If no process reports for longer, the coordinator itself was paused: every live process reports more often.
STOPPED_S = 2.0
# The author gets its error when every process has acknowledged that its rollout is aborted, or after this time.
ABORT_S = 2.0
_UNEQUAL = "the self-check of a layer gave different results in two processes"


@dataclasses.dataclass(slots=True)
class Member:
    """One process, from its start to its death."""

    send: Callable[[ServiceStatus], None]
    status: WorkerStatus = dataclasses.field(default_factory=WorkerStatus)
    reported_at: float = -math.inf
    outcome: RolloutOutcome | None = None
    sent: ServiceStatus | None = None


@dataclasses.dataclass(slots=True)
class Rollout:
    """A change in progress, which the process `author` requested; the author gets `outcome` when it has ended.

    While the desired state is SETTLED, it has been aborted and awaits acknowledgements.
    """

    author: int
    deadline: float
    outcome: RolloutOutcome


class Coordinator:
    """`join`, `report` and `leave` follow a process from its start to its end; `now` gives monotonic seconds."""

    def __init__(self, expected_workers: int, now: Callable[[], float]) -> None:
        self.expected_workers = expected_workers
        self.desired = DesiredState()
        self._source: SourceStatus | None = None
        self._now = now
        self._paused_s = 0.0
        self._members: dict[int, Member] = {}
        self._reported_at = now()
        self._rollout: Rollout | None = None

    def join(self, pid: int, send: Callable[[ServiceStatus], None]) -> None:
        """Add a process that has been started; `send` gets each new status of the service, and must not call the coordinator."""
        self._members[pid] = Member(send)
        self._go_on()

    def report(self, pid: int, status: WorkerStatus) -> None:
        """Take in what a process reports of itself; ignore one that has left."""
        member = self._members.get(pid)
        if member is None:
            return
        pause_s = self._time() - self._reported_at
        if pause_s > STOPPED_S:
            self._paused_s += pause_s
        before, member.status = member.status, status
        member.reported_at = self._reported_at = self._time()
        if self.desired.version == 0 and status.found is not None:
            self.desired = DesiredState(1, layers=status.found, layer_set=status.found_set)
        self._source = status.source or self._source
        if (change := status.change) != before.change:
            self._withdraw(pid)
            if change is not None:
                try:
                    self._prepare(pid, change)
                except ServiceError as error:
                    member.outcome = _refused(change.number, error)
        member.sent = None
        self._go_on()

    def leave(self, pid: int) -> None:
        """Remove a process that has ended."""
        self._members.pop(pid, None)
        self._withdraw(pid)
        self._go_on()

    def why_not_ready(self) -> str | None:
        """Return None while every expected process is ready, else the worst reason in one sentence."""
        reported = [member for member in self._members.values() if member.reported_at > -math.inf]
        fresh = self._fresh().values()
        for status in fresh:
            if status.state is State.FAILED:
                return f"a process has failed: {status.reason}" if status.reason else "a process has failed"
        if _differ(fresh):
            return _UNEQUAL
        for state in (State.DRAINING, State.STARTING):
            if count := sum(status.state is state for status in fresh):
                return self._count(count, state.value)
        if len(fresh) < len(reported):
            oldest = min(member.reported_at for member in reported)
            return f"a process has not reported for {self._time() - oldest:.0f} s"
        if len(fresh) < self.expected_workers:
            return self._count(self.expected_workers - len(fresh), "not up yet")
        return None

    def _count(self, count: int, what: str) -> str:
        nouns = "process" if self.expected_workers == 1 else "processes"
        return f"{count} of {self.expected_workers} {nouns} {'is' if count == 1 else 'are'} {what}"

    def _time(self) -> float:
        """Return monotonic seconds without those in which the coordinator was paused."""
        return self._now() - self._paused_s

    def _fresh(self) -> dict[int, WorkerStatus]:
        """Return the status of each process that counts."""
        oldest = self._time() - MAX_AGE_S
        return {pid: member.status for pid, member in self._members.items() if member.reported_at >= oldest}

    def _prepare(self, author: int, change: Change) -> None:
        """Begin the change, or set its outcome if every process serves it already; raise LayerChanged or NotReady."""
        if self._rollout is not None:
            raise NotReady("another change of layers is under way", retry_after_s=1)
        current, prepared = self.desired.layers, self.desired.prepare(change.layers, change.layer_set)
        fresh = self._fresh().values()
        num_serving = sum(one.state is State.READY and one.version == self.desired.version for one in fresh)
        is_served = (prepared.layers, prepared.layer_set) == (current, self.desired.layer_set)
        if is_served and num_serving >= self.expected_workers:
            self._members[author].outcome = RolloutOutcome(change.number)
            return
        taken = [
            digest and current.get(name) not in (change.seen.get(name), digest)
            for name, digest in change.layers.items()
        ]
        if any(taken):
            raise LayerChanged("another change of this layer came first; nothing was changed")
        num_up = sum(one.state in (State.READY, State.FAILED) and one.version > 0 for one in fresh)
        if num_up < self.expected_workers:
            raise NotReady(f"{num_up} of {self.expected_workers} processes are up", retry_after_s=5)
        outcome = RolloutOutcome(change.number, is_new=not change.layers.keys() & current.keys())
        self._rollout = Rollout(author, self._time() + change.timeout_s, outcome)
        self.desired = prepared

    def _withdraw(self, author: int) -> None:
        """Roll back the change that this process requested, because it no longer waits for the outcome."""
        if self._rollout is not None and self._rollout.author == author:
            self._rollout, self.desired = None, self.desired.abort()

    def _go_on(self) -> None:
        """Take the next step of the rollout if its condition holds, and send the status to every process that lacks it."""
        rollout = self._rollout
        if rollout is not None and self.desired.phase is not Phase.SETTLED:
            try:
                self._commit(rollout)
            except (LayerChanged, NotReady) as error:
                self.desired = self.desired.abort()
                rollout.outcome = _refused(rollout.outcome.number, error)
                rollout.deadline = self._time() + ABORT_S
        elif rollout is not None:
            are_back = all(one.status.version in (0, self.desired.version) for one in self._members.values())
            if are_back or self._time() >= rollout.deadline:
                self._end(rollout)
        reason = self.why_not_ready()
        ready = [pid for pid, status in self._fresh().items() if status.state is State.READY]
        for member in self._members.values():
            status = ServiceStatus(self.desired, reason, ready, member.outcome, self._source)
            if status != member.sent:
                member.sent = status
                member.send(status)

    def _commit(self, rollout: Rollout) -> None:
        """Enter the next phase once every process has acknowledged; raise LayerChanged or NotReady if one never will."""
        desired, fresh = self.desired, self._fresh().values()
        acknowledged = [status for status in fresh if status.version == desired.version]
        for status in acknowledged:
            if status.refusal and status.is_file_changed:
                if desired.layer_set:
                    raise LayerChanged(f"the set is refused: {status.refusal}")
                raise LayerChanged("the layer's file changed while the processes loaded it; nothing was changed")
            if status.refusal:
                reason = f"a process could not load the layer; the change was rolled back: {status.refusal}"
                raise NotReady(reason, retry_after_s=5)
        if _differ(acknowledged):
            raise NotReady(f"{_UNEQUAL}; the change was rolled back", retry_after_s=5)
        if desired.phase is Phase.PREPARE and len(fresh) < self.expected_workers:
            raise NotReady("a process ended or fell silent during the change; it was rolled back", retry_after_s=5)
        if len(acknowledged) < self.expected_workers:
            if self._time() >= rollout.deadline:
                reason = "a process did not acknowledge the change in time; it was rolled back"
                raise NotReady(reason, retry_after_s=5)
        elif desired.phase is Phase.PREPARE:
            self.desired = desired.serve()
        else:
            self.desired = desired.settle()
            self._end(rollout)

    def _end(self, rollout: Rollout) -> None:
        self._rollout = None
        self._members[rollout.author].outcome = rollout.outcome


def _differ(statuses: Iterable[WorkerStatus]) -> bool:
    """Return whether two processes found other least rows for one layer."""
    found: dict[str, int] = {}
    return any(found.setdefault(*each) != each[1] for status in statuses for each in status.least_rows.items())


def _refused(number: int, error: ServiceError) -> RolloutOutcome:
    return RolloutOutcome(number, code=error.code, message=error.message, retry_after_s=error.retry_after_s)
