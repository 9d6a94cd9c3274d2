"""Run directories: made, kept, and removed by their last holder; other directories are never touched."""

import fcntl
import os
import resource
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from service.observability import shared_values
from service.supervisor.processes import StartError
from service.supervisor.run_directory import METRICS_BYTES, RunDirectory


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_run_directory_is_private_and_removed_after_use(tmp_path):
    parent = tmp_path / "made" / "on demand"
    with closing(RunDirectory.make(parent, 1)) as first, closing(RunDirectory.make(parent, 1)) as second:
        assert first.path.name.startswith(f"attention-{os.getpid()}-")
        assert first.path != second.path
        assert first.path.stat().st_mode & 0o777 == 0o700
        assert names(first.path) == ["metrics"]
        assert names(first.metrics) == []
    assert names(parent) == []


def test_a_run_directory_that_cannot_be_created_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError) as refusal:
        RunDirectory.make(tmp_path / "file", 1)
    assert refusal.value.message == f"cannot make a run directory in {tmp_path / 'file'}: File exists"


def test_without_space_for_all_metrics_no_run_directory_is_created(tmp_path):
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * METRICS_BYTES, most))
    try:
        RunDirectory.make(tmp_path, 2).close()
        with pytest.raises(StartError, match=r"cannot make a run directory in .*: File too large"):
            RunDirectory.make(tmp_path, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert names(tmp_path) == []


def test_the_reserved_space_is_that_of_a_process():
    assert len(shared_values.KINDS) * shared_values.RESERVED_BYTES == METRICS_BYTES


@pytest.mark.parametrize("part", ["", "metrics"])
def test_a_missing_directory_is_created_again_for_this_user_alone_and_reported_once(tmp_path, part):
    with closing(RunDirectory.make(tmp_path / "parent", 1)) as run:
        assert not run.restore()
        (run.path / part).rename(tmp_path / "elsewhere")
        if not part:
            run.path.parent.rmdir()
        assert run.restore()
        assert not run.restore()
        assert names(run.path) == ["metrics"]
        assert run.path.stat().st_mode & 0o777 == 0o700


def test_a_foreign_directory_is_left_alone_and_reported(tmp_path, monkeypatch):
    with closing(RunDirectory.make(tmp_path, 1)) as run:
        run.metrics.rmdir()
        run.metrics.symlink_to(tmp_path)
        with pytest.raises(OSError, match="something else is in its place"):
            run.restore()
        run.metrics.unlink()
        run.metrics.write_text("mine")
        with pytest.raises(OSError, match="something else is in its place"):
            run.restore()
        assert run.metrics.read_text() == "mine"
        run.metrics.unlink()
        with monkeypatch.context() as patched:
            patched.setattr(os, "geteuid", lambda: run.path.stat().st_uid + 1)
            with pytest.raises(OSError, match="it belongs to another user"):
                run.restore()
        assert run.restore()


def left_over(parent, name="attention-1-abcdefgh.run"):
    """Make a run directory as a killed supervisor leaves it."""
    run = RunDirectory(parent / name)
    run.metrics.mkdir(parents=True)
    (run.metrics / "counter_0.db").write_bytes(b"")
    return run.path


@pytest.mark.parametrize("pid", [1, os.getpid(), 4_194_305], ids=["first", "own", "none"])
def test_a_start_removes_unlocked_directories_whatever_process_has_their_number(tmp_path, pid):
    left_over(tmp_path, f"attention-{pid}-abcdefgh.run")
    with closing(RunDirectory.make(tmp_path, 1)) as run:
        assert names(tmp_path) == [run.path.name]


def test_a_start_leaves_locked_and_foreign_directories_alone(tmp_path, monkeypatch):
    with closing(RunDirectory.make(tmp_path, 1)) as running:
        (left_over(tmp_path, "attention-2-abcdefgh.run") / "notes").touch()
        left_over(tmp_path, "attention-3-abcdefgh")  # made by a version without a lock: it may be in use
        left_over(tmp_path, "attention-4-abcdefgh.run.old")
        left_over(tmp_path, "elsewhere")
        (tmp_path / "attention-5-abcdefgh.run").write_text("")
        (tmp_path / "attention-6-abcdefgh.run").symlink_to(tmp_path / "elsewhere")
        before = names(tmp_path)
        with closing(RunDirectory.make(tmp_path, 1)) as another:
            assert names(tmp_path) == sorted([*before, another.path.name])
        assert names(tmp_path) == before
        assert names(tmp_path / "elsewhere") == ["metrics"]
        assert running.path.is_dir()
    left = left_over(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
    with pytest.raises(StartError, match="it belongs to another user"):
        RunDirectory.make(tmp_path, 1)
    assert left.is_dir()


def test_every_process_locks_the_run_directory_and_the_last_removes_it(tmp_path):
    supervisor = RunDirectory.make(tmp_path, 1)
    worker = RunDirectory(supervisor.path)
    worker.restore()
    supervisor.close()
    assert worker.path.is_dir()
    worker.close()
    assert names(tmp_path) == []


def test_a_recreated_directory_is_locked_again(tmp_path):
    supervisor = RunDirectory.make(tmp_path, 1)
    worker = RunDirectory(supervisor.path)
    worker.restore()
    supervisor.path.rename(tmp_path / "elsewhere")
    worker.restore()
    RunDirectory.make(tmp_path, 1).close()
    assert worker.path.is_dir()
    supervisor.clean_up(0)
    worker.close()
    assert worker.path.is_dir(), "the supervisor holds it since the last death"
    supervisor.close()
    assert names(tmp_path) == ["elsewhere"]


def test_a_directory_under_removal_is_not_locked(tmp_path):
    path = left_over(tmp_path)
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        RunDirectory(path).restore()
    os.close(descriptor)
    RunDirectory(path).restore()


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_directory_that_another_start_removes_before_it_is_locked_is_made_again(tmp_path, monkeypatch, is_removed):
    """The other start holds its lock for the removal, or has finished it."""
    mkdtemp = tempfile.mkdtemp
    removing: list[int] = []

    def made_beside_another_start(*arguments):
        path = mkdtemp(*arguments)
        if not removing:
            removing.append(os.open(path, os.O_RDONLY))
            fcntl.flock(removing[0], fcntl.LOCK_EX)
            if is_removed:
                Path(path).rmdir()
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", made_beside_another_start)
    with closing(RunDirectory.make(tmp_path, 1)) as run:
        assert names(run.path) == ["metrics"]
    os.close(removing[0])


def test_a_start_whose_directories_are_all_removed_ends_with_one_line(tmp_path, monkeypatch):
    mkdtemp = tempfile.mkdtemp

    def made_and_removed(*arguments):
        path = mkdtemp(*arguments)
        Path(path).rmdir()
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_removed)
    with pytest.raises(StartError, match="cannot make a run directory"):
        RunDirectory.make(tmp_path, 1)


def test_the_live_metrics_of_a_dead_process_are_removed(tmp_path):
    with closing(RunDirectory.make(tmp_path, 1)) as run:
        for name in (
            "gauge_livesum_3.db",
            "gauge_livemin_3.db",
            "counter_3.db",
            "gauge_livesum_4.db",
            "gauge_max_3.db",
        ):
            (run.metrics / name).write_bytes(b"")
        run.clean_up(3)
        assert names(run.metrics) == ["counter_3.db", "gauge_livesum_4.db", "gauge_max_3.db"]


def test_removing_a_process_without_metrics_raises_nothing_even_without_a_directory(tmp_path):
    with closing(RunDirectory.make(tmp_path, 1)) as run:
        run.clean_up(0)
        run.path.rename(tmp_path / "elsewhere")
        run.clean_up(0)
        assert names(run.path) == ["metrics"]


def test_a_full_directory_is_reported_though_nothing_is_missing(tmp_path):
    with closing(RunDirectory.make(tmp_path, 1)) as run:
        limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
        try:
            with pytest.raises(OSError, match="File too large"):
                run.restore()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        assert not run.restore()
        assert names(run.metrics) == []
