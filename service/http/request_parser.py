"""Request parser: parses heads and body framing strictly (RFC 9112), so that no two parsers read them differently.

Must not know: sockets, time, how large a body may be (`api/request_body.py`).
Invariants: A head that two parsers could read in two ways is refused, so that a proxy in front always sees the same requests as
this service. Only CR LF ends a line. Of an incomplete head only the request line, the bytes and the sizes are checked. Clients
repeat their heads, so `read_head` caches them, and HeaderFields caches what is parsed from their fields. A cached head was
fully checked. Whether a request is accepted never depends on how its bytes are split.
A body ends at an exact byte; what follows belongs to the next request. Besides FREE_FRAMING_BYTES, chunk sizes, extensions and
trailers together take at most half as many bytes as the data, so that a million tiny chunks cannot keep the loop busy.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import urllib.parse
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from service.errors import BadRequest, HeadersTooLarge, TargetTooLong
from service.http.asgi import HEADER_FIELDS

Bytes = bytes | memoryview
T = TypeVar("T")
Options = TypeVarTuple("Options")

BLANKS = b" \t"


class HeaderFields(dict[bytes, tuple[bytes, ...]]):
    """The values of each lower-case name in order, without blanks around them; an empty tuple for a missing name.

    Requests may share an instance: never change it.
    """

    __slots__ = ("_made",)

    def __init__(self, fields: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__()
        self._made: dict[object, Any] = {}
        for name, value in fields:
            self[name] = (*self[name], value.strip(BLANKS))

    def __missing__(self, name: bytes) -> tuple[bytes, ...]:
        return ()

    def make(self, reader: Callable[[HeaderFields, *Options], T], *options: *Options) -> T:
        """Return the result of `reader`, which uses only these fields and `options`; cache it unless it raises."""
        key = (reader, options)
        try:
            found: T = self._made[key]
        except KeyError:
            found = self._made[key] = reader(self, *options)
        return found


def fields_of(scope: MutableMapping[str, Any]) -> HeaderFields:
    found: HeaderFields | None = scope.get(HEADER_FIELDS)
    if found is None:  # another ASGI server's scope
        found = scope[HEADER_FIELDS] = HeaderFields(scope["headers"])
    return found


CRLF = b"\r\n"
END = b"\r\n\r\n"
# 19 digits hold every length up to 2^63; no machine holds a longer body.
MAX_LENGTH_DIGITS = 19
# Clients repeat most heads, and most lines of the other heads. Parsing costs many times as much as a cache lookup.
NUM_CACHED_HEADS = 256
MAX_CACHED_HEAD_BYTES = 1024
_MAX_METHOD_BYTES = 32
# A method, two spaces, "HTTP/1.1" and CR around the target.
_AROUND_TARGET_BYTES = _MAX_METHOD_BYTES + 11

TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# Bytes allowed in a line: visible characters, spaces, tabs and the bytes above ASCII.
_IN_LINE = bytes([0x09, *range(0x20, 0x7F), *range(0x80, 0x100)])
_METHOD = rb"[!#$%%&'*+\-.^_`|~0-9A-Za-z]{1,%d}" % _MAX_METHOD_BYTES
_BEGINNING = re.compile(_METHOD + rb"(?: |\Z)")
_REQUEST_LINE = re.compile(rb"(" + _METHOD + rb") ([\x21-\x7e]+) HTTP/1\.([01])")
_GLIMPSE = re.compile(rb"(" + _METHOD + rb") (?:(?i:https?)://[^/?# ]{0,255})?(/[\x21-\x3e\x40-\x7e]{0,255})?")
_AUTHORITY = re.compile(rb"[^ ]+ (?i:https?)://([^/? ]+)")
_ABSOLUTE = re.compile(rb"(?i:http(s?))://[A-Za-z0-9.\-_~:\[\]]+(/.*|\?.*)?")
_UNCLEAN = "the lines of a request must end with CR LF and have no control characters"
_HOST_VALUE = re.compile(rb"(?:[A-Za-z0-9.\-_~!$&'()*+,;=%]*|\[[0-9A-Fa-fv:.]+\])(?::[0-9]*)?")


class HeadLimits(NamedTuple):
    max_header_bytes: int  # of all header fields together
    max_target_bytes: int
    max_headers: int
    is_tls: bool = False  # a target that is a whole URL may have https, not only http


class RequestLine(NamedTuple):
    method: str
    path: str  # decoded; `*` for OPTIONS *
    raw_path: bytes
    query: bytes
    version: str


class Head(NamedTuple):
    """A request before its body. `length` is None for a body in chunks. Requests may share a cached Head: never change it."""

    line: RequestLine
    fields: Sequence[tuple[bytes, bytes]] = ()
    named: HeaderFields = HeaderFields()  # the same fields by name
    length: int | None = None
    keeps_alive: bool = False
    expects_continue: bool = False
    authority: bytes = b""
    """The host of a target that is a whole URL, which replaces Host (RFC 9112, section 3.2.2); else empty."""


def read_head(head: bytes, limits: HeadLimits) -> Head:
    """Parse a whole head, without the empty line at its end. Raises BadRequest, TargetTooLong or HeadersTooLarge."""
    return (_cached_head if len(head) <= MAX_CACHED_HEAD_BYTES else _read_head)(head, limits)


def _read_head(head: bytes, limits: HeadLimits) -> Head:
    line, _, block = head.partition(CRLF)
    request_line = read_request_line(line, limits)
    if len(block) > limits.max_header_bytes:
        raise _too_large(limits.max_header_bytes)
    if not is_clean(head):
        raise BadRequest(_UNCLEAN)
    lines = block.split(CRLF) if block else []
    if len(lines) > limits.max_headers:
        raise HeadersTooLarge(
            f"the request has {len(lines):,} header fields, expected at most {limits.max_headers:,} (ATTENTION_MAX_HEADERS)"
        )
    fields = [read_field(line) for line in lines]
    named = HeaderFields(fields)
    is_current = request_line.version == "1.1"
    if authority := _AUTHORITY.match(line):
        _check_hosts([authority[1]], is_needed=True)
    _check_hosts(named[b"host"], is_needed=is_current)
    length = _length(named[b"content-length"], named[b"transfer-encoding"], may_be_chunked=is_current)
    expected = named[b"expect"] if is_current else ()  # before HTTP/1.1 there is no 100 Continue
    if any(value.lower() != b"100-continue" for value in expected):
        raise BadRequest("the only supported expectation is 100-continue")
    options = b",".join(named[b"connection"]).lower().split(b",")
    keeps_alive = is_current and b"close" not in [option.strip(BLANKS) for option in options]
    host = authority[1] if authority else b""
    return Head(request_line, fields, named, length, keeps_alive, bool(expected), host)


_cached_head = functools.lru_cache(NUM_CACHED_HEADS)(_read_head)


def check_partial_head(partial_head: bytes, limits: HeadLimits) -> None:
    """Raise the error that is already certain from the start of an incomplete head."""
    if partial_head == b"\r":  # the start of an empty line before the request
        return
    line, end, block = partial_head.partition(CRLF)
    if not is_clean(partial_head.removesuffix(b"\r")):
        raise BadRequest(_UNCLEAN)
    if end:
        read_request_line(line, limits)
    elif _BEGINNING.match(partial_head) is None:
        raise BadRequest("a request must begin with a method, a target and a version")
    elif len(partial_head) > limits.max_target_bytes + _AROUND_TARGET_BYTES:
        raise _too_long(limits.max_target_bytes)
    if len(block) > limits.max_header_bytes + len(END):
        raise _too_large(limits.max_header_bytes)


def take_head(partial_head: bytes, limits: HeadLimits) -> tuple[Head | None, Bytes]:
    """Return the head of a request and the bytes after it; None and all bytes while it is incomplete. Raises as `read_head`."""
    text = partial_head.removeprefix(CRLF)  # RFC 9112, section 2.2: skip one empty line before a request
    end = text.find(END)
    if end >= 0:
        return read_head(text[:end], limits), memoryview(text)[end + len(END) :]
    if text:
        check_partial_head(text, limits)
    return None, partial_head


def glimpse(partial_head: bytes) -> RequestLine:
    """Guess the request line of a refused request, for the error's format and the log line; the method may be `-`."""
    found = _GLIMPSE.match(partial_head.removeprefix(CRLF))
    method, path = (b"-", b"") if found is None else found.groups(b"")
    return RequestLine(method.decode("ascii"), urllib.parse.unquote(path.decode("ascii")), path, b"", "1.1")


@functools.lru_cache(NUM_CACHED_HEADS)
def read_request_line(line: bytes, limits: HeadLimits) -> RequestLine:
    max_target_bytes = limits.max_target_bytes
    found = _REQUEST_LINE.fullmatch(line)
    # Check the length first: a target that is too long gets that error, whatever it contains.
    if len(line) > max_target_bytes and len(line.partition(b" ")[2].partition(b" ")[0]) > max_target_bytes:
        raise _too_long(max_target_bytes)
    if found is None:
        raise BadRequest("a request line must be a method, a target of visible ASCII and HTTP/1.1 or HTTP/1.0")
    method, target = found[1].decode("ascii"), found[2]
    if not target.startswith(b"/") and (method, target) != ("OPTIONS", b"*"):  # RFC 9112, section 3.2
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None or (absolute[1] and not limits.is_tls):
            raise BadRequest("a request target must be a path, an http URL (with TLS also https), or * for OPTIONS")
        rest = absolute[2] or b"/"
        target = rest if rest.startswith(b"/") else b"/" + rest
    if b"#" in target:
        raise BadRequest("a request target must not have a fragment")
    raw_path, _, query = target.partition(b"?")
    path = raw_path.decode("ascii")
    path = urllib.parse.unquote(path) if "%" in path else path
    return RequestLine(method, path, raw_path, query, f"1.{found[3].decode('ascii')}")


@functools.lru_cache(NUM_CACHED_HEADS)
def read_field(line: bytes) -> tuple[bytes, bytes]:
    """Parse one header or trailer field. A name with a space is refused: it is a folded line or a smuggling attempt."""
    name, colon, value = line.partition(b":")
    if not colon or not name or name.translate(None, TOKEN):
        raise BadRequest("a header field must be a name, a colon and a value on one line")
    return name.lower(), value.strip(BLANKS)


def _check_hosts(hosts: Sequence[bytes], *, is_needed: bool) -> None:
    if len(hosts) > 1 or (is_needed and not hosts):
        raise BadRequest("a request must have exactly one Host")
    if hosts and _HOST_VALUE.fullmatch(hosts[0]) is None:
        raise BadRequest("Host must be a name or an address, with an optional port")


def _length(lengths: Sequence[bytes], codings: Sequence[bytes], *, may_be_chunked: bool) -> int | None:
    if codings:
        if lengths or not may_be_chunked or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise BadRequest("Transfer-Encoding must be chunked, once, without Content-Length and in HTTP/1.1")
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > MAX_LENGTH_DIGITS:
        raise BadRequest(f"Content-Length must be one number of bytes with at most {MAX_LENGTH_DIGITS} digits")
    return int(lengths[0])


def is_clean(text: bytes) -> bool:
    """Return whether the text has no control characters except tabs and the CR LF between lines."""
    return len(text.translate(None, _IN_LINE)) == len(CRLF) * text.count(CRLF)


def _too_long(max_target_bytes: int) -> TargetTooLong:
    return TargetTooLong(
        f"the request target has more than {max_target_bytes:,} bytes (ATTENTION_MAX_TARGET_BYTES); put data into the body"
    )


def _too_large(max_header_bytes: int) -> HeadersTooLarge:
    return HeadersTooLarge(
        f"the header fields of the request have more than {max_header_bytes:,} bytes together (ATTENTION_MAX_HEADER_BYTES)"
    )


# A body of any size may have this many bytes of framing, which is enough for about 3,000 chunks of one byte.
FREE_FRAMING_BYTES = 16 * 1024
MAX_CHUNK_LINE_BYTES = 1024
# Lines parsed in one loop tick, which takes 0.25 ms; a chunk has one or two lines.
LINES_A_TICK = 250

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")


@dataclasses.dataclass(slots=True)
class CountedBody:
    """A body of which `left` bytes are still to come."""

    left: int

    @property
    def is_complete(self) -> bool:
        return not self.left

    def take(self, data: Bytes) -> tuple[Bytes, Bytes]:
        """Return the body's part of `data`, and the rest: bytes of the next request."""
        piece = data if len(data) <= self.left else data[: self.left]
        self.left -= len(piece)
        return piece, data[len(piece) :]


class ChunkedBody:
    """A body in chunks (RFC 9112, section 7.1), up to a chunk of size 0 and a trailer, which is parsed and discarded."""

    left = None  # unknown

    def __init__(self) -> None:
        self.is_complete = False
        self._chunk_left = 0
        self._has_line_end = True  # after the data of the last chunk
        self._in_trailer = False
        self._partial_line = b""
        self._num_data_bytes = 0
        self._num_framing_bytes = 0

    def take(self, data: Bytes) -> tuple[bytes, bytes]:
        """Return the body's part of `data`, and the rest: of the next request, or for another loop tick. Raises BadRequest."""
        data, self._partial_line = self._partial_line + data, b""
        pieces: list[bytes] = []
        at = lines = 0
        while at < len(data) and not self.is_complete and lines < LINES_A_TICK:
            if self._chunk_left:
                pieces.append(data[at : at + self._chunk_left])
                at = self._end_of_data(data, at, len(pieces[-1]))
                continue
            end = self._line_end(data, at)
            if end < 0:
                self._partial_line, at = data[at:], len(data)
                break
            self._line(data[at:end])
            self._num_framing_bytes += end + len(CRLF) - at
            if self._num_framing_bytes > FREE_FRAMING_BYTES + self._num_data_bytes // 2:
                raise BadRequest(
                    "a chunked body may spend at most half as many bytes on chunk sizes as on data; send larger chunks"
                )
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
        end = data.find(CRLF, at, at + MAX_CHUNK_LINE_BYTES)
        if end < 0 and (len(data) - at >= MAX_CHUNK_LINE_BYTES or b"\n" in data[at:] or b"\r" in data[at:-1]):
            raise BadRequest(
                f"a line of a chunked body must end with CR LF and have fewer than {MAX_CHUNK_LINE_BYTES:,} bytes"
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
