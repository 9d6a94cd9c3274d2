"""The benchmark measures with real servers and real load; what it finds is for a quiet machine."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from benchmarks import process_tree
from benchmarks.bench import Bench, run_apart
from benchmarks.echo import SIZE_HEADER
from benchmarks.load_generators import DRAIN_S, closed_loop, open_loop
from benchmarks.server import Server
from benchmarks.subjects import ROOT, SubjectFailed, echo
from benchmarks.tables import number
from benchmarks.wires import write_requests
from benchmarks.workloads import Workload

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed: apt-get install wrk"),
]
WORK = Workload("small", (2, 3))
TINY = Workload("tiny", (2,))
WIRE = echo().wires["binary"]


@pytest.fixture
def requests(tmp_path):
    """Two requests to the echo, for answers of 4,096 and 6,144 bytes."""
    return write_requests(tmp_path / "requests", WIRE, WORK.inputs())


def start(tmp_path, subject):
    return Server(subject, "binary", {}, tmp_path / "echo.log")


@pytest.fixture
def server(tmp_path):
    with start(tmp_path, echo(1)) as server:
        yield server


def living(pids):
    return [pid for pid in pids if process_tree.memory_mib([pid], "VmRSS")]


@pytest.mark.long
def test_a_quick_run_measures_service_twice_bound_and_echo_and_prints_their_ratio(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "w2", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    machine = found["parts"]["w2"]["machine"]
    assert set(f"{machine['cpu']} {machine['isa']}".split()) <= set(
        Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    )
    samples = {sample["subject"]: sample for sample in found["parts"]["w2"]["samples"]}
    assert set(samples) == {"bound", "service", "service again", "echo"}
    assert all(
        sample["rps"] > 0 and sample["tok_s"] == pytest.approx(sample["rps"] * 16) for sample in samples.values()
    )
    assert samples["service"]["refused"] == samples["service"]["broken"] == 0
    assert 0 < samples["service"]["max_abs_error"] < 1e-5
    over = number(samples["service"]["tok_s"] / samples["bound"]["tok_s"])
    assert "### W2, 32 callers" in done.stdout
    assert f"| W2, 16 tokens | ≥ 0.75 × bound | {over} |" in done.stdout


@pytest.mark.long
def test_both_generators_drive_the_echo_and_no_process_remains(tmp_path, requests):
    with start(tmp_path, echo(2)) as server:
        assert [len(server.ask("/", WIRE.write(x)).content) for x in WORK.inputs()] == [4096, 6144]
        closed = closed_loop(server.port, requests, 4, 1)
        assert closed["rps"] > 0
        assert closed["refused"] == closed["broken"] == 0
        opened = open_loop(server.port, requests, per_second=50, seconds=1, seed=0)
        assert 10 < opened["rps"] <= opened["offered_rps"] < 100
        assert opened["refused"] == opened["broken"] == 0
        pids = server.pids
    assert len(pids) > 2
    assert living(pids) == []


def test_a_subject_is_awaited_while_it_still_works(server, requests):
    before = process_tree.cpu_seconds(server.pids)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(closed_loop, server.port, requests, 2, 1)
        while process_tree.cpu_seconds(server.pids) == before:
            pass
        server.await_idle()
        assert wait([load], timeout=0.5).done


def test_what_a_subject_leaves_behind_is_killed(tmp_path):
    command = ("sh", "-c", f"sleep 1000 & exec {' '.join(echo(1).command)}")
    with start(tmp_path, dataclasses.replace(echo(1), command=command)) as server:
        pids = server.pids
        assert len(pids) == 2
    assert living(pids) == []


def test_a_subject_that_refuses_everything_gives_no_figure(tmp_path, server):
    asked = dataclasses.replace(WIRE, write=lambda x: ({**WIRE.write(x)[0], SIZE_HEADER: "none"}, b""))
    with pytest.raises(SubjectFailed, match="no answer of 2xx"):
        closed_loop(server.port, write_requests(tmp_path / "refused", asked, WORK.inputs()), 1, 1)


@pytest.mark.long
def test_the_end_of_a_process_apart_is_a_failure_of_its_sample_alone(tmp_path):
    with Bench(tmp_path, seconds=1) as bench:
        failed = bench.sample("bound", "tiny", lambda: run_apart(os._exit, 1))
        assert failed["failed"].startswith("BrokenProcessPool")
        assert bench.bound_figures(TINY, 1, 0.05)["rps"] > 0


def test_the_open_loop_counts_unanswered_requests(requests):
    """A port that refuses connections: every request is broken, and the latency is the longest."""
    found = open_loop(1, requests, per_second=40, seconds=0.5, seed=0)
    assert found["rps"] == 0
    assert found["broken"] == found["offered_rps"] * 0.5
    assert found["p99_ms"] == DRAIN_S * 1000


def test_an_answer_of_another_size_stops_a_subject_before_it_is_timed(tmp_path):
    short = dataclasses.replace(WIRE, write=lambda x: WIRE.write(x[1:]))
    with (
        start(tmp_path, dataclasses.replace(echo(1), wires={"binary": short})) as server,
        pytest.raises(SubjectFailed, match="512 numbers instead of 1024"),
    ):
        server.largest_error(WORK, 2)


def test_a_wrong_answer_stops_a_subject_before_it_is_timed(tmp_path):
    with (
        start(tmp_path, dataclasses.replace(echo(1), tolerance=1e-4)) as server,
        pytest.raises(SubjectFailed, match="off by"),
    ):
        server.largest_error(WORK, 2)


def test_a_refused_connection_is_a_failure_and_no_figure(requests):
    with pytest.raises(SubjectFailed):
        closed_loop(1, requests, 1, 1)


def test_silence_is_a_failure_and_no_figure(requests):
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(SubjectFailed, match="no answer"):
        closed_loop(silent.getsockname()[1], requests, 1, 1)
