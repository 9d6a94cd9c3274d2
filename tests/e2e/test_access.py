"""Keys, warnings and HTTPS in real processes: what a start refuses and says, rotation in every process, TLS to its end."""

import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from attention_client import Client
from attention_client.errors import Unauthorized
from service.api.auth.key_ring import Role, line_for
from tests.e2e.started import Started, X
from tests.integration.running import LAYERS, prepare

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
NEEDS_OPENSSL = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed: apt-get install openssl"
)
MAKE_CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost "
    "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
)


@pytest.fixture
def serve(tmp_path):
    started: list[Started] = []
    prepare(tmp_path, LAYERS)

    def start(**settings) -> Started:
        started.append(Started(tmp_path / "layers", **settings))
        return started[-1]

    yield start
    for service in started:
        service.end()


@pytest.fixture
def certificate(tmp_path):
    subprocess.run(MAKE_CERTIFICATE, shell=True, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "cert.pem", tmp_path / "key.pem"


def lines(*secrets: str) -> str:
    return "".join(line_for(secret, Role.INFER) + "\n" for secret in secrets)


def refusal(service: Started) -> tuple[int, str]:
    _, text = service.process.communicate(timeout=30)
    return service.process.returncode, text


@pytest.mark.parametrize(
    ("text", "words"),
    [("my-plain-key infer\n", "line 1 "), (lines("a") + "\nnonsense", "line 3 "), (None, "cannot be read")],
)
def test_a_start_with_a_bad_keys_file_is_refused_with_one_line(serve, tmp_path, text, words):
    if text is not None:
        (tmp_path / "keys").write_text(text)
    code, message = refusal(serve(api_keys_file=tmp_path / "keys"))
    assert code == 1
    assert message.startswith("attention-service: ATTENTION_API_KEYS_FILE: ")
    assert words in message
    assert len(message.splitlines()) == 1
    assert "plain" not in message
    assert line_for("a", Role.INFER)[:10] not in message


def test_a_start_with_impossible_hosts_is_refused_with_one_line(serve):
    code, message = refusal(serve(allowed_hosts="https://api.example"))
    assert code == 1
    assert message.startswith("attention-service: ATTENTION_ALLOWED_HOSTS: ")
    assert len(message.splitlines()) == 1


def status_of(port: int, head: str) -> int:
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        return int(connection.makefile("rb").readline().split()[1])


ORIGIN = "\nOrigin: http://evil.example"
BY_DEFAULT = [
    ("GET /v1/layers HTTP/1.1\nHost: evil.example", 200),
    ("GET /v1/layers HTTP/1.1\nHost: evil.example" + ORIGIN, 400),
    ("GET /v1/layers HTTP/1.1\nHost: evil.example\nsec-fetch-site: same-origin", 400),
    ("GET /healthz HTTP/1.1\nHost: evil.example" + ORIGIN, 400),
    ("GET /v1/layers HTTP/1.1\nHost: localhost" + ORIGIN, 200),
    ("GET /v1/layers HTTP/1.1\nHost: [::1]:8000" + ORIGIN, 200),
    ("GET http://evil.example/v1/layers HTTP/1.1\nHost: localhost" + ORIGIN, 400),
    ("GET http://localhost:1/v1/layers HTTP/1.1\nHost: evil.example" + ORIGIN, 200),
    ("GET http://localhost?x HTTP/1.1\nHost: localhost" + ORIGIN, 404),
    ("OPTIONS * HTTP/1.1\nHost: evil.example" + ORIGIN, 400),
    ("GET /v1/layers HTTP/1.0", 200),
    ("GET /v1/layers HTTP/1.0" + ORIGIN, 400),
]
NAMED = [
    ("GET /v1/layers HTTP/1.1\nHost: a.api.example:80", 200),
    ("GET /v1/layers HTTP/1.1\nHost: 127.0.0.1", 400),
    ("GET http://127.0.0.1/v1/layers HTTP/1.1\nHost: a.api.example", 400),
    ("GET http://a.api.example/v1/layers HTTP/1.1\nHost: 127.0.0.1", 200),
    ("GET /v1/layers HTTP/1.0", 400),
    ("GET /readyz HTTP/1.1\nHost: 10.0.0.7:8000", 200),
    ("GET /v2/health/ready HTTP/1.0", 200),
    ("GET /readyz HTTP/1.1\nHost: 10.0.0.7:8000" + ORIGIN, 400),
]


@pytest.mark.long
@pytest.mark.parametrize(("settings", "cases"), [({}, BY_DEFAULT), ({"allowed_hosts": "*.api.example"}, NAMED)])
def test_D9_a_request_names_a_host_that_is_allowed(serve, settings, cases):
    service = serve(workers=1, **settings)
    service.wait_ready()
    port = service.line(event="serving", host="127.0.0.1")["port"]
    assert [(head, status_of(port, head)) for head, _ in cases] == cases
    assert not service.find(level="error")


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
    port = service.line(event="serving", host="127.0.0.1")["port"]
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
    port = service.line(event="serving", host="127.0.0.1")["port"]

    def ask(headers: bytes, target: bytes = b"/v1/layers") -> bytes:
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n")
            return b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n")[0]

    assert b" 200 " in ask(b"authorization: bearer good\r\n")
    assert b" 200 " in ask(b"X-API-KEY:good\r\n")
    for headers in (
        b"",
        b"Authorization:\r\n",
        b"Authorization: Bearer good\r\nAuthorization: Bearer good\r\n",
        b"Authorization: Bearer good\r\nX-API-Key: bad\r\n",
        b"X-API-Key: good\r\nX-API-Key: good\r\n",
        b"X-API-Key: \xc3\xa9\r\n",
        b"X-API-Key: \xe9\r\n",
        b"X-API-Key: go\0od\r\n",
        b"X-API-Key: good\0\r\n",
        b"X-API-Key: go\r\n od\r\n",
        b"X-API-Key : good\r\n",
        b"Authorization: Bearer " + b"k" * 60_000 + b"\r\n",
    ):
        assert ask(headers).split(b" ")[1] in (b"401", b"400", b"431"), headers[:60]
    for target in (
        b"/v1/layers?api_key=good",
        b"/v1/layers?x-api-key=good",
        b"//healthz/../v1/layers",
        b"/v1/layers#good",
    ):
        assert ask(b"", target).split(b" ")[1] in (b"401", b"400"), target
    for target in (b"/healthz", b"/%68ealthz", b"http://elsewhere/healthz"):
        assert b" 200 " in ask(b"", target), target
    assert service.process.poll() is None


def secure(certificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate[0])


@NEEDS_OPENSSL
def test_https_answers_from_the_start_to_the_drain(serve, certificate, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(lines("good"))
    cert, key = certificate
    service = serve(workers=1, tls_cert_file=cert, tls_key_file=key, api_keys_file=keys)
    assert service.line(event="listening")["address"].startswith("https://127.0.0.1:")
    port = service.line(event="serving", host="127.0.0.1")["port"]
    url = f"https://127.0.0.1:{port}"
    transport = httpx2.AsyncHTTPTransport(verify=secure(certificate))
    with Client(url, api_key="good", transport=transport) as client:
        ready(client)
        assert client.attend_json("small", X)["masked_rows"] == 0
    with (
        Client(url, transport=httpx2.AsyncHTTPTransport(verify=secure(certificate))) as stranger,
        pytest.raises(Unauthorized),
    ):
        stranger.layers()
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(f"http://127.0.0.1:{port}/healthz")
    idle = [http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=secure(certificate)) for _ in range(8)]
    for connection in idle:
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
    silent = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(4)]  # they never shake hands
    service.process.send_signal(signal.SIGTERM)
    service.line(event="draining")
    end, is_last = time.monotonic() + 10, False
    while not is_last:  # the drain begins a moment after its line
        assert time.monotonic() < end
        idle[0].request("GET", "/healthz")
        answer = idle[0].getresponse()
        assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
        is_last = answer.getheader("connection") == "close"
    assert service.process.wait(10) == 0
    assert service.process.stderr is not None
    assert service.process.stderr.read() == ""
    assert not service.find(level="error")
    for connection in idle:
        connection.close()
    for peer in silent:
        peer.close()


def ready(client: Client) -> None:
    end = time.monotonic() + 60
    while not client.is_ready():
        assert time.monotonic() < end
        time.sleep(0.05)


@NEEDS_OPENSSL
def test_https_loses_no_request_that_was_accepted_before_the_end(serve, certificate):
    cert, key = certificate
    both = cert.with_name("both.pem")
    both.write_text(cert.read_text() + key.read_text())
    service = serve(workers=1, tls_cert_file=both, drain_delay_s=0.3)
    port = service.line(event="serving", host="127.0.0.1")["port"]
    with Client(f"https://127.0.0.1:{port}", transport=httpx2.AsyncHTTPTransport(verify=secure(certificate))) as client:
        ready(client)
    stopped, context = threading.Event(), secure(certificate)

    def ask(_: int) -> list[int]:
        statuses = []
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
        while not stopped.is_set():
            body = json.dumps(X)
            connection.request("POST", "/v1/layers/small/attend", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
            if "close" in answer.getheader("connection", ""):
                break
        connection.close()
        return statuses

    with ThreadPoolExecutor(8) as pool:
        asked = pool.map(ask, range(8))
        time.sleep(0.5)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
        stopped.set()
        found = [status for statuses in asked for status in statuses]
    assert set(found) <= {200, 503}
    assert found.count(200) > 8


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
