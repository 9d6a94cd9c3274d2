"""Shared work: one computation for all callers; a failure is not kept; a caller after an event gets a result that has it."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.api.shared_work import THROTTLE_S, Memo, Throttle
from tests.doubles import ManualClock


class Maker:
    """What a Memo calls: held in its thread while the gate is closed; fails while there are faults left."""

    def __init__(self, faults: int = 0) -> None:
        self.gate = threading.Event()
        self.threads: list[threading.Thread] = []
        self.faults = faults

    def __call__(self) -> int:
        self.threads.append(threading.current_thread())
        assert self.gate.wait(20)
        if self.faults:
            self.faults -= 1
            raise ValueError("not this time")
        return len(self.threads)


class Renders:
    """What a Throttle calls: says how many events there were when it began, once the test lets it end."""

    def __init__(self) -> None:
        self.events = 0
        self.begun = 0
        self.ends: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def __call__(self) -> int:
        self.begun += 1
        seen = self.events
        if (error := await self.ends.get()) is not None:
            raise error
        return seen


async def turns() -> None:
    """Every task gets as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def ask(shared: Throttle[int], times: int = 1) -> list[asyncio.Task[int]]:
    return [asyncio.ensure_future(shared.get()) for _ in range(times)]


def test_concurrent_requests_share_one_value_made_in_a_thread():
    async def main():
        memo, make = Memo[int](ThreadPoolExecutor()), Maker()
        asking = [asyncio.ensure_future(memo.get("a", make)) for _ in range(50)]
        await turns()
        make.gate.set()
        assert set(await asyncio.gather(*asking)) == {1}
        assert await memo.get("a", make) == 1
        assert len(make.threads) == 1
        assert make.threads[0] is not threading.main_thread()

    asyncio.run(main())


def test_another_key_makes_another_value_and_only_the_last_is_kept():
    async def main():
        memo, make = Memo[int](ThreadPoolExecutor()), Maker()
        make.gate.set()
        assert [await memo.get(key, make) for key in ("a", "a", None, None, "a")] == [1, 1, 2, 2, 3]

    asyncio.run(main())


def test_a_key_that_changes_while_a_value_is_made_gets_its_own():
    async def main():
        memo, old, new = Memo[int](ThreadPoolExecutor()), Maker(), Maker()
        new.gate.set()
        asking = asyncio.ensure_future(memo.get("old", old))
        await turns()
        assert await memo.get("new", new) == 1
        old.gate.set()
        assert await asking == 1
        assert await memo.get("new", new) == 1
        assert (len(old.threads), len(new.threads)) == (1, 1)

    asyncio.run(main())


def test_a_failure_reaches_all_waiting_requests_and_is_not_kept():
    async def main():
        memo, make = Memo[int](ThreadPoolExecutor()), Maker(faults=1)
        asking = [asyncio.ensure_future(memo.get("a", make)) for _ in range(3)]
        await turns()
        make.gate.set()
        assert {str(x) for x in await asyncio.gather(*asking, return_exceptions=True)} == {"not this time"}
        assert await memo.get("a", make) == 2

    asyncio.run(main())


def test_a_cancelled_request_cancels_no_other():
    async def main():
        memo, make = Memo[int](ThreadPoolExecutor()), Maker()
        first, second = (asyncio.ensure_future(memo.get("a", make)) for _ in range(2))
        await turns()
        first.cancel()
        make.gate.set()
        assert await second == 1
        assert len(make.threads) == 1

    asyncio.run(main())


def test_a_key_whose_value_could_not_be_begun_does_not_get_the_value_of_the_one_before():
    async def main():
        thread = ThreadPoolExecutor()
        memo = Memo[str](thread)
        assert await memo.get("a", lambda: "of a") == "of a"
        thread.shutdown()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shutdown"):
                await memo.get("b", lambda: "of b")

    asyncio.run(main())


def test_a_cancelled_value_is_computed_again():
    async def main():
        blocked, may_go_on = ThreadPoolExecutor(1), threading.Event()
        blocked.submit(may_go_on.wait, 20)
        memo = Memo[int](blocked)
        waiting = asyncio.ensure_future(memo.get("a", lambda: 1))
        await turns()
        assert memo._value is not None
        memo._value.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        may_go_on.set()
        assert await memo.get("a", lambda: 2) == 2

    asyncio.run(main())


def test_the_first_request_is_rendered_at_once():
    async def main():
        renders = Renders()
        shared = Throttle(renders, ManualClock())
        (only,) = ask(shared)
        await turns()
        assert renders.begun == 1
        renders.ends.put_nowait(None)
        assert await only == 0

    asyncio.run(main())


def test_concurrent_requests_get_one_rendering_and_then_a_pause():
    async def main():
        clock, renders = ManualClock(), Renders()
        shared = Throttle(renders, clock)
        asking = ask(shared, 50)
        await turns()
        renders.ends.put_nowait(None)
        await asyncio.gather(*asking)
        late = ask(shared, 50)
        await turns()
        clock.advance(THROTTLE_S * 0.9)
        await turns()
        assert renders.begun == 1
        clock.advance(THROTTLE_S * 0.2)
        renders.ends.put_nowait(None)
        await asyncio.gather(*late)
        assert renders.begun == 2
        assert clock.num_calls == 0

    asyncio.run(main())


def test_a_request_never_gets_an_earlier_rendering():
    async def main():
        clock, renders = ManualClock(), Renders()
        shared = Throttle(renders, clock)
        (first,) = ask(shared)
        await turns()
        renders.events = 7  # while the first is being rendered
        (second,) = ask(shared)
        await turns()
        assert renders.begun == 1, "never two at once"
        renders.ends.put_nowait(None)
        assert await first == 0
        clock.advance(THROTTLE_S)
        renders.ends.put_nowait(None)
        assert await second == 7

    asyncio.run(main())


def test_a_failed_rendering_is_raised_and_the_next_request_renders_again():
    async def main():
        clock, renders = ManualClock(), Renders()
        shared = Throttle(renders, clock)
        asking = ask(shared, 3)
        renders.ends.put_nowait(OSError("gone"))
        assert {str(x) for x in await asyncio.gather(*asking, return_exceptions=True)} == {"gone"}
        (again,) = ask(shared)
        await turns()
        clock.advance(THROTTLE_S)
        renders.ends.put_nowait(None)
        assert await again == 0

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before it begins", "while it runs"])
def test_a_cancelled_scrape_cancels_no_other(when):
    async def main():
        clock, renders = ManualClock(), Renders()
        shared = Throttle(renders, clock)
        leaving, staying = ask(shared, 2)
        if when == "while it runs":
            await turns()
        else:
            await asyncio.sleep(0)
        leaving.cancel()
        await turns()
        renders.ends.put_nowait(None)
        assert await staying == 0
        assert renders.begun == 1

    asyncio.run(main())
