"""More connections than a process keeps, and no descriptor left: it stays, health is answered, and all is back afterwards."""

import contextlib
import os
import resource
import socket
import time
from pathlib import Path

import httpx2
import pytest

from tests.e2e.raw_client import RawClient
from tests.e2e.started import Started
from tests.integration.running import LAYERS, prepare
from tests.processes import eventually
from tests.raw_inputs import get

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

KEPT = 20
# Above the kept: guests, a batch that is being taken, and files that are open for a moment.
ROOM = 64 + 16 + 20
TICKS_A_S = os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    directory = tmp_path_factory.mktemp("crowd")
    prepare(directory, LAYERS)
    started = Started(
        directory / "layers", workers=1, max_connections=KEPT, header_timeout_s=30, heartbeat_s=0.2, probe_s=1
    )
    started.wait_ready()
    started.attend()  # whose heartbeat opens the last of the metrics' files
    eventually(lambda: any("layer_last_answer" in name for name in started.samples()), "the first heartbeat came")
    yield started
    started.end()


@pytest.fixture
def port(service) -> int:
    return int(service.url.rsplit(":", 1)[1])


@pytest.fixture
def worker(service) -> int:
    """Its process id."""
    return int(service.find(event="worker_started")[0]["pid"])


@pytest.fixture(autouse=True)
def same_process_and_true_counts(service):
    """After each test: one process, the first one, and as many ends as beginnings."""
    yield
    eventually(lambda: answered(service) == 200, "requests are answered")
    samples = service.samples()
    ends = sum(
        value for name, value in samples.items() if name.startswith(("attention_requests_", "attention_cancelled_"))
    )
    assert samples["attention_received_total"] == ends
    assert samples["attention_in_flight_requests"] == 0
    assert len(service.find(event="worker_started")) == 1


@contextlib.contextmanager
def silent(port: int, number: int):
    """So many connections that say nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        yield


def answered(service) -> int:
    with contextlib.suppress(httpx2.HTTPError):
        return int(service.attend().status_code)
    return 0


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def num_descriptors_at_rest(pid: int) -> int:
    """The least of some looks: a connection that a client has just closed still has its descriptor."""
    counts = []
    for _ in range(25):
        counts.append(num_descriptors(pid))
        time.sleep(0.02)
    return min(counts)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_S


@pytest.mark.long
@pytest.mark.parametrize("number", [KEPT, KEPT + 10, 20 * KEPT])
def test_above_max_connections_health_is_answered_and_all_else_refused(service, port, worker, number):
    before = num_descriptors_at_rest(worker)
    with silent(port, number):
        eventually(lambda: num_descriptors(worker) >= before + min(number, KEPT), "the connections are accepted")
        for path in (b"/healthz", b"/readyz", b"/metrics", b"/v2/health/ready"):
            with RawClient(port) as client:
                client.send(get(b"GET " + path + b" HTTP/1.1"))
                (answer,) = client.hear_all()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        with RawClient(port) as client:
            client.send(2 * get())
            (answer,) = client.hear_all()
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "not_ready", "1")
        assert num_descriptors(worker) <= before + KEPT + ROOM
    eventually(lambda: num_descriptors(worker) <= before, "their descriptors are closed")


def test_an_existing_connection_is_served_beside_a_crowd(service, port):
    with httpx2.Client(base_url=service.url) as client:
        assert client.get("/v1/layers").status_code == 200
        with silent(port, 10 * KEPT):
            for _ in range(10):
                assert client.get("/v1/layers").status_code == 200


def test_a_process_without_a_free_descriptor_stays_and_is_ready_again(service, port, worker):
    soft, hard = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    with httpx2.Client(base_url=service.url) as client:
        assert client.get("/healthz").status_code == 200
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (0, hard))
        try:
            service.line(event="heartbeat_not_written")
            busy = cpu_s(worker)
            with silent(port, 10):
                service.line(event="connections_not_taken")
                time.sleep(1)
            assert cpu_s(worker) - busy < 0.7  # of more than a second: nothing spins
            assert client.get("/healthz").status_code == 200
        finally:
            resource.prlimit(worker, resource.RLIMIT_NOFILE, (soft, hard))
    service.wait_ready()
