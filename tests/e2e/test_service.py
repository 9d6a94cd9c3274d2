"""The real service in real processes: what it refuses to start with, and its first answers."""

import signal
import socket
import subprocess
import sys
import time

import httpx2
import pytest
import torch

from tests import processes
from tests.integration.running import LAYERS, prepare

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_an_early_request_waits_and_is_not_refused(serve):
    """The port takes connections while torch is still being imported, which the line `listening` comes after."""
    service = serve(workers=1)
    port = service.port
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.01)
    assert not service.find(event="listening")
    assert httpx2.get(f"{service.url}/readyz", timeout=60).status_code in (200, 503)


def test_a_head_has_the_headers_of_its_get_and_the_connection_goes_on(url):
    with httpx2.Client(base_url=url) as session:
        for path, status in (("/docs", 200), ("/healthz", 200), ("/openapi.json", 200), ("/nope", 404)):
            head, get = session.head(path), session.get(path)
            assert head.status_code == get.status_code == status
            assert head.headers["content-length"] == get.headers["content-length"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_device_is_one_line_and_an_exit_code(serve):
    service = serve(workers=1, device="cuda")
    assert service.process.wait(60) == 3
    assert service.process.stderr is not None
    assert "cuda" in service.process.stderr.read()


@pytest.mark.long
def test_l11_a_directory_of_broken_layers_is_one_line_and_an_exit_code(serve, tmp_path):
    """An empty one serves attention without a layer (`test_attention_memory.py`)."""
    directory = tmp_path / "broken"
    directory.mkdir()
    (directory / "small.safetensors").write_bytes(b"\0" * 64)
    service = serve(directory, workers=2)
    assert service.process.wait(60) == 3
    assert service.process.stderr is not None
    (told,) = service.process.stderr.read().strip().splitlines()
    assert told.startswith("attention-service: ")


@pytest.mark.parametrize("files", [pytest.param([], marks=pytest.mark.long), ["README.md"]])
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


REFUSED = {
    "L11-unknown-option": (["--prot", "1"], {}, "--prot"),
    "L11-unknown-command": (["--help-me"], {}, "--help-me"),
    "L11-misspelt-variable": ([], {"ATTENTION_WORKER": "1"}, "ATTENTION_WORKERS"),
    "L11-limit-of-0": ([], {"ATTENTION_QUEUE_CAPACITY": "0"}, "ATTENTION_QUEUE_CAPACITY"),
    "L11-negative-limit": ([], {"ATTENTION_MAX_BATCH_TOKENS": "-1"}, "ATTENTION_MAX_BATCH_TOKENS"),
    "L11-negative-time": ([], {"ATTENTION_STUCK_S": "-1"}, "ATTENTION_STUCK_S"),
    "L11-time-of-0": ([], {"ATTENTION_LAYER_CHANGE_S": "0"}, "ATTENTION_LAYER_CHANGE_S"),
    "L11-no-number": ([], {"ATTENTION_STUCK_S": "nan"}, "ATTENTION_STUCK_S"),
    "L11-port-out-of-range": (["--port", "70000"], {}, "--port 70000"),
    "L11-missing-directory": (["--layers-dir", "there/is/none"], {}, "--layers-dir"),
    "L11-unknown-device": (["--device", "abacus"], {}, "--device abacus"),
    "L11-unknown-host": (["--host", "203.0.113.7"], {}, "203.0.113.7"),
}


@pytest.mark.parametrize(("options", "environment", "says"), REFUSED.values(), ids=REFUSED)
def test_an_impossible_start_is_one_clear_line_and_an_exit_code(tmp_path, options, environment, says):
    prepare(tmp_path, LAYERS[:1])
    layers = str(tmp_path / "layers")
    command = [sys.executable, "-m", "service", "serve", "--port", "0", "--layers-dir", layers, *options]
    env = processes.environment() | environment
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert refused.returncode not in (0, -signal.SIGKILL)
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
