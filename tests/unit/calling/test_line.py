"""A call goes out, again if need be, within one deadline; what comes back is a reply or a typed error."""

import asyncio
import math
from typing import Any

import httpx2
import pytest
import stamina

from service import errors
from service.calling.line import Line, LineOptions
from service.calling.problem import BadAnswer, ConnectionFailed, Reply
from service.calling.request import layers_call
from tests.doubles import ManualClock, run, turns
from tests.unit.calling.answering import Answering, problem_of

URL = "http://service:8000"
QUICK: dict[str, Any] = {"url": URL, "timeout_s": 30.0, "max_connections": 4, "attempts": 4, "api_key": None}


def asked(service: Answering, *, clock: ManualClock | None = None, options=None, **kwargs) -> Reply:
    line = Line(
        LineOptions(**{**QUICK, **(options or {})}),
        service.transport,
        clock=(clock or ManualClock()).now,
        draw=lambda: 0,
    )

    async def main() -> Reply:
        try:
            return await line.ask(layers_call(), **kwargs)
        finally:
            await line.close()

    return run(main)


@pytest.fixture
def no_waits():
    """stamina's testing mode: as many attempts as asked for, no waits."""
    with stamina.set_testing(True, attempts=99, cap=True):
        yield


@pytest.fixture
def waits(monkeypatch):
    """Waits pass on a clock turned by hand and are written down."""
    clock, slept, sleep = ManualClock(), [], asyncio.sleep

    async def pass_time(seconds, result=None):
        if seconds:
            slept.append(seconds)
            clock.advance(seconds)
        return await sleep(0, result)

    monkeypatch.setattr(asyncio, "sleep", pass_time)
    return clock, slept


TRANSIENT = [
    httpx2.ConnectError("x"), httpx2.ConnectTimeout("x"), httpx2.ReadError("x"), httpx2.WriteError("x"),
    httpx2.RemoteProtocolError("cut"), problem_of(429, "queue_full"), problem_of(429, "brand_new"),
    problem_of(503, "draining"), problem_of(503, "not_ready"), problem_of(503, "engine_down"), httpx2.Response(503),
    httpx2.Response(502, text="<html>"),
]  # fmt: skip


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("trouble", TRANSIENT, ids=repr)
def test_trouble_that_passes_is_not_noticed(trouble):
    service = Answering(trouble, trouble)
    assert asked(service).status == 200
    assert len(service.seen) == 3


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422, 500, 501, 504])
def test_what_will_not_change_is_asked_once(status):
    service = Answering(problem_of(status, "brand_new"))
    with pytest.raises(errors.ServiceError):
        asked(service)
    assert len(service.seen) == 1


@pytest.mark.usefixtures("no_waits")
def test_trouble_that_stays_is_raised_after_the_last_attempt():
    service = Answering(*[httpx2.ConnectError("refused")] * 9)
    with pytest.raises(ConnectionFailed, match="no answer from http://service:8000: ConnectError") as told:
        asked(service)
    assert len(service.seen) == 4
    assert told.value.request_id == service.seen[0].headers["x-request-id"]
    with pytest.raises(ConnectionFailed):
        asked(service, attempts=1)
    assert len(service.seen) == 5


def test_waits_grow_and_are_never_shorter_than_retry_after(waits):
    clock, slept = waits
    full = [problem_of(429, "queue_full", retry_after="3"), problem_of(429, "queue_full"), httpx2.ReadError("x")]
    assert asked(Answering(*full), clock=clock).status == 200
    assert slept == [3, 0.2, 0.4]


def test_the_deadline_covers_all_attempts_and_no_wait_outlasts_it(waits):
    clock, slept = waits
    service = Answering(*[problem_of(429, "queue_full", retry_after="4")] * 9)
    with pytest.raises(errors.QueueFull) as told:
        asked(service, clock=clock, timeout_s=10.0)
    assert slept == [4, 4], "a third wait would end after the deadline"
    assert told.value.retry_after_s == 4
    assert [request.headers["x-request-timeout-ms"] for request in service.seen] == ["10000", "6000", "2000"]


async def for_ever(request):
    await asyncio.Event().wait()
    raise AssertionError


def test_a_service_that_is_silent_until_the_deadline_is_a_deadline():
    with pytest.raises(errors.DeadlineExceeded, match=r"no answer from http://service:8000 within 0.001 s") as told:
        asked(Answering(for_ever), timeout_s=0.001)
    assert told.value.status is None
    assert told.value.request_id


@pytest.mark.parametrize("for_ever", [None, math.inf, 1e300])
def test_without_a_deadline_none_is_told(for_ever):
    service = Answering()
    asked(service, options={"timeout_s": for_ever})
    asked(service, options={"timeout_s": None}, timeout_s=for_ever)
    assert all("x-request-timeout-ms" not in request.headers for request in service.seen)


@pytest.mark.usefixtures("no_waits")
def test_all_attempts_have_one_request_id_and_the_answer_has_the_services():
    service = Answering(httpx2.ReadError("x"), httpx2.Response(200, headers={"x-request-id": "theirs"}))
    assert asked(service).request_id == "theirs"
    assert len({request.headers["x-request-id"] for request in service.seen}) == 1
    assert asked(Answering(), request_id="job/7").request_id == "job/7"
    with pytest.raises(errors.InvalidInput):
        asked(Answering(), request_id="two\r\nlines")


@pytest.mark.parametrize(
    "failure", [httpx2.TooManyRedirects("x"), httpx2.UnsupportedProtocol("x"), httpx2.InvalidURL("x")]
)
def test_no_error_of_the_http_library_gets_out(failure):
    with pytest.raises(ConnectionFailed):
        asked(Answering(failure), options={"attempts": 1})


def test_an_answer_that_cannot_be_decompressed_is_a_bad_answer():
    damaged = httpx2.Response(200, headers={"content-encoding": "gzip"}, stream=Pieces(b"no gzip"))
    with pytest.raises(BadAnswer):
        asked(Answering(damaged))


class Pieces(httpx2.AsyncByteStream):
    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    async def __aiter__(self):
        for piece in self.pieces:
            yield piece


def test_a_call_that_is_cancelled_is_cancelled_and_not_asked_again():
    service = Answering(for_ever)

    async def main() -> None:
        line = Line(LineOptions(**QUICK), service.transport)
        task = asyncio.ensure_future(line.ask(layers_call()))
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
    assert "s3cret" not in repr(LineOptions(**{**QUICK, "api_key": "s3cret"}))


def test_a_password_in_the_address_is_used_and_never_shown():
    address = "http://me:s3cret@service:8000"
    service = Answering(httpx2.ConnectError("x"))
    with pytest.raises(ConnectionFailed, match=r"no answer from http://service:8000: ConnectError") as told:
        asked(service, options={"url": address, "attempts": 1})
    assert service.seen[0].headers["authorization"].startswith("Basic ")
    assert "s3cret" not in str(told.value)
    assert "s3cret" not in repr(LineOptions(**{**QUICK, "url": address}))


def test_an_address_with_a_path_keeps_it():
    service = Answering()
    asked(service, options={"url": "http://proxy/attention/"})
    assert str(service.seen[0].url) == "http://proxy/attention/v1/layers"


@pytest.mark.parametrize(
    "wrong",
    [{"url": "nonsense"}, {"url": "ftp://x"}, {"url": "http://"}, {"url": "http://x:y"}, {"url": None}, {"timeout_s": 0},
     {"timeout_s": float("nan")}, {"attempts": 0}, {"max_connections": 0}, {"api_key": "two\nlines"}, {"api_key": ""}],
)  # fmt: skip
def test_options_that_cannot_be_are_refused_at_once(wrong):
    with pytest.raises(errors.InvalidInput):
        LineOptions(**{**QUICK, **wrong})
