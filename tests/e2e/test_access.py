"""Keys, warnings and HTTPS in real processes: what a start refuses and says, rotation in every process, TLS to its end."""

import contextlib
import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from attention_client import Client
from attention_client.errors import Unauthorized
from service.api.auth.key_ring import Role, line_for
from tests.e2e.raw_client import RawClient
from tests.e2e.started import Started, X
from tests.processes import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
NEEDS_OPENSSL = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed: apt-get install openssl"
)
MAKE_CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost "
    "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
)


@pytest.fixture
def certificate(tmp_path):
    subprocess.run(MAKE_CERTIFICATE, shell=True, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "cert.pem", tmp_path / "key.pem"


def lines(*secrets: str) -> str:
    return "".join(line_for(secret, Role.INFER) + "\n" for secret in secrets)


def refusal(service: Started) -> tuple[int, str]:
    _, text = service.process.communicate(timeout=30)
    return service.process.returncode, text


def test_a_start_with_a_bad_keys_file_is_refused_with_one_line_that_repeats_no_key(serve, tmp_path):
    (tmp_path / "keys").write_text(lines("a") + "my-plain-key infer\n")
    code, message = refusal(serve(api_keys_file=tmp_path / "keys"))
    assert code == 1
    assert message.startswith("attention-service: ATTENTION_API_KEYS_FILE: line 2 ")
    assert len(message.splitlines()) == 1
    assert "plain" not in message
    assert line_for("a", Role.INFER)[:10] not in message


ORIGIN = "\nOrigin: http://evil.example"
# Heads that no client library writes: the host is in the target, or missing.
HEADS = {
    "GET http://evil.example/v1/layers HTTP/1.1\nHost: localhost" + ORIGIN: 400,
    "GET http://localhost:1/v1/layers HTTP/1.1\nHost: evil.example" + ORIGIN: 200,
    "GET http://localhost?x HTTP/1.1\nHost: localhost" + ORIGIN: 307,
    "OPTIONS * HTTP/1.1\nHost: evil.example" + ORIGIN: 400,
    "GET /v1/layers HTTP/1.0": 200,
    "GET /v1/layers HTTP/1.0" + ORIGIN: 400,
}


def test_D9_the_host_of_a_target_counts_and_a_browser_must_name_one(url):
    def status(head):
        with RawClient(int(url.rpartition(":")[2])) as client:
            client.send(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
            answer = client.hear()
        assert answer is not None
        return answer.status

    assert {head: status(head) for head in HEADS} == HEADS


@pytest.mark.parametrize("arguments", [["--role", "root"], ["--name", "two\nlines"]])
def test_a_failure_to_make_a_key_is_one_line(arguments):
    command = [sys.executable, "-m", "service", "keys", "new", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.long
def test_A9_a_removed_key_is_refused_in_every_process_within_5_s(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(lines("old", "new"))
    service = serve(workers=2, api_keys_file=keys)
    service.wait_ready()

    def ask(key: str) -> int:
        """Send a request over a connection of its own, which the kernel gives to either process."""
        return httpx2.get(f"{service.url}/v1/layers", headers={"x-api-key": key}).status_code

    assert {ask(key) for key in ("old", "new") * 10} == {200}
    keys.write_text(lines("new"))
    written = time.monotonic()
    time.sleep(4)
    assert time.monotonic() - written < 5
    assert {ask("old") for _ in range(40)} == {401}
    assert {ask("new") for _ in range(20)} == {200}
    keys.write_text("nonsense")
    service.line(event="api_keys_refused")
    assert {ask("new") for _ in range(20)} == {200}
    time.sleep(2)
    assert len(service.find(event="api_keys_refused")) <= 2, "once in each process"


def test_A12_R12_the_start_logs_what_is_open_and_no_secret(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(lines("my-secret-key"))
    open_to_all = serve(workers=1, host="0.0.0.0")
    assert open_to_all.line(event="open_to_all")["level"] == "warning"
    assert len(open_to_all.find(event="open_to_all")) == 1
    open_to_all.end()
    service = serve(workers=1, host="0.0.0.0", api_keys_file=keys)
    service.line(event="api_keys_reloaded", infer=1, admin=0)
    assert not service.find(event="open_to_all")
    text = json.dumps(service.lines)
    for secret in ("my-secret-key", line_for("my-secret-key", Role.INFER)[:64], str(keys)):
        assert secret not in text


def test_a_request_line_names_the_key_the_worker_and_the_reason_of_a_refusal(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(lines("good").replace("\n", "  # team a\n") + lines("nameless"))
    service = serve(workers=2, api_keys_file=keys)
    service.wait_ready()
    digest = lines("nameless")[:8]
    attend, url = "/v1/layers/{layer}/attend", service.url
    found = []
    for rows in (1, 60):
        for secret, body in (
            ("good", {"query": X["query"][:1] * rows}),
            ("nameless", {"query": [[1.0]] * rows}),
            ("wrong", {}),
        ):
            path = f"{url}/v1/layers/small/attend"
            answer = httpx2.post(path, json=body, headers={"authorization": f"Bearer {secret}"})
            found.append(service.line(event="request", request_id=answer.headers["x-request-id"]))
    assert [line["status"] for line in found] == [200, 422, 401] * 2
    assert [line.get("key") for line in found] == ["team a", digest, None] * 2
    assert {line["route"] for line in found} == {attend}
    assert {line["peer"] for line in found} == {"127.0.0.1"}
    assert {line["worker"] for line in found} <= {0, 1}
    assert ["detail" in line for line in found] == [False, True, True] * 2
    assert found[1]["detail"].startswith("query has 1 features")
    assert httpx2.get(f"{url}/nothing").status_code == 401
    assert service.line(event="request", method="GET", status=401)["route"] == "unmatched"
    texts = json.dumps(service.lines)
    assert not any(secret in texts for secret in ("good", "wrong", lines("good")[:64]))


def test_the_supervisor_and_its_workers_write_lines_of_one_form(serve):
    service = serve(workers=1)
    service.wait_ready()
    started, listening = service.line(event="worker_started"), service.line(event="listening")
    assert (started["worker"], started["pid"]) == (listening["worker"], listening["pid"])
    for line, text in zip(list(service.lines), service.texts, strict=False):
        assert list(line)[:4] == ["timestamp", "level", "event", "version"]
        assert text.rstrip("\n") == json.dumps(line, ensure_ascii=False, separators=(",", ":"))


def test_A12_by_default_it_listens_on_loopback_alone(serve):
    service = serve(workers=1)
    port = service.port
    service.wait_ready()
    assert not service.find(event="open_to_all")
    listening = subprocess.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=True)
    found = [line.split()[1:4] for line in listening.stdout.splitlines()]
    bound = {local for local, _, state in found if state == "0A" and local.endswith(f":{port:04X}")}
    assert bound == {f"0100007F:{port:04X}"}


def test_A5_bytes_that_no_client_library_sends_are_401_or_refused_by_the_parser(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(lines("good"))
    service = serve(workers=1, api_keys_file=keys)
    service.wait_ready()

    def status(headers=b"", target=b"/v1/layers"):
        with RawClient(service.port) as client:
            client.send(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n")
            (answer,) = client.hear_all()
        return answer.status

    assert status(b"X-API-KEY:good\r\n") == 200
    for headers in (
        b"X-API-Key: \xe9\r\n",
        b"X-API-Key: go\0od\r\n",
        b"X-API-Key: go\r\n od\r\n",
        b"X-API-Key : good\r\n",
        b"Authorization: Bearer " + b"k" * 60_000 + b"\r\n",
    ):
        assert status(headers) in (401, 400, 431), headers[:60]
    for target in (b"//healthz/../v1/layers", b"/v1/layers#good"):
        assert status(target=target) in (401, 400), target
    for target in (b"/%68ealthz", b"http://elsewhere/healthz"):
        assert status(target=target) == 200, target
    assert service.process.poll() is None


def secure(certificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate[0])


@NEEDS_OPENSSL
def test_https_answers_from_the_start_to_the_drain_and_loses_no_accepted_request(serve, certificate, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(lines("good"))
    both = tmp_path / "both.pem"
    both.write_text("".join(path.read_text() for path in certificate))
    service = serve(workers=1, tls_cert_file=both, api_keys_file=keys)
    assert service.line(event="listening")["address"].startswith("https://127.0.0.1:")
    port = service.port
    url = f"https://127.0.0.1:{port}"
    transport = httpx2.AsyncHTTPTransport(verify=secure(certificate))
    with Client(url, api_key="good", transport=transport) as client:
        eventually(client.is_ready, "it is ready", within_s=60)
        assert client.attend_json("small", X)["masked_rows"] == 0
    with (
        Client(url, transport=httpx2.AsyncHTTPTransport(verify=secure(certificate))) as stranger,
        pytest.raises(Unauthorized),
    ):
        stranger.layers()
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(f"http://127.0.0.1:{port}/healthz")
    silent = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(4)]  # they never shake hands
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(statuses_to_the_end, port, secure(certificate)) for _ in range(8)]
        time.sleep(0.5)
        service.process.send_signal(signal.SIGTERM)
        found = [status for one in asked for status in one.result()]
    assert set(found) <= {200, 503}
    assert found.count(200) > 8
    assert service.process.wait(10) == 0
    assert service.process.stderr is not None
    assert service.process.stderr.read() == ""
    assert not service.find(level="error")
    for peer in silent:
        peer.close()


def statuses_to_the_end(port: int, context: ssl.SSLContext) -> list[int]:
    """What one connection is answered, request after request, until it is told that this was its last answer."""
    headers = {"content-type": "application/json", "x-api-key": "good"}
    statuses, is_last = [], False
    with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)) as connection:
        while not is_last:
            connection.request("POST", "/v1/layers/small/attend", json.dumps(X), headers)
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
            is_last = "close" in answer.getheader("connection", "")
    return statuses


@NEEDS_OPENSSL
@pytest.mark.parametrize("case", ["missing", "key alone", "swapped", "other key", "passphrase", "no pem"])
def test_an_unusable_certificate_is_one_line(serve, certificate, case):
    cert, key = certificate
    other = key.with_name("other.pem")
    if case in ("other key", "passphrase"):
        cipher = "-aes256 -pass pass:secret" if case == "passphrase" else ""
        make = f"openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:prime256v1 {cipher} -out {other}"
        subprocess.run(make, shell=True, check=True, capture_output=True)
    settings = {
        "missing": {"tls_cert_file": cert.with_name("nowhere"), "tls_key_file": key},
        "key alone": {"tls_key_file": key},
        "swapped": {"tls_cert_file": key, "tls_key_file": cert},
        "other key": {"tls_cert_file": cert, "tls_key_file": other},
        "passphrase": {"tls_cert_file": cert, "tls_key_file": other},
        "no pem": {"tls_cert_file": sys.executable, "tls_key_file": key},
    }[case]
    code, message = refusal(serve(**settings))
    assert code == 1
    assert message.startswith("attention-service: ATTENTION_TLS_")
    assert len(message.splitlines()) == 1
