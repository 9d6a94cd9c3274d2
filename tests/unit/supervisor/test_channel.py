"""Channel: messages arrive whole, only the latest waits for a peer that does not read, and its death is the end of file."""

import dataclasses
import socket
from typing import Any

import pytest

from service.supervisor import channel
from service.supervisor.channel import Channel


@dataclasses.dataclass
class Message:
    number: int
    text: str = ""


@pytest.fixture
def ends():
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def test_messages_arrive_in_order(ends):
    one, two = map(Channel, ends)
    for number in range(3):
        one.send(Message(number))
    assert two.receive() == [{"number": number, "text": ""} for number in range(3)]
    assert two.receive() == []
    two.send(Message(7, "é\ud800"))
    assert one.receive() == [{"number": 7, "text": "é\ud800"}]


def test_only_the_latest_message_waits_for_a_peer_that_does_not_read(ends):
    one, two = map(Channel, ends)
    long = "x" * 100_000
    for number in range(1000):
        one.send(Message(number, long))
    assert one.is_full
    seen = [-1]
    while seen[-1] != 999:
        seen += [message["number"] for message in two.receive() or ()]
        one.flush()
    assert len(seen) < 20
    assert seen == sorted(seen)


def test_a_message_of_many_pieces_arrives_whole(ends):
    one, two = map(Channel, ends)
    one.send(Message(1, "x" * 1_000_000))
    found: list[Any] = []
    while not found:
        found = two.receive() or []
        one.flush()
    assert found == [{"number": 1, "text": "x" * 1_000_000}]


def test_what_the_dead_peer_sent_is_read_before_the_end_of_file(ends):
    one, two = map(Channel, ends)
    one.send(Message(1))
    two.send(Message(2))  # unread, which makes the end of file an error
    one.close()
    assert two.receive() == [{"number": 1, "text": ""}]
    assert two.receive() is None
    two.send(Message(3))
    assert not two.is_full


@pytest.mark.parametrize("line", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"1 2"])
def test_a_line_that_is_no_json_is_none_and_the_next_is_read(ends, line):
    two = Channel(ends[1])
    ends[0].sendall(line + b"\n{}\n")
    found: list[Any] = []
    while len(found) < 2:
        found += two.receive() or []
    assert found == [None, {}]


def test_a_peer_that_sends_no_line_end_is_cut_off(ends, monkeypatch):
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 1000)
    two = Channel(ends[1])
    ends[0].sendall(b"x" * 1001)
    assert two.receive() is None
