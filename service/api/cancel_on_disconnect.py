"""CancelOnDisconnect: cancels the task that serves a caller when the caller disconnects, and raises ClientGone.

Invariant: it ends only its own cancellation; one from outside (shutdown) goes on.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from service.api.caller import Caller
from service.http.asgi import ClientGone


class CancelOnDisconnect:
    """A context manager for the task that serves the caller."""

    __slots__ = ("_caller", "_is_gone", "_serving")

    def __init__(self, caller: Caller) -> None:
        serving = asyncio.current_task()
        assert serving is not None, "an endpoint runs in a task. This is a bug."
        self._serving = serving
        self._caller = caller
        self._is_gone = False

    def __enter__(self) -> None:
        self._caller.when_gone(self._leave)

    def _leave(self) -> None:
        self._is_gone = True
        self._serving.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._caller.when_gone(None)
        if self._is_gone and isinstance(error, asyncio.CancelledError):
            # This cancellation is our own and ends here; one from outside (shutdown) goes on.
            self._serving.uncancel()
            raise ClientGone from None
