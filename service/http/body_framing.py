"""Body framing: finds the end of a body of known length or in chunks (RFC 9112, section 7.1).

Must not know: sockets, ASGI, how large a body may be (`api/request_body.py`).
Invariants: A body ends at one byte; what follows belongs to the next request. Besides FREE_FRAMING_BYTES, chunk sizes, extensions
and trailers together take at most half as many bytes as the data, so that a million tiny chunks cannot keep the loop busy.
Extensions and trailers are parsed, bounded and discarded.
"""

from __future__ import annotations

import re
from typing import Protocol

from service.errors import BadRequest
from service.http.request_parser import CRLF, is_clean, read_field

# Framing that every body may have besides: about 3,000 chunks of one byte.
FREE_FRAMING_BYTES = 16 * 1024
MAX_LINE_BYTES = 1024
# Lines parsed in one loop tick, which takes 0.25 ms; a chunk has one or two lines.
LINES_A_TICK = 250

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")


Bytes = bytes | memoryview
Piece = bytes | bytearray | memoryview


class WireBody(Protocol):
    """A body that is arriving. `left` is the number of bytes still to come, None if unknown."""

    is_complete: bool

    @property
    def left(self) -> int | None: ...

    def take(self, data: Bytes) -> tuple[Bytes, Bytes]:
        """Return the body's part of `data` and the rest: bytes of the next request, or work for another loop tick."""


class CountedBody:
    """A body of `length` bytes."""

    def __init__(self, length: int) -> None:
        self.left = length
        self.is_complete = length == 0

    def take(self, data: Bytes) -> tuple[Bytes, Bytes]:
        piece = data if len(data) <= self.left else data[: self.left]
        self.left -= len(piece)
        self.is_complete = not self.left
        return piece, data[len(piece) :]


class ChunkedBody:
    """A body in chunks, up to a chunk of size 0 and a trailer; `take` raises BadRequest."""

    left = None

    def __init__(self) -> None:
        self.is_complete = False
        self._chunk_left = 0
        self._has_line_end = True  # after the data of the last chunk
        self._in_trailer = False
        self._begun = b""
        self._num_data_bytes = 0
        self._num_framing_bytes = 0

    def take(self, data: Bytes) -> tuple[bytes, bytes]:
        data, self._begun = self._begun + data, b""
        pieces: list[bytes] = []
        at = lines = 0
        while at < len(data) and not self.is_complete and lines < LINES_A_TICK:
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
        """Count chunk data and return the position after it, or after its line end if that has arrived."""
        self._chunk_left -= num_bytes
        self._num_data_bytes += num_bytes
        at += num_bytes
        self._has_line_end = not self._chunk_left and data.startswith(CRLF, at)
        if not self._has_line_end:
            return at
        self._num_framing_bytes += len(CRLF)
        return at + len(CRLF)

    def _line_end(self, data: bytes, at: int) -> int:
        """Return where the line that begins at `at` ends, or -1 if its end has not arrived."""
        end = data.find(CRLF, at, at + MAX_LINE_BYTES)
        if end < 0 and (len(data) - at >= MAX_LINE_BYTES or b"\n" in data[at:] or b"\r" in data[at:-1]):
            raise BadRequest(
                f"a line of a chunked body must end with CR LF and have fewer than {MAX_LINE_BYTES:,} bytes"
            )
        return end

    def _line(self, line: bytes) -> None:
        if not self._has_line_end:
            if line:
                raise BadRequest("a chunk must have as many bytes as its size states")
            self._has_line_end = True
        elif not self._in_trailer:
            found = _SIZE.fullmatch(line)
            if found is None:
                raise BadRequest("a chunk must begin with its size in hexadecimal digits")
            self._chunk_left = int(found[1], 16)
            self._in_trailer = not self._chunk_left
        elif line:
            read_field(line)
            if not is_clean(line):
                raise BadRequest("a trailer field must not have control characters")
        else:
            self.is_complete = True

    def _count_framing(self, num_bytes: int) -> None:
        self._num_framing_bytes += num_bytes
        if self._num_framing_bytes > FREE_FRAMING_BYTES + self._num_data_bytes // 2:
            raise BadRequest(
                "a chunked body may spend at most half as many bytes on chunk sizes as on data; send larger chunks"
            )
