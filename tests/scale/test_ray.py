"""deploy/ray on two machines of one CPU each: both serve, and neither a killed replica nor a killed machine reaches a caller.

With Ray's own proxy and with its HAProxy ingress; with the latter the layers come out of Ray's object store.
"""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests import processes
from tests.scale.callers import Callers, goodput
from tests.scale.replicas import replicas

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
RECOVERY_S = 30
pytestmark = pytest.mark.long  # Ray alone takes half a minute to start


class Ray:
    """A cluster that serves at `url`; tests/scale/ray_cluster.py runs it."""

    def __init__(self, layers_dir: Path, *arguments: str, is_haproxy: bool) -> None:
        assert PYTHON.exists(), "Ray is not installed: make install-ray"
        # Ray's sockets lie there, and their addresses have at most 107 bytes.
        self._directory = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
        port = processes.free_port()
        self.url = f"http://127.0.0.1:{port}"
        env = processes.environment(layers_dir=layers_dir) | {"RAY_TMPDIR": self._directory.name}
        env |= {"RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": self._directory.name}
        env |= _haproxy(self._directory.name) if is_haproxy else {}
        self._log = Path(self._directory.name, "log").open("w+")  # noqa: SIM115 (closed by `end`)
        self._process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("ray_cluster.py"), str(port), *arguments],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C is for pytest, which ends it
        )

    def command(self, text: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self.log()
        return json.loads(line)

    def replicas(self) -> dict[str, int]:
        """The pid of the replica of each node that has one."""
        return dict(self.command("replicas"))

    def wait_for_two(self, *, but: int = 0) -> None:
        """Wait until two nodes have a replica, none of them with that pid."""
        processes.eventually(
            lambda: len(found := self.replicas()) == 2 and but not in found.values(), "two replicas", 2 * RECOVERY_S
        )

    def log(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")[-3000:]

    def end(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        processes.eventually(lambda: not _left(), "the processes of Ray have ended")
        layers = Path(self._directory.name)
        processes.eventually(lambda: not list(layers.glob("attention-layers-*")), "no replica has left its layers")
        self._log.close()
        self._directory.cleanup()


def _left() -> list[str]:
    return [text for text in processes.children().values() if ".venv-ray/" in text or text.startswith("ray::")]


def _haproxy(directory: str) -> dict[str, str]:
    names = {
        "CONFIG_FILE_LOC": "h/cfg",
        "SOCKET_PATH": "h/s",
        "SERVER_STATE_FILE": "h/state",
        "METRICS_SOCKET_PATH": "h/m",
    }
    files = {name: f"{directory}/{path}" for name, path in names.items()} | {"SERVER_STATE_BASE": f"{directory}/h"}
    ports = {name: str(processes.free_port()) for name in ("METRICS_PORT", "STATS_PORT")}
    fast = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"}
    return (
        {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
        | fast
        | {f"RAY_SERVE_HAPROXY_{n}": value for n, value in (files | ports).items()}
    )


@pytest.fixture(scope="module", params=["proxy", "haproxy"])
def ray(request, layers_dir):
    is_haproxy = request.param == "haproxy"
    arguments = ["min_replicas=2", "max_replicas=2", *(["in_store=true"] if is_haproxy else [])]
    cluster = Ray(layers_dir, *arguments, is_haproxy=is_haproxy)
    try:
        cluster.wait_for_two()
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="module")
def plain(layers_dir):
    with replicas(1, layers_dir) as [plain]:
        yield plain


@pytest.fixture
def callers(ray, plain):
    return Callers(ray.url, reference=plain.url)


def test_both_nodes_serve(ray, callers):
    def nodes_that_answered() -> int:
        texts = [httpx2.get(url).text for url in ray.command("metrics_urls")]
        return sum(bool(re.search(r"^ray_attention_received_total\{.*\} [1-9]", text, re.MULTILINE)) for text in texts)

    with callers:
        processes.eventually(lambda: nodes_that_answered() == 2, "the metrics of two nodes have requests")
    assert not callers.result().failures
    assert callers.result().num_wrong == 0


@pytest.mark.parametrize("path", ["readyz", "nothing"])
def test_an_answer_has_one_request_id_and_it_is_the_callers(ray, path):
    answer = httpx2.get(f"{ray.url}/{path}", headers={"X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert answer.json().get("request_id", "mine") == "mine"


def test_a_replica_refuses_a_change_of_layers(ray):
    for method in ("PUT", "DELETE"):
        answer = httpx2.request(method, f"{ray.url}/v1/layers/small")
        assert (answer.status_code, answer.json()["code"]) == (409, "layers_fixed")
        assert "deploy again" in answer.json()["detail"]


def test_a_killed_replica_is_replaced_and_no_caller_notices(ray, callers):
    with callers:
        before = callers.watched(3)
        pid = next(iter(ray.replicas().values()))
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        during = callers.watched(5)
        ray.wait_for_two(but=pid)
        recovery_s = time.monotonic() - killed
        callers.watched(1)
    assert not callers.result().failures
    assert callers.result().num_wrong == 0
    assert goodput(before, during) >= 0.4
    assert recovery_s <= RECOVERY_S


def test_a_killed_node_is_replaced_and_no_caller_notices(ray, callers):
    with callers:
        callers.watched(2)
        node, pid = next(iter(ray.replicas().items()))
        killed = time.monotonic()
        ray.command(f"kill_node {node}")
        ray.command("add_node")  # what a cloud's autoscaler or KubeRay does
        ray.wait_for_two(but=pid)
        recovery_s = time.monotonic() - killed
        callers.watched(1)
    assert not callers.result().failures
    assert callers.result().num_wrong == 0
    assert recovery_s <= RECOVERY_S
