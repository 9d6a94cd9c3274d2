"""Layer rollout: what the process that got the request sends to the coordinator, and the answer to its caller.

The test reports the statuses of the other process; nothing sleeps.
"""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from service.errors import (
    Draining,
    InvalidInput,
    LayerChanged,
    LayerError,
    LayerMissing,
    LayerNotFound,
    LayerNotLoaded,
    LayersFixed,
    NotReady,
)
from service.layers.catalog import Catalog
from service.supervisor.coordinator import Coordinator
from service.supervisor.status import DesiredState, Phase, State, WorkerStatus
from service.worker import layer_rollout
from service.worker.layer_rollout import LayerRollout
from service.worker.local_channel import LocalChannel
from tests.doubles import turns

OLD = {"a": "sha256:1"}


class Registry:
    """The digests in the layer directory, and the layers that this process serves."""

    def __init__(self):
        self.found = {"a": "sha256:1", "b": "sha256:2"}
        self.damaged = set()
        self.is_short_of_memory = False
        self.gate = None  # holds back the reading of a slow file
        self.catalog: Catalog | None = Catalog({})

    async def digest(self, name):
        found = self.found.get(name)
        if self.gate is not None:
            await self.gate.wait()
        if self.is_short_of_memory:
            raise LayerNotLoaded(f'layer "{name}": no memory for it')
        if name in self.damaged:
            raise LayerError(f'layer "{name}": tensors are missing')
        if found is None:
            raise LayerMissing("nothing there")
        return found


class Service:
    """Two processes, which follow each desired state at once unless `answers` says otherwise; only the first has a rollout."""

    def __init__(self, timeout_s=20.0):
        self.coordinator = Coordinator(2, time.monotonic)
        self.registry = Registry()
        self.channel = LocalChannel(self.coordinator, pid=1)
        self.events: list[tuple[str, str]] = []
        telemetry: Any = SimpleNamespace(
            layer_refused=lambda name, error: self.events.append((name, error.message)),
            layers_changed=lambda action, name: self.events.append((name, action)),
        )
        self.rollout = LayerRollout(self.registry, self.channel, telemetry, timeout_s)  # type: ignore[arg-type]
        self.desired_states = []
        self.answers: Any = lambda desired, pid: {}

    def open(self):
        self.coordinator.join(2, self.changed)
        self.channel.open(self.changed)
        for pid in (1, 2):
            self.report(pid, state=State.READY, found=OLD)
        self.follow()

    def changed(self, *_):
        self.rollout.check()
        asyncio.get_running_loop().call_soon(self.follow)

    def report(self, pid, **fields):
        self.channel.report(**fields) if pid == 1 else self.coordinator.report(2, WorkerStatus(**fields))

    def follow(self):
        desired = self.coordinator.desired
        if desired not in self.desired_states:
            self.desired_states.append(desired)
            served: Any = {name: (name, digest) for name, digest in desired.served.items()}
            self.registry.catalog = Catalog(served)
            for pid in (1, 2):
                answer = self.answers(desired, pid)
                if answer is not None:
                    self.report(pid, **{"state": State.READY, "version": desired.version, "refusal": "", **answer})

    @property
    def phases(self):
        return [(desired.phase, dict(desired.served)) for desired in self.desired_states[1:]]


def the_second_is_silent(desired, pid):
    return None if pid == 2 and desired.version > 1 else {}


@pytest.fixture
def service():
    return Service()


def run(service, story):
    """Run a coroutine, or `story()`, in a service that has begun."""

    async def main():
        service.open()
        await turns()
        found = await (story() if callable(story) else story)
        await turns()
        return found

    return asyncio.run(main())


def test_a_new_layer_takes_three_desired_states_and_is_returned(service):
    both = {**OLD, "b": "sha256:2"}
    assert run(service, service.rollout.put("b")) == (("b", "sha256:2"), True)
    assert service.phases == [(Phase.PREPARE, OLD), (Phase.SERVE, both), (Phase.SETTLED, both)]
    assert service.events == [("b", "put")]


def test_a_changed_layer_replaces_and_an_unchanged_one_changes_nothing(service):
    async def story():
        assert await service.rollout.put("a") == (("a", "sha256:1"), False)
        assert service.phases == []
        service.registry.found["a"] = "sha256:9"
        assert await service.rollout.put("a") == (("a", "sha256:9"), False)

    run(service, story)


def test_a_dropped_layer_leaves_the_rest(service):
    run(service, service.rollout.drop("a"))
    assert service.coordinator.desired == DesiredState(4, Phase.SETTLED, {})


def test_the_layer_of_a_put_is_returned_though_another_change_follows_at_once(service):
    """The caller's task runs some loop ticks after the outcome has arrived."""

    async def story():
        putting = asyncio.ensure_future(service.rollout.put("b"))
        while service.channel.service.outcome is None:  # noqa: ASYNC110 (ticks are counted, not events)
            await asyncio.sleep(0)
        service.registry.catalog = Catalog({})
        assert await putting == (("b", "sha256:2"), True)

    run(service, story)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ({"refusal": "no memory"}, NotReady, "no memory"),
        ({"refusal": "x", "is_file_changed": True}, LayerChanged, "while"),
    ],
)
def test_a_refusal_is_raised_to_the_caller_and_another_rollout_may_begin(service, answer, error, message):
    service.answers = lambda desired, pid: answer if pid == 2 and desired.phase is Phase.PREPARE else {}

    async def story():
        with pytest.raises(error, match=message) as refused:
            await service.rollout.put("b")
        assert refused.value.retry_after_s == (1 if error is LayerChanged else 5)
        assert service.phases[-1] == (Phase.SETTLED, OLD)
        service.answers = lambda desired, pid: {}
        assert (await service.rollout.put("b"))[1] is True

    run(service, story)


def test_a_slow_file_blocks_no_other_rollout(service):
    """The change begins after its file is read, because most often there is nothing to change."""

    async def story():
        service.registry.gate = asyncio.Event()
        slow = [asyncio.ensure_future(service.rollout.put(name)) for name in ("a", "absent")]
        await turns()
        await service.rollout.drop("a")
        service.registry.gate.set()
        ends = await asyncio.gather(*slow, return_exceptions=True)
        assert [type(end) for end in ends] == [LayerChanged, LayerNotFound]
        assert service.coordinator.desired.layers == {}

    run(service, story)


def test_a_file_that_cannot_be_read_in_time_begins_no_rollout():
    service = Service(timeout_s=0.01)

    async def story():
        service.registry.gate = asyncio.Event()
        with pytest.raises(NotReady, match="could not be read in time"):
            await service.rollout.put("b")

    run(service, story)
    assert service.phases == []


def test_a_rollout_without_an_answer_of_the_supervisor_is_withdrawn(service, monkeypatch):
    monkeypatch.setattr(layer_rollout, "REPLY_S", -19.99)
    service.answers = the_second_is_silent

    async def story():
        with pytest.raises(NotReady, match="does not answer"):
            await service.rollout.put("b")

    run(service, story)
    assert service.phases[-1] == (Phase.SETTLED, OLD)


@pytest.mark.parametrize("how", ["cancel", "drain"])
def test_a_rollout_that_ends_early_is_withdrawn(service, how):
    service.answers = the_second_is_silent

    async def story():
        changing = asyncio.ensure_future(service.rollout.put("b"))
        await turns()
        changing.cancel() if how == "cancel" else service.rollout.close()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else Draining):
            await changing

    run(service, story)
    assert service.coordinator.desired == DesiredState(3, Phase.SETTLED, OLD)


def test_a_draining_process_begins_no_rollout(service):
    service.rollout.close()
    for begin in (service.rollout.put, service.rollout.drop):
        with pytest.raises(Draining):
            run(service, begin("a"))


def test_a_second_rollout_meanwhile_is_refused_before_its_file_is_read(service):
    service.answers = the_second_is_silent

    async def story():
        first = asyncio.ensure_future(service.rollout.put("b"))
        await turns()
        service.registry.gate = asyncio.Event()
        other = LayerRollout(service.registry, service.channel, service.rollout.telemetry, 20.0)
        for second in (service.rollout.drop("a"), service.rollout.put("a"), other.put("a")):
            with pytest.raises(NotReady, match="another change") as refused:
                await second
            assert refused.value.retry_after_s == 1
        first.cancel()
        await asyncio.wait([first])

    run(service, story)


def test_before_the_first_layers_are_loaded_nothing_changes(service):
    for begin in (service.rollout.put, service.rollout.drop):
        with pytest.raises(NotReady, match="layers are being loaded"):
            asyncio.run(begin("a"))


def test_an_error_of_the_layer_directory_is_raised_to_the_caller(service):
    service.registry.damaged.add("c")

    async def story():
        with pytest.raises(InvalidInput, match="tensors are missing") as refused:
            await service.rollout.put("c")
        assert refused.value.__context__ is None, "its traceback would hold the layer's tensors until a full collection"
        assert service.events == [("c", 'layer "c": tensors are missing')]
        for name in ("absent", "../a", "A", "", "a" * 65):
            with pytest.raises(LayerNotFound):
                await service.rollout.put(name)
            with pytest.raises(LayerNotFound):
                await service.rollout.drop(name)

    run(service, story)
    assert service.phases == []


def test_a_file_that_this_process_cannot_read_now_is_not_the_callers_fault(service):
    service.registry.is_short_of_memory = True

    async def story():
        with pytest.raises(NotReady, match="no memory for it; nothing was changed") as refused:
            await service.rollout.put("b")
        assert refused.value.retry_after_s == 5
        assert service.events == [("b", 'layer "b": no memory for it')]

    run(service, story)
    assert service.phases == []


def test_layers_that_come_from_elsewhere_are_changed_by_no_request(service):
    service.rollout.fixed = "the layers follow a source"

    async def story():
        for begin in (service.rollout.put, service.rollout.drop):
            for name in ("a", "b", "../a"):
                with pytest.raises(LayersFixed, match="the layers follow a source"):
                    await begin(name)

    run(service, story)
    assert service.phases == []
