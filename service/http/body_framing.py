"""Bodies on the wire: of a known length, or in chunks (RFC 9112, section 7.1). Where they end, and nothing else.

Must not know: sockets, ASGI, how large a body may be (`api/request_body.py`).
Laws: a body ends at one byte, and what follows is the next request's; chunk sizes, extensions and trailers together cost at
most half as much as the data, so that a million tiny chunks are no way to keep the loop busy; extensions and trailers are
read, bounded and forgotten.
"""

from __future__ import annotations

import re
from typing import Protocol

from service.errors import BadRequest
from service.http.head import CRLF, is_clean, read_field

# Free for everybody: some three thousand chunks of one byte.
FREE_FRAMING_BYTES = 16 * 1024
MAX_LINE_BYTES = 1024
# Read in one turn of the loop, which takes a quarter of a millisecond; a chunk has one or two.
LINES_A_TURN = 250

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")


Bytes = bytes | memoryview
Piece = bytes | bytearray | memoryview


class WireBody(Protocol):
    """A body that is arriving; `left` is how many bytes are still to come, None where nobody knows."""

    is_complete: bool

    @property
    def left(self) -> int | None: ...

    def take(self, data: Bytes) -> tuple[Bytes, Bytes]:
        """What of `data` is the body's, and what is left of it: the next request's bytes, or work for another turn."""


class CountedBody:
    """`length` bytes."""

    def __init__(self, length: int) -> None:
        self.left = length
        self.is_complete = length == 0

    def take(self, data: Bytes) -> tuple[Bytes, Bytes]:
        piece = data if len(data) <= self.left else data[: self.left]
        self.left -= len(piece)
        self.is_complete = not self.left
        return piece, data[len(piece) :]


class ChunkedBody:
    """Chunks up to one of size 0, and a trailer; `take` raises BadRequest."""

    left = None

    def __init__(self) -> None:
        self.is_complete = False
        self._chunk_left = 0
        self._has_line_end = True  # the one that closes a chunk's data
        self._in_trailer = False
        self._begun = b""
        self._num_data_bytes = 0
        self._num_framing_bytes = 0

    def take(self, data: Bytes) -> tuple[bytes, bytes]:
        data, self._begun = self._begun + data, b""
        pieces: list[bytes] = []
        at = lines = 0
        while at < len(data) and not self.is_complete and lines < LINES_A_TURN:
            if self._chunk_left:
                pieces.append(data[at : at + self._chunk_left])
                at = self._end_of_data(data, at, len(pieces[-1]))
                continue
            end = self._line_end(data, at)
            if end < 0:
                self._begun, at = data[at:], len(data)
                break
            self._line(data[at:end])
            self._count_framing(end + len(CRLF) - at)
            at = end + len(CRLF)
            lines += 1
        return b"".join(pieces), data[at:]

    def _end_of_data(self, data: bytes, at: int, num_bytes: int) -> int:
        """Where the next line begins, behind the line end that closes a chunk if it is there already."""
        self._chunk_left -= num_bytes
        self._num_data_bytes += num_bytes
        at += num_bytes
        self._has_line_end = not self._chunk_left and data.startswith(CRLF, at)
        if not self._has_line_end:
            return at
        self._num_framing_bytes += len(CRLF)
        return at + len(CRLF)

    def _line_end(self, data: bytes, at: int) -> int:
        """Where the line ends that begins `at`; -1 while its end has not come."""
        end = data.find(CRLF, at, at + MAX_LINE_BYTES)
        if end < 0 and (len(data) - at >= MAX_LINE_BYTES or b"\n" in data[at:] or b"\r" in data[at:-1]):
            raise BadRequest(f"a line of a chunked body ends with CR LF and has less than {MAX_LINE_BYTES:,} bytes")
        return end

    def _line(self, line: bytes) -> None:
        if not self._has_line_end:
            if line:
                raise BadRequest("a chunk is as long as its size says")
            self._has_line_end = True
        elif not self._in_trailer:
            found = _SIZE.fullmatch(line)
            if found is None:
                raise BadRequest("a chunk begins with its size in hexadecimal digits")
            self._chunk_left = int(found[1], 16)
            self._in_trailer = not self._chunk_left
        elif line:
            read_field(line)
            if not is_clean(line):
                raise BadRequest("a trailer field has no control characters")
        else:
            self.is_complete = True

    def _count_framing(self, num_bytes: int) -> None:
        self._num_framing_bytes += num_bytes
        if self._num_framing_bytes > FREE_FRAMING_BYTES + self._num_data_bytes // 2:
            raise BadRequest(
                "a chunked body may spend half as many bytes on chunk sizes as on data: send larger chunks"
            )
