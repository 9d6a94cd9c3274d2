"""Worker status: how good, old, torn and missing heartbeats are read."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.supervisor.worker_status import Heartbeat, State, WorkerStatus, read_heartbeat, remove_heartbeat


class Time:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def statuses(tmp_path, time):
    """Two processes of one service."""
    return [WorkerStatus(tmp_path, 2, 5.0, pid=pid, now=time) for pid in (11, 12)]


def test_the_service_is_ready_once_all_are_and_every_process_says_so(statuses):
    for status in statuses:
        status.write(State.READY)
    assert [status.why_not_ready() for status in statuses] == [None, None]


def test_a_starting_process_is_missing(statuses):
    statuses[0].write(State.READY)
    assert statuses[0].why_not_ready() == "1 of 2 processes is not up yet"


def test_no_process_and_no_directory_count_as_missing(statuses, tmp_path):
    assert statuses[0].why_not_ready() == "2 of 2 processes are not up yet"
    assert WorkerStatus(tmp_path / "gone", 1, 5.0).why_not_ready() == "1 of 1 process is not up yet"


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING])
def test_one_unready_process_makes_the_service_unready(statuses, state):
    statuses[0].write(State.READY)
    statuses[1].write(state, "a reason of its own")
    assert statuses[0].why_not_ready() == f"1 of 2 processes is {state.value}"


def test_a_failure_is_reported_first_with_its_reason(statuses):
    statuses[0].write(State.STARTING)
    statuses[1].write(State.FAILED, "the engine is down")
    assert statuses[0].why_not_ready() == "a process has failed: the engine is down"


def test_a_report_counts_until_it_is_too_old(statuses, time):
    for status in statuses:
        status.write(State.READY)
    time.now += 5
    assert statuses[0].why_not_ready() is None
    time.now += 1
    statuses[0].write(State.READY)
    assert statuses[0].why_not_ready() == "a process has not reported for 6 s"


def test_a_later_report_replaces_the_earlier_one(statuses, tmp_path):
    statuses[0].write(State.STARTING, "layers are being loaded")
    statuses[0].write(State.READY)
    assert [path.name for path in tmp_path.iterdir()] == ["11.json"]
    assert read_heartbeat(tmp_path, 11) == Heartbeat(11, State.READY, "", 1000.0)


def test_a_removed_process_is_missing_and_removing_it_twice_is_harmless(statuses, tmp_path):
    for status in statuses:
        status.write(State.READY)
    (tmp_path / ".12.json.12.tmp").write_bytes(b"{")
    remove_heartbeat(tmp_path, 12)
    remove_heartbeat(tmp_path, 12)
    assert [path.name for path in tmp_path.iterdir()] == ["11.json"]
    assert statuses[0].why_not_ready() == "1 of 2 processes is not up yet"


def test_a_long_reason_and_any_character_survive(statuses, tmp_path):
    statuses[0].write(State.FAILED, "é\ud800\n" * 1000)
    found = read_heartbeat(tmp_path, 11)
    assert found is not None
    assert found.reason == ("é\ud800\n" * 1000)[:256]


GOOD = {"pid": 11, "state": "ready", "reason": "", "at": 1000.0, "desired": 3, "refusal": "", "file_changed": False}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"pid": 1',
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 4000,
        json.dumps({**GOOD, "state": "asleep"}).encode(),
        json.dumps({**GOOD, "pid": "11"}).encode(),
        json.dumps({**GOOD, "pid": True}).encode(),
        json.dumps({**GOOD, "at": float("nan")}).encode(),
        json.dumps({**GOOD, "at": None}).encode(),
        json.dumps({**GOOD, "reason": 5}).encode(),
        json.dumps({**GOOD, "desired": None}).encode(),
        json.dumps({**GOOD, "desired": True}).encode(),
        json.dumps({**GOOD, "refusal": 1}).encode(),
        json.dumps({**GOOD, "file_changed": 1}).encode(),
        json.dumps({"pid": 11}).encode(),
        json.dumps({**GOOD, "reason": "x" * 5000}).encode(),
    ],
)
def test_a_malformed_report_is_refused(statuses, tmp_path, text):
    statuses[0].write(State.READY)
    (tmp_path / "12.json").write_bytes(text)
    assert statuses[0].why_not_ready() == "1 of 2 processes is not up yet"
    assert read_heartbeat(tmp_path, 12) is None


def test_the_base_of_the_malformed_reports_is_valid():
    assert Heartbeat.parse(json.dumps(GOOD).encode()) == Heartbeat(11, State.READY, "", 1000.0, 3)


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_raise(text):
    assert Heartbeat.parse(text) is None or text.startswith(b"{")


def test_half_written_and_foreign_files_are_not_read(statuses, tmp_path):
    for status in statuses:
        status.write(State.READY)
    (tmp_path / ".13.tmp").write_bytes(json.dumps({**GOOD, "state": "starting"}).encode())
    (tmp_path / "notes.txt").write_bytes(b"hello")
    (tmp_path / "folder.json").mkdir()
    assert statuses[0].why_not_ready() is None


def test_a_process_reports_its_desired_state_version_and_its_fault(statuses, time):
    statuses[0].write(State.READY, desired=7)
    statuses[1].write(State.FAILED, "slow", desired=8, refusal="no memory")
    assert [(heartbeat.pid, heartbeat.desired, heartbeat.refusal) for heartbeat in statuses[0].fresh()] == [
        (11, 7, ""),
        (12, 8, "no memory"),
    ]
    time.now += 6
    assert statuses[0].fresh() == []
