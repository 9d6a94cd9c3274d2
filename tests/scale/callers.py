"""Callers: callers with a client of ours each, who attend at a fixed pace and compare every answer with one replica's own.

The pace, not the machine, sets their goodput: a caller that is late skips what it has missed and does not catch up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from attention_client import AsyncClient, Client, ServiceError
from tests import processes

BEGIN_S = 60
WIDTH = 16  # of the layers of tests.integration.running
# The last one is larger than `tune.bufsize` of the balancer, so that the client itself has to retry it.
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 2200)


def inputs_of(width: int = WIDTH) -> list[np.ndarray]:
    draws = np.random.default_rng(43)
    return [draws.standard_normal((length, width), np.float32) for length in LENGTHS]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call through the client, its retries included; times in seconds since the callers began."""

    begun_s: float
    ended_s: float
    failure: str = ""  # the type and text of the exception
    is_wrong: bool = False  # other bits than the replica's own


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    calls: tuple[Call, ...]

    @property
    def failures(self) -> Counter[str]:
        return Counter(call.failure for call in self.calls if call.failure)

    @property
    def num_wrong(self) -> int:
        return sum(call.is_wrong for call in self.calls)

    def per_second(self, start_s: float, end_s: float) -> float:
        """Right answers a second that came between the two times."""
        right = [call.ended_s for call in self.calls if not call.failure and not call.is_wrong]
        return sum(start_s <= ended_s < end_s for ended_s in right) / (end_s - start_s)

    @property
    def slowest_s(self) -> float:
        return max(call.ended_s - call.begun_s for call in self.calls)


def goodput(before: float, during: float) -> float:
    """The share of the earlier rate that was kept."""
    assert before > 0, "nothing was answered even before"
    return during / before


class Callers:
    """`num` callers of `url`, each `per_second` times a second at most; answers are compared with those of `reference`, a URL.

    `options` go to the clients. As a context manager it starts and ends them.
    """

    def __init__(
        self,
        url: str,
        num: int = 6,
        *,
        reference: str,
        layer: str = "small",
        per_second: float = 10.0,
        inputs: Sequence[np.ndarray] | None = None,
        **options: Any,
    ) -> None:
        self._url, self._num, self._layer, self._period_s = url, num, layer, 1 / per_second
        self._inputs = list(inputs_of() if inputs is None else inputs)
        self._options = options
        with Client(reference) as client:
            self._wanted = [client.attend(layer, x).output.tobytes() for x in self._inputs]
        self._calls: list[Call] = []
        self._is_over = False
        self._start = time.monotonic()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        """Return once as many calls have ended as there are callers, so that no rate counts their start."""
        self._start = time.monotonic()
        self._thread.start()
        try:
            processes.eventually(lambda: len(self._calls) >= self._num, "the callers have begun", BEGIN_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def now_s(self) -> float:
        return time.monotonic() - self._start

    def watched(self, seconds: float) -> float:
        """Wait so long, and return the right answers a second of that time."""
        start_s = self.now_s()
        time.sleep(seconds)
        return self.result().per_second(start_s, self.now_s())

    def result(self) -> Result:
        """All calls that have ended so far; after the block, all."""
        return Result(tuple(self._calls))

    async def _run(self) -> None:
        await asyncio.gather(*map(self._caller, range(self._num)))

    async def _caller(self, number: int) -> None:
        async with AsyncClient(self._url, **self._options) as client:
            due_s, turn = number / self._num * self._period_s, number
            while not self._is_over:
                await asyncio.sleep(max(0.0, due_s - self.now_s()))
                await self._call(client, turn % len(self._inputs))
                due_s, turn = max(due_s + self._period_s, self.now_s()), turn + 1

    async def _call(self, client: AsyncClient, kind: int) -> None:
        begun_s = self.now_s()
        failure, is_wrong = "", False
        try:
            answer = await client.attend(self._layer, self._inputs[kind])
            is_wrong = answer.output.tobytes() != self._wanted[kind]
        except ServiceError as error:
            failure = f"{type(error).__name__}: {error}"
        self._calls.append(Call(begun_s, self.now_s(), failure, is_wrong))
