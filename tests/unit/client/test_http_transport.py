"""HTTP transport: sends a call, with retries, within one deadline; returns a reply or raises a typed error."""

import asyncio
import gzip
import math
import socket
import ssl
import tomllib
import traceback
from pathlib import Path
from typing import Any

import httpx2
import pytest
import stamina

from attention_client import errors, http_transport
from attention_client.answer import Reply
from attention_client.errors import BadAnswer, ConnectionFailed
from attention_client.http_transport import HttpTransport
from attention_client.options import ClientOptions
from attention_client.request import Call
from tests.doubles import ManualClock, run, turns
from tests.unit.client.answering import Answering, Hanging, problem_of

URL = "http://service:8000"
QUICK: dict[str, Any] = {"url": URL, "timeout_s": 30.0, "max_connections": 4, "attempts": 4, "api_key": None}


def call(attempts: int | None = None) -> Call[Reply]:
    return Call("/v1/layers", lambda reply: reply, attempts=attempts)


def asked(service: Answering, *, options=None, attempts: int | None = None, **kwargs) -> Reply:
    options = ClientOptions(**{**QUICK, **(options or {}), "transport": service.transport})
    line = HttpTransport(options, draw=lambda: 0)

    async def main() -> Reply:
        try:
            return await line.ask(call(attempts), **kwargs)
        finally:
            await line.close()

    return run(main)


@pytest.fixture
def no_waits():
    """Use stamina's testing mode: all attempts of a call, without waits."""
    with stamina.set_testing(True, attempts=99, cap=True):
        yield


@pytest.fixture
def waits(monkeypatch):
    """Give loops a manual clock, by which sleeps pass at once, and record the sleeps."""
    clock, slept, sleep = ManualClock(), [], asyncio.sleep

    async def pass_time(seconds, result=None):
        if seconds:
            slept.append(seconds)
            clock.advance(seconds)
        return await sleep(0, result)

    monkeypatch.setattr(asyncio, "sleep", pass_time)
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: clock.now())
    return slept


TRANSIENT = [
    httpx2.ConnectError("x"), httpx2.ConnectTimeout("x"), httpx2.ReadError("x"), httpx2.WriteError("x"),
    httpx2.RemoteProtocolError("cut"), problem_of(429, "queue_full"), problem_of(429, "brand_new"),
    problem_of(503, "draining"), problem_of(503, "not_ready"), problem_of(503, "engine_down"),
    *[httpx2.Response(status, text="<html>") for status in (500, 502, 503, 504)], httpx2.Response(504),
]  # fmt: skip


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("trouble", TRANSIENT, ids=repr)
def test_a_transient_failure_is_retried(trouble):
    service = Answering(trouble, trouble)
    assert asked(service).status == 200
    assert len(service.seen) == 3


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422, 500, 501, 504])
def test_a_permanent_failure_is_not_retried(status):
    service = Answering(problem_of(status, "brand_new"))
    with pytest.raises(errors.ServiceError):
        asked(service)
    assert len(service.seen) == 1


@pytest.mark.usefixtures("no_waits")
def test_a_persistent_failure_is_raised_after_the_last_attempt():
    service = Answering(*[httpx2.ConnectError("refused")] * 9)
    with pytest.raises(ConnectionFailed, match="no answer from http://service:8000: ConnectError") as raised:
        asked(service)
    assert len(service.seen) == 4
    assert raised.value.request_id == service.seen[0].headers["x-request-id"]
    with pytest.raises(ConnectionFailed):
        asked(service, attempts=1)
    assert len(service.seen) == 5


@pytest.mark.parametrize("version", ["1", "12.3.4"])
def test_a_service_of_another_major_version_is_warned_of_once(version):
    other = {"server": f"attention-service/{version}"}
    service = Answering(*[httpx2.Response(200, json={}, headers=other)] * 2)

    async def story():
        transport = HttpTransport(ClientOptions(**QUICK, transport=service.transport))
        for _ in range(2):
            await transport.ask(call())
        await transport.close()

    with pytest.warns(UserWarning, match=f"of major version {version.partition('.')[0]}, this client of 0") as warned:
        run(story)
    assert len(warned) == 1


@pytest.mark.parametrize(
    "server", [None, "nginx/1.2", "attention-service/0", "attention-service/", "attention-service/x1"]
)
def test_a_service_of_the_same_or_an_unknown_version_is_not_warned_of(server):
    headers = {} if server is None else {"server": server}
    assert asked(Answering(httpx2.Response(200, json={}, headers=headers))).status == 200


def test_the_major_version_is_that_of_the_distribution():
    text = (Path(http_transport.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text)["project"]["version"].partition(".")[0] == str(http_transport.MAJOR_VERSION)


def test_waits_grow_and_are_never_shorter_than_retry_after(waits):
    full = [problem_of(429, "queue_full", retry_after="3"), problem_of(429, "queue_full"), httpx2.ReadError("x")]
    assert asked(Answering(*full)).status == 200
    assert waits == [3, 0.2, 0.4]


def test_the_deadline_covers_all_attempts_and_no_wait_outlasts_it(waits):
    service = Answering(*[problem_of(429, "queue_full", retry_after="4")] * 9)
    with pytest.raises(errors.QueueFull) as raised:
        asked(service, timeout_s=10.0)
    assert waits == [4, 4], "a third wait would end after the deadline"
    assert raised.value.retry_after_s == 4
    assert [request.headers["x-request-timeout-ms"] for request in service.seen] == ["10000", "6000", "2000"]


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize(("timeout_s", "sent"), [(0.0105, "10"), (0.0005, "1")])
def test_the_remaining_time_is_sent_in_whole_milliseconds_and_never_as_zero(timeout_s, sent):
    service = Answering()
    asked(service, timeout_s=timeout_s)
    assert service.seen[0].headers["x-request-timeout-ms"] == sent


def test_a_silent_service_raises_deadline_exceeded():
    with pytest.raises(errors.DeadlineExceeded, match=r"no answer from http://service:8000 within 0.001 s") as raised:
        asked(Answering(Hanging()), timeout_s=0.001)
    assert raised.value.status is None
    assert raised.value.request_id


@pytest.mark.parametrize("for_ever", [None, math.inf, 1e300])
def test_without_a_deadline_no_header_is_sent(for_ever):
    service = Answering()
    asked(service, options={"timeout_s": for_ever})
    asked(service, options={"timeout_s": None}, timeout_s=for_ever)
    assert all("x-request-timeout-ms" not in request.headers for request in service.seen)


@pytest.mark.usefixtures("no_waits")
def test_all_attempts_share_one_request_id_and_the_answer_has_that_of_the_service():
    service = Answering(httpx2.ReadError("x"), httpx2.Response(200, headers={"x-request-id": "theirs"}))
    assert asked(service).request_id == "theirs"
    assert len({request.headers["x-request-id"] for request in service.seen}) == 1
    assert asked(Answering(), request_id="job/7").request_id == "job/7"
    with pytest.raises(errors.InvalidInput):
        asked(Answering(), request_id="two\r\nlines")


@pytest.mark.parametrize(
    "failure",
    [httpx2.TooManyRedirects("x"), httpx2.UnsupportedProtocol("x"), httpx2.InvalidURL("x"), OSError("x"),
     OverflowError("x"), ValueError("x"), UnicodeError("x"), RuntimeError("x"), TimeoutError("x"),
     ExceptionGroup("x", [OSError("x"), OverflowError("x")])],
    ids=repr,
)  # fmt: skip
def test_no_error_of_the_http_library_or_below_escapes(failure):
    with pytest.raises(ConnectionFailed, match=type(failure).__name__) as raised:
        asked(Answering(failure), options={"attempts": 1})
    assert raised.value.request_id


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("trouble", [problem_of(422, "bad_shape"), problem_of(503, "draining")], ids=repr)
def test_an_error_has_no_frames_and_no_cause_of_the_retry_library(trouble):
    with pytest.raises(errors.ServiceError) as raised:
        asked(Answering(*[trouble] * 9))
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    assert not {"stamina", "tenacity"} & {Path(f.filename).parent.name for f in traceback.extract_tb(raised.tb)}


class Pieces(httpx2.AsyncByteStream):
    """Counts the pieces that were read."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = pieces
        self.num_taken = 0
        self.is_closed = False

    async def __aiter__(self):
        for piece in self.pieces:
            self.num_taken += 1
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def aclose(self) -> None:
        self.is_closed = True


def test_a_truncated_answer_is_a_broken_connection():
    answer = httpx2.Response(200, stream=Pieces(b"{", ExceptionGroup("x", [OSError("x")])))
    with pytest.raises(ConnectionFailed, match="ExceptionGroup"):
        asked(Answering(answer), options={"attempts": 1})


def test_an_endless_answer_is_read_up_to_the_limit():
    body = Pieces(*[b"x" * 10] * 1000)
    with pytest.raises(BadAnswer, match="larger than 95 bytes") as raised:
        asked(Answering(httpx2.Response(200, stream=body)), options={"max_answer_bytes": 95})
    assert (body.num_taken, body.is_closed) == (10, True)
    assert raised.value.status == 200
    assert raised.value.request_id


def test_an_answer_as_large_as_the_limit_is_accepted():
    answer = httpx2.Response(200, stream=Pieces(*[b"x" * 10] * 9))
    assert asked(Answering(answer), options={"max_answer_bytes": 90}).content == b"x" * 90


@pytest.mark.usefixtures("no_waits")
def test_an_endless_refusal_is_judged_by_its_status():
    body = Pieces(*[b"x" * 2**14] * 1000)
    assert asked(Answering(httpx2.Response(503, stream=body))).status == 200, "a request is sent again after 503"
    assert (body.num_taken, body.is_closed) == (5, True)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "identity", "nonsense"])
def test_an_answer_is_never_unpacked(coding):
    """No answer becomes larger than the limit; one that a proxy compressed is refused as damaged when it is decoded."""
    packed = gzip.compress(b"x" * 1000)
    answer = httpx2.Response(200, headers={"content-encoding": coding}, stream=Pieces(packed))
    assert asked(Answering(answer)).content == packed


def test_a_compressed_refusal_is_judged_by_its_status():
    body = Pieces(gzip.compress(b"{}"))
    with pytest.raises(errors.Rejected):
        asked(Answering(httpx2.Response(413, headers={"content-encoding": "gzip"}, stream=body)))


def test_a_cancelled_call_is_not_retried():
    service = Answering(Hanging())

    async def main() -> None:
        line = HttpTransport(ClientOptions(**QUICK, transport=service.transport))
        task = asyncio.ensure_future(line.ask(call()))
        await turns()
        assert service.seen
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await line.close()

    run(main)
    assert len(service.seen) == 1


def test_the_key_is_sent_and_never_shown():
    service = Answering()
    asked(service, options={"api_key": "s3cret"})
    assert service.seen[0].headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(ClientOptions(**{**QUICK, "api_key": "s3cret"}))


def test_a_password_in_the_address_is_used_and_never_shown():
    address = "http://me:s3cret@service:8000"
    service = Answering(httpx2.ConnectError("x"))
    with pytest.raises(ConnectionFailed, match=r"no answer from http://service:8000: ConnectError") as raised:
        asked(service, options={"url": address, "attempts": 1})
    assert service.seen[0].headers["authorization"].startswith("Basic ")
    assert "s3cret" not in str(raised.value)
    assert "s3cret" not in repr(ClientOptions(**{**QUICK, "url": address}))


@pytest.mark.parametrize("cause", [ssl.SSLCertVerificationError("x"), ssl.SSLError("x"), socket.gaierror(-2, "x")])
def test_a_failed_handshake_or_look_up_is_named(cause):
    failure, below = httpx2.ConnectError("x"), OSError("x")
    failure.__context__, below.__context__ = below, cause
    name = type(cause).__name__
    with pytest.raises(ConnectionFailed, match=rf"no answer from http://service:8000: {name}\. Is the service"):
        asked(Answering(failure), options={"attempts": 1})


def test_an_address_with_a_path_keeps_it():
    service = Answering()
    asked(service, options={"url": "http://proxy/attention/"})
    assert str(service.seen[0].url) == "http://proxy/attention/v1/layers"
