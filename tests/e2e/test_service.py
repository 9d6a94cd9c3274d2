"""The real service in real processes: what it refuses to start with, how it ends, what survives a killed process."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch

from tests import processes
from tests.e2e.started import Started, X
from tests.integration.running import LAYERS, prepare

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture
def serve(tmp_path):
    started: list[Started] = []
    prepare(tmp_path, LAYERS)

    def start(directory=tmp_path / "layers", **settings) -> Started:
        started.append(Started(directory, **settings))
        return started[-1]

    yield start
    for service in started:
        service.end()


@pytest.mark.long
def test_two_processes_answer_on_one_port_and_their_metrics_add_up(serve):
    service = serve(workers=2)
    service.wait_ready()
    answers = [service.attend() for _ in range(40)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text.split('"weights"')[0] for answer in answers}) == 1
    samples = service.samples()
    route = "/v1/layers/{layer}/attend"
    assert samples[f'attention_requests_total{{route="{route}",status="200"}}'] == 40
    assert samples["attention_received_total"] == 40
    assert samples["attention_in_flight_requests"] == 0


def test_an_early_request_waits_and_is_not_refused(serve):
    """The port takes connections while torch is still being imported, which the line `listening` comes after."""
    service = serve(workers=1)
    port = service.line(event="serving", host="127.0.0.1")["port"]
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.01)
    assert not service.find(event="listening")
    assert httpx2.get(f"{service.url}/readyz", timeout=60).status_code in (200, 503)


def test_a_head_has_the_headers_of_its_get_and_the_connection_goes_on(serve):
    service = serve(workers=1)
    service.wait_ready()
    with httpx2.Client(base_url=service.url) as session:
        for path, status in (("/docs", 200), ("/healthz", 200), ("/openapi.json", 200), ("/nope", 404)):
            head, get = session.head(path), session.get(path)
            assert head.status_code == get.status_code == status
            assert head.headers["content-length"] == get.headers["content-length"]
    samples = service.samples()
    assert samples["attention_in_flight_requests"] == 0
    answered = sum(value for name, value in samples.items() if name.startswith("attention_requests_total"))
    assert samples["attention_received_total"] == answered


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_device_is_one_line_and_an_exit_code(serve):
    service = serve(workers=1, device="cuda")
    assert service.process.wait(60) == 3
    assert service.process.stderr is not None
    assert "cuda" in service.process.stderr.read()


@pytest.mark.long
def test_a_killed_process_is_replaced_and_no_other_request_fails(serve):
    """X5."""
    service = serve(workers=2)
    service.wait_ready()
    before = service.attend().text.split('"weights"')[0]
    victim = service.line(event="worker_started", worker=0)["pid"]
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    service.line(event="worker_died", pid=victim)
    answers = [service.attend() for _ in range(20)]
    assert {answer.status_code for answer in answers} <= {200, 503}
    service.wait_ready()
    assert time.monotonic() - killed < 30
    assert service.attend().text.split('"weights"')[0] == before


@pytest.mark.long
def test_l4_sigterm_under_load_loses_no_accepted_request(serve):
    service = serve(workers=2)
    service.wait_ready()
    stopping = threading.Event()

    def client(_: int) -> list[int]:
        statuses = []
        with httpx2.Client(base_url=service.url) as session:
            while not stopping.is_set():
                try:
                    statuses.append(session.post("/v1/layers/small/attend", json=X).status_code)
                except httpx2.ConnectError:
                    break  # the listener is closed: nothing was accepted
        return statuses

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, i) for i in range(8)]
        time.sleep(1)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
        stopping.set()
        statuses = [status for found in clients for status in found.result()]
    assert len(statuses) > 20
    assert set(statuses) <= {200, 503}


@pytest.mark.long
@pytest.mark.parametrize(("damage", "exit_code"), [("missing", 1), ("broken", 3)])
def test_l11_an_unservable_directory_is_one_line_and_an_exit_code(serve, tmp_path, damage, exit_code):
    """An empty one serves attention without a layer (`test_attention_memory.py`)."""
    directory = tmp_path / damage
    if damage == "broken":
        directory.mkdir()
        (directory / "small.safetensors").write_bytes(b"\0" * 64)
    service = serve(directory, workers=2)
    assert service.process.wait(60) == exit_code
    assert service.process.stderr is not None
    told = service.process.stderr.read().strip().splitlines()
    assert len(told) == 1
    assert told[0].startswith("attention-service: ")


@pytest.mark.parametrize("files", [[], ["README.md"]])
def test_a_directory_without_layers_is_said_at_the_start_with_what_makes_some(serve, tmp_path, files):
    directory = tmp_path / "none"
    directory.mkdir()
    for name in files:
        (directory / name).touch()
    service = serve(directory, workers=1)
    assert "attention-service layers import" in service.line(event="no_layers", level="warning")["reason"]
    service.wait_ready()
    assert (
        httpx2.post(f"{service.url}/v1/attention", json={"query": [[1]], "key": [[1]], "value": [[2]]}).status_code
        == 200
    )


def test_l11_a_busy_port_is_one_line_and_an_exit_code(serve, tmp_path):
    first = serve(workers=1)
    port = first.line(event="serving", host="127.0.0.1")["port"]
    command = [sys.executable, "-m", "service", "serve", "--port", str(port), "--layers-dir", str(tmp_path / "layers")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert str(port) in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


REFUSED = {
    "L11-unknown-option": (["--prot", "1"], {}, "--prot"),
    "L11-unknown-command": (["--help-me"], {}, "--help-me"),
    "L11-misspelt-variable": ([], {"ATTENTION_WORKER": "1"}, "ATTENTION_WORKERS"),
    "L11-limit-of-0": ([], {"ATTENTION_QUEUE_CAPACITY": "0"}, "ATTENTION_QUEUE_CAPACITY"),
    "L11-negative-limit": ([], {"ATTENTION_MAX_BATCH_TOKENS": "-1"}, "ATTENTION_MAX_BATCH_TOKENS"),
    "L11-negative-time": ([], {"ATTENTION_STUCK_S": "-1"}, "ATTENTION_STUCK_S"),
    "L11-time-of-0": ([], {"ATTENTION_LAYER_CHANGE_S": "0"}, "ATTENTION_LAYER_CHANGE_S"),
    "L11-no-number": ([], {"ATTENTION_STUCK_S": "nan"}, "ATTENTION_STUCK_S"),
    "L11-port-out-of-range": (["--port", "70000"], {}, "ATTENTION_PORT"),
    "L11-missing-directory": (["--layers-dir", "there/is/none"], {}, "ATTENTION_LAYERS_DIR"),
    "L11-unknown-device": (["--device", "abacus"], {}, "ATTENTION_DEVICE"),
    "L11-unknown-host": (["--host", "203.0.113.7"], {}, "203.0.113.7"),
}


@pytest.mark.parametrize(("options", "environment", "says"), REFUSED.values(), ids=REFUSED)
def test_an_impossible_start_is_one_clear_line_and_an_exit_code(tmp_path, options, environment, says):
    prepare(tmp_path, LAYERS[:1])
    command = [
        sys.executable,
        *["-m", "service", "serve", "--port", "0", "--layers-dir"],
        str(tmp_path / "layers"),
        *options,
    ]
    env = processes.environment() | environment
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert refused.returncode not in (0, -signal.SIGKILL)
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
