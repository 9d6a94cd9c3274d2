"""Shared files: a reader sees a whole file or none, and a failed write leaves nothing behind."""

import os

import pytest

from service.supervisor import shared_file


def test_a_written_file_is_read_and_overwritten(tmp_path):
    path = tmp_path / "desired_state"
    shared_file.replace(path, b"first, and long")
    shared_file.replace(path, b"second")
    assert shared_file.read(path, 6) == b"second"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("max_bytes", [0, 5])
def test_a_file_above_the_limit_reads_as_nothing(tmp_path, max_bytes):
    shared_file.replace(tmp_path / "desired_state", b"second")
    assert shared_file.read(tmp_path / "desired_state", max_bytes) is None


def test_a_missing_file_and_a_directory_read_as_nothing(tmp_path):
    assert shared_file.read(tmp_path / "gone", 10) is None
    assert shared_file.read(tmp_path, 10) is None


def test_only_the_first_writer_creates(tmp_path):
    path = tmp_path / "desired_state"
    assert shared_file.create(path, b"first")
    assert not shared_file.create(path, b"second")
    assert shared_file.read(path, 10) == b"first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [shared_file.replace, shared_file.create])
def test_without_its_directory_a_write_raises(tmp_path, write):
    with pytest.raises(OSError, match="No such file"):
        write(tmp_path / "gone" / "desired_state", b"text")


@pytest.mark.parametrize("write", [shared_file.replace, shared_file.create])
def test_a_failed_write_leaves_only_the_old_content(tmp_path, monkeypatch, write):
    def no_space(temporary, text):
        temporary.touch()
        raise OSError(28, "No space left on device")

    path = tmp_path / "desired_state"
    shared_file.replace(path, b"before")
    monkeypatch.setattr(type(path), "write_bytes", no_space)
    with pytest.raises(OSError, match="No space"):
        write(path, b"after")
    assert shared_file.read(path, 10) == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_removing_deletes_the_half_written_file_of_a_dead_writer(tmp_path):
    path = tmp_path / "11.json"
    for name in (path, shared_file.temporary_of(path, 11), shared_file.temporary_of(path, os.getpid())):
        name.write_bytes(b"{")
    shared_file.remove(path, 11)
    shared_file.remove(path, 11)
    assert list(tmp_path.iterdir()) == [shared_file.temporary_of(path, os.getpid())]
