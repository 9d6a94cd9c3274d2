"""Channel: messages arrive whole, only the latest waits for a peer that does not read, and its death is the end of file."""

import dataclasses
import functools
import socket
from typing import Any

import pytest

from service.supervisor import channel

MAX_BYTES = 2**20
Channel = functools.partial(channel.Channel, max_bytes=MAX_BYTES)


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


def test_the_latest_message_is_received(ends):
    one, two = map(Channel, ends)
    for number in range(3):
        one.send(Message(number))
    assert two.receive() == {"number": 2, "text": ""}
    assert two.receive() is None
    two.send(Message(7, "é\ud800"))
    assert one.receive() == {"number": 7, "text": "é\ud800"}


def test_only_the_latest_message_waits_for_a_peer_that_does_not_read(ends):
    one, two = map(Channel, ends)
    long = "x" * 100_000
    for number in range(1000):
        one.send(Message(number, long))
    assert one.is_full
    seen = [-1]
    while seen[-1] != 999:
        if (message := two.receive()) is not None:
            seen.append(message["number"])
        one.flush()
    assert len(seen) < 20
    assert seen == sorted(seen)


def test_a_message_of_many_pieces_arrives_whole(ends):
    one, two = map(Channel, ends)
    one.send(Message(1, "x" * 1_000_000))
    found: Any = None
    while found is None:
        found = two.receive()
        one.flush()
    assert found == {"number": 1, "text": "x" * 1_000_000}
    assert not two.is_ended


def test_what_the_dead_peer_sent_is_read_before_the_end_of_file(ends):
    one, two = map(Channel, ends)
    one.send(Message(1))
    two.send(Message(2))  # unread, which makes the end of file an error
    one.close()
    assert two.receive() == {"number": 1, "text": ""}
    assert two.is_ended
    assert two.receive() is None
    two.send(Message(3))
    assert not two.is_full


@pytest.mark.parametrize("line", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"1 2"])
def test_a_line_that_is_no_json_is_none_and_the_next_is_read(ends, line):
    two = Channel(ends[1])
    ends[0].sendall(line + b"\n")
    assert two.receive() is None
    assert not two.is_ended
    ends[0].sendall(b"{}\n")
    assert two.receive() == {}


def test_of_many_lines_only_the_last_is_parsed(ends, monkeypatch):
    parsed: list[bytes] = []
    monkeypatch.setattr("service.supervisor.channel.json.loads", parsed.append)
    ends[0].sendall(b"\n" * 50_000 + b"{}\n[")
    Channel(ends[1]).receive()
    assert parsed == [b"{}"]


@pytest.mark.parametrize("before", [b"", b"{}\n"])
def test_a_peer_that_sends_no_line_end_is_cut_off(ends, before):
    two = channel.Channel(ends[1], 1000)
    ends[0].sendall(before + b"x" * 999)
    two.receive()
    assert not two.is_ended
    ends[0].sendall(b"xx")
    two.receive()
    assert two.is_ended


def test_a_peer_that_writes_without_end_does_not_hold_its_reader():
    class Endless:
        num_reads = 0

        def setblocking(self, _):
            pass

        def set_inheritable(self, _):
            pass

        def recv(self, size):
            self.num_reads += 1
            return b"\n" * size

    end: Any = Endless()
    Channel(end).receive()
    assert end.num_reads == 32
