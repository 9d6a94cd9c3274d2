"""The load test itself (`loadtest/`): a healthy service passes; a slow, a wrong, a refusing and a closed one each fail by name.

Load is short and objectives of time are either far above what any machine takes or below what is planted, so that no busy
machine changes an outcome.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from service.api.auth.key_ring import Role, line_for
from tests.e2e.started import Started
from tests.integration.running import LAYERS, prepare

ROOT = Path(__file__).parents[2]
FAULTY = Path(__file__).parent / "faulty_service.py"
LOCUST = ROOT / ".venv-load" / "bin" / "locust"
LOCUSTFILE = ROOT / "loadtest" / "locustfile.py"
KEY = "the-callers-own"
SLOW_S = 0.05
# Short, and for a machine that does much else besides.
BRIEF = ("--hold-s", "2", "--peak-users", "4", "--slo-p99-ms", "60000", "--check-every", "1", "--long-tokens", "40")
SMALL = ("--layer-names", "small")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not (ROOT / ".venv-load" / ".installed").exists(), reason="make install-load has not been run"),
]


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("layers")
    prepare(directory, LAYERS)
    return directory / "layers"


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
        told, _ = self.process.communicate(timeout=150)
        report = json.loads(self.json_report.read_text()) if self.json_report.exists() else {}
        return self.process.returncode, told, report


def headless(directory, url, *options, environment=None) -> tuple[int, str, dict]:
    return Ran(directory, url, "--headless", *BRIEF, *options, environment=environment).end()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def distributed(directory, url, *options) -> tuple[int, str, dict]:
    """A master and two workers."""
    port = str(free_port())
    workers = []
    for name in ("one", "two"):
        (directory / name).mkdir()
        workers.append(Ran(directory / name, url, "--worker", "--master-port", port))
    master = ("--headless", "--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port)
    found = Ran(directory, url, *master, "--expect-workers", "2", *BRIEF, *options).end()
    for worker in workers:
        worker.end()
    return found


def make_load(layers, reports, *options):
    """What `make load` runs."""
    program = [sys.executable, ROOT / "loadtest" / "run.py", "--layers-dir", layers, "--reports", reports]
    return [*program, "--locust", LOCUST, *options]


def one_worker() -> dict[str, str]:
    """The environment without settings, for a service of one process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ATTENTION_", "LOADTEST_"))}
    return {**clean, "ATTENTION_WORKERS": "1"}


def test_make_load_starts_a_service_passes_its_smoke_and_leaves_reports(tmp_path, layers):
    ran = subprocess.run(
        make_load(layers, tmp_path / "reports", *BRIEF),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=one_worker(),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "\npassed\n" in ran.stdout
    report = json.loads((tmp_path / "reports" / "load.json").read_text())
    assert report["verdict"] == "passed"
    assert report["bits"]["compared"] == report["whole"]["right"] > 0
    assert report["float64"]["checked"] == report["bits"]["references"]
    assert report["float64"]["worst"] < 1
    assert {layer["name"]: layer["query_width"] for layer in report["target"]["layers"]} == {
        "small": 16, "cross": 16, "zero": 16,
    }  # fmt: skip
    assert "<html" in (tmp_path / "reports" / "load.html").read_text().lower()
    assert "Aggregated" in (tmp_path / "reports" / "load_stats.csv").read_text()


def test_a_load_that_is_called_off_ends_its_service_and_leaves_no_earlier_report(tmp_path, layers):
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "load.json").write_text('{"verdict": "passed"}')
    with subprocess.Popen(
        make_load(layers, reports, "--hold-s", "600"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=one_worker(),
    ) as running:
        assert running.stdout is not None
        told = next(line for line in running.stdout if "taking references" in line)
        running.send_signal(signal.SIGTERM)
        told += running.stdout.read()
        assert running.wait(60) == 128 + signal.SIGTERM, told
    ended = [json.loads(line) for line in (reports / "service.log").read_text().splitlines()]
    assert ended[-1]["event"] == "stopped"
    report = reports / "load.json"
    assert not report.exists() or json.loads(report.read_text())["verdict"] != "passed"


def test_a_slow_server_fails_the_objectives_of_latency_and_goodput_by_name(tmp_path, service):
    """Each forward pass takes 50 ms, so one user cannot have more than 20 answers a second; alone its bits are right."""
    objectives = ("--slo-p50-ms", "40", "--slo-p99-ms", "40", "--slo-goodput", "21", "--good-within-ms", "60000")
    status, told, report = headless(tmp_path, service["faulty"].url, *SMALL, "--peak-users", "1", *objectives)
    assert status == 1
    assert report["missed"] == ["p50_ms", "p99_ms", "goodput_per_s"], told
    assert "failed: p50_ms, p99_ms, goodput_per_s" in told


def test_a_master_and_two_workers_find_the_knee_of_a_ramp(tmp_path, service):
    status, told, report = distributed(tmp_path, service["healthy"].url, *SMALL, "--shape", "ramp", "--steps", "2")
    assert status == 0, told
    assert report["workers"] == 2
    assert [phase["users"] for phase in report["phases"]][:1] == [2]
    assert report["knee"]["users"] in {2, 4}
    assert report["judged"]["requests"] == report["knee"]["requests"] > 0
    assert f"knee: {report['knee']['users']} users" in told


def test_one_flipped_bit_on_a_worker_fails_the_master(tmp_path, service):
    """Answers that shared their forward pass with others: what a batcher that mixes requests up would do."""
    status, told, report = distributed(tmp_path, service["faulty"].url, *SMALL)
    assert status == 1
    assert report["missed"] == ["error_ratio", "wrong_bits"], told
    assert report["bits"]["wrong"] > 0
    assert any("have other bits" in example for example in report["examples"])


def test_without_a_key_nothing_is_asked_and_the_run_fails(tmp_path, service):
    status, told, report = headless(tmp_path, service["closed"].url)
    assert status == 1
    assert "run" in report["missed"]
    assert "answered with 401" in told
    assert report["whole"]["requests"] == 0


def test_refusals_are_counted_apart_and_the_key_stays_out_of_the_reports(tmp_path, service):
    """A key, and a rate that is used up soon after the references are taken."""
    options = (*SMALL, "--html", str(tmp_path / "load.html"), "--csv", str(tmp_path / "load"))
    status, told, report = headless(
        tmp_path, service["closed"].url, *options, environment={"LOADTEST_API_KEY": KEY, "LOADTEST_PACE": "20"}
    )
    assert status == 1
    assert report["missed"] == ["refusal_ratio"], told
    assert report["statuses"].keys() == {"200", "429"}
    assert "refused 429" in (tmp_path / "load_stats.csv").read_text()
    written = "".join(file.read_text() for file in tmp_path.iterdir() if file.is_file())
    assert KEY not in written + told


def test_the_web_page_starts_a_run_and_the_exit_status_is_its_verdict(tmp_path, service):
    port = free_port()
    options = ("--web-host", "127.0.0.1", "--web-port", str(port), *BRIEF, *SMALL)
    ran = Ran(tmp_path, service["healthy"].url, *options)
    page = f"http://127.0.0.1:{port}"
    wait_for(lambda: httpx2.get(f"{page}/verdict").json() is None)
    assert httpx2.post(f"{page}/swarm", data={"shape": "spike", "hold_s": "1"}).json()["success"]
    wait_for(lambda: httpx2.get(f"{page}/verdict").json() is not None)
    verdict = httpx2.get(f"{page}/verdict").json()
    ran.process.send_signal(signal.SIGTERM)
    status, told, report = ran.end()
    assert verdict == report
    assert (status, report["verdict"], report["shape"]) == (0, "passed", "spike"), told


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
