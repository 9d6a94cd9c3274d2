"""HTTP at the socket: any bytes get one answer in the contract's form, an end that a client can read, and are counted."""

import contextlib
import gzip
import http.client
import json
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import pytest

from attention_client import Client
from attention_client.errors import BodyTooLarge
from tests.e2e.raw_client import RawClient
from tests.e2e.started import Started, X
from tests.integration.running import LAYERS, prepare
from tests.processes import eventually
from tests.raw_inputs import ATTEND, SMUGGLED, TOO_MUCH, WIRED, chunked, get, post

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MAX_BODY_BYTES = 2**20
HEADER_TIMEOUT_S = 2.0
BODY_TIMEOUT_S = 1.5
WRITE_TIMEOUT_S = 2.0
SLOW_BYTES_PER_S = 1_000_000
BODY = json.dumps(X).encode()
GOOD = post(b"Content-Length: %d" % len(BODY), body=BODY)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    directory = tmp_path_factory.mktemp("door")
    prepare(directory, LAYERS)
    started = Started(
        directory / "layers",
        workers=1,
        max_body_bytes=MAX_BODY_BYTES,
        header_timeout_s=HEADER_TIMEOUT_S,
        body_timeout_s=BODY_TIMEOUT_S,
        write_timeout_s=WRITE_TIMEOUT_S,
        min_response_bytes_per_s=4 * SLOW_BYTES_PER_S,
    )
    started.wait_ready()
    yield started
    started.end()


@pytest.fixture
def port(service) -> int:
    return int(service.url.rsplit(":", 1)[1])


@pytest.fixture(autouse=True)
def whole_and_counted(service):
    """After each test: alive, nothing in flight, and as many ends as beginnings."""
    yield
    assert service.attend().status_code == 200
    samples = at_rest(service)
    ends = sum(
        value for name, value in samples.items() if name.startswith(("attention_requests_", "attention_cancelled_"))
    )
    assert samples["attention_received_total"] == ends
    assert samples["attention_queued_requests"] == samples["attention_queued_bytes"] == 0
    assert service.process.poll() is None


@contextlib.contextmanager
def python_client(port: int):
    """Python's own client, which looks for an answer when all is sent; `requests` works so."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        yield connection


def at_rest(service):
    """The metrics once nothing is in flight and nothing is queued, not even a probe of a layer."""
    end, gauges = time.monotonic() + 5, ("attention_in_flight_requests", "attention_queued_requests")
    while any((samples := service.samples())[name] for name in gauges) and time.monotonic() < end:
        time.sleep(0.02)
    assert [samples[name] for name in gauges] == [0, 0]
    return samples


def rejected(samples, code):
    return samples.get(f'attention_rejected_total{{reason="{code}"}}', 0.0)


def only_answer(port: int, *parts: bytes):
    """What was heard in answer to these bytes: one answer and the end."""
    with RawClient(port) as client:
        for part in parts:
            client.send(part)
        heard = client.hear_all()
    assert len(heard) == 1
    assert heard[0].headers["connection"] == "close"
    return heard[0]


# What is no request


@pytest.mark.parametrize(("raw", "code"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_input_above_a_limit_gets_one_answer_that_names_it(port, raw, code):
    answer = only_answer(port, raw)
    assert answer.code == code
    assert answer.status == {"target_too_long": 414, "headers_too_large": 431, "body_too_large": 413}[code]


def num_logged(service) -> int:
    """Refusals with a line of their own, and those that are summed up after the first hundred of a second."""
    sums = service.find(event="refusals_suppressed", code="bad_request")
    return len(service.find(event="request", code="bad_request")) + sum(int(line["count"]) for line in sums)


def test_malformed_input_gets_one_answer_is_counted_once_and_logged_once(service, port):
    eventually(
        lambda: num_logged(service) == rejected(at_rest(service), "bad_request"), "the sums of other tests are written"
    )
    before, logged = at_rest(service), num_logged(service)
    for raw in WIRED.values():
        answer = only_answer(port, raw)
        assert (answer.status, answer.code) == (400, "bad_request")
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-request-id"] == json.loads(answer.body)["request_id"]
        assert len(answer.body) < 4096
    after = at_rest(service)
    assert rejected(after, "bad_request") - rejected(before, "bad_request") == len(WIRED)
    assert after["attention_received_total"] - before["attention_received_total"] == len(WIRED)
    eventually(lambda: num_logged(service) - logged >= len(WIRED), "all are logged")
    assert num_logged(service) - logged == len(WIRED)


def test_a_refusal_under_v2_has_the_form_of_that_protocol(port):
    for raw in (b"GET /v2/models HTTP/1.1\r\n\r\n", get(b"GET /v2 HTTP/1.1", b"A : b")):
        answer = only_answer(port, raw)
        assert answer.status == 400
        assert set(json.loads(answer.body)) == {"error"}


@pytest.mark.parametrize("method", ["GET", "CONNECT", "post"])
def test_H18_another_method_is_405_with_what_is_allowed(port, method):
    with RawClient(port) as client:
        client.send(method.encode() + b" " + ATTEND + b" HTTP/1.1\r\nHost: x\r\n\r\n" + GOOD)
        answer, next_answer = client.hear(), client.hear()
    assert answer is not None
    assert next_answer is not None
    assert (answer.status, answer.headers["allow"]) == (405, "OPTIONS, POST")
    assert next_answer.status == 200


def test_H18_a_head_of_a_post_route_is_405_too(port):
    with python_client(port) as connection:
        connection.request("HEAD", ATTEND.decode())
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (405, b"")


@pytest.mark.parametrize("sent", [b"a" * 10_000, "é".encode(), b"a b", b'"', b"a\tb"], ids=len)
def test_H30_a_malformed_id_is_replaced_and_logged_once(service, port, sent):
    with RawClient(port) as client:
        client.send(get(b"GET /v1/layers HTTP/1.1", b"X-Request-ID: " + sent))
        answer = client.hear()
    assert answer is not None
    assert len(answer.headers["x-request-id"]) == 24
    service.line(event="request", request_id=answer.headers["x-request-id"])
    assert len(service.find(request_id=answer.headers["x-request-id"])) == 1


def test_an_upgrade_is_ignored(port):
    with RawClient(port) as client:
        client.send(
            post(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"Content-Length: %d" % len(BODY), body=BODY)
        )
        answer = client.hear()
    assert answer is not None
    assert answer.status == 200


# Several requests on one connection


def test_pipelined_requests_are_answered_in_order(port):
    raws = [post(b"X-Request-ID: id-%d" % i, b"Content-Length: %d" % len(BODY), body=BODY) for i in range(50)]
    with RawClient(port) as client:
        client.send(b"".join(raws))
        ids = [answer.headers["x-request-id"] for _ in raws if (answer := client.hear()) is not None]
    assert ids == [f"id-{i}" for i in range(50)]


@pytest.mark.parametrize(
    "raw", [GOOD, chunked(b"%x\r\n%b\r\n0\r\nA: b\r\n\r\n" % (len(BODY), BODY))], ids=["counted", "chunked"]
)
def test_a_request_behind_a_body_begins_where_the_body_ends(port, raw):
    with RawClient(port) as client:
        client.send(raw + SMUGGLED + b"nonsense\r\n\r\n")
        heard = client.hear_all()
    assert [answer.status for answer in heard] == [200, 200, 400]


@pytest.mark.parametrize("step", [1, 7])
def test_a_request_may_arrive_in_any_pieces(port, step):
    raw = chunked(b"5\r\n" + BODY[:5] + b"\r\n%x;a=b\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\n\r\n")
    with RawClient(port) as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(raw), step):
            client.send(raw[start : start + step])
        answer = client.hear()
    assert answer is not None
    assert answer.status == 200


# A client that ends its own sending


CLOSING = (b"Connection: close", b"Content-Length: %d" % len(BODY))
# 900 rows by 900 keys in 4 heads: 13 MB, more than all buffers on the way hold.
LONG = json.dumps({"query": [[0.5] * 16] * 900, "weights": {"form": "heads"}}).encode()
SAYS_LAST = {
    "close": post(*CLOSING, body=BODY),
    "http-1-0": post(*CLOSING[1:], body=BODY, version=b"HTTP/1.0"),
    "many-chunks": chunked(b"1\r\n \r\n" * 1000 + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY), CLOSING[0]),
    "a-body-that-was-to-be-asked-for": post(b"Expect: 100-continue", *CLOSING, body=BODY),
    "a-line-end-behind-it": post(*CLOSING, body=BODY) + b"\r\n",
}


def ended(port: int, raw: bytes, *, pause_s: float = 0.0) -> list[int]:
    """The statuses that a client gets if it sends this, shuts down its side and waits."""
    with RawClient(port) as client:
        client.send(raw)
        time.sleep(pause_s)
        client.socket.shutdown(socket.SHUT_WR)
        return [answer.status for answer in client.hear_all() if answer.status != 100]


@pytest.mark.parametrize("pause_s", [0.0, 0.001])
@pytest.mark.parametrize("sent", SAYS_LAST.values(), ids=SAYS_LAST)
def test_D6_a_half_closed_client_gets_its_answer(port, sent, pause_s):
    assert [ended(port, sent, pause_s=pause_s) for _ in range(8)] == [[200]] * 8


def test_D6_requests_before_the_last_are_answered_too(port):
    assert ended(port, GOOD * 3 + SAYS_LAST["close"]) == [200] * 4
    assert ended(port, SMUGGLED + SAYS_LAST["many-chunks"] + GOOD) == [200] * 2


def test_D6_a_half_closed_client_gets_a_long_answer_complete(port):
    raw = post(CLOSING[0], b"Content-Length: %d" % len(LONG), body=LONG)
    with RawClient(port) as client:
        client.send(raw)
        client.socket.shutdown(socket.SHUT_WR)
        time.sleep(0.5)
        heard = b"".join(iter(lambda: client.socket.recv(2**20), b""))
    assert heard.startswith(b"HTTP/1.1 200 ")
    assert len(heard) > 10 * 2**20
    assert heard.endswith(b"}\r\n0\r\n\r\n")


@pytest.mark.parametrize("cut", [1, len(BODY), len(BODY) + 10])
@pytest.mark.parametrize("before", [b"", GOOD])
def test_D6_an_incomplete_request_of_a_half_closed_client_is_not_answered(port, before, cut):
    heard = ended(port, before + SAYS_LAST["close"][:-cut])
    assert len(heard) <= (before != b"")


def test_D6_a_kept_alive_request_whose_client_ends_is_cancelled(service, port):
    before = at_rest(service)
    raw = post(b"Content-Length: %d" % len(LONG), body=LONG)
    for _ in range(3):
        with RawClient(port) as client:
            client.send(raw)
            client.socket.shutdown(socket.SHUT_WR)
            end = time.monotonic() + 5
            while client.socket.recv(2**20):
                assert time.monotonic() < end
    after = at_rest(service)
    assert cancelled(after) - cancelled(before) == 3


def cancelled(samples: dict[str, float]) -> float:
    return sum(value for name, value in samples.items() if name.startswith("attention_cancelled_total"))


# Bodies


def test_H1_an_announced_body_above_the_limit_is_refused_before_it_is_sent(port):
    started = time.monotonic()
    answer = only_answer(port, post(b"Content-Length: %d" % (MAX_BODY_BYTES + 1)))
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert time.monotonic() - started < 1


def test_H2_chunks_beyond_the_limit_are_refused_there(port):
    with RawClient(port) as client:
        client.send(post(b"Transfer-Encoding: chunked"))
        sent = 0
        while not select.select([client.socket], [], [], 0)[0] and sent < 20 * MAX_BODY_BYTES:
            client.send(b"10000\r\n" + b" " * 65536 + b"\r\n")
            sent += 65536
        answer = client.hear()
    assert answer is not None
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert sent < 20 * MAX_BODY_BYTES


def test_figure_8_a_million_chunks_are_refused_at_once(port):
    started = time.monotonic()
    with RawClient(port) as client:
        client.send(post(b"Transfer-Encoding: chunked"))
        with contextlib.suppress(OSError):
            client.send(b"1\r\n \r\n" * 1_000_000)
        answer = client.hear()
    assert answer is not None
    assert answer.status == 400
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("coding", [None, "gzip"])
def test_H17_the_limit_of_a_body_is_inclusive(service, extra, coding):
    data = b"\0" * (1000 * 16 * 16 * 4)
    tensor = {"query": {"dtype": "F32", "shape": [1000, 16, 16], "data_offsets": [0, len(data)]}}
    header = json.dumps(tensor).encode().ljust(MAX_BODY_BYTES + extra - len(data) - 8)
    body = len(header).to_bytes(8, "little") + header + data
    headers = {"content-type": "application/vnd.safetensors"} | ({"content-encoding": coding} if coding else {})
    answer = httpx2.post(
        f"{service.url}{ATTEND.decode()}", content=gzip.compress(body) if coding else body, headers=headers
    )
    assert answer.status_code == (413 if extra else 200)


def test_H15_a_bomb_is_refused_by_its_decompressed_size(service):
    bomb = gzip.compress(b" " * 200 * MAX_BODY_BYTES, 9)
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = httpx2.post(f"{service.url}{ATTEND.decode()}", content=bomb, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (413, "decompressed_too_large")


def test_H21_a_slow_body_is_refused_at_its_deadline_and_holds_no_queue_entry(service, port):
    with RawClient(port) as client:
        client.send(post(b"Content-Length: 1000", body=b"{"))
        started = time.monotonic()
        while not select.select([client.socket], [], [], 0.1)[0]:
            client.send(b" ")
            samples = service.samples()
            assert samples["attention_queued_requests"] == samples["attention_queued_bytes"] == 0
            assert time.monotonic() - started < BODY_TIMEOUT_S + 1
        answer = client.hear()
        assert client.hear() is None
    assert answer is not None
    assert (answer.status, answer.code) == (408, "client_timeout")


@pytest.mark.parametrize("length", [MAX_BODY_BYTES + 1, 2**63])
def test_H25_a_length_above_the_limit_is_refused_without_a_100(port, length):
    answer = only_answer(port, post(b"Content-Length: %d" % length, b"Expect: 100-continue"))
    assert answer.status == 413


def test_H25_a_body_to_read_gets_a_100_continue(port):
    raw = post(b"Content-Length: %d" % len(BODY), b"Expect: 100-continue")
    with RawClient(port) as client:
        client.send(raw)
        asked = client.hear()
        assert asked is not None
        assert asked.status == 100
        client.send(BODY)
        answer = client.hear()
    assert answer is not None
    assert answer.status == 200


# An early answer is read by a client that is still sending

LARGE = b"[" + b"0," * 10_000_000 + b"0]"


def test_a_client_that_sends_everything_first_reads_its_413(port):
    """As http.client and requests do: the answer is looked for when the last byte is out."""
    for _ in range(5):
        with python_client(port) as connection:
            connection.request("POST", ATTEND.decode(), LARGE, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())["code"]) == (413, "body_too_large")


def test_a_client_that_sends_chunks_reads_its_413(port):
    pieces = (LARGE[i : i + 2**20] for i in range(0, len(LARGE), 2**20))
    with python_client(port) as connection:
        connection.request("POST", ATTEND.decode(), pieces, {"Content-Type": "application/json"}, encode_chunked=True)
        assert connection.getresponse().status == 413


def test_the_python_client_reads_its_413(service):
    with Client(service.url) as client, pytest.raises(BodyTooLarge):
        client.attend("small", np.ones((400_000, 16), np.float32))


def test_a_large_body_to_an_unknown_path_gets_a_404_that_the_client_reads(port):
    with python_client(port) as connection:
        connection.request("POST", "/nowhere", LARGE)
        assert connection.getresponse().status == 404


def test_a_small_body_to_an_unknown_path_leaves_the_connection_usable(port):
    with python_client(port) as connection:
        for _ in range(3):
            connection.request("POST", "/nowhere", BODY)
            answer = connection.getresponse()
            assert (answer.status, answer.getheader("connection")) == (404, None)
            answer.read()


def test_a_client_that_never_stops_sending_is_disconnected(port):
    with RawClient(port) as client:
        client.send(post(b"Content-Length: 999999999"))
        started = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - started < 10:
                client.send(b" " * 1000)
                time.sleep(0.01)
    assert time.monotonic() - started < 5


# Deadlines


def test_H20_connections_with_slow_headers_end_at_the_deadline_and_no_other_request_fails(service, port):
    clients = [RawClient(port) for _ in range(100)]
    started = time.monotonic()
    for client in clients:
        client.send(b"POST / HTTP/1.1\r\nX: ")
    while time.monotonic() - started < HEADER_TIMEOUT_S - 0.5:
        for client in clients:
            client.send(b"a")
        assert service.attend().status_code == 200
    with ThreadPoolExecutor(100) as pool:
        heard = list(pool.map(RawClient.hear_all, clients))
    assert time.monotonic() - started < HEADER_TIMEOUT_S + 1 + 1
    assert [[answer.status for answer in answers] for answers in heard] == [[408]] * 100
    for client in clients:
        client.socket.close()


def test_a_silent_connection_is_closed_at_the_deadline_and_not_counted(service, port):
    before = at_rest(service)["attention_received_total"]
    with RawClient(port) as client:
        assert client.seconds_to_end() < HEADER_TIMEOUT_S + 1
    assert at_rest(service)["attention_received_total"] == before


def test_a_kept_connection_is_not_under_the_header_deadline(port):
    with RawClient(port) as client:
        client.send(GOOD)
        assert client.hear() is not None
        time.sleep(HEADER_TIMEOUT_S + 0.5)
        client.send(GOOD)
        assert client.hear() is not None


def test_an_unread_answer_is_cut_off_and_counted(service, port):
    query = [[0.5] * 16] * 1200
    body = json.dumps({"query": query, "weights": {"form": "heads"}, "encoding": "list"}).encode()
    before = at_rest(service)
    with RawClient(port) as client:
        client.send(post(b"Content-Length: %d" % len(body), body=body))
        end = time.monotonic() + 30
        while (
            at_now(service, "in_flight_requests")
            or not at_now(service, "received_total") > before["attention_received_total"]
        ):
            assert time.monotonic() < end
            time.sleep(0.1)
    after = at_rest(service)
    name = 'attention_cancelled_total{stage="sending"}'
    assert after[name] - before.get(name, 0) == 1
    assert after["attention_received_total"] - before["attention_received_total"] == 1


@pytest.mark.long
def test_a_client_that_reads_every_piece_but_too_slowly_is_cut_off_D9(service, port):
    before = at_rest(service)
    heard = 0
    with RawClient(port) as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        client.send(post(b"Content-Length: %d" % len(LONG), body=LONG))
        with contextlib.suppress(ConnectionResetError):
            while piece := client.socket.recv(SLOW_BYTES_PER_S // 20, socket.MSG_WAITALL):
                heard += len(piece)
                time.sleep(0.05)
    assert 2**20 < heard < 10 * 2**20
    assert cancelled(at_rest(service)) - cancelled(before) == 1


def at_now(service, name: str) -> float:
    return float(service.samples()[f"attention_{name}"])


def test_a_disconnect_is_noticed_at_every_stage(service, port):
    before = at_rest(service)
    for cut in range(1, len(GOOD), 3):
        client = RawClient(port)
        client.send(GOOD[:cut])
        client.socket.close()
    after = at_rest(service)
    begun = after["attention_received_total"] - before["attention_received_total"]
    assert 0 < begun < len(GOOD)
