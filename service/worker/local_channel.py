"""LocalChannel: the control channel of a process without a supervisor, to a coordinator in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable

from service.supervisor.coordinator import Coordinator
from service.worker.control_channel import ControlChannel


class LocalChannel(ControlChannel):
    """Several processes' channels may share one coordinator; `pid` tells them apart."""

    def __init__(self, coordinator: Coordinator | None = None, pid: int = 0, *, has_peers: bool = False) -> None:
        self.coordinator = coordinator or Coordinator(1, time.monotonic)
        self.pid = pid
        super().__init__(None, has_peers=has_peers)  # type: ignore[arg-type]  # every use of it is overridden

    def open(self, *changed: Callable[[], object]) -> None:
        self._changed = changed
        self.coordinator.join(self.pid, self._take)
        self._repeat()

    def _send(self) -> None:
        self.coordinator.report(self.pid, self.status)
