"""Connection: one answer per request, in order; deadlines, early bytes, and an end that lets the client read its answer."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import itertools
import re
import sys
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import QueueFull
from service.http.asgi import CYCLE
from service.http.connection import (
    CHUNK_PAUSE_S,
    MAX_DROPPED_BYTES,
    RESET_CHECK_S,
    RESPONSE_LINGER_S,
    Shared,
)
from service.http.cycle import MAX_AHEAD_BYTES
from service.http.request_parser import LINES_A_TICK
from tests.raw_inputs import BAD_REQUESTS
from tests.unit.http.wire import LIMITS, Room, turns

HOST = b"Host: x\r\n"


def post(path: bytes = b"/", body: bytes = b"hello", *fields: bytes) -> bytes:
    lines = [*fields, b"Content-Length: %d" % len(body)]
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def answers(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """The status and body of each answer: a body may look like a status line, so its length counts."""
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        length = re.search(rb"(?m)^content-length: (\d+)", head)
        assert length is not None
        size = int(length[1])
        yield int(head.split()[1]), rest[:size]
        raw = rest[size:]


def chunked(path: bytes, *chunks: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def on_the_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


# Requests


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=40)), max_size=5), st.lists(st.integers(1, 300)))
@on_the_loop
async def test_requests_may_arrive_in_any_pieces_and_are_answered_in_order(requests, sizes):
    """Each is counted or in chunks, and the first may follow an empty line."""
    room = Room()
    raw = b"\r\n" + b"".join(
        chunked(b"/%d" % number, *filter(None, (body[:3], body[3:]))) if is_chunked else post(b"/%d" % number, body)
        for number, (is_chunked, body) in enumerate(requests)
    )
    edges = [0, *sorted(itertools.accumulate(sizes)), len(raw)]
    await room.send(*(raw[start:end] for start, end in itertools.pairwise(edges)))
    assert room.echo.seen == [("POST", f"/{number}", body) for number, (_, body) in enumerate(requests)]
    assert list(answers(room.wire.written)) == [(200, body) for _, body in requests]
    assert room.wire.events == []


@on_the_loop
async def test_pipelined_requests_are_answered_one_after_another():
    room = Room()
    await room.send(post(b"/held", b"1") + chunked(b"/2", b"2") + post(b"/3", b"3") + post(b"/4", b"4")[:30])
    assert room.echo.seen == [("POST", "/held", b"1")]
    room.echo.gate.set()
    await turns(60)
    assert [path for _, path, _ in room.echo.seen] == ["/held", "/2", "/3"]
    places = [room.wire.written.index(body) for body in (b"\r\n\r\n1", b"\r\n\r\n2", b"\r\n\r\n3")]
    assert places == sorted(places)
    await room.send(post(b"/4", b"4")[30:])
    assert room.statuses == [200] * 4


@on_the_loop
async def test_pipelined_bytes_are_bounded():
    room = Room()
    await room.send(post(b"/held"), b"x" * 50_000, b"x" * 50_000)
    assert not room.wire.is_reading
    room.echo.gate.set()
    await turns()
    assert room.statuses == [200, 400]


@on_the_loop
async def test_a_malformed_pipelined_request_is_refused_after_the_answers_before_it():
    room = Room()
    await room.send(post(b"/held") + b"nonsense\r\n\r\n")
    assert room.statuses == []
    room.echo.gate.set()
    await turns()
    assert room.statuses == [200, 400]
    assert room.ledger.ends == [200, "bad_request"]


@on_the_loop
async def test_a_disconnect_is_noticed_in_every_state():
    for raw in (post(b"/", b"hello")[:-1], post(b"/held"), post(b"/held") + post(b"/2")):
        room = Room()
        await room.send(raw)
        await room.lose()
        room.echo.gate.set()
        await turns()
        assert room.ledger.num_received == len(room.ledger.ends) == 1
        assert room.ledger.ends == ["gone"]
        assert room.clock.num_calls == 0


class Asking:
    """An application that uses the connection's cycle (`api/request_body.py`) and answers when `gate` opens."""

    def __init__(self, room: Room) -> None:
        self.gate = asyncio.Event()
        self.taken: list[bytes | None] = []
        self.gone: list[str] = []
        room.connection.app = self

    async def __call__(self, scope, receive, send):
        cycle = scope[CYCLE]
        whole = cycle.take_body()
        self.taken.append(None if whole is None else b"".join(whole))
        while whole is None and (await receive())["more_body"]:
            pass
        cycle.on_disconnect(lambda: self.gone.append(scope["path"]))
        await self.gate.wait()
        cycle.on_disconnect(None)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@on_the_loop
async def test_an_arrived_body_is_returned_at_once_and_only_once():
    room = Room()
    asking = Asking(room)
    await room.send(post(b"/1", b"hello"))
    assert asking.taken == [b"hello"]
    asking.gate.set()
    await turns()
    await room.send(post(b"/2", b"hello")[:-1], b"o")
    assert asking.taken == [b"hello", None]
    assert room.statuses == [200, 200]


@on_the_loop
async def test_bytes_are_counted_on_arrival_rather_than_on_receive():
    room = Room()
    come: list[int] = []

    async def application(scope, receive, send):
        cycle = scope[CYCLE]
        cycle.on_bytes(come.append)
        await receive()

    room.connection.app = application
    raw = post(b"/", b"x" * 1000)
    await room.send(raw[:-900])
    await room.send(raw[-900:-400])
    assert come == [100, 500]
    await room.lose()


@on_the_loop
async def test_a_body_above_the_budget_is_dropped_and_its_reader_gets_the_error():
    room = Room()
    held: list[int] = []

    def come(num_bytes):
        if sum(held) + num_bytes > 300:
            raise QueueFull("no room")
        held.append(num_bytes)

    async def application(scope, receive, send):
        scope[CYCLE].on_bytes(come)
        with pytest.raises(QueueFull, match="no room"):
            await receive()
        await asyncio.Event().wait()

    room.connection.app = application
    raw = post(b"/", b"x" * 1000)
    for start, stop in ((0, len(raw) - 800), (len(raw) - 800, len(raw) - 400), (len(raw) - 400, len(raw))):
        await room.send(raw[start:stop])
    assert held == [200]
    assert room.connection.cycle._pieces == []
    await room.lose()


@pytest.mark.parametrize(("counts", "num_woken"), [(False, 5), (True, 1)])
@on_the_loop
async def test_reading_pauses_far_ahead_of_an_application_and_not_of_one_that_counts_the_bytes(counts, num_woken):
    room, gate = Room(), asyncio.Event()
    woken: list[int] = []

    async def application(scope, receive, send):
        await gate.wait()
        if counts:
            scope[CYCLE].on_bytes(lambda _: None)
        while (message := await receive())["more_body"]:
            woken.append(len(message["body"]))

    room.connection.app = application
    raw, size = post(b"/", b"x" * (10 * MAX_AHEAD_BYTES)), 2 * MAX_AHEAD_BYTES
    await room.send(raw[:size])
    was_reading = room.wire.is_reading
    gate.set()
    await turns()
    assert (was_reading, room.wire.is_reading) == (False, True)
    await room.send(*(raw[at : at + size] for at in range(size, len(raw), size)))
    assert len(woken) == num_woken, "the first time by what had arrived before"
    await room.lose()


@on_the_loop
async def test_a_body_that_no_application_reads_yet_is_refused_above_the_bound_of_all_connections():
    room, gate = Room(), asyncio.Event()
    errors: list[QueueFull] = []

    async def application(scope, receive, send):
        await gate.wait()
        try:
            await receive()
        except QueueFull as error:
            errors.append(error)
        await asyncio.Event().wait()

    room.connection.app = application
    raw = post(b"/", b"x" * 2000)
    room.read_ahead.num_bytes = LIMITS.max_read_ahead_bytes - 1500  # other connections'
    await room.send(raw[:-1000])
    assert room.read_ahead.num_bytes == LIMITS.max_read_ahead_bytes - 500
    await room.send(raw[-1000:])
    assert room.read_ahead.num_bytes == LIMITS.max_read_ahead_bytes - 1500, "the refused body is released"
    gate.set()
    await turns()
    assert len(errors) == 1
    await room.lose()


@pytest.mark.parametrize("end", ["the application reads", "it counts the bytes", "the client leaves"])
@on_the_loop
async def test_bytes_read_ahead_count_until(end):
    room, gate = Room(), asyncio.Event()

    async def application(scope, receive, send):
        await gate.wait()
        if end == "it counts the bytes":
            scope[CYCLE].on_bytes(lambda _: None)
            await asyncio.Event().wait()
        await receive()

    room.connection.app = application
    await room.send(post(b"/", b"x" * 1000)[: -500 if end == "it counts the bytes" else None])
    assert room.read_ahead.num_bytes > 0
    if end == "the client leaves":
        await room.lose()
    gate.set()
    await turns()
    assert room.read_ahead.num_bytes == 0


@on_the_loop
async def test_the_read_part_of_a_refused_body_is_released_while_the_rest_is_dropped():
    """The frames of the error's traceback keep it alive."""
    room = Room()
    counted, refusals = [], []

    def come(num_bytes):
        counted.append(num_bytes)
        if len(counted) == 1:
            return
        refusal = QueueFull("no room")
        refusals.append(weakref.ref(refusal))
        raise refusal

    async def application(scope, receive, send):
        scope[CYCLE].on_bytes(come)
        with contextlib.suppress(QueueFull):
            await receive()
        assert (await receive())["type"] == "http.disconnect"
        await asyncio.Event().wait()

    room.connection.app = application
    raw = post(b"/", b"x" * 1000)
    await room.send(raw[:-500])
    await room.send(raw[-500:])
    assert [refusal() for refusal in refusals] == [None]
    await room.lose()


@on_the_loop
async def test_the_read_part_of_a_body_is_released_once_its_request_is_answered():
    """The connection may linger for RESPONSE_LINGER_S, and an overload has hundreds of such connections."""
    room = Room()
    await room.send(post(b"/early", b"x" * (MAX_DROPPED_BYTES + 1000))[: -MAX_DROPPED_BYTES - 1])
    assert (room.statuses, room.wire.events) == ([404], ["eof"])
    assert room.connection.cycle._pieces == []


@on_the_loop
async def test_the_read_part_of_a_body_is_released_when_its_client_leaves():
    """Only the garbage collector finds a connection that has ended."""
    room = Room()
    await room.send(post(b"/", b"x" * 1000)[:-500])
    await room.lose()
    assert room.connection.cycle._pieces == []


@on_the_loop
async def test_a_disconnect_is_reported_once_and_not_after_the_answer():
    room = Room()
    asking = Asking(room)
    await room.send(post(b"/1"))
    await room.lose()
    assert asking.gone == ["/1"]
    answered = Room()
    asking = Asking(answered)
    asking.gate.set()
    await answered.send(post(b"/2"))
    await answered.lose()
    assert asking.gone == []


@on_the_loop
async def test_a_slow_body_wakes_its_reader_only_when_complete():
    room = Room()
    woken: list[int] = []

    async def application(scope, receive, send):
        message = await receive()
        woken.append(len(message["body"]))
        while message["more_body"]:
            message = await receive()
            woken.append(len(message["body"]))

    room.connection.app = application
    raw = post(b"/", b"x" * 1000)
    await room.send(*(raw[i : i + 1] for i in range(len(raw))))
    assert woken == [1000]


@on_the_loop
async def test_a_finished_request_needs_no_garbage_collector():
    room = Room()
    await room.send(post(b"/1"))
    gc.disable()
    try:
        first = weakref.ref(room.connection.cycle)
        await room.send(post(b"/2"))
        assert first() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "begin",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GE\0T",
        chunked(b"/")[:-5] + b"none\r\n",
        chunked(b"/early")[:-5] + b"none\r\n",
    ],
    ids=["head", "part-of-a-head", "body", "unread-body"],
)
@on_the_loop
async def test_the_bytes_of_malformed_input_are_not_kept_while_the_connection_lingers(begin):
    """The frames of an error's traceback hold them."""
    room = Room()
    raw = begin + bytes(2**18)
    num_references = sys.getrefcount(raw)
    gc.disable()
    try:
        await room.send(raw)
        assert sys.getrefcount(raw) == num_references
    finally:
        gc.enable()
    assert room.wire.events == ["eof"]


@on_the_loop
async def test_an_incomplete_head_is_no_request():
    room = Room()
    await room.send(b"POST / HT")
    assert not room.connection.eof_received()
    await room.lose()
    assert room.ledger.num_received == 0


# Refusals


@pytest.mark.parametrize("raw", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
@on_the_loop
async def test_malformed_input_is_refused_once_and_the_connection_ends(raw):
    """H4 and the other malformed heads and bodies; each id begins with its case."""
    room = Room()
    await room.send(raw[:1], raw[1:])
    assert room.statuses == [400]
    assert (room.ledger.ends, room.ledger.num_received) == (["bad_request"], 1)
    assert b"connection: close" in room.wire.written
    await room.send(post())
    assert len(room.statuses) == 1
    assert room.wire.events == ["eof"]
    await room.advance(RESPONSE_LINGER_S)
    assert room.wire.events == ["eof", "close"]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"GET /" + b"a" * 256 + b" HTTP/1.1\r\nHost: x\r\n\r\n", "target_too_long"),
        (b"GET /" + b"a" * 400, "target_too_long"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 1024 + b"\r\n\r\n", "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 1100, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20 + b"\r\n", "headers_too_large"),
    ],
    ids=["H11-target", "H11-target-that-never-ends", "header-block", "header-that-never-ends", "many-fields"],
)
@on_the_loop
async def test_input_above_a_limit_is_refused_with_the_code_of_the_limit(raw, code):
    room = Room()
    await room.send(raw)
    assert room.codes == [code]
    assert room.statuses == [414 if code == "target_too_long" else 431]


@pytest.mark.parametrize(("path", "form"), [(b"/v2/models", b'{"error":'), (b"/v1/layers", b'"code":"bad_request"')])
@on_the_loop
async def test_a_refusal_has_the_form_of_its_path(path, form):
    room = Room()
    await room.send(b"GET " + path + b" HTTP/1.1\r\n\r\n")
    assert form in room.wire.written
    for header in (b"x-request-id: ", b"cache-control: no-store", b"x-content-type-options: nosniff"):
        assert header in room.wire.written


@on_the_loop
async def test_a_refusal_is_sent_to_a_half_closed_client():
    room = Room()
    room.connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    assert room.connection.eof_received()
    await turns()
    assert room.statuses == [400]
    assert room.wire.events == ["close"]


@on_the_loop
async def test_a_malformed_body_raises_at_its_reader():
    room = Room()
    await room.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", b"nonsense\r\n")
    assert room.statuses == [400]
    assert room.ledger.ends == ["bad_request"]
    assert room.wire.events == ["eof"]


@on_the_loop
async def test_many_small_chunks_are_read_with_pauses_and_little_is_read_ahead():
    room = Room()
    whole, pauses = chunked(b"/", *[b"0123456789abcdef"] * 20_000), 0
    for start in range(0, len(whole), 2**16):
        room.connection.data_received(whole[start : start + 2**16])
        while not room.wire.is_reading:
            pauses += 1
            await room.advance(CHUNK_PAUSE_S)
        assert len(room.connection._pipelined_bytes) <= 2**17
    while room.is_pausing:
        await room.advance(CHUNK_PAUSE_S)
    assert pauses > 10
    assert room.echo.seen == [("POST", "/", b"0123456789abcdef" * 20_000)]


# Ends


@on_the_loop
async def test_an_answer_before_a_small_rest_of_the_body_leaves_the_connection_usable():
    room = Room()
    raw = post(b"/early", b"x" * MAX_DROPPED_BYTES)
    head, body = raw[:-MAX_DROPPED_BYTES], raw[-MAX_DROPPED_BYTES:]
    await room.send(head, body[:10])
    assert room.statuses == [404]
    assert b"connection: close" not in room.wire.written
    await room.send(body[10:] + post(b"/2"))
    assert room.statuses == [404, 200]


@on_the_loop
async def test_a_body_that_never_completes_ends_the_connection():
    room = Room()
    await room.send(post(b"/early", b"x" * 100)[:-1])
    await room.advance(LIMITS.header_timeout_s)
    assert room.wire.events == ["close"]
    assert room.ledger.ends == [404]


@pytest.mark.parametrize(
    "raw",
    [
        post(b"/early", b"x" * (MAX_DROPPED_BYTES + 1))[: -MAX_DROPPED_BYTES - 1],
        post(b"/early", b"x", b"Expect: 100-continue")[:-1],
        chunked(b"/early", b"x")[:-5],
    ],
    ids=["large", "H25-expected", "chunked"],
)
@on_the_loop
async def test_an_answer_before_a_large_rest_is_the_last_and_the_client_can_read_it(raw):
    room = Room()
    await room.send(raw)
    assert room.statuses == [404]
    assert b"connection: close" in room.wire.written
    assert room.wire.events == ["eof"]
    await room.send(b"x" * 100_000)
    await room.advance(RESPONSE_LINGER_S - 0.1)
    assert room.wire.events == ["eof"]
    await room.advance(0.2)
    assert room.wire.events == ["eof", "close"]


async def refused_early() -> Room:
    room = Room()
    await room.send(post(b"/early", b"x" * (MAX_DROPPED_BYTES + 1))[: -MAX_DROPPED_BYTES - 1])
    assert room.wire.events == ["eof"]
    return room


@on_the_loop
async def test_what_a_refused_client_still_sends_is_dropped_until_the_connection_closes():
    room = await refused_early()
    assert room.wire.is_reading
    await room.send(*[bytes(2**22)] * 4)
    assert room.wire.events == ["eof"]
    await room.advance(RESPONSE_LINGER_S + 0.1)
    assert room.wire.events == ["eof", "close"]


@on_the_loop
async def test_lingering_ends_when_the_client_closes_the_connection():
    room = await refused_early()
    assert not room.connection.eof_received(), "the transport closes"
    await room.lose()
    assert room.clock.num_calls == 0


@on_the_loop
async def test_a_complete_request_with_connection_close_is_closed_at_once():
    room = Room()
    await room.send(post(b"/", b"hello", b"Connection: Keep-Alive, Close"))
    assert room.wire.events == ["close"]


@on_the_loop
async def test_the_head_of_an_answer_is_sent_with_the_beginning_of_its_body():
    room = Room()
    await room.send(post())
    assert room.wire.num_writes == 1
    await room.send(post(b"/long"))
    assert room.wire.num_writes == 3, "two pieces"
    assert room.statuses == [200, 200]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n", 200),
        (b"HEAD / HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n", 200),
        (b"POST /nothing HTTP/1.1\r\n" + HOST + b"\r\n", 204),
    ],
)
@on_the_loop
async def test_an_answer_without_a_body_is_sent(raw, status):
    room = Room()
    await room.send(raw)
    assert room.statuses == [status]
    assert room.wire.written.endswith(b"\r\n\r\n")
    assert room.wire.events == ["close"] * (b"close" in raw)
    if not room.wire.is_closing():
        await room.send(post())
        assert room.statuses == [status, 200]


@on_the_loop
async def test_a_head_without_its_body_is_sent_before_the_end(monkeypatch):
    room = Room()
    monkeypatch.setattr(room.ledger, "faulted", lambda trace, error: None)
    await room.send(post(b"/broken"))
    assert room.statuses == [200]
    assert room.wire.events == ["close"]


@pytest.mark.parametrize("expected", [True, False])
@on_the_loop
async def test_100_continue_is_sent_when_the_body_is_read(expected):
    room = Room()
    raw = post(b"/", b"hello", *[b"Expect: 100-continue"] * expected)
    await room.send(raw[:-5])
    assert room.wire.written.startswith(b"HTTP/1.1 100") == expected
    await room.send(raw[-5:])
    assert room.statuses == [100] * expected + [200]


@on_the_loop
async def test_100_continue_is_not_sent_if_the_whole_body_has_arrived():
    room = Room()
    raw = post(b"/", b"hello", b"Expect: 100-continue")
    room.connection.data_received(raw[:-5])
    await room.send(raw[-5:])
    assert room.statuses == [200]


async def answer_to(raw: bytes, status: int, *fields: tuple[bytes, bytes]) -> Room:
    """Return the room whose application answers so, while the server drains."""
    room = Room()
    room.state.default_headers = [(b"connection", b"close")]

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": b"" if status == 204 else b"hello"})

    room.connection.app = application
    await room.send(raw)
    return room


@on_the_loop
async def test_connection_close_is_sent_once_however_often_a_response_asks_for_it():
    room = await answer_to(post(b"/", b"", CLOSE), 200, (b"Connection", b"Close"), (b"x", b"y"))
    assert room.wire.written.lower().count(b"connection: close") == 1
    assert b"\r\nx: y\r\n" in room.wire.written
    assert room.wire.events == ["close"]


@pytest.mark.parametrize("length", [[], [(b"content-length", b"5")]], ids=["chunks", "counted"])
@on_the_loop
async def test_the_framing_of_an_answer_is_not_the_applications(length):
    room = await answer_to(post(), 200, *length, (b"Transfer-Encoding", b"gzip, chunked"))
    framing = b"content-length: 5" if length else b"transfer-encoding: chunked"
    assert room.wire.written.count(b"\r\n" + framing + b"\r\n") == 1
    assert b"gzip" not in room.wire.written
    assert room.wire.written.endswith(b"\r\n\r\n" + (b"hello" if length else b"5\r\nhello\r\n0\r\n\r\n"))


@on_the_loop
async def test_an_answer_of_204_has_no_length():
    room = await answer_to(post(), 204, (b"content-length", b"0"))
    assert room.statuses == [204]
    assert b"content-length" not in room.wire.written


@pytest.mark.parametrize("name", [b"", b"a b", b"a:b", b"\xe4"])
@on_the_loop
async def test_a_field_name_that_is_no_token_is_a_fault(name, caplog):
    room = await answer_to(post(), 200, (name, b"planted"))
    assert room.statuses == [500]
    assert b"planted" not in room.wire.written
    assert "must be a token" in caplog.text


@on_the_loop
async def test_shutdown_ends_an_idle_connection_and_waits_for_a_busy_one():
    idle, working = Room(), Room()
    await idle.send(post())
    await working.send(post(b"/held"))
    for room in (idle, working):
        room.connection.shutdown()
    assert (idle.wire.events, working.wire.events) == (["close"], [])
    working.echo.gate.set()
    await turns()
    assert working.statuses == [200]
    assert b"connection: close" in working.wire.written
    assert working.wire.events == ["close"]


# A client that ends its own sending

CLOSE = b"Connection: close"
FEW, MANY = [b"hello"], [b"x"] * LINES_A_TICK * 3
SAYS_LAST = {
    "close": post(b"/held", b"hello", CLOSE),
    "http-1-0": post(b"/held").replace(b"HTTP/1.1", b"HTTP/1.0"),
    "chunked": chunked(b"/held", *FEW).replace(HOST, HOST + CLOSE + b"\r\n"),
    "an-end-of-line-behind-it": post(b"/held", b"hello", CLOSE) + b"\r\n",
    "another-request-behind-it": post(b"/held", b"hello", CLOSE) + post(),
}


async def answered_at_last(room: Room) -> None:
    room.echo.gate.set()
    await turns(60)
    assert room.wire.events == ["close"], "at once, for the client has nothing more to say"
    await room.advance(RESPONSE_LINGER_S)
    await room.lose()
    assert room.clock.num_calls == 0


@pytest.mark.parametrize("raw", SAYS_LAST.values(), ids=SAYS_LAST)
@pytest.mark.parametrize("is_overflow", [False, True])
@on_the_loop
async def test_a_half_closed_client_is_answered(raw, is_overflow):
    room = Room(is_overflow=is_overflow)
    room.connection.data_received(raw)
    assert room.connection.eof_received()
    await turns()
    await room.advance(100)
    await answered_at_last(room)
    assert room.statuses == [503 if is_overflow else 200]
    assert len(room.ledger.ends) == room.ledger.num_received == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"POST",
        post(b"/held"),
        post(b"/held") + post(),
        post(b"/held", b"hello", CLOSE)[:-1],
        post(b"/held") + b"\r\n",
    ],
    ids=["nothing", "a-beginning", "kept-alive", "two-kept-alive", "a-part-of-the-body", "an-end-of-line-behind-it"],
)
@on_the_loop
async def test_any_other_client_that_sends_eof_is_disconnected(raw):
    room = Room()
    await room.send(raw)
    assert not room.connection.eof_received()


@pytest.mark.parametrize("last", SAYS_LAST.values(), ids=SAYS_LAST)
@on_the_loop
async def test_requests_before_the_last_are_answered_in_order(last):
    room = Room()
    await room.send(post(b"/held", b"1") + post(b"/2", b"2") + last)
    assert room.connection.eof_received()
    await answered_at_last(room)
    assert room.statuses == [200] * 3
    assert [path for _, path, _ in room.echo.seen] == ["/held", "/2", "/held"]


@pytest.mark.parametrize("behind", [post(b"/2", b"hello", CLOSE)[:-1], b"GET / HTTP/1.0\r\n"], ids=["body", "head"])
@on_the_loop
async def test_an_incomplete_last_request_is_not_waited_for(behind):
    room = Room()
    await room.send(post(b"/held") + behind)
    assert room.connection.eof_received()
    await answered_at_last(room)
    assert room.statuses == [200]
    assert room.echo.seen == [("POST", "/held", b"hello")]
    assert room.ledger.num_received == len(room.ledger.ends)


@pytest.mark.parametrize(
    ("raw", "statuses"),
    [
        (chunked(b"/held", *MANY).replace(HOST, HOST + CLOSE + b"\r\n"), [200]),
        (chunked(b"/held", *MANY).replace(HOST, HOST + CLOSE + b"\r\n")[:-1], []),
        (chunked(b"/held", *MANY), []),
        (chunked(b"/held", *MANY) + SAYS_LAST["http-1-0"], [200, 200]),
    ],
    ids=["last", "not-whole", "kept-alive", "another-behind-it"],
)
@on_the_loop
async def test_arrived_chunks_are_read_before_an_eof_is_judged(raw, statuses):
    room = Room()
    room.connection.data_received(raw)
    assert room.is_pausing
    assert room.connection.eof_received()
    await room.send(b"")  # returns once no chunk waits
    assert room.wire.events == ["close"] * (not statuses)
    if not statuses:
        await room.lose()
    room.echo.gate.set()
    await turns(60)
    assert set(room.wire.events) == {"close"}
    assert room.statuses == statuses
    assert room.ledger.num_received == len(room.ledger.ends) == max(1, len(statuses))


async def resets(room: Room) -> None:
    """Let the client reset its connection, which is noticed at the next check."""
    room.taken.is_reset = True
    await room.advance(RESET_CHECK_S)
    assert room.wire.events == ["close"]
    await room.lose()
    room.echo.gate.set()
    await turns()
    assert room.ledger.ends == ["gone"]
    assert room.clock.num_calls == 0


@on_the_loop
async def test_a_half_closed_client_that_resets_is_disconnected():
    room = Room()
    await room.send(SAYS_LAST["close"])
    assert room.connection.eof_received()
    await room.advance(10)
    assert room.wire.events == []
    await resets(room)


@on_the_loop
async def test_a_client_that_resets_while_reading_is_paused_is_disconnected():
    room = Room()
    await room.send(post(b"/held"), post() * 2000)
    assert not room.wire.is_reading
    await room.advance(100)
    assert room.wire.events == []
    await resets(room)


@on_the_loop
async def test_pipelined_requests_above_the_buffer_are_answered_however_long_each_takes():
    room = Room()
    await room.send(post(b"/held") * 3 + post() * 2000)
    await room.advance(100)
    room.echo.gate.set()
    await turns(40_000)
    await room.advance(RESET_CHECK_S)
    assert room.statuses == [200] * 2003
    assert room.wire.is_reading
    assert room.wire.events == []


@on_the_loop
async def test_a_client_that_resets_before_its_eof_is_read_is_disconnected():
    room = Room()
    await room.send(SAYS_LAST["close"])
    room.taken.is_reset = True
    assert not room.connection.eof_received()
    await room.lose()
    room.echo.gate.set()
    await turns()
    assert room.ledger.ends == ["gone"]


@on_the_loop
async def test_a_half_closed_client_is_answered_at_shutdown_too():
    room = Room()
    await room.send(SAYS_LAST["close"])
    assert room.connection.eof_received()
    room.connection.shutdown()
    await answered_at_last(room)
    assert room.statuses == [200]


# Deadlines


@on_the_loop
async def test_H20_slow_headers_are_refused_at_the_deadline():
    room = Room()
    for _ in range(9):
        await room.send(b"G")
        await room.advance(1)
    assert room.statuses == []
    assert not room.state.tasks
    await room.advance(1)
    assert room.statuses == [408]
    assert room.codes == ["client_timeout"]
    assert room.wire.events == ["eof"]


@on_the_loop
async def test_H20_an_empty_line_does_not_postpone_the_deadline():
    room = Room()
    await room.send(post())
    await room.advance(50)
    for byte in (b"\r", b"\n"):
        await room.send(byte)
        await room.advance(4.5)
    await room.send(b"GET")
    await room.advance(1)
    assert room.statuses == [200, 408]


@on_the_loop
async def test_H20_an_empty_line_alone_is_no_request():
    room = Room()
    await room.send(post(), b"\r\n")
    await room.advance(LIMITS.header_timeout_s)
    assert room.statuses == [200]
    assert room.wire.events == ["close"]


@on_the_loop
async def test_H20_a_second_empty_line_is_refused_at_once():
    room = Room()
    await room.send(post(), b"\r\n")
    await room.advance(1)
    await room.send(b"\r\n")
    assert room.statuses == [200, 400]


@on_the_loop
async def test_a_silent_connection_is_closed_and_is_no_request():
    room = Room()
    await room.advance(LIMITS.header_timeout_s)
    assert room.wire.events == ["close"]
    assert room.ledger.num_received == 0


@on_the_loop
async def test_an_idle_connection_has_the_keep_alive_time_and_then_the_header_time_from_its_first_byte():
    room = Room()
    await room.send(post())
    await room.advance(74)
    await room.send(b"POST")
    await room.advance(9.9)
    assert room.wire.events == []
    await room.advance(0.2)
    assert room.statuses == [200, 408]
    other = Room()
    await other.send(post())
    await other.advance(75)
    assert other.wire.events == ["close"]
    assert other.statuses == [200]


@on_the_loop
async def test_a_running_request_has_no_connection_deadline():
    room = Room()
    await room.send(post(b"/held"))
    await room.advance(1000)
    assert room.wire.events == []
    room.echo.gate.set()
    await turns()
    assert room.statuses == [200]


@on_the_loop
async def test_a_thousand_requests_cost_a_timer_or_two():
    room = Room()
    for _ in range(1000):
        await room.send(post())
    assert room.clock.num_calls <= 2
    await room.lose()
    assert room.clock.num_calls == 0


@on_the_loop
async def test_an_unread_answer_is_cut_off_and_counted_once():
    room = Room()
    await room.send(post(b"/long")[:-1])
    room.wire.is_stuck = True
    room.connection.pause_writing()
    await room.send(b"o")
    await room.advance(LIMITS.write_timeout_s - 0.1)
    assert room.wire.events == []
    await room.advance(0.2)
    assert room.wire.events == ["abort"]
    await room.lose()
    assert room.ledger.ends == ["gone"]


@on_the_loop
async def test_a_client_that_reads_nothing_is_cut_off_though_it_keeps_sending():
    room = Room()
    room.wire.full_with, room.wire.when_full = b"first", room.connection.pause_writing
    await room.send(post(b"/1", b"first") + post(b"/2"))
    await room.advance(LIMITS.write_timeout_s)
    assert room.wire.events == ["abort"]
    await room.lose()
    assert room.ledger.ends == [200, "gone"]


@on_the_loop
async def test_a_slow_client_that_keeps_reading_is_not_cut_off():
    room = Room()
    await room.send(post(b"/held"))
    room.wire.is_stuck = True
    for _ in range(5):
        room.connection.pause_writing()
        await room.advance(LIMITS.write_timeout_s - 1)
        room.connection.resume_writing()
    room.echo.gate.set()
    await turns()
    assert room.wire.events == []


RATED = dataclasses.replace(LIMITS, min_response_bytes_per_s=1000)
PIECE = b"x" * 10_000


class LongAnswer:
    """An application that sends `num_pieces` pieces, one per `_turn` event; the client of `room` reads none at once."""

    def __init__(self, room: Room, num_pieces: int) -> None:
        self._room, self._num_pieces = room, num_pieces
        self._turn = asyncio.Event()
        room.connection.app = self
        room.wire.full_with, room.wire.when_full = PIECE, room.connection.pause_writing

    async def __call__(self, scope, receive, send):
        length = (b"content-length", b"%d" % (self._num_pieces * len(PIECE)))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        for _ in range(self._num_pieces):
            await self._turn.wait()
            self._turn.clear()
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def taken_after(self, seconds: float) -> None:
        """Write a piece; the client reads it `seconds` later, unless its connection is cut before."""
        self._turn.set()
        await turns()
        await self._room.advance(seconds)
        if not self._room.wire.events:
            self._room.wire.is_stuck = False
            self._room.connection.resume_writing()
            await turns()


@pytest.mark.parametrize(
    ("waits_s", "is_cut"),
    [
        ([10] * 20, False),
        ([29, 20, 10], False),
        ([12] * 14, False),
        ([12] * 17, True),
        ([1] * 30 + [29] * 10, False),
        ([29, 29, 29], True),
        ([1, 1, 30], True),
    ],
)
@on_the_loop
async def test_the_waits_of_one_answer_together_are_bounded_by_its_bytes_D9(waits_s, is_cut):
    """Each piece allows 10 s, plus 30 s for the answer. The time between two waits does not count."""
    room = Room(RATED)
    answer = LongAnswer(room, len(waits_s))
    await room.send(post())
    for wait_s in waits_s:
        await room.advance(1000)
        await answer.taken_after(wait_s)
    assert room.wire.events == ["abort"] * is_cut
    await room.lose()
    assert room.wire.written.endswith(PIECE)
    assert len(room.wire.written) < (len(waits_s) + 1) * len(PIECE)


@on_the_loop
async def test_each_answer_of_a_connection_has_its_own_write_deadline():
    room = Room(RATED)
    for _ in range(5):
        answer = LongAnswer(room, 2)
        await room.send(post())
        for _ in range(2):
            await answer.taken_after(24)
    assert room.statuses == [200] * 5
    assert room.wire.events == []


@pytest.mark.parametrize("is_held", [False, True])
@on_the_loop
async def test_waiting_for_one_answer_does_not_count_for_the_next(is_held):
    """Even if the first is held back and sent once the next request has begun."""
    shared = Shared(RATED)
    room = Room(shared=shared)
    answer = LongAnswer(room, 2)

    async def application(scope, receive, send):
        if scope["path"] == "/first" and is_held:
            assert shared.coalescer.may_send_now(lambda: None)
        await (room.echo if scope["path"] == "/first" else answer)(scope, receive, send)

    room.connection.app, room.wire.full_with = application, b"first"
    await room.send(post(b"/first", b"first") + post())
    assert room.wire.is_stuck
    await room.advance(29)
    room.wire.is_stuck, room.wire.full_with = False, PIECE
    room.connection.resume_writing()
    for _ in range(2):
        await answer.taken_after(24)
    assert room.statuses == [200] * 2
    assert room.wire.events == []


@pytest.mark.parametrize("last", [[], [b"Connection: close"]], ids=["kept", "closed"])
@on_the_loop
async def test_the_unread_end_of_an_answer_is_cut_off_too(last):
    room = Room()
    room.wire.is_stuck = True
    await room.send(post(b"/", b"hello", *last))
    room.connection.pause_writing()
    room.connection.resume_writing()
    await room.advance(LIMITS.write_timeout_s)
    assert room.wire.events[-1] == "abort"
    assert room.ledger.ends == [200]


@on_the_loop
async def test_before_http_1_1_a_long_answer_ends_with_the_connection_and_has_no_chunks():
    room = Room()
    await room.send(post(b"/long").replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert room.wire.written.endswith(b"\r\n\r\n" + b"x" * 10 + b"y" * 10)
    assert b"transfer-encoding" not in room.wire.written
    assert room.wire.events == ["close"]


@on_the_loop
async def test_before_http_1_1_a_short_answer_has_its_length():
    room = Room()
    await room.send(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert room.wire.written.endswith(b"\r\n\r\nhello")
    assert b"\r\ncontent-length: 5\r\n" in room.wire.written
    assert room.wire.events == ["close"]


# Overdue: above its age, or shed because another process has joined

AGED = dataclasses.replace(LIMITS, max_age_s=50)
OVERDUE = pytest.mark.parametrize("is_shed", [True, False], ids=["shed", "aged"])


async def overdue(is_shed: bool) -> Room:
    """A connection that has had one answer and is overdue, by either cause."""
    room = Room(shared=Shared(LIMITS if is_shed else AGED, draw=lambda: 0))
    await room.send(post())
    if is_shed:
        room.connection.shed()
    else:
        await room.advance(50)
    assert room.wire.events == []
    assert b"connection: close" not in room.wire.written
    return room


async def ends(room: Room, num_answers: int) -> None:
    """Check that the last answer, and no other, said so, and that the connection closes behind it without a reset."""
    assert room.statuses == [200] * num_answers
    assert room.wire.written.count(b"connection: close") == 1
    assert b"connection: close" in room.wire.written.rpartition(b"HTTP/1.1 ")[2]
    assert room.wire.events == ["eof"]
    await room.advance(RESPONSE_LINGER_S)
    assert room.wire.events == ["eof", "close"]


@OVERDUE
@on_the_loop
async def test_an_overdue_connection_ends_with_its_next_answer_and_not_before_D9(is_shed):
    room = await overdue(is_shed)
    await room.advance(20)
    assert room.wire.events == []
    await room.send(post())
    await ends(room, 2)


@OVERDUE
@on_the_loop
async def test_an_answer_not_yet_begun_is_the_last_of_an_overdue_connection(is_shed):
    room = Room(shared=Shared(LIMITS if is_shed else AGED))
    await room.send(post(b"/held"))
    if is_shed:
        room.connection.shed()
    else:
        await room.advance(50)
    room.echo.gate.set()
    await turns()
    await ends(room, 1)


@OVERDUE
@on_the_loop
async def test_pipelined_requests_are_answered_before_an_overdue_connection_ends(is_shed):
    room = await overdue(is_shed)
    await room.send(post(b"/held") + post(b"/2") + post(b"/3"))
    room.echo.gate.set()
    await turns(60)
    await ends(room, 4)


@OVERDUE
@on_the_loop
async def test_a_request_behind_the_last_answer_of_an_overdue_connection_is_dropped_without_a_reset(is_shed):
    room = await overdue(is_shed)
    await room.send(post(), post())
    await ends(room, 2)


@OVERDUE
@on_the_loop
async def test_the_rest_of_a_body_is_not_waited_for_on_an_overdue_connection(is_shed):
    room = await overdue(is_shed)
    await room.send(post(b"/early", b"x" * 100)[:-1])
    assert room.statuses == [200, 404]
    assert room.wire.written.count(b"connection: close") == 1
    assert room.wire.events == ["eof"]


@OVERDUE
@on_the_loop
async def test_over_tls_an_overdue_connection_ends_without_half_a_close(is_shed):
    room = await overdue(is_shed)
    room.wire.is_tls = True
    await room.send(post())
    assert room.wire.events == []
    await room.advance(RESPONSE_LINGER_S)
    assert room.wire.events == ["close"]


@OVERDUE
@pytest.mark.parametrize(
    "last", [post(b"/", b"", CLOSE), post().replace(b"HTTP/1.1", b"HTTP/1.0")], ids=["close", "1.0"]
)
@on_the_loop
async def test_a_request_that_ends_its_overdue_connection_itself_closes_it_at_once(is_shed, last):
    room = await overdue(is_shed)
    room.wire.is_tls = True
    await room.send(last)
    assert room.wire.events == ["close"]


@on_the_loop
async def test_a_body_that_arrives_while_its_connection_comes_of_age_is_read_and_answered():
    room = Room(AGED)
    request = post(b"/", b"x" * 1000)
    await room.send(request[:-900])
    await room.advance(60)
    await room.send(request[-900:])
    assert room.echo.seen == [("POST", "/", b"x" * 1000)]
    await ends(room, 1)


@pytest.mark.parametrize(("drawn", "age_s"), [(0.0, 50), (0.5, 45), (1.0, 40)])
@on_the_loop
async def test_each_connection_draws_its_own_age(drawn, age_s):
    room = Room(shared=Shared(AGED, draw=lambda: drawn))
    await room.send(post())
    await room.advance(age_s - 1)
    await room.send(post())
    assert b"connection: close" not in room.wire.written
    await room.advance(1)
    await room.send(post())
    await ends(room, 3)


@on_the_loop
async def test_without_a_limit_no_age_ends_a_connection():
    room = Room()
    for _ in range(50):
        await room.send(post())
        await room.advance(70)
    assert room.statuses == [200] * 50
    assert b"connection: close" not in room.wire.written


# Over TLS, where one end cannot be closed without the other


@on_the_loop
async def test_over_tls_an_answer_before_the_body_ends_the_connection_a_moment_later():
    room = Room()
    room.wire.is_tls = True
    await room.send(b"nonsense\r\n\r\n")
    assert room.statuses == [400]
    assert room.codes == ["bad_request"]
    assert room.wire.events == []
    await room.advance(RESPONSE_LINGER_S)
    assert room.wire.events == ["close"]


@on_the_loop
async def test_over_tls_a_client_that_sends_eof_is_disconnected():
    room = Room()
    room.wire.is_tls = True
    room.connection.data_received(b"nonsense\r\n\r\n")
    assert not room.connection.eof_received()


@on_the_loop
async def test_bytes_that_are_not_sent_yet_are_not_acknowledged():
    room = Room()
    room.wire.is_stuck = True
    assert not room.connection.is_acknowledged
    room.wire.is_stuck = False
    assert room.connection.is_acknowledged


# Overflow connections, accepted above max_connections


@on_the_loop
async def test_an_overflow_connection_is_refused_with_retry_after_and_closed():
    room = Room(is_overflow=True)
    await room.send(post() + post(b"/2"))
    assert room.statuses == [503]
    assert room.codes == ["not_ready"]
    assert b"\r\nretry-after: 1\r\n" in room.wire.written
    assert b"\r\nconnection: close\r\n" in room.wire.written
    assert room.echo.seen == []
    assert "eof" in room.wire.events


@pytest.mark.parametrize("path", [b"/healthz", b"/readyz", b"/v2/health/live", b"/metrics"])
@on_the_loop
async def test_an_overflow_connection_gets_one_answer_of_health_or_metrics(path):
    room = Room(is_overflow=True)
    await room.send(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert room.statuses == [200]
    assert b"\r\nconnection: close\r\n" in room.wire.written
    assert room.wire.events == ["close"]


@pytest.mark.parametrize("is_overflow", [False, True])
@on_the_loop
async def test_a_slot_is_free_when_its_connection_is_lost(is_overflow):
    room = Room(is_overflow=is_overflow)
    assert len(room.slots) == 1
    await room.lose()
    assert len(room.slots) == 0


@on_the_loop
async def test_a_body_of_single_bytes_needs_little_more_memory_than_its_bytes():
    """One object per byte would take forty times as much memory."""
    room = Room()
    asking = Asking(room)
    raw = post(b"/", b"x" * 20_000)
    await room.send(raw[:200])
    for at in range(200, len(raw) - 1):
        room.connection.data_received(raw[at : at + 1])
    assert len(room.connection.cycle._pieces) < 10
    await room.send(raw[-1:])
    assert asking.taken == [None]
    asking.gate.set()
    await turns()
    assert room.statuses == [200]
