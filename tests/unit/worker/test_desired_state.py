"""Desired state: what each phase serves and holds, the rollback, damaged files and two concurrent writers."""

import json
import multiprocessing
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.worker.desired_state import DesiredState, DesiredStateFile, Phase

OLD, NEW = {"a": "sha256:1", "b": "sha256:2"}, {"a": "sha256:3", "b": "sha256:2"}


@pytest.fixture
def desired_file(tmp_path):
    return DesiredStateFile(tmp_path)


def test_a_rollout_serves_the_old_layers_until_all_are_ready_and_holds_both_until_all_serve():
    before = DesiredState(4, Phase.SETTLED, OLD)
    prepare = before.prepare("a", "sha256:3")
    serve = prepare.serve()
    after = serve.settle()
    assert [desired.version for desired in (before, prepare, serve, after)] == [4, 5, 6, 7]
    assert [desired.served for desired in (before, prepare, serve, after)] == [OLD, OLD, NEW, NEW]
    both = {*OLD.items(), *NEW.items()}
    assert [desired.loaded for desired in (before, prepare, serve, after)] == [
        {*OLD.items()},
        both,
        both,
        {*NEW.items()},
    ]


@pytest.mark.parametrize(
    ("name", "digest", "layers"),
    [("a", None, {"b": "sha256:2"}), ("c", "sha256:9", {**OLD, "c": "sha256:9"}), ("a", "sha256:1", OLD)],
    ids=["drop", "add", "same"],
)
def test_a_rollout_changes_one_layer(name, digest, layers):
    desired = DesiredState(4, Phase.SETTLED, OLD).prepare(name, digest)
    assert (desired.layers, desired.previous, desired.changed_layer) == (layers, OLD, name)
    assert desired.serve().changed_layer == name
    assert desired.serve().settle() == DesiredState(7, Phase.SETTLED, layers)


@pytest.mark.parametrize("steps", [1, 2])
def test_an_abort_restores_the_old_layers_from_either_phase(steps):
    desired = DesiredState(4, Phase.SETTLED, OLD).prepare("a", "sha256:3")
    desired = desired.serve() if steps == 2 else desired
    assert desired.abort() == DesiredState(desired.version + 1, Phase.SETTLED, OLD)


def test_the_written_state_is_read_back(desired_file):
    assert desired_file.read() is None
    for desired in (
        DesiredState(1, Phase.SETTLED, OLD),
        DesiredState(2, Phase.PREPARE, NEW, OLD, "a"),
        DesiredState(9, Phase.SERVE, {}, NEW),
    ):
        desired_file.write(desired)
        assert desired_file.read() == desired


def test_the_first_process_writes_the_first_desired_state(desired_file, tmp_path):
    assert desired_file.create(OLD) == DesiredState(1, Phase.SETTLED, OLD)
    assert desired_file.create(NEW) == DesiredState(1, Phase.SETTLED, OLD)
    assert [path.name for path in tmp_path.iterdir()] == ["desired_state"]


GOOD: dict[str, object] = {"version": 3, "phase": "settled", "layers": {"a": "x"}, "previous": {}, "changed_layer": ""}
CHANGES: list[dict[str, object]] = [
    {"version": True},
    {"version": "3"},
    {"phase": "done"},
    {"layers": []},
    {"layers": {"a": 1}},
    {"previous": None},
    {"changed_layer": None},
]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        *(json.dumps({**GOOD, **change}).encode() for change in CHANGES),
        json.dumps(GOOD).encode()[:-1],
    ],
)
def test_a_malformed_desired_state_is_none(desired_file, tmp_path, text):
    (tmp_path / "desired_state").write_bytes(text)
    assert desired_file.read() is None


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_raise(text):
    assert DesiredState.parse(text) is None


def test_only_one_process_holds_the_lock_and_releases_it(desired_file, tmp_path):
    with desired_file.locked() as first, DesiredStateFile(tmp_path).locked() as second:
        assert (first, second) == (True, False)
    with desired_file.locked() as again:
        assert again


def test_a_removed_lock_gives_no_right_to_write_and_is_not_held_twice(desired_file, tmp_path):
    desired_file.create(OLD)
    with desired_file.locked():
        desired_file.write(DesiredState(2, Phase.SETTLED, NEW))
        (tmp_path / "desired_state.lock").unlink()
        with pytest.raises(OSError, match="No such file"):
            desired_file.write(DesiredState(3, Phase.SETTLED, OLD))
        with desired_file.locked() as again:
            assert not again
        with DesiredStateFile(tmp_path).locked() as other:
            assert other
            with pytest.raises(OSError, match="another process may hold"):
                desired_file.write(DesiredState(3, Phase.SETTLED, OLD))
    with desired_file.locked() as later:
        assert later
        desired_file.write(DesiredState(3, Phase.SETTLED, OLD))


def test_the_lock_is_released_when_its_holder_dies(desired_file, tmp_path):
    context = multiprocessing.get_context("spawn")
    holder = context.Process(target=_die_with_the_lock, args=(tmp_path,))
    holder.start()
    holder.join(30)
    assert holder.exitcode == 7
    with desired_file.locked() as has_lock:
        assert has_lock


def _die_with_the_lock(directory):
    with DesiredStateFile(directory).locked() as has_lock:
        os._exit(7 if has_lock else 1)


def test_without_a_directory_nothing_is_read_or_locked_and_writing_raises(tmp_path):
    desired_file = DesiredStateFile(tmp_path / "gone")
    assert desired_file.read() is None
    with desired_file.locked() as has_lock:
        assert not has_lock
    for write in (lambda: desired_file.write(DesiredState(1, Phase.SETTLED, OLD)), lambda: desired_file.create(OLD)):
        with pytest.raises(OSError, match="No such file"):
            write()
