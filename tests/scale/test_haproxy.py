"""deploy/haproxy/haproxy.cfg with the real haproxy in front of three real services: a fault of one of them reaches no caller; and
what HAProxy passes on, refuses and adds.
"""

import contextlib
import functools
import ssl
import subprocess
from pathlib import Path

import httpx2
import numpy as np
import pytest

from attention_client import Client
from tests import processes
from tests.scale.balancer import Balancer
from tests.scale.callers import Callers, goodput
from tests.scale.faults import Network, stub

BEFORE_S, DURING_S = 2, 7.5
MIN_GOODPUT = 0.6
# A frozen or unreachable replica is marked as down within some five seconds, which is what a call waits for it.
MAX_LATENCY_S = 7
ATTEND = "/v1/layers/small/attend"
RIGHT = b'HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{"output":[[1.0]]}'
ERROR = b"HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbad"


@pytest.fixture
def balancer(three):
    with Balancer([one.url for one in three]) as balancer:
        yield balancer


def check(callers, before, during):
    """No caller saw a failure or other bits than a replica alone gives, or waited for long, or lost its pace."""
    result = callers.result()
    assert not result.failures
    assert result.num_wrong == 0
    assert result.slowest_s < MAX_LATENCY_S
    assert goodput(before, during) >= MIN_GOODPUT


def killed(replica, _):
    replica.kill()


def frozen(replica, _):
    replica.freeze()


def replaced(health, call, replica, stack):
    """By a server that answers health checks and calls like this."""
    replica.kill()
    stack.enter_context(stub(replica.port, health, call))


def wrong(health, call, name):
    return pytest.param(functools.partial(replaced, health, call), 5, id=name, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("fault", "during_s"),
    [
        pytest.param(killed, 4, id="killed"),
        pytest.param(frozen, DURING_S, id="frozen"),
        wrong(200, ERROR, "says-ready-and-answers-500"),
        wrong(200, b"", "says-ready-and-hangs-up"),
    ],
)
def test_a_fault_of_one_of_three_reaches_no_caller(three, balancer, fault, during_s):
    with Callers(balancer.url, reference=three[0].url) as callers:
        before = callers.watched(BEFORE_S)
        with contextlib.ExitStack() as stack:
            fault(three[1], stack)
            during = callers.watched(during_s)
            assert balancer.status("replica2") == "DOWN"
        three[1].restore()
        balancer.wait("replica2", "UP")
    check(callers, before, during)


def test_a_rolling_restart_of_all_three_loses_no_accepted_request(three, balancer):
    with Callers(balancer.url, reference=three[0].url) as callers:
        before, start_s = callers.watched(BEFORE_S), callers.now_s()
        for name, replica in zip(balancer.names, three, strict=True):
            replica.drain()
            balancer.wait(name, "NOLB")
            assert replica.drained() == 0
            replica.restore()
            balancer.wait(name, "UP")
        during = callers.result().per_second(start_s, callers.now_s())
    check(callers, before, during)
    assert [balancer.stats()[name]["eresp"] for name in balancer.names] == ["0"] * 3


@contextlib.contextmanager
def behind_networks(three, **options):
    """A balancer that reaches each replica through a network of its own."""
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(Network(one.port, **options)) for one in three]
        yield lines, stack.enter_context(Balancer([line.url for line in lines]))


@pytest.mark.long
def test_a_partition_of_one_of_three_reaches_no_caller(three):
    with behind_networks(three) as (lines, balancer):
        with Callers(balancer.url, reference=three[0].url) as callers:
            before = callers.watched(BEFORE_S)
            lines[1].cut()
            during = callers.watched(DURING_S)
            assert balancer.status("replica2") == "DOWN"
            lines[1].heal()
            balancer.wait("replica2", "UP")
        check(callers, before, during)


@pytest.mark.long
def test_a_replica_that_is_ten_times_slower_gets_fewer_calls(three):
    """With round robin it gets a third of them, and a caller's cycle takes more than twice as long."""
    with behind_networks(three, delay_s=0.06) as (lines, balancer):
        with Callers(balancer.url, reference=three[0].url) as callers:
            before = callers.watched(BEFORE_S)
            lines[1].delay_s = 0.6
            balancer.command("clear counters all")
            during = callers.watched(DURING_S)
        rows = balancer.stats()
    check(callers, before, during)
    assert int(rows["replica2"]["stot"]) < int(rows["BACKEND"]["stot"]) / 6


@pytest.fixture(scope="module")
def edge(fleet):
    with Balancer([fleet[0].url]) as balancer:
        yield balancer


@pytest.mark.parametrize(
    ("health", "call"),
    [
        pytest.param(200, ERROR, id="500"),
        pytest.param(200, b"\x00 no HTTP\r\n\r\n", id="garbage"),
        pytest.param(200, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", id="nonsense"),
        pytest.param(200, b"", id="hangs up"),
        *(pytest.param(status, RIGHT, id=f"health {status}") for status in (302, 404, 500, 503)),
    ],
)
def test_a_server_with_wrong_health_or_calls_is_down(health, call):
    port = processes.free_port()
    with stub(port, health, call), Balancer([f"http://127.0.0.1:{port}"], status="DOWN"):
        pass


def refusal(status):
    return f"HTTP/1.1 {status} Later\r\nRetry-After: 7\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


@contextlib.contextmanager
def scripted(answer: bytes):
    """A balancer whose only replica, checked no more, answers every call with these bytes, and the headers of the calls."""
    port = processes.free_port()
    with stub(port, 503, answer) as posts, Balancer([f"http://127.0.0.1:{port}"], status="DOWN") as balancer:
        balancer.command("disable health attention/replica1")
        balancer.command("set server attention/replica1 health up")
        yield balancer.url + ATTEND, posts


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        pytest.param("PUT", "/v1/layers/small", {}, 409, id="PUT would reach one replica"),
        pytest.param("DELETE", "/v1/layers/small", {}, 409, id="DELETE would reach one replica"),
        pytest.param("PUT", "/v1/%6Cayers/small", {}, 409, id="however the path is written"),
        pytest.param("GET", "/metrics", {}, 404, id="metrics would be those of one replica"),
        pytest.param("GET", "/%6detrics", {}, 404, id="however that path is written"),
        pytest.param("POST", ATTEND, {"X-Long": "x" * 20_000}, 431, id="the service limits header bytes"),
        pytest.param("POST", ATTEND, {f"X-{n}": "x" for n in range(120)}, 431, id="and headers"),
        pytest.param("POST", f"{ATTEND}?{'x' * 9_000}", {}, 414, id="and the target"),
    ],
)
def test_a_head_is_refused(edge, method, path, headers, status):
    answer = httpx2.request(method, edge.url + path, headers=headers)
    assert answer.status_code == status
    assert status == 404 or answer.json()["status"] == status


def test_metrics_are_the_balancers_on_a_port_of_their_own(edge):
    assert (
        'haproxy_server_status{proxy="attention",server="replica1",state="UP"} 1' in httpx2.get(edge.metrics_url).text
    )


@pytest.mark.parametrize(
    ("status", "num_bytes", "num_posts"),
    [
        pytest.param(429, 1000, 1, id="429-is-not-sent-again"),
        pytest.param(503, 1000, 3, id="503-is-sent-again"),
        pytest.param(503, 200_000, 1, id="503-unless-the-request-exceeds-a-buffer"),
    ],
)
def test_a_refusal_passes_with_its_retry_after(status, num_bytes, num_posts):
    with scripted(refusal(status)) as (url, posts):
        found = httpx2.post(url, content=b"x" * num_bytes)
    assert (found.status_code, found.headers["retry-after"], len(posts)) == (status, "7", num_posts)


def test_forwarded_headers_of_a_caller_are_dropped_and_others_pass():
    given = {"host": "api.example", "authorization": "Bearer k", "x-request-id": "a.1"}
    forged = {"X-Forwarded-For": "9.9.9.9", "X-Forwarded-Host": "b", "X-Forwarded-Proto": "https", "Forwarded": "for=9"}
    with scripted(refusal(503)) as (url, posts):
        httpx2.post(url, headers=given | forged)
    assert posts[0].items() >= given.items()
    assert not [name for name in posts[0] if "forwarded" in name]


def test_without_a_ready_replica_the_answer_is_a_503_with_retry_after():
    with Balancer([f"http://127.0.0.1:{processes.free_port()}"], status="DOWN") as balancer:
        found = httpx2.post(balancer.url + ATTEND)
    assert (found.status_code, found.headers["retry-after"], found.json()["code"]) == (503, "1", "not_ready")


def test_tls_ends_at_the_edge(fleet, tmp_path):
    pem, port = tmp_path / "edge.pem", processes.free_port()
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    options = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", pem, "-out", f"{pem}.crt")
    subprocess.run([*command.split(), *options], check=True, capture_output=True)
    with pem.open("a") as file:
        file.write(Path(f"{pem}.crt").read_text())
    trusted = httpx2.AsyncHTTPTransport(verify=ssl.create_default_context(cafile=f"{pem}.crt"))
    bind = {"BALANCER_BIND": f"127.0.0.1:{port} ssl crt {pem} alpn h2,http/1.1"}
    with Balancer([fleet[0].url], env=bind), Client(f"https://127.0.0.1:{port}", transport=trusted) as client:
        assert client.attend("small", np.ones((2, 16), np.float32)).output.shape == (2, 16)
