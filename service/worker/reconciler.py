"""The follower: keeps this process's shelf in line with the roll.

Lives here: the first load, the task that looks at the roll whenever there may be news, and the way back from a change whose
author died. Must not know: HTTP, what a layer is, who rings.
Laws: a roll is acknowledged (`version`) only when the shelf has done with it what it can; the first process of all writes the
first roll, later ones serve what the roll says and not what the directory has come to hold meanwhile; a roll that is lost is
written again by who followed it, of several who did by who followed the latest; what could not be loaded is tried again after
`retry_s`, for files come back; a roll that another has replaced is not followed to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from service.batching.clock import Clock
from service.errors import NotReady
from service.worker.desired_state import DesiredState, DesiredStateFile, Phase
from service.worker.layer_registry import LayerRegistry

# How long a process waits for its mates to write a roll again that was lost: they do with their next heartbeat.
ROLL_S = 10.0


class Reconciler:
    """`acknowledge` is called when another roll has been followed; a process that `has_mates` serves what they serve."""

    def __init__(
        self,
        registry: LayerRegistry,
        desired_file: DesiredStateFile,
        clock: Clock,
        retry_s: float,
        acknowledge: Callable[[], None],
        *,
        has_mates: bool = False,
    ) -> None:
        self._registry = registry
        self._desired_file = desired_file
        self._clock = clock
        self._retry_s = retry_s
        self._acknowledge = acknowledge
        self._has_mates = has_mates
        self._news = asyncio.Event()
        self._roll: DesiredState | None = None
        self._next: tuple[DesiredState, asyncio.Task[None]] | None = None
        self._retry_at = 0.0

    @property
    def version(self) -> int:
        """Of the roll that was followed last; 0 before the first."""
        return 0 if self._roll is None else self._roll.version

    def look(self) -> None:
        """There may be another roll, or time for another try."""
        self._news.set()
        if self._next is not None:
            roll, turning = self._next
            if (now := self._desired_file.read()) is not None and now.version != roll.version:
                turning.cancel()

    async def begin(self, *, strict: bool) -> None:
        """The first layers; raises LayerError where the directory cannot be served, NotReady where others have no roll."""
        roll = await self._roll_of_mates() if self._has_mates else self._desired_file.read()
        if roll is None:
            roll = self._begun(await self._registry.stock(strict=strict))
        await self._turn_to(roll)

    async def follow(self) -> None:
        """For ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            roll = self._desired_file.read()
            if roll is None or self._is_stale(roll):
                roll = self._written_again()
            elif roll.phase is not Phase.SETTLED:
                roll = self._with_author(roll)
            if roll.version != self.version or (self._registry.trouble and self._clock.now() >= self._retry_at):
                await self._turn_while_in_force(roll)

    async def _turn_while_in_force(self, roll: DesiredState) -> None:
        """What is loaded for a change that was called off may take long, and the next one must not wait for it."""
        turning = asyncio.ensure_future(self._turn_to(roll))
        self._next = roll, turning
        try:
            await asyncio.wait([turning])
            if not turning.cancelled():
                turning.result()
        finally:
            self._next = None
            turning.cancel()

    async def _turn_to(self, roll: DesiredState) -> None:
        await self._registry.follow(roll)
        self._roll = roll
        self._retry_at = self._clock.now() + self._retry_s
        self._acknowledge()

    async def _roll_of_mates(self) -> DesiredState:
        try:
            async with asyncio.timeout(ROLL_S):
                while (roll := self._desired_file.read()) is None:
                    await self._news.wait()
                    self._news.clear()
        except TimeoutError:
            raise NotReady(
                "the others serve layers, and the run directory does not say which", retry_after_s=5
            ) from None
        return roll

    def _is_stale(self, found: DesiredState) -> bool:
        """A process that did not know the roll has begun another."""
        return found.version <= self.version and found != self._roll

    def _written_again(self) -> DesiredState:
        """The run directory was emptied under us: what is served is what was agreed on. A change under way is taken back."""
        known = self._roll
        assert known is not None, "it has begun before it follows. This is a bug."
        layers = known.layers if known.phase is Phase.SETTLED else known.before
        with self._desired_file.locked() as is_ours:
            found = self._desired_file.read()
            if found is not None and not self._is_stale(found):
                return found
            with contextlib.suppress(OSError):
                if is_ours:
                    again = DesiredState(known.version + 1, Phase.SETTLED, layers)
                    self._desired_file.write(again)
                    return again
        return known

    def _begun(self, layers: Mapping[str, str]) -> DesiredState:
        try:
            return self._desired_file.begin(layers)
        except OSError:  # without a run directory this process is alone with what it found
            return DesiredState(max(1, self.version), Phase.SETTLED, layers)

    def _with_author(self, roll: DesiredState) -> DesiredState:
        """The roll itself while its author holds the lock; else the change is taken back here."""
        with self._desired_file.locked() as is_ours:
            if not is_ours:
                return roll
            found = self._desired_file.read() or roll
            if found.phase is not Phase.SETTLED:
                found = found.take_back()
                with contextlib.suppress(OSError):
                    self._desired_file.write(found)
            return found
