"""D1: file changes and layer rollouts in any order and in several processes end no process and affect no other layer.

Hypothesis generates the sequences of steps and shrinks those that break an invariant. The registries, reconcilers, rollouts and
the coordinator are real. Each step completes something that a process waits for: a file is read, a layer is loaded, a message
arrives. A step may also kill a process or start its replacement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.errors import InvalidInput, LayerChanged, LayerError, LayerMissing, LayerNotFound, NotReady
from service.supervisor.coordinator import MAX_AGE_S, Coordinator
from service.supervisor.status import Phase, ServiceStatus
from service.worker.layer_registry import LayerRegistry, Reconciler
from service.worker.layer_rollout import LayerRollout
from service.worker.local_channel import LocalChannel
from service.worker.readiness import Readiness
from tests.doubles import ManualClock, turns

NUM_PROCESSES = 2
TIMEOUT_S = 1e6
STILL = "still"  # no step changes its file
NAMES = st.sampled_from("aaab")
VERSIONS = ("v1", "v2")
DAMAGED, NONE = "damaged", "none"
ALLOWED = (LayerChanged, InvalidInput, LayerNotFound, NotReady, asyncio.CancelledError)


class Directory:
    """The layer directory: by name, a version or the state of the file (damaged, none)."""

    def __init__(self) -> None:
        self.files = {STILL: "v1", "a": "v1", "b": "v1"}
        self.num_writes = 0

    def put(self, name: str, content: str) -> None:
        self.num_writes += 1
        self.files[name] = content

    def of_set(self, _: str) -> Self:
        return self

    def names(self) -> list[str]:
        return sorted(name for name, content in self.files.items() if content != NONE)

    def load(self, name: str) -> Any:
        content = self.files[name]
        if content == NONE:
            raise LayerMissing("there is no file")
        if content == DAMAGED:
            raise LayerError("it is no layer")
        return SimpleNamespace(name=name, digest=content, spec=None, tensors={})


class Work:
    """An executor whose jobs run only when a step calls for it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append((Future(), partial(work, *args, **kwargs)))
        return self.waiting[-1][0]

    def do_next(self) -> None:
        future, work = self.waiting.pop(0)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except LayerError as error:
                future.set_exception(error)

    def fail_next(self, error: Exception) -> None:
        future, _ = self.waiting.pop(0)
        if future.set_running_or_notify_cancel():
            future.set_exception(error)

    def shutdown(self, **_: Any) -> None:
        pass


class Engine(Work):
    def load(self, build: Any, **options: Any) -> Future[Any]:
        return self.submit(partial(SimpleNamespace, is_sequential=False, least_rows=4))

    def release(self) -> None:
        pass


class SlowChannel(LocalChannel):
    """Each message arrives only when a step calls for it, and only the latest waits, as on a real one."""

    inbox: ServiceStatus | None = None
    has_unsent = is_dead = False

    def open(self, *changed: Callable[[], object]) -> None:
        self._changed = changed
        self.coordinator.join(self.pid, self._take)
        self.receive()
        self._send()

    def _send(self) -> None:
        self.has_unsent = not self.is_dead

    def _take(self, service: ServiceStatus) -> None:
        self.inbox = service

    def send(self) -> None:
        self.has_unsent = False
        self.coordinator.report(self.pid, self.status)

    def receive(self) -> None:
        if self.inbox is not None:
            service, self.inbox = self.inbox, None
            super()._take(service)


class Process:
    """One process as `worker/service.py` assembles it, without HTTP and engine."""

    def __init__(self, coordinator: Coordinator, files: Directory, clock: ManualClock, pid: int) -> None:
        self.is_dead = self.was_content = False
        self.reading, self.digest_reads, self.engine = Work(), Work(), Engine()
        self.channel = SlowChannel(coordinator, pid)
        quiet = SimpleNamespace(
            layer_loaded=lambda *_: None, layer_refused=lambda *_: None, layer_not_loaded=lambda *_: None,
            serving=lambda *_: None, readiness_changed=lambda **_: None, seconds_since_answer=lambda _: 0.0,
            layers_changed=lambda *_: None,
        )  # fmt: skip
        self.registry = LayerRegistry(files, self.engine, quiet)  # type: ignore[arg-type]
        self.registry.close()
        self.registry._load_thread, self.registry._digest_thread = self.reading, self.digest_reads  # type: ignore[assignment]
        self.rollout = LayerRollout(self.registry, self.channel, quiet, TIMEOUT_S)  # type: ignore[arg-type]
        batcher = SimpleNamespace(is_alive=True)
        self.readiness = Readiness(self.channel, batcher, self.registry, quiet, quiet, bool, 10.0, 1.0)  # type: ignore[arg-type]
        self.reconciler = Reconciler(self.registry, self.channel, clock, 10.0, self.readiness.state_applied)
        self.channel.open(self.check)
        self.readiness.port_opened()
        self.life = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        self.readiness.report()
        await self.reconciler.load(strict=False)
        desired = self.registry.applied
        self.was_content = desired.version > 0 and desired.loaded <= self.registry._loaded.keys()
        await self.reconciler.run()

    def check(self) -> None:
        self.readiness.check()
        self.reconciler.check()
        self.rollout.check()

    def heartbeat(self) -> None:
        self.readiness.report()
        self.reconciler.check()

    @property
    def has_begun(self) -> bool:
        return self.registry.applied.version > 0

    @property
    def catalog(self) -> Any:
        assert self.registry.catalog is not None
        return self.registry.catalog

    @property
    def digests(self) -> dict[str, str]:
        return {name: layer.digest for name, layer in self.catalog.layers.items()}


class LayerRace(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.complaints: list[Any] = []
        self.runner.get_loop().set_exception_handler(lambda _, context: self.complaints.append(context))
        self.files, self.clock = Directory(), ManualClock()
        self.coordinator = Coordinator(NUM_PROCESSES, self.clock.now)
        self.pids = iter(range(1, 10_000))
        self.slots: list[Process] = []
        self.changing: list[tuple[Process, asyncio.Task[None]]] = []
        self.untrue: list[str] = []
        self.num_changed = self.num_deaths = self.num_failed_loads = self.num_silences = self.num_asked = 0
        self.do(lambda: self.slots.extend(self.started() for _ in range(NUM_PROCESSES)))
        self.let_all_end()

    def do(self, action: Callable[[], object]) -> None:
        async def event() -> None:
            action()
            await turns(15)

        self.runner.run(event())

    def started(self) -> Process:
        return Process(self.coordinator, self.files, self.clock, next(self.pids))

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.slots if not process.is_dead]

    async def change(self, process: Process, method: str, name: str) -> None:
        """Run a PUT or DELETE and record an error whose stated reason is not true."""
        deaths, failed, writes, changed, silences = (
            self.num_deaths,
            self.num_failed_loads,
            self.files.num_writes,
            self.num_changed,
            self.num_silences,
        )
        asked, was_busy = self.num_asked, self.coordinator._rollout is not None
        was_busy |= process.channel.service.desired.phase is not Phase.SETTLED
        was_busy |= {*self.open_changes} != {asyncio.current_task()}
        are_all_up = len(self.alive) == NUM_PROCESSES and all(one.has_begun for one in self.slots)
        try:
            await (process.rollout.put(name) if method == "PUT" else process.rollout.drop(name))
        except ALLOWED as error:
            whys = {
                "changed while": self.files.num_writes > writes,
                "came first": self.num_changed > changed,
                "another change of layers": self.num_asked - asked > 0 or was_busy,
                "could not load the layer": self.num_failed_loads > failed,
                "during the change": self.num_deaths > deaths or self.num_silences > silences,
                "processes are up": not are_all_up or self.num_deaths > deaths or self.num_silences > 0,
                "in time": self.num_silences > silences,
            }
            is_told_why = isinstance(error, LayerChanged | NotReady)
            self.untrue += (
                [str(error)] if is_told_why and not any(why in str(error) and whys[why] for why in whys) else []
            )
        else:
            self.num_changed += 1
            for one in self.alive:
                if one.has_begun and not process.is_dead:
                    assert (name in one.digests) == (method == "PUT"), "success means that every process serves it so"
                    assert one.digests.get(name) == process.digests.get(name)

    @property
    def open_changes(self) -> list[asyncio.Task[None]]:
        return [task for process, task in self.changing if not task.done() and not process.is_dead]

    # Steps

    @rule(name=NAMES, content=st.sampled_from([*VERSIONS, *VERSIONS, *VERSIONS, DAMAGED, NONE]))
    def a_file_is_replaced_damaged_or_removed(self, name: str, content: str) -> None:
        self.files.put(name, content)

    @rule(slot=st.integers(0, NUM_PROCESSES - 1), method=st.sampled_from(["PUT", "PUT", "DELETE"]), name=NAMES)
    def an_admin_asks(self, slot: int, method: str, name: str) -> None:
        process = self.slots[slot]
        if not process.is_dead and process.has_begun:
            self.num_asked += 1
            make = lambda: asyncio.ensure_future(self.change(process, method, name))
            self.do(lambda: self.changing.append((process, make())))

    @precondition(lambda self: self.open_changes)
    @rule(data=st.data())
    def an_admin_leaves(self, data: st.DataObject) -> None:
        self.do(data.draw(st.sampled_from(self.open_changes)).cancel)

    @property
    def waiting(self) -> list[Callable[[], object]]:
        """Return what may happen next: a file is read, a layer is loaded, a message arrives."""
        found: list[Callable[[], object]] = []
        for process in self.alive:
            found += [work.do_next for work in (process.reading, process.digest_reads, process.engine) if work.waiting]
            found += [process.channel.send] if process.channel.has_unsent else []
            found += [process.channel.receive] if process.channel.inbox is not None else []
        return found

    @precondition(lambda self: self.waiting)
    @rule(choices=st.lists(st.integers(0, 11), min_size=1, max_size=6))
    def what_waits_goes_on(self, choices: list[int]) -> None:
        for choice in choices:
            if waiting := self.waiting:
                self.do(waiting[choice % len(waiting)])

    @precondition(lambda self: any(process.engine.waiting and process.has_begun for process in self.alive))
    @rule()
    def a_layer_finds_no_room(self) -> None:
        process = next(process for process in self.alive if process.engine.waiting and process.has_begun)
        self.num_failed_loads += 1
        self.do(partial(process.engine.fail_next, RuntimeError("no memory")))

    @rule(slot=st.integers(0, NUM_PROCESSES - 1))
    def a_process_beats(self, slot: int) -> None:
        if not self.slots[slot].is_dead:
            self.do(self.slots[slot].heartbeat)

    @rule(seconds=st.sampled_from([1.0, 15.0]))
    def time_passes(self, seconds: float) -> None:
        self.num_silences += seconds > MAX_AGE_S
        self.do(lambda: self.clock.advance(seconds))

    @precondition(lambda self: self.open_changes)
    @rule(slot=st.integers(0, NUM_PROCESSES - 1))
    def a_process_dies(self, slot: int) -> None:
        victim = self.slots[slot]
        if not victim.is_dead:
            self.num_deaths += 1
            victim.is_dead = victim.channel.is_dead = True
            self.coordinator.leave(victim.channel.pid)
            tasks = [victim.life, *(task for process, task in self.changing if process is victim)]
            self.do(lambda: [task.cancel() for task in tasks])

    @precondition(lambda self: len(self.alive) < NUM_PROCESSES)
    @rule()
    def the_dead_are_replaced(self) -> None:
        for slot in range(NUM_PROCESSES):
            self.replace(slot)

    def replace(self, slot: int) -> None:
        if self.slots[slot].is_dead:
            self.do(lambda: self.slots.__setitem__(slot, self.started()))

    # Invariants

    @invariant()
    def no_process_ends(self) -> None:
        assert not [process.life for process in self.alive if process.life.done()]
        assert self.complaints == []

    @invariant()
    def a_layer_that_nobody_touched_is_served_by_all_who_have_begun(self) -> None:
        for process in self.alive:
            if process.has_begun:
                assert process.catalog.get(STILL).digest == "v1"

    @invariant()
    def who_served_everything_once_lacks_nothing_later(self) -> None:
        for process in self.alive:
            if process.was_content:
                assert process.catalog.awaited == frozenset()

    @invariant()
    def whoever_is_refused_is_told_the_truth(self) -> None:
        assert self.untrue == []

    @invariant()
    def each_change_ended_as_it_may(self) -> None:
        for _, task in self.changing:
            if task.done() and not task.cancelled():
                task.result()

    def let_all_end(self) -> None:
        """Replace dead processes and finish all work that has begun."""
        for slot in range(NUM_PROCESSES):
            self.replace(slot)
        for _ in range(6):
            for process in self.slots:
                self.do(process.heartbeat)
            while self.waiting:
                self.do(self.waiting[0])
        self.check_rest()

    def check_rest(self) -> None:
        assert self.open_changes == []
        desired = self.coordinator.desired
        assert desired.phase is Phase.SETTLED
        for process in self.slots:
            assert process.registry.applied.version == desired.version
            assert {*process.digests} | process.catalog.awaited == {*desired.layers}
            assert process.digests.items() <= desired.layers.items()
            assert not process.was_content or process.digests == desired.layers

    def teardown(self) -> None:
        try:
            self.let_all_end()
            for number, name in enumerate("ab"):  # no rollout is under way, so a PUT loads what a process lacks
                self.files.put(name, VERSIONS[number])
                self.an_admin_asks(number, "PUT", name)
                self.let_all_end()
                assert all(process.digests[name] == VERSIONS[number] for process in self.slots)
            for process in self.slots:
                self.do(process.life.cancel)
            self.no_process_ends_with_an_error()
        finally:
            self.runner.close()

    def no_process_ends_with_an_error(self) -> None:
        assert all(process.life.cancelled() for process in self.slots)
        assert self.complaints == []


TestLayerRace = LayerRace.TestCase
TestLayerRace.settings = settings(max_examples=50, stateful_step_count=30)
