"""The benchmark measures: a quick run with real servers and real load; what it finds out is for a quiet machine to say."""

import dataclasses
import json
import shutil
import socket
import subprocess
import sys

import pytest

from benchmarks import process_tree
from benchmarks.bodies import write_bodies
from benchmarks.bound_process import BoundProcess
from benchmarks.echo import SIZE_HEADER
from benchmarks.open_loop import Arrivals
from benchmarks.running import Running, SubjectFailed
from benchmarks.subjects import ROOT, echo
from benchmarks.wires import plain_wires
from benchmarks.workloads import Workload, save_layer
from benchmarks.wrk import Load, WrkFailed, run_wrk

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed: apt-get install wrk"),
]
WORK = Workload("small", (2, 3))


@pytest.fixture
def sized(tmp_path):
    """Two requests to the echo, of answers of 100 and 70,000 bytes."""
    return write_bodies(tmp_path / "own", plain_wires()["binary"], WORK).asking_for([100, 70_000], tmp_path / "sized")


@pytest.fixture
def running(tmp_path):
    with Running(echo(1), {}, tmp_path / "echo.log") as running:
        yield running


@pytest.mark.long
def test_a_quick_run_measures_service_and_bound_and_prints_their_ratio(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "w2", "--subjects", "bound,service"]
    told = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    samples = {sample["subject"]: sample for sample in found["parts"]["w2"]["samples"]}
    assert set(samples) == {"bound", "service"}
    assert all(
        sample["rps"] > 0 and sample["tok_s"] == pytest.approx(sample["rps"] * 16) for sample in samples.values()
    )
    assert samples["service"]["refused"] == samples["service"]["broken"] == 0
    assert 0 < samples["service"]["max_abs_error"] < 1e-5
    ratio = next(x["ratio"][0] for x in found["ratios"] if (x["over"], x["figure"]) == ("bound", "tok_s"))
    assert ratio == pytest.approx(samples["service"]["tok_s"] / samples["bound"]["tok_s"], rel=1e-4)
    assert "### W2, 32 callers" in told.stdout


@pytest.mark.long
def test_both_generators_drive_the_echo_and_no_process_remains(tmp_path, sized):
    with Running(echo(2), {}, tmp_path / "two.log") as running:
        running.check_sizes(sized, 2)
        assert running.answer_sizes(sized) == [100, 70_000]
        closed = run_wrk(running.port, sized, Load(4, 1))
        assert closed["rps"] > 0
        assert closed["refused"] == closed["broken"] == 0
        asked = Arrivals(running.port, str(sized.directory), "/", 2, per_second=50, seconds=1, seed=0)
        opened = open_loop(asked)
        assert 10 < opened["rps"] <= opened["offered_rps"] < 100
        assert opened["refused"] == opened["broken"] == 0
        pids = running.pids
    assert len(pids) > 2
    assert [pid for pid in pids if process_tree.resident_bytes([pid])] == []


def test_a_polling_subject_rests_until_woken_and_can_end_while_resting(tmp_path, sized):
    with Running(dataclasses.replace(echo(2), polls=True), {}, tmp_path / "two.log") as running:
        running.rest()
        before = process_tree.cpu_seconds(running.pids)
        with pytest.raises(WrkFailed, match="no answer"):
            run_wrk(running.port, sized, Load(2, 1))
        assert process_tree.cpu_seconds(running.pids) == before
        running.wake()
        assert run_wrk(running.port, sized, Load(2, 1))["rps"] > 0
        running.rest()
        pids = running.pids
    assert [pid for pid in pids if process_tree.resident_bytes([pid])] == []


def test_a_subject_that_does_not_poll_is_not_suspended(running, sized):
    running.rest()
    assert run_wrk(running.port, sized, Load(2, 1))["rps"] > 0


@pytest.mark.long
def test_the_bound_process_reports_its_failure_and_restarts(tmp_path):
    save_layer(tmp_path / "layer.safetensors")
    bound = BoundProcess(tmp_path / "layer.safetensors", 1, tmp_path / "bound.log")
    try:
        assert all(bound.figures("w2/1", 0.05)["rps"] > 0 for _ in range(2))
        with pytest.raises(SubjectFailed, match="no-such-work"):
            bound.figures("no-such-work", 0.05)
        assert bound.figures("w2/1", 0.05)["rps"] > 0, "it is started anew"
    finally:
        bound.end()


def open_loop(asked: Arrivals):
    command = [sys.executable, "-m", "benchmarks.open_loop", json.dumps(dataclasses.asdict(asked))]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(told.stdout)


def test_the_open_loop_counts_unanswered_requests(running, sized):
    """A port that refuses connections: every request is broken, none is answered, and the latency says the most."""
    asked = Arrivals(1, str(sized.directory), "/", 2, per_second=40, seconds=0.5, seed=0)
    found = open_loop(asked)
    assert found["rps"] == 0
    assert found["broken"] == found["offered_rps"] * 0.5


def test_a_wrong_answer_stops_a_subject_before_it_is_timed(running, sized):
    with pytest.raises(SubjectFailed, match="numbers"):
        running.largest_error(WORK, sized, plain_wires()["binary"], 2)
    headers, _ = sized.request(0)
    assert headers[SIZE_HEADER] == "100"


def test_a_refused_connection_is_a_failure_and_no_figure(sized):
    with pytest.raises(WrkFailed):
        run_wrk(1, sized, Load(1, 1))


def test_silence_is_a_failure_and_no_figure(sized):
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(WrkFailed, match="no answer"):
        run_wrk(silent.getsockname()[1], sized, Load(1, 1))
