"""`make gpu` on the CPU, with real processes; what it finds is for a machine with a GPU."""

import json
import subprocess
import sys

import pytest

from benchmarks.echo import SIZE_HEADER
from benchmarks.gpu import LIMITS, NOT_DRY
from benchmarks.gpu_load import LoadFailed, closed_loop
from benchmarks.server import Server
from benchmarks.subjects import ROOT, echo
from benchmarks.wires import write_requests
from benchmarks.workloads import Workload

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
WIRE, WORK = echo().wires["binary"], Workload("small", (2, 300))


def test_several_processes_drive_the_echo_and_count_what_it_refuses(tmp_path):
    """One request is larger than a socket's buffer."""
    refused = write_requests(tmp_path / "refused", WIRE, WORK.inputs()[:1])
    text = (refused / "0").read_bytes().replace(f"{SIZE_HEADER}: 4096".encode(), f"{SIZE_HEADER}: none".encode())
    (refused / "0").write_bytes(text)
    with Server(echo(1), "binary", {}, tmp_path / "echo.log") as server:
        requests = write_requests(tmp_path / "requests", WIRE, WORK.inputs())
        found = closed_loop(server.port, requests, connections=3, seconds=0.3, processes=2)
        assert found["rps"] > 0
        assert 0 < found["p50_ms"] <= found["p99_ms"]
        assert found["refused"] == found["broken"] == 0
        with pytest.raises(LoadFailed, match="no answer of 2xx"):
            closed_loop(server.port, refused, connections=1, seconds=0.1, processes=1)


def test_a_machine_without_a_gpu_is_told_what_it_lacks():
    command = [sys.executable, "benchmarks/gpu_start.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    if "A CUDA device is needed" not in done.stderr:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 2
    assert "`make gpu` cannot go on here" in done.stderr


@pytest.mark.long
def test_a_dry_run_goes_through_all_parts_on_the_cpu(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert parts.keys() == LIMITS.keys() - NOT_DRY
    served = [row for name in ("serve-1", "serve-2") for row in parts[name]["rows"]]
    assert [(row["workers"], row["case"]) for row in served] == [(1, "w2"), (1, "w1"), (2, "w2"), (2, "w1")]
    assert all(row["rps"] > 0 and not row["refused"] for row in served)
