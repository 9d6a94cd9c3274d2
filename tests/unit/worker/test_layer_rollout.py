"""Layer rollout: what the process that runs it writes to the desired state, and how it ends when other processes fail.

The other processes are heartbeats that the test writes; nothing sleeps.
"""

import asyncio
import errno

import pytest

from service.errors import Draining, InvalidInput, LayerChanged, LayerError, LayerMissing, LayerNotFound, NotReady
from service.supervisor.worker_status import State, WorkerStatus
from service.worker.desired_state import DesiredState, DesiredStateFile, Phase
from service.worker.layer_rollout import LayerRollout
from tests.doubles import turns

OLD = {"a": "sha256:1"}


class Directory:
    """The digests in the layer directory."""

    def __init__(self):
        self.found = {"a": "sha256:1", "b": "sha256:2"}
        self.damaged = set()
        self.gate = None  # holds back the reading of a slow file

    async def digest(self, name):
        if self.gate is not None:
            await self.gate.wait()
        if name in self.damaged:
            raise LayerError(f'layer "{name}": tensors are missing')
        if name not in self.found:
            raise LayerMissing("nothing there")
        return self.found[name]


class Others:
    """Two processes, which follow each desired state at once unless `answers` says otherwise."""

    def __init__(self, directory):
        self.desired_file = DesiredStateFile(directory)
        self.statuses = {pid: WorkerStatus(directory, 2, 5.0, pid=pid) for pid in (1, 2)}
        self.desired_states = []
        self.answers = lambda desired, pid: (State.READY, None)
        self.desired_file.create(OLD)
        self.follow()

    def follow(self):
        desired = self.desired_file.read()
        assert desired is not None
        self.desired_states.append(desired)
        for pid, status in self.statuses.items():
            answer = self.answers(desired, pid)
            if answer is not None:
                status.write(answer[0], desired=desired.version, refusal=answer[1], file_changed=len(answer) > 2)

    @property
    def phases(self):
        return [(desired.phase, dict(desired.served)) for desired in self.desired_states[1:]]


@pytest.fixture
def others(tmp_path):
    return Others(tmp_path)


@pytest.fixture
def directory():
    return Directory()


@pytest.fixture
def rollout(others, directory):
    return run_with(others, directory)


def run_with(others, directory, timeout_s=20.0):

    def notify():
        others.follow()
        made.check()

    made = LayerRollout(directory, others.desired_file, others.statuses[1], notify, timeout_s)
    return made


def run(coroutine):
    return asyncio.run(coroutine)


def test_a_new_layer_takes_three_desired_states(rollout, others):
    assert run(rollout.put("b")) is True
    both = {**OLD, "b": "sha256:2"}
    assert others.phases == [(Phase.PREPARE, OLD), (Phase.SERVE, both), (Phase.SETTLED, both)]
    assert others.desired_file.read() == DesiredState(4, Phase.SETTLED, both)


def test_a_changed_layer_replaces_and_an_unchanged_one_writes_nothing(rollout, others, directory):
    assert run(rollout.put("a")) is False
    assert others.phases == []
    directory.found["a"] = "sha256:9"
    assert run(rollout.put("a")) is False
    assert others.desired_file.read().layers == {"a": "sha256:9"}


def test_an_unchanged_layer_is_rolled_out_again_if_a_process_has_a_fault(rollout, others):
    others.answers = lambda desired, pid: (State.FAILED if pid == 2 else State.READY, None)
    others.follow()
    others.answers = lambda desired, pid: (State.READY, None)
    assert run(rollout.put("a")) is False
    assert [phase for phase, _ in others.phases[1:]] == [Phase.PREPARE, Phase.SERVE, Phase.SETTLED]


def test_a_dropped_layer_leaves_the_rest(rollout, others):
    run(rollout.drop("a"))
    assert others.desired_file.read() == DesiredState(4, Phase.SETTLED, {})


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.SERVE])
def test_a_full_run_directory_leaves_the_served_layers_unchanged(rollout, others, phase):
    """Only the write of this phase fails: a smaller state, for example one without layers, still fits on the disk."""
    write = others.desired_file.write

    def full(desired):
        if desired.phase is phase:
            raise OSError(errno.ENOSPC, "no space left")
        write(desired)

    others.desired_file.write = full
    with pytest.raises(NotReady, match="cannot be written"):
        run(rollout.put("b"))
    others.desired_file.write = write
    assert others.desired_file.read().served == OLD
    assert run(rollout.put("b")) is True, "the way is free again"


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.SERVE])
def test_an_objection_aborts_the_rollout(rollout, others, phase):
    others.answers = lambda desired, pid: (State.READY, "no memory" if pid == 2 and desired.phase is phase else None)
    with pytest.raises(NotReady, match="no memory"):
        run(rollout.put("b"))
    assert others.phases[-1] == (Phase.SETTLED, OLD)
    others.answers = lambda desired, pid: (State.READY, None)
    assert run(rollout.put("b")) is True, "the way is free again"


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.SERVE])
def test_a_file_that_changed_meanwhile_aborts_the_rollout_as_a_conflict_D1(rollout, others, phase):
    others.answers = lambda desired, pid: (
        (State.READY, "another file", True) if pid == 2 and desired.phase is phase else (State.READY, None)
    )
    with pytest.raises(LayerChanged, match="changed while") as refused:
        run(rollout.put("b"))
    assert refused.value.retry_after_s == 1
    assert others.phases[-1] == (Phase.SETTLED, OLD)
    others.answers = lambda desired, pid: (State.READY, None)
    assert run(rollout.put("b")) is True, "the way is free again"


def test_a_slow_file_blocks_no_other_rollout(rollout, others, directory):
    """The lock is held for the change only, because most often there is nothing to change."""

    async def story():
        directory.gate = asyncio.Event()
        slow = [asyncio.ensure_future(rollout.put(name)) for name in ("a", "b", "absent")]
        await turns()
        await run_with(others, directory).drop("a")
        directory.gate.set()
        ends = await asyncio.gather(*slow, return_exceptions=True)
        assert [type(end) for end in ends] == [LayerChanged, bool, LayerNotFound]
        assert others.desired_file.read().layers == {"b": "sha256:2"}

    run(story())


def test_an_earlier_rollout_does_not_undo_a_later_one_of_the_same_layer(rollout, others, directory):
    """The digest that the earlier one has read is outdated."""

    async def story():
        reading = asyncio.Event()

        class Slow:
            async def digest(self, name):
                found = directory.found[name]
                await reading.wait()
                return found

        directory.found["a"] = "sha256:8"
        earlier = asyncio.ensure_future(run_with(others, Slow()).put("a"))
        await turns()
        directory.found["a"] = "sha256:9"
        assert await rollout.put("a") is False
        reading.set()
        with pytest.raises(LayerChanged, match="came first"):
            await earlier
        assert others.desired_file.read().layers == {"a": "sha256:9"}

    run(story())


def test_a_file_that_cannot_be_read_in_time_aborts_the_rollout(others, directory):
    directory.gate = asyncio.Event()
    with pytest.raises(NotReady, match="could not be read in time"):
        run(run_with(others, directory, timeout_s=0.01).put("b"))
    assert others.phases == []


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.SERVE])
def test_a_missing_acknowledgement_aborts_the_rollout(others, directory, phase):
    others.answers = lambda desired, pid: None if pid == 2 and desired.phase is phase else (State.READY, None)
    with pytest.raises(NotReady, match="in time"):
        run(run_with(others, directory, timeout_s=0.01).put("b"))
    assert others.phases[-1] == (Phase.SETTLED, OLD)


def test_a_death_during_prepare_aborts_the_rollout_at_once(rollout, others, tmp_path):
    def die(desired, pid):
        if pid == 2 and desired.phase is Phase.PREPARE:
            (tmp_path / "2.json").unlink()
            return None
        return (State.READY, None)

    others.answers = die
    with pytest.raises(NotReady, match="ended"):
        run(rollout.put("b"))


def test_a_death_during_commit_is_acknowledged_by_the_replacement(rollout, others, tmp_path):
    """The replacement starts with the current desired state."""

    async def story():
        changing = asyncio.ensure_future(rollout.put("b"))
        await turns()
        assert not changing.done()
        WorkerStatus(tmp_path, 2, 5.0, pid=3).write(State.READY, desired=others.desired_file.read().version)
        rollout.check()
        assert await changing is True

    def die(desired, pid):
        if pid == 2 and desired.phase is Phase.SERVE:
            (tmp_path / "2.json").unlink()
            return None
        return (State.READY, None)

    others.answers = die
    run(story())
    assert others.desired_file.read().phase is Phase.SETTLED


@pytest.mark.parametrize("how", ["cancel", "drain"])
def test_a_rollout_that_ends_early_is_aborted(rollout, others, how):
    others.answers = lambda desired, pid: None if pid == 2 else (State.READY, None)

    async def story():
        changing = asyncio.ensure_future(rollout.put("b"))
        await turns()
        changing.cancel() if how == "cancel" else rollout.close()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else Draining):
            await changing

    run(story())
    assert others.desired_file.read() == DesiredState(3, Phase.SETTLED, OLD)


def test_a_second_rollout_meanwhile_is_refused_with_retry_after(rollout, others, directory):
    others.answers = lambda desired, pid: None

    async def story():
        first = asyncio.ensure_future(rollout.put("b"))
        await turns()
        directory.gate = asyncio.Event()  # the refusal comes before any file is read
        for second in (run_with(others, directory).drop("a"), run_with(others, directory).put("a")):
            with pytest.raises(NotReady, match="another change") as refused:
                await second
            assert refused.value.retry_after_s == 1
        first.cancel()
        await asyncio.wait([first])

    run(story())


def test_an_abandoned_rollout_is_aborted_before_the_next(rollout, others):
    desired = others.desired_file.read()
    others.desired_file.write(desired.prepare("a", None).serve())
    assert run(rollout.put("b")) is True
    assert others.desired_file.read() == DesiredState(7, Phase.SETTLED, {**OLD, "b": "sha256:2"})


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING])
def test_without_every_process_up_nothing_is_written(rollout, others, state):
    others.statuses[2].write(state, desired=1)
    with pytest.raises(NotReady, match="1 of 2"):
        run(rollout.put("b"))
    assert others.phases == []


def test_an_error_of_the_layer_directory_is_raised_to_the_caller(rollout, others, directory):
    directory.damaged.add("c")
    with pytest.raises(InvalidInput, match="tensors are missing"):
        run(rollout.put("c"))
    for name in ("absent", "../a", "A", "", "a" * 65):
        with pytest.raises(LayerNotFound):
            run(rollout.put(name))
        with pytest.raises(LayerNotFound):
            run(rollout.drop(name))
    assert others.phases == []
