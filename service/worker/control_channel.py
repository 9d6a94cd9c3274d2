"""ControlChannel: a process's link to the coordinator, which runs in the supervisor.

Must not know: layers, HTTP, what the reports say.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
from collections.abc import Callable
from typing import Any

from service.supervisor.channel import PING_S, STACKS_SIGNAL, Channel
from service.supervisor.coordinator import MAX_AGE_S
from service.supervisor.status import ServiceStatus, WorkerStatus

# As many answers as a process may miss reports (`supervisor/coordinator.py`).
MAX_UNANSWERED = int(MAX_AGE_S / PING_S)


class ControlChannel:
    """`status` is the latest of this process, `service` that of the whole service.

    `has_peers`: other processes' loops ran already when this one started. `ended` is called if the supervisor ends first.
    """

    def __init__(self, end: Channel, *, has_peers: bool) -> None:
        self.has_peers = has_peers
        self.service = ServiceStatus()
        self.has_heard = False
        self.status = WorkerStatus()
        self.ended: Callable[[], object] = bool
        self.is_orphaned = False
        self._end = end
        self._num_unanswered = 0
        self._changed: tuple[Callable[[], object], ...] = ()

    def open(self, *changed: Callable[[], object]) -> None:
        """Begin to report, from the running loop; from now on call each `changed` whenever a status of the service arrives."""
        self._changed = changed
        faulthandler.register(STACKS_SIGNAL)
        asyncio.get_running_loop().add_reader(self._end.fileno(), self._receive)
        self._receive()
        self._repeat()

    @property
    def why_not_ready(self) -> str | None:
        """Why the service is not ready; None if it is. Without answers the state of the other processes is unknown.

        Unanswered reports are counted, not seconds: a pause of the whole service must not look like a silent supervisor.
        """
        if self._num_unanswered > MAX_UNANSWERED:
            return f"the supervisor has not answered {self._num_unanswered} reports"
        return self.service.why_not_ready

    def report(self, **fields: Any) -> None:
        """Change these fields of this process's status, and report the whole status."""
        self.status = dataclasses.replace(self.status, **fields)
        self._send()

    def _repeat(self) -> None:
        self._num_unanswered += 1
        self._send()
        asyncio.get_running_loop().call_later(PING_S, self._repeat)

    def _send(self) -> None:
        self._end.send(self.status)
        if self._end.is_full:
            asyncio.get_running_loop().add_writer(self._end.fileno(), self._flush)

    def _flush(self) -> None:
        self._end.flush()
        if not self._end.is_full:
            asyncio.get_running_loop().remove_writer(self._end.fileno())

    def _receive(self) -> None:
        message = self._end.receive()
        if message is not None:
            self._take(ServiceStatus.parse(message))
        if self._end.is_ended:
            self.is_orphaned = True
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._end.fileno())
            loop.remove_writer(self._end.fileno())
            loop.call_soon(self.ended)

    def _take(self, service: ServiceStatus) -> None:
        self.service, self.has_heard, self._num_unanswered = service, True, 0
        for changed in self._changed:
            changed()
