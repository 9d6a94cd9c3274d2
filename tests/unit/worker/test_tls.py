"""TLS: whether the client has received everything, so that its connection may be cut."""

import socket
from typing import Any

import pytest

from service.worker.tls import is_acknowledged


class Socketed:
    """A connection's transport; `wire` is its socket, or None once it is closed."""

    def __init__(self, wire, unsent=0) -> None:
        self._wire, self._unsent = wire, unsent

    def get_write_buffer_size(self):
        return self._unsent

    def get_extra_info(self, name):
        assert name == "socket"
        return self._wire


def transport(wire, unsent=0) -> Any:
    return Socketed(wire, unsent)


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            yield one, other


def test_a_peer_that_reads_nothing_has_not_received_all(pair):
    one, other = pair
    other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    assert is_acknowledged(transport(one))
    assert not is_acknowledged(transport(one, unsent=1))
    one.setblocking(False)
    while True:
        try:
            one.send(b"x" * 2**16)
        except BlockingIOError:
            break
    assert not is_acknowledged(transport(one))


def test_a_lost_connection_is_not_waited_for(pair):
    one, _ = pair
    one.close()
    assert is_acknowledged(transport(one))
    assert is_acknowledged(transport(None))
