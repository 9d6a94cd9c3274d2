"""Any order of submit, cancel, complete, fail, lack memory, stick, die, tick and drain keeps the invariants of both queues.

Hypothesis draws sequences of rules and shrinks those that break an invariant. After each rule the loop runs until nothing more
happens, and the invariants are checked.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.batching import batcher as batcher_module
from service.batching.dispatcher import Dispatcher
from service.batching.job import Job
from service.errors import CostLimit, DeadlineExceeded, Draining, EngineDown, EngineFailed, QueueFull
from tests.doubles import turns
from tests.unit.batching.room import Room, cost_of, error_of, stage_of

CAPACITY, MAX_BYTES, MAX_REQUESTS, MAX_COMPUTE_S = 6, 100, 3, 1e6
SHORT, LONG = 1000, 5000  # flops: a second, as long as a short request may take, and more
FAILED = (asyncio.CancelledError, CostLimit, DeadlineExceeded, Draining, EngineDown, EngineFailed)
REFUSED = (QueueFull, Draining, EngineDown, DeadlineExceeded)


class CountedJob(Job[Any, Any]):
    """A job that counts its endings and adds itself to `made`."""

    made: list[CountedJob]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_endings = 0
        self.was_executed_when_it_ended = False
        self.made.append(self)

    def settle(self, result: Any) -> bool:
        return self._counted(super().settle(result))

    def fail(self, error: BaseException) -> bool:
        return self._counted(super().fail(error))

    def _counted(self, is_ending: bool) -> bool:
        if is_ending:
            self.num_endings += 1
            self.was_executed_when_it_ended = self.started_at is not None
        return is_ending


class WaitingRoom(RuleBasedStateMachine):
    max_wait_s = 0.0
    inline_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.complaints: list[Any] = []
        self.runner.get_loop().set_exception_handler(lambda _, context: self.complaints.append(context))
        CountedJob.made = []
        vars(batcher_module)["Job"] = CountedJob
        self.clients: list[asyncio.Task[Any]] = []
        self.drain_task: asyncio.Task[int] | None = None
        self.is_dead = False
        self.room = Room(
            capacity=CAPACITY,
            max_bytes=MAX_BYTES,
            max_requests=MAX_REQUESTS,
            max_wait_s=self.max_wait_s,
            max_compute_s=MAX_COMPUTE_S,
            inline_s=self.inline_s,
            long_s=1.0,
        )
        self.room.engine.first_rate = float(SHORT)
        self.engine, self.batcher, self.clock = self.room.engine, self.room.batcher, self.room.clock
        self.do(self.batcher.start)

    def do(self, action: Callable[[], object]) -> None:
        """Do one action, and all that follows from it."""

        async def event() -> None:
            action()
            await turns(30)

        self.runner.run(event())

    def send(
        self,
        lane: str,
        num_bytes: int,
        timeout_s: float,
        *,
        flops: int = SHORT,
        is_bad: bool = False,
        caller: str | None = None,
    ) -> None:
        payload = len(self.clients)
        if is_bad:
            self.engine.bad[payload] = ValueError("bad")
        cost = cost_of(input_bytes=num_bytes, flops=flops)
        self.clients.append(self.room.send(payload, lane, timeout_s=timeout_s, cost=cost, caller=caller))

    @property
    def dispatchers(self) -> list[Dispatcher[Any, Any]]:
        return self.batcher._dispatchers

    @property
    def threads(self) -> list[bool]:
        """Whether it is the one for long batches, for each thread that holds a batch."""
        return [is_long for is_long in (False, True) if self.engine.is_held(is_long=is_long)]

    @property
    def waiting_clients(self) -> list[asyncio.Task[Any]]:
        return [client for client in self.clients if not client.done()]

    # The rules

    @rule(
        lane=st.sampled_from("abc"),
        num_bytes=st.integers(0, 60),
        timeout_s=st.sampled_from([0.5, 3.0, 60.0]),
        flops=st.sampled_from([SHORT, SHORT, LONG]),
        is_bad=st.sampled_from([False, False, False, True]),
        caller=st.sampled_from([None, "x", "y"]),
    )
    def submit(self, lane: str, num_bytes: int, timeout_s: float, flops: int, is_bad: bool, caller: str | None) -> None:
        self.do(lambda: self.send(lane, num_bytes, timeout_s, flops=flops, is_bad=is_bad, caller=caller))

    @rule(lanes=st.text("ab", min_size=2, max_size=10))
    def submit_many_in_one_turn(self, lanes: str) -> None:
        def send_all() -> None:
            for lane in lanes:
                self.send(lane, 5, 20.0)

        self.do(send_all)

    @precondition(lambda self: self.waiting_clients)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.do(data.draw(st.sampled_from(self.waiting_clients)).cancel)

    @precondition(lambda self: self.threads)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        is_long = data.draw(st.sampled_from(self.threads))
        self.do(lambda: self.engine.release(is_long=is_long))

    @precondition(lambda self: self.threads and self.waiting_clients)
    @rule(data=st.data(), num_turns=st.integers(0, 3), does_fail=st.booleans())
    def end_a_batch_and_cancel_meanwhile(self, data: st.DataObject, num_turns: int, does_fail: bool) -> None:
        is_long = data.draw(st.sampled_from(self.threads))
        leaving = data.draw(st.lists(st.sampled_from(self.waiting_clients), unique=True))

        async def story() -> None:
            if does_fail:
                self.engine.fail(ValueError("batch"), is_long=is_long)
            else:
                self.engine.release(is_long=is_long)
            for client in leaving:
                client.cancel()
                await turns(num_turns)

        self.runner.run(story())
        self.do(lambda: None)

    @precondition(lambda self: self.threads)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        is_long = data.draw(st.sampled_from(self.threads))
        self.do(lambda: self.engine.fail(ValueError("batch"), is_long=is_long))

    @rule(room=st.sampled_from([0, 1, 2, MAX_REQUESTS]))
    def have_memory_for(self, room: int) -> None:
        """From now on larger batches fail for want of memory, and are tried in halves; with 0 even those of one."""
        self.engine.room = room

    @precondition(lambda self: self.threads and len(self.clients) > 8)
    @rule()
    def be_stuck(self) -> None:
        self.is_dead = self.is_dead or self.batcher.is_alive
        self.do(lambda: self.clock.advance(MAX_COMPUTE_S))

    @precondition(lambda self: self.threads and len(self.clients) > 8)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        is_long = data.draw(st.sampled_from(self.threads))
        self.is_dead = self.is_dead or self.batcher.is_alive
        self.do(lambda: self.engine.die(is_long=is_long))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 5.0]))
    def tick(self, seconds: float) -> None:
        self.do(lambda: self.clock.advance(seconds))

    @precondition(lambda self: self.drain_task is None and len(self.clients) > 5)
    @rule(timeout_s=st.sampled_from([0.0, 2.0, 30.0]))
    def drain(self, timeout_s: float) -> None:
        def start() -> None:
            self.drain_task = asyncio.create_task(self.batcher.drain(timeout_s))

        self.do(start)

    # The invariants

    @property
    def admitted(self) -> list[CountedJob]:
        """The jobs that were made here and not refused: the batcher has set their timer.

        A service that another test left on a thread of its own makes jobs too, with another clock.
        """
        return [job for job in CountedJob.made if job.timer is not None and job.clock is self.clock]

    @invariant()
    def every_admitted_job_is_settled_exactly_once_and_its_client_has_the_result(self) -> None:
        assert all(job.num_endings == job.is_settled for job in self.admitted)
        settled = {job.payload for job in self.admitted if job.is_settled}
        admitted = {job.payload for job in self.admitted}
        for payload, client in enumerate(self.clients):
            if payload not in admitted:
                assert isinstance(error_of(client), REFUSED)
            else:
                assert client.done() == (payload in settled)
            if client.done() and error_of(client) is None:
                assert client.result().result == ("answer", payload), "the answer to its own payload"
            elif payload in settled:
                assert isinstance(error_of(client), FAILED)

    @invariant()
    def queued_and_running_and_settled_are_all_that_was_admitted(self) -> None:
        num_settled = sum(job.is_settled for job in self.admitted)
        assert self.batcher.num_queued + self.batcher.num_running + num_settled == len(self.admitted)
        waiting = [job for job in self.admitted if stage_of(job) == "queued"]
        assert self.batcher.num_queued == len(waiting) <= CAPACITY
        num_bytes = sum(job.cost.input_bytes for job in waiting)
        assert num_bytes <= MAX_BYTES
        assert not self.room.heard.queue or self.room.heard.queue[-1] == (len(waiting), num_bytes)

    @invariant()
    def a_caller_is_served_in_order_of_arrival_within_a_lane_of_a_queue_and_what_ended_waiting_never(self) -> None:
        batches = list(zip(self.engine.batches, self.engine.long_flags, strict=True))
        for lane, caller, is_long in itertools.product("abc", (None, "x", "y"), (False, True)):
            executed = dict.fromkeys(payload for batch, flag in batches if flag is is_long for payload in batch)
            payloads = {job.payload for job in self.admitted if job.lane == lane and job.caller == caller}
            in_lane = [payload for payload in executed if payload in payloads]
            assert in_lane == sorted(in_lane)
        never = {job.payload for job in self.admitted if job.num_endings and not job.was_executed_when_it_ended}
        assert not never & set(self.engine.executed)

    @invariant()
    def a_batch_is_stopped_when_its_last_caller_has_left_and_only_then(self) -> None:
        open_jobs = {job.payload for job in self.admitted if not job.is_settled}
        for held in self.engine.held.values():
            assert held.progress.is_stopped == (not open_jobs & set(held.batch)) or not self.batcher.is_alive
        assert not open_jobs & {payload for batch in self.engine.stopped for payload in batch}

    @invariant()
    def a_batch_keeps_its_limits_and_its_lane(self) -> None:
        lane_of = {job.payload: job.lane for job in self.admitted}
        for batch in self.engine.batches:
            assert 1 <= len(batch) <= MAX_REQUESTS
            assert len({lane_of[payload] for payload in batch}) == 1

    @invariant()
    def each_job_not_settled_has_one_timer_and_a_batch_that_runs_another(self) -> None:
        num_open = sum(not job.is_settled for job in self.admitted)
        is_draining = self.drain_task is not None and not self.drain_task.done()
        idle = [dispatcher.queue.lanes.num_jobs for dispatcher in self.idle]
        num_gathering = sum(num_jobs > 0 for num_jobs in idle) if self.max_wait_s else 0
        num_watching = len(self.threads) if self.batcher.is_alive else 0
        assert self.clock.num_calls == num_open + is_draining + num_gathering + num_watching

    @property
    def idle(self) -> list[Dispatcher]:
        """Those without a batch, but not the long one while a short batch that ran out of memory runs again, alone."""
        is_alone = self.dispatchers[0].runner.beside.locked()
        return [each for each in self.dispatchers if not each.running and not (is_alone and each.queue.is_long)]

    @invariant()
    def an_idle_thread_has_nothing_waiting_beyond_the_wait_for_company(self) -> None:
        for dispatcher in self.idle:
            jobs = [job for lane in "abc" for job in dispatcher.queue.lanes.jobs(lane)]
            assert all(self.clock.now() - job.accepted_at < self.max_wait_s for job in jobs)

    @invariant()
    def readiness_tells_the_truth_and_the_dead_have_told_everyone(self) -> None:
        assert self.batcher.is_alive != self.is_dead
        assert len(self.room.heard.deaths) == self.is_dead
        if self.is_dead:
            assert all(job.is_settled for job in self.admitted)
        if self.drain_task is not None and self.drain_task.done():
            assert self.drain_task.exception() is None
            assert self.batcher.num_queued == self.batcher.num_running == 0

    @invariant()
    def nobody_complains(self) -> None:
        assert self.complaints == []

    def teardown(self) -> None:
        self.engine.room = MAX_REQUESTS
        try:
            self.do(self.engine.open)
            self.runner.run(self.batcher.drain(0.0))
            self.runner.run(self.batcher.stop())
            self.do(lambda: None)
            self.room.check_empty()
            assert all(job.num_endings == 1 for job in self.admitted)
            assert all(client.done() for client in self.clients)
            assert self.complaints == []
        finally:
            vars(batcher_module)["Job"] = Job
            self.runner.close()


class WaitingRoomWithAWait(WaitingRoom):
    max_wait_s = 0.75


class WaitingRoomOfBriefBatches(WaitingRoom):
    inline_s = MAX_COMPUTE_S


SETTINGS = settings(max_examples=60, stateful_step_count=30)

TestWaitingRoom = WaitingRoom.TestCase
TestWaitingRoom.settings = SETTINGS
TestWaitingRoomWithAWait = WaitingRoomWithAWait.TestCase
TestWaitingRoomWithAWait.settings = SETTINGS
TestWaitingRoomOfBriefBatches = WaitingRoomOfBriefBatches.TestCase
TestWaitingRoomOfBriefBatches.settings = SETTINGS
