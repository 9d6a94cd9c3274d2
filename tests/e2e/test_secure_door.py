"""HTTP over TLS: malformed input is answered as without TLS, and every connection ends in its time."""

import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.e2e.raw_client import RawClient
from tests.e2e.started import Started
from tests.integration.running import LAYERS, prepare
from tests.raw_inputs import TOO_MUCH, WIRED, get, post

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed: apt-get install openssl"),
]

HEADER_TIMEOUT_S = 2.0
LONG_ANSWER = json.dumps({"query": [[0.5] * 16] * 900, "weights": {"form": "heads"}, "encoding": "list"}).encode()


@pytest.fixture
def directory(tmp_path):
    prepare(tmp_path, LAYERS)
    make = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {tmp_path}/key -out {tmp_path}/cert"
    )
    subprocess.run(make, shell=True, check=True, capture_output=True)
    return tmp_path


@pytest.fixture
def tls(directory):
    return ssl.create_default_context(cafile=directory / "cert")


@pytest.fixture
def service(directory, tls):
    started = Started(
        directory / "layers",
        workers=1,
        max_body_bytes=2**20,
        header_timeout_s=HEADER_TIMEOUT_S,
        write_timeout_s=5,
        tls_cert_file=directory / "cert",
        tls_key_file=directory / "key",
    )
    started.line(event="layers_served", layers=len(LAYERS))
    yield started
    started.end()


@pytest.fixture
def port(service) -> int:
    return int(service.line(event="serving", host="127.0.0.1")["port"])


def received(port, tls) -> tuple[float, ...]:
    """How many requests came, and how many ended with an answer."""
    text = httpx2.get(f"https://127.0.0.1:{port}/metrics", verify=tls).text
    samples = [line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
    return tuple(
        sum(float(value) for name, value in samples if name.startswith(f"attention_{series}_total"))
        for series in ("received", "requests")
    )


def test_a_refusal_is_read_counted_and_ends_the_connection(service, port, tls):
    raws = [*WIRED.values(), *(raw for raw, _ in TOO_MUCH.values())]

    def heard(raw: bytes) -> tuple[int, ...]:
        with RawClient(port, tls=tls) as client:
            client.send(raw)
            return tuple(answer.status for answer in client.hear_all())

    with ThreadPoolExecutor(len(raws)) as pool:
        assert set(pool.map(heard, raws)) == {(400,), (413,), (414,), (431,)}
    with RawClient(port, tls=tls) as client:
        client.send(get())
        assert client.hear() is not None
    assert received(port, tls) == (len(raws) + 1, len(raws) + 1)
    assert not service.find(event="library")


@pytest.mark.long
def test_a_client_that_only_connects_is_disconnected_at_the_header_deadline(port):
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        started = time.monotonic()
        assert client.recv(1) == b""
        assert time.monotonic() - started < HEADER_TIMEOUT_S + 1


@pytest.mark.long
def test_a_target_may_be_a_whole_https_url(port, tls):
    with RawClient(port, tls=tls) as client:
        client.send(get().replace(b"GET /", b"GET https://localhost/", 1))
        answer = client.hear()
        assert answer is not None
        assert answer.status == 200


def test_a_client_whose_handshake_the_drain_interrupts_is_answered(service, port, tls):
    arrived, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls.wrap_bio(arrived, sent, server_hostname="localhost")
    with socket.create_connection(("127.0.0.1", port), 10) as raw, socket.create_connection(("127.0.0.1", port), 10):
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        raw.sendall(sent.read())
        arrived.write(raw.recv(2**16))
        service.process.send_signal(signal.SIGTERM)
        service.line(event="draining")
        time.sleep(0.2)
        client.do_handshake()
        client.write(get())
        raw.sendall(sent.read())
        while received := raw.recv(2**16):
            arrived.write(received)
        text = b""
        while piece := client.read(2**16):
            text += piece
    assert text.startswith(b"HTTP/1.1 200 ")
    assert text.count(b"\r\nconnection: close\r\n") == 1
    assert service.process.wait(10) == 0
    assert service.process.stderr.read() == ""


@pytest.mark.long
def test_clients_that_read_nothing_do_not_prevent_an_orderly_shutdown(service, port, tls):
    slow = [RawClient(port, tls=tls) for _ in range(8)]
    for client in slow:
        client.send(post(b"Content-Length: %d" % len(LONG_ANSWER), body=LONG_ANSWER))
    idle = [RawClient(port, tls=tls) for _ in range(8)]
    for client in idle:
        client.send(get())
        assert client.hear() is not None
    service.process.send_signal(signal.SIGTERM)
    service.line(event="draining")
    assert service.process.wait(20) == 0
    assert service.process.stderr.read() == ""
    assert not service.find(event="library")
    for client in [*slow, *idle]:
        client.socket.close()
