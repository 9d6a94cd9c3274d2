"""A client that sends bytes as they are and distinguishes every answer."""

import json
import socket
import ssl
import time
from typing import NamedTuple


class Heard(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["code"])


class RawClient:
    def __init__(self, port, timeout_s=10.0, tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._unread = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def hear(self) -> Heard | None:
        """The next answer; None at the end of the connection. A reset is an error."""
        if not self._until(lambda: b"\r\n\r\n" in self._unread):
            assert not self._unread
            return None
        head, _, self._unread = self._unread.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        assert self._until(lambda: len(self._unread) >= length), "the answer is cut short"
        body, self._unread = self._unread[:length], self._unread[length:]
        return Heard(int(first.split()[1]), headers, body)

    def hear_all(self) -> list[Heard]:
        """Every answer up to the end of the connection."""
        heard = []
        while (answer := self.hear()) is not None:
            heard.append(answer)
        return heard

    def seconds_to_end(self) -> float:
        started = time.monotonic()
        self.hear_all()
        return time.monotonic() - started

    def _until(self, condition) -> bool:
        while not condition():
            data = self.socket.recv(65536)
            if not data:
                return False
            self._unread += data
        return True
