"""What deploy/haproxy/haproxy.cfg passes on, refuses and adds, with the real haproxy."""

import contextlib
import ssl
import subprocess

import httpx2
import numpy as np
import pytest

from attention_client import Client
from tests import processes
from tests.scale.balancer import Balancer
from tests.scale.faults import stub
from tests.scale.replicas import replicas

ATTEND = "/v1/layers/small/attend"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def replica(layers_dir):
    with replicas(1, layers_dir, env={"ATTENTION_RATE_LIMIT_PER_S": "4"}) as (one,):
        yield one


@pytest.fixture(scope="module")
def edge(replica):
    with Balancer([replica.url]) as balancer:
        yield balancer


@contextlib.contextmanager
def scripted(answer: bytes):
    """A balancer whose only replica, checked no more, answers every call with these bytes, and the headers of the calls."""
    port = processes.free_port()
    with stub(port, 200, answer) as posts, Balancer([f"http://127.0.0.1:{port}"], status="DOWN") as balancer:
        balancer.command("disable health attention/replica1")
        balancer.command("set server attention/replica1 health up")
        yield balancer.url + ATTEND, posts


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        pytest.param("PUT", "/v1/layers/small", {}, 409, id="PUT would reach one replica"),
        pytest.param("DELETE", "/v1/layers/small", {}, 409, id="DELETE would reach one replica"),
        pytest.param("GET", "/metrics", {}, 404, id="metrics would be those of one replica"),
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


def test_a_429_passes_with_its_retry_after_and_is_not_sent_again(edge):
    answers = [httpx2.post(edge.url + ATTEND, json={"query": [[0.5] * 16]}) for _ in range(20)]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert (refused.headers["retry-after"], refused.json()["code"]) == ("1", "rate_limited")
    assert edge.stats()["replica1"]["wretr"] == "0"


@pytest.mark.parametrize(("num_bytes", "num_posts"), [(1000, 3), (200_000, 1)], ids=["fits a buffer", "does not"])
def test_a_503_is_sent_again_if_it_fits_and_passes_with_its_retry_after(num_bytes, num_posts):
    with scripted(BUSY) as (url, posts):
        found = httpx2.post(url, content=b"x" * num_bytes)
    assert (found.status_code, found.headers["retry-after"], len(posts)) == (503, "7", num_posts)


def test_forwarded_headers_of_a_caller_are_dropped_and_others_pass():
    given = {"host": "api.example", "authorization": "Bearer k", "x-request-id": "a.1"}
    forged = {"X-Forwarded-For": "9.9.9.9", "X-Forwarded-Host": "b", "X-Forwarded-Proto": "https", "Forwarded": "for=9"}
    with scripted(BUSY) as (url, posts):
        httpx2.post(url, headers=given | forged)
    assert posts[0].items() >= given.items()
    assert not [name for name in posts[0] if "forwarded" in name]


def test_without_a_ready_replica_the_answer_is_a_503_with_retry_after():
    with Balancer([f"http://127.0.0.1:{processes.free_port()}"], status="DOWN") as balancer:
        found = httpx2.post(balancer.url + ATTEND)
    assert (found.status_code, found.headers["retry-after"], found.json()["code"]) == (503, "1", "not_ready")


def test_tls_ends_at_the_edge(replica, tmp_path):
    pem, port = tmp_path / "edge.pem", processes.free_port()
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", pem, "-out", f"{pem}.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    with pem.open("a") as file:
        file.write((tmp_path / "edge.pem.crt").read_text())
    trusted = httpx2.AsyncHTTPTransport(verify=ssl.create_default_context(cafile=f"{pem}.crt"))
    bind = {"BALANCER_BIND": f"127.0.0.1:{port} ssl crt {pem} alpn h2,http/1.1"}
    with Balancer([replica.url], env=bind), Client(f"https://127.0.0.1:{port}", transport=trusted) as client:
        assert client.attend("small", np.ones((2, 16), np.float32)).output.shape == (2, 16)
