"""Write coalescing: the first answer of a loop tick is sent at once, the others together and in order at its end."""

import asyncio
import functools

import pytest

from service.http.connection import Shared
from service.http.cycle import WriteCoalescer
from tests.doubles import on_loop
from tests.unit.http.wire import LIMITS, Room, turns

ASK = b"POST / HTTP/1.1\r\nhost: a\r\nx-request-id: same\r\ncontent-length: 2\r\n\r\n%s"


@on_loop
async def test_the_first_answer_of_a_loop_tick_is_sent_at_once_and_the_others_in_order_at_its_end():
    sent: list[int] = []
    coalescer = WriteCoalescer()
    for _ in range(2):
        now = [coalescer.may_send_now(functools.partial(sent.append, number)) for number in range(4)]
        assert now == [True, False, False, False]
        assert sent == []
        await asyncio.sleep(0)
        assert sent == [1, 2, 3]
        sent.clear()


def rooms(count: int) -> list[Room]:
    shared = Shared(LIMITS)
    return [Room(shared=shared) for _ in range(count)]


async def ask_all(asked: list[Room], request: bytes = ASK % b"ab") -> list[int]:
    """Send a request on each at once; return the number answered after each of the next loop ticks."""
    for room in asked:
        room.connection.data_received(request)
    counts = []
    for _ in range(20):
        await asyncio.sleep(0)
        counts.append(sum(bool(room.wire.written) for room in asked))
    return counts


@on_loop
async def test_answers_of_several_connections_in_one_tick_are_sent_complete():
    asked = rooms(4)
    counts = await ask_all(asked)
    assert set(counts) == {1, 4}
    assert [room.wire.num_writes for room in asked] == [1] * 4
    assert all(room.wire.written.endswith(b"\r\n\r\nab") for room in asked)


@pytest.mark.parametrize("path", [b"/long", b"/nothing", b"/early", b"/"])
@on_loop
async def test_an_answer_of_any_form_is_the_same_with_and_without_coalescing(path):
    asked = rooms(3)
    await ask_all(asked, (ASK % b"ab").replace(b" / ", b" %s " % path))
    assert asked[0].wire.written
    assert {room.wire.written for room in asked} == {asked[0].wire.written}


@on_loop
async def test_pipelined_requests_of_one_connection_are_answered_in_order():
    _, room = asked = rooms(2)
    await ask_all(asked, ASK % b"uv" + ASK % b"wx" + ASK % b"yz")
    places = [room.wire.written.index(body) for body in (b"uv", b"wx", b"yz")]
    assert places == sorted(places)
    assert room.statuses == [200] * 3


def one_held() -> Room:
    """Return the connection with the second of two answers in one loop tick, which has not ended."""
    first, room = rooms(2)
    for each in (first, room):
        each.connection.flow.write([b"head ", b"body"], begins=True)
    assert (first.wire.written, room.wire.written) == (b"head body", b"")
    return room


@on_loop
async def test_later_writes_wait_for_a_held_answer():
    room = one_held()
    room.connection.flow.write([b" more"], begins=False)
    await turns(1)
    assert room.wire.written == b"head body more"


@pytest.mark.parametrize("end", ["close", "shutdown"])
@on_loop
async def test_a_held_answer_is_sent_before_its_connection_is_closed(end):
    room = one_held()
    room.connection.shutdown() if end == "shutdown" else room.connection.flow.close()
    assert room.wire.written == b"head body"
    await turns()
    assert room.wire.written == b"head body"


@on_loop
async def test_a_held_answer_is_sent_before_an_eof_is_handled():
    """uvloop closes a connection at the client's EOF, which may come before the loop tick ends."""
    room = one_held()
    room.connection.eof_received()
    assert room.wire.written == b"head body"


@on_loop
async def test_an_unwritable_connection_is_closed_and_the_others_get_their_answers():
    asked = rooms(4)

    def fail(pieces):
        raise MemoryError

    vars(asked[2].wire)["writelines"] = fail
    for _ in range(2):
        await ask_all(asked)
    assert asked[2].wire.events == ["abort"]
    assert [room.wire.num_writes for room in asked] == [2, 2, 0, 2]


@on_loop
async def test_a_held_answer_of_a_lost_connection_is_dropped():
    room = one_held()
    room.wire.abort()
    await room.lose()
    assert room.wire.written == b""
