"""The load test itself (`loadtest/`): a healthy service passes; a slow, wrong, refusing, silent or closed one fails by name.

Load is short and objectives of time are either far above what any machine takes or below what is planted, so that no busy
machine changes an outcome.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from service.api.auth.key_ring import Role, line_for
from tests.e2e.scripted_service import (
    REFERENCES,
    ScriptedService,
    every_other_time,
    half_an_answer,
    hang,
    no_answer,
    one_at_a_time,
    refuse_with,
)
from tests.e2e.started import Started
from tests.integration.running import LAYERS, prepare
from tests.processes import free_port

ROOT = Path(__file__).parents[2]
FAULTY = Path(__file__).parent / "faulty_service.py"
LOCUST = ROOT / ".venv-load" / "bin" / "locust"
LOCUSTFILE = ROOT / "loadtest" / "locustfile.py"
KEY = "the-callers-own"
SLOW_S = 0.05
# Short, and suited to a busy machine.
BRIEF = ("--hold-s", "2", "--peak-users", "4", "--max-p99-ms", "60000", "--check-every", "1", "--long-tokens", "40")
SMALL = ("--layer", "small")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        not (ROOT / ".venv-load" / ".installed").exists(), reason="the load test is not installed: make install-load"
    ),
]


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("layers"), LAYERS)


@pytest.fixture(scope="module")
def service(layers):
    """All kinds of them, started together: importing torch is what takes long."""
    keys = layers.parent / "keys"
    keys.write_text(line_for(KEY, Role.INFER), encoding="ascii")
    found = {
        "healthy": Started(layers, workers=1),
        "faulty": Started(
            layers, workers=1, program=[FAULTY], environment={"FAULTY_FORWARD_S": str(SLOW_S), "FAULTY_FLIP": "1"}
        ),
        "closed": Started(layers, workers=1, api_keys_file=keys, rate_limit_per_s=1, rate_burst=60),
    }
    for started in found.values():
        started.wait_ready()
    yield found
    for started in found.values():
        started.end()


class Ran:
    """Locust in a process of its own, without anything of the repository on its path, from a directory that is not it."""

    def __init__(self, directory, url, *options, environment=None) -> None:
        self.json_report = directory / "load.json"
        clean = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        self.process = subprocess.Popen(
            [LOCUST, "-f", LOCUSTFILE, "--host", url, "--only-summary", "--json-report", self.json_report, *options],
            cwd=directory,
            env={**clean, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> tuple[int, str, dict]:
        """Exit status, everything printed, the JSON report."""
        try:
            told, _ = self.process.communicate(timeout=150)
        finally:
            self.process.kill()
        report = json.loads(self.json_report.read_text()) if self.json_report.exists() else {}
        return self.process.returncode, told, report


def headless(directory, url, *options, environment=None) -> tuple[int, str, dict]:
    return Ran(directory, url, "--headless", *BRIEF, *options, environment=environment).end()


class Distributed:
    """A master and two workers."""

    def __init__(self, directory, url, *options) -> None:
        port = str(free_port())
        self.workers = []
        for name in ("one", "two"):
            (directory / name).mkdir()
            self.workers.append(Ran(directory / name, url, "--worker", "--master-port", port))
        master = ("--headless", "--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port)
        self.master = Ran(directory, url, *master, "--expect-workers", "2", *BRIEF, *options)

    def end(self) -> tuple[int, str, dict]:
        found = self.master.end()
        for worker in self.workers:
            worker.end()
        return found


def in_two_workers(directory, url, *options) -> tuple[int, str, dict]:
    return Distributed(directory, url, *options).end()


def make_load(layers, reports, *options, url=""):
    """What `make load` runs: the program and its environment, for a service of one process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ATTENTION_", "LOADTEST_"))}
    places = {"LAYERS_DIR": str(layers), "REPORTS": str(reports), "PYTHON": sys.executable, "LOCUST": str(LOCUST)}
    return [ROOT / "loadtest" / "run.sh", *options], {**clean, **places, "URL": url, "ATTENTION_WORKERS": "1"}


@pytest.mark.long
def test_make_load_starts_a_service_passes_its_smoke_and_leaves_reports(tmp_path, layers):
    reports = tmp_path / "reports"
    command, environment = make_load(layers, reports, *BRIEF)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "\npassed\n" in ran.stdout
    report = json.loads((reports / "load.json").read_text())
    assert report["verdict"] == "passed"
    assert report["bits"]["compared"] == report["whole"]["requests"] > 0
    assert report["references"] == 32, "ten of each layer and two without one"
    assert {layer["name"]: layer["query_width"] for layer in report["target"]["layers"]} == {
        "small": 16, "cross": 16, "zero": 16,
    }  # fmt: skip
    assert "<html" in (reports / "load.html").read_text().lower()
    assert "Aggregated" in (reports / "load_stats.csv").read_text()
    assert json.loads((reports / "service.log").read_text().splitlines()[-1])["event"] == "stopped"


def test_make_load_without_a_service_reports_it_and_exits_with_3(tmp_path):
    command, environment = make_load(tmp_path / "no-layers", tmp_path / "reports")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert "the service did not become ready" in ran.stderr


@pytest.mark.long
def test_a_cancelled_load_ends_its_service_and_leaves_no_earlier_report(tmp_path, layers):
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "load.json").write_text('{"verdict": "passed"}')
    command, environment = make_load(layers, reports, "--hold-s", "600")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as running:
        assert running.stdout is not None
        output = next(line for line in running.stdout if "fetching references" in line)
        running.send_signal(signal.SIGTERM)
        output += running.stdout.read()
        assert running.wait(60) == 128 + signal.SIGTERM, output
    ended = [json.loads(line) for line in (reports / "service.log").read_text().splitlines()]
    assert ended[-1]["event"] == "stopped"
    report = reports / "load.json"
    assert not report.exists() or json.loads(report.read_text())["verdict"] != "passed"


@pytest.mark.long
def test_a_slow_service_fails_the_objectives_of_latency_and_throughput_by_name(tmp_path, service):
    """Each forward pass takes 50 ms, so one user cannot have more than 20 answers a second; alone its bits are right."""
    objectives = ("--max-p50-ms", "40", "--max-p99-ms", "40", "--min-rps", "21")
    status, output, report = headless(tmp_path, service["faulty"].url, *SMALL, "--peak-users", "1", *objectives)
    assert status == 1
    assert report["missed"] == ["p50_ms", "p99_ms", "rps"], output
    assert "failed: p50_ms, p99_ms, rps" in output


@pytest.mark.long
def test_a_master_and_two_workers_ramp_to_the_peak(tmp_path, service):
    ramp = ("--scenario", "ramp", "--steps", "2")
    status, output, report = in_two_workers(tmp_path, service["healthy"].url, *SMALL, *ramp)
    assert status == 0, output
    assert report["workers"] == 2
    assert [(stage["users"], stage["requests"] > 0) for stage in report["stages"]] == [(2, True), (4, True)]
    assert (report["knee"]["users"], report["knee"]["is_passed"]) == (4, False)
    assert report["judged"]["requests"] == report["knee"]["requests"]
    assert report["bits"]["compared"] == report["whole"]["requests"]
    assert "knee: 4 users" in output


@pytest.mark.long
def test_processes_of_locust_share_the_load(tmp_path, service):
    status, output, report = headless(tmp_path, service["healthy"].url, *SMALL, "--processes", "2")
    assert status == 0, output
    assert report["workers"] == 2
    assert report["bits"]["compared"] == report["whole"]["requests"] > 0


@pytest.mark.long
def test_one_flipped_bit_on_a_worker_fails_the_master(tmp_path, service):
    """Answers that shared their forward pass with others: what a batcher that mixes requests up would do."""
    status, output, report = in_two_workers(tmp_path, service["faulty"].url, *SMALL)
    assert status == 1
    assert report["missed"] == ["error_share", "wrong_bits"], output
    assert report["bits"]["wrong"] == report["whole"]["failures"] > 0
    assert "bits differ from the reference" in output


@pytest.mark.long
def test_without_a_key_no_load_is_sent_and_the_run_fails(tmp_path, service):
    status, output, report = headless(tmp_path, service["closed"].url)
    assert status == 1
    assert "run" in report["missed"]
    assert "HTTP Error 401" in report["objectives"][-1]["measured"], output
    assert report["whole"]["requests"] == 0


@pytest.mark.long
def test_refusals_are_counted_apart_and_the_key_stays_out_of_the_reports(tmp_path, service):
    """A key, and a rate that is used up soon after the references are fetched."""
    options = (*SMALL, "--html", str(tmp_path / "load.html"), "--csv", str(tmp_path / "load"))
    status, output, report = headless(
        tmp_path, service["closed"].url, *options, environment={"LOADTEST_API_KEY": KEY, "LOADTEST_PACE": "20"}
    )
    assert status == 1
    assert "refusal_share" in report["missed"], output
    assert "error_share" not in report["missed"], output
    assert report["whole"]["refusals"] > 0
    assert report["whole"]["failures"] == 0
    assert "REFUSED,short" in (tmp_path / "load_stats.csv").read_text()
    written = "".join(file.read_text() for file in tmp_path.iterdir() if file.is_file())
    assert KEY not in written + output


@pytest.mark.long
@pytest.mark.parametrize("status", [429, 503])
def test_an_overload_status_with_retry_after_is_a_refusal(tmp_path, status):
    with ScriptedService(refuse_with(status, Retry_After="1")) as refusing:
        _, output, report = headless(tmp_path, refusing.url, "--hold-s", "1", "--pace", "5")
    assert report["whole"]["refusals"] == report["whole"]["requests"] > 0, output
    assert report["missed"] == ["p99_ms", "refusal_share", "wrong_bits"]


@pytest.mark.long
@pytest.mark.parametrize("status", [204, 429])
def test_every_other_status_but_200_is_a_failure(tmp_path, status):
    with ScriptedService(refuse_with(status)) as failing:
        _, output, report = headless(tmp_path, failing.url, "--hold-s", "1", "--pace", "5")
    assert report["whole"]["failures"] == report["whole"]["requests"] > 0, output
    assert report["missed"] == ["error_share", "wrong_bits"]
    assert f"status {status}" in output


@pytest.mark.long
@pytest.mark.parametrize(
    ("lost", "retries", "missed"),
    [
        *((lost, "6", []) for lost in (no_answer, half_an_answer, refuse_with(502))),
        (half_an_answer, "0", ["error_share"]),
    ],
)
def test_with_retries_what_a_balancer_loses_with_a_replica_is_no_failure(tmp_path, lost, retries, missed):
    with ScriptedService(every_other_time(lost)) as losing:
        options = ("--hold-s", "1", "--pace", "5", "--max-p99-ms", "0", "--retries", retries)
        _, output, report = headless(tmp_path, losing.url, *options)
    assert report["missed"] == missed, output
    assert (report["whole"]["retries"] > 0) == (retries != "0")
    assert report["bits"]["compared"] == report["whole"]["requests"] - report["whole"]["failures"] > 0


@pytest.mark.long
@pytest.mark.parametrize("run", [headless, in_two_workers])
def test_unanswered_requests_fail_even_in_flight_at_the_end(tmp_path, run):
    with ScriptedService(hang) as silent:
        status, output, report = run(tmp_path, silent.url, "--hold-s", "1", "--request-timeout-s", "4")
    assert status == 1
    assert report["whole"]["failures"] == report["whole"]["requests"] >= 4, output
    assert "error_share" in report["missed"]


@pytest.mark.long
def test_a_ramp_stops_at_the_first_step_beyond_the_knee(tmp_path):
    """Answers take 50 ms one after another: 2 users wait 100 ms, 4 users 200 ms; 8 are not tried."""
    ramp = ("--scenario", "ramp", "--peak-users", "8", "--steps", "3", "--max-p99-ms", "150")
    with ScriptedService(one_at_a_time(0.05)) as queueing:
        status, output, report = headless(tmp_path, queueing.url, *ramp)
    assert status == 0, output
    assert [stage["users"] for stage in report["stages"]] == [2, 4]
    assert (report["knee"]["users"], report["knee"]["is_passed"]) == (2, True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("scenario", "hold_s", "stages"),
    [("spike", "1", ["before", "spike", "after"]), ("soak", "4", [f"quarter {n}" for n in (1, 2, 3, 4)])],
)
def test_a_scenario_runs_to_its_end(tmp_path, scenario, hold_s, stages):
    with ScriptedService() as fast:
        status, output, report = headless(
            tmp_path, fast.url, "--scenario", scenario, "--hold-s", hold_s, "--pace", "20"
        )
    assert (status, report["verdict"]) == (0, "passed"), output
    assert [stage["name"] for stage in report["stages"]] == stages


def test_a_run_that_is_stopped_before_its_end_has_failed(tmp_path):
    with ScriptedService() as fast:
        ran = Ran(tmp_path, fast.url, "--headless", "--hold-s", "600", "--pace", "5")
        wait_for(lambda: fast.answered > REFERENCES + 10)
        ran.process.send_signal(signal.SIGINT)  # to SIGTERM Locust has no answer while a headless run goes on
        status, output, report = ran.end()
    assert status == 1
    assert "run" in report["missed"], output
    assert report["objectives"][-1]["measured"] == "stopped before its end"


@pytest.mark.long
def test_a_lost_worker_fails_the_run(tmp_path):
    with ScriptedService() as fast:
        ran = Distributed(tmp_path, fast.url, "--pace", "5", "--hold-s", "8")
        wait_for(lambda: fast.answered > REFERENCES + 10)
        ran.workers[0].process.kill()
        status, output, report = ran.end()
    assert status == 1
    assert report["objectives"][-1]["measured"] == "1 workers were lost", output


@pytest.mark.long
def test_a_report_that_cannot_be_written_fails_the_run(tmp_path):
    with ScriptedService() as fast:
        status, output, _ = headless(
            tmp_path, fast.url, "--hold-s", "1", "--pace", "5", "--json-report", str(tmp_path / "missing" / "load.json")
        )
    assert status == 1
    assert "the JSON report cannot be written" in output


@pytest.mark.long
@pytest.mark.parametrize("run", [headless, in_two_workers])
def test_an_address_may_end_with_a_slash(tmp_path, run):
    with ScriptedService() as fast:
        status, output, report = run(tmp_path, f"{fast.url}/", "--hold-s", "1", "--pace", "5")
    assert (status, report["verdict"]) == (0, "passed"), output
    assert report["target"]["url"] == fast.url


def test_an_address_with_a_route_fails_the_run_by_name(tmp_path):
    status, output, report = headless(tmp_path, "http://127.0.0.1:9/v1")
    assert status == 1
    assert "--host: give the address without /v1" in report["objectives"][-1]["measured"], output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(("--steps", "0"), "--steps must be positive", marks=pytest.mark.long),
        (("--layer", "other"), "the service has no layer other"),
        pytest.param(
            ("--tags", "other", "--hold-s", "1"),
            "no request was made: --tags and --exclude-tags leave no task",
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_option_that_cannot_be_met_fails_the_run_by_name(tmp_path, options, message):
    with ScriptedService() as fast:
        status, output, report = headless(tmp_path, fast.url, *options)
    assert status == 1
    assert message in report["objectives"][-1]["measured"], output


@pytest.mark.long
def test_the_web_page_starts_runs_and_the_exit_status_is_the_verdict_of_the_last(tmp_path, service):
    port = free_port()
    options = ("--web-host", "127.0.0.1", "--web-port", str(port), *BRIEF, *SMALL)
    ran = Ran(tmp_path, service["healthy"].url, *options)
    page = f"http://127.0.0.1:{port}"
    wait_for(lambda: httpx2.get(page).status_code == 200)
    for run in ({"scenario": "smoke", "max_p50_ms": "0.01"}, {"scenario": "spike", "max_p50_ms": "0"}):
        ran.json_report.unlink(missing_ok=True)
        assert httpx2.post(f"{page}/swarm", data={**run, "hold_s": "1"}).json()["success"]
        wait_for(lambda: ran.json_report.exists() and httpx2.get(f"{page}/stats/requests").json()["state"] == "stopped")
    ran.process.send_signal(signal.SIGTERM)
    status, output, report = ran.end()
    assert (status, report["verdict"], report["options"]["scenario"]) == (0, "passed", "spike"), output


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if condition():
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError("it did not come to be")
