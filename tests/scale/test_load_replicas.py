"""`make load-replicas` passes only if the objectives hold and every replica serves at the end."""

import os
import subprocess
import sys

import pytest

from tests.scale.load_replicas import NOT_BACK, ROOT, verdict

AT_RESTART = {"replica1": 10, "replica2": 10, "replica3": 10}


@pytest.mark.parametrize(
    ("status", "at_end", "code", "sentence"),
    [
        (
            0,
            (30, 20, 11),
            0,
            "passed: the objectives held with replicas killed; requests after the restart: replica1 20",
        ),
        (1, (30, 20, 11), 1, "FAILED: the load test ended with 1"),
        (-15, (30, 20, 11), 1, "FAILED: the load test ended with -15"),
        (0, (10, 10, 30), NOT_BACK, "FAILED: the objectives held, but at the end replica1 and replica2 served nothing"),
        (3, (10, 10, 10), 3, "FAILED: the load test ended with 3"),
    ],
)
def test_the_status_is_the_load_tests_own_or_that_of_a_replica_that_did_not_come_back(status, at_end, code, sentence):
    found = verdict(status, AT_RESTART, dict(zip(AT_RESTART, at_end, strict=True)))
    assert found[0] == code
    assert sentence in found[1]


@pytest.mark.long
def test_replicas_that_stay_away_fail_the_run_though_the_last_one_meets_the_objectives(layers_dir, tmp_path):
    environment = {**os.environ, "LAYERS_DIR": str(layers_dir), "REPORTS": str(tmp_path)}
    # Until the checks notice that both are away, HAProxy refuses some calls, and Locust's users do not wait for Retry-After.
    lenient = ("--max-p99-ms", "60000", "--max-refusal-share", "1")
    options = ("--kill", "2", "--no-restart", "--hold-s", "20", *lenient)
    command = [sys.executable, "-m", "tests.scale.load_replicas", *options]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert ran.returncode == NOT_BACK, ran.stdout + ran.stderr
