"""Changes: loading, replacing and unloading a layer at run time, in all processes or in none.

Lives here: the author's side of a change, in whichever process the request came to. Must not know: HTTP, how a process follows a
roll (`shelf.py`), how the others are told (a callable).
Laws: one change at a time over all processes; no process serves the new layers before every one has them ready; the caller hears
of success only when every process serves them; on anything else (a refusal, a death, a timeout, a caller who leaves) the roll is
taken back, and what was served before goes on being served. The name decides which file is read: nothing else of the request
reaches the file system.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from service.errors import Draining, InvalidInput, LayerError, LayerMissing, LayerNotFound, NotReady
from service.heartbeat import Board, Heartbeat, State
from service.layers.stored_layer import NAME
from service.roll import Phase, Roll, RollBook

TAKE_BACK_S = 2.0
_UP = (State.READY, State.FAILED)


class Library(Protocol):
    """What the directory has (`shelf.py`)."""

    async def digest(self, name: str) -> str: ...


class Changes:
    """`tell` lets every process look at the roll, this one included; a change has `timeout_s` for each of its steps."""

    def __init__(
        self,
        library: Library,
        book: RollBook,
        board: Board,
        tell: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._library = library
        self._book = book
        self._board = board
        self._tell = tell
        self._timeout_s = timeout_s
        self._news = asyncio.Event()
        self._is_closed = False

    def look(self) -> None:
        """Somebody may have acknowledged, or died."""
        self._news.set()

    def close(self) -> None:
        """The process drains: a change under way is taken back, none is begun."""
        self._is_closed = True
        self._news.set()

    async def put(self, name: str) -> bool:
        """Every process serves the layer that the directory has now; whether none of that name was served before."""
        _check_name(name)
        async with self._alone() as roll:
            digest = await self._digest(name)
            is_new = name not in roll.layers
            if roll.layers.get(name) != digest or not self._all_are_content(roll):
                await self._carry_out(roll, name, digest)
            return is_new

    async def drop(self, name: str) -> None:
        """No process serves the layer any more."""
        _check_name(name)
        async with self._alone() as roll:
            if name not in roll.layers:
                raise _not_served()
            await self._carry_out(roll, name, None)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[Roll]:
        """The roll as it stands, which nobody else changes meanwhile."""
        if self._is_closed:
            raise Draining("the service is shutting down and changes no layers")
        with self._book.locked() as is_ours:
            if not is_ours:
                raise NotReady("another change of layers is under way", retry_after_s=1)
            roll = self._book.read()
            if roll is None:
                raise NotReady("layers are being loaded", retry_after_s=1)
            yield roll if roll.phase is Phase.SETTLED else self._written(roll.take_back())

    async def _digest(self, name: str) -> str:
        try:
            return await self._library.digest(name)
        except LayerMissing:
            raise LayerNotFound("the layer directory has no file of that name") from None
        except LayerError as error:
            raise InvalidInput(error.message) from error

    async def _carry_out(self, roll: Roll, name: str, digest: str | None) -> None:
        pids = self._pids_of_all()
        # Not in the block: until this is written there is nothing to take back.
        roll = self._written(roll.prepare(name, digest))
        try:
            await self._followed(roll, self._timeout_s, pids)
            roll = self._written(roll.serve())
            await self._followed(roll, self._timeout_s)
        except BaseException as error:
            back = self._written(roll.take_back())
            if isinstance(error, NotReady):
                with contextlib.suppress(NotReady, Draining):
                    await self._followed(back, TAKE_BACK_S)
            raise
        self._written(roll.settle())

    def _written(self, roll: Roll) -> Roll:
        try:
            self._book.write(roll)
        except OSError:
            raise NotReady("the run directory cannot be written", retry_after_s=5) from None
        self._tell()
        return roll

    async def _followed(self, roll: Roll, timeout_s: float, pids: frozenset[int] = frozenset()) -> None:
        """Until every process has acknowledged the roll; with `pids` these very ones: a death ends it at once."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._have_all_followed(roll, pids):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise NotReady("not every process followed in time; the change was taken back", retry_after_s=5) from None

    def _have_all_followed(self, roll: Roll, pids: frozenset[int]) -> bool:
        beats = self._board.fresh()
        followers = [beat for beat in beats if beat.roll == roll.version]
        if self._is_closed:
            raise Draining("the service is shutting down; the change was taken back")
        if trouble := next((beat.trouble for beat in followers if beat.trouble), None):
            raise NotReady(f"a process could not follow, the change was taken back: {trouble}", retry_after_s=5)
        if pids - {beat.pid for beat in beats}:
            raise NotReady("a process ended meanwhile; the change was taken back", retry_after_s=5)
        return len(followers) >= self._board.expected_workers

    def _pids_of_all(self) -> frozenset[int]:
        """Of the processes that are up; raises NotReady unless that is every one."""
        pids = frozenset(beat.pid for beat in self._board.fresh() if beat.state in _UP and beat.roll)
        if len(pids) < self._board.expected_workers:
            raise NotReady(f"{len(pids)} of {self._board.expected_workers} processes are up", retry_after_s=5)
        return pids

    def _all_are_content(self, roll: Roll) -> bool:
        def is_content(beat: Heartbeat) -> bool:
            return beat.roll == roll.version and beat.state is State.READY

        return sum(map(is_content, self._board.fresh())) >= self._board.expected_workers


def _check_name(name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise _not_served()


def _not_served() -> LayerNotFound:
    return LayerNotFound("no layer of that name is served; GET /v1/layers lists them")
