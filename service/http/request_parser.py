"""Head: parses the request line and header fields strictly (RFC 9112); HeaderFields finds fields by name.

Must not know: sockets, ASGI, time.
Invariants: A head that two parsers could read in two ways is refused, so that a proxy in front always sees the same requests as
this service. Only CR LF ends a line. A head is refused as soon as the part that has arrived is wrong.

HeaderFields: header fields of one request by name, and a cache of what readers parse from them.
Invariants: Names are lower-case bytes. Blanks around a value are removed (RFC 9110, section 5.5). No value is trusted.
Clients repeat their heads, and `read_head` caches them. So a value that depends only on the fields is cached
as well.
"""

from __future__ import annotations

import functools
import re
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from service.errors import BadRequest, HeadersTooLarge, TargetTooLong
from service.http.connection_limits import ConnectionLimits

T = TypeVar("T")
Options = TypeVarTuple("Options")

BLANKS = b" \t"


class HeaderFields(dict[bytes, tuple[bytes, ...]]):
    """All values of a name, in order; an empty tuple for a missing name. Requests may share an instance: never change it."""

    __slots__ = ("_made",)

    def __init__(self, fields: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__()
        self._made: dict[object, Any] = {}
        for name, value in fields:
            self[name] = (*self[name], value.strip(BLANKS))

    def __missing__(self, name: bytes) -> tuple[bytes, ...]:
        return ()

    def make(self, reader: Callable[[HeaderFields, *Options], T], *options: *Options) -> T:
        """Return the cached result of `reader`, which uses only these fields and `options`. Its errors are raised every time."""
        key = (reader, options)
        try:
            found: T = self._made[key]
        except KeyError:
            found = self._made[key] = reader(self, *options)
        return found


CRLF = b"\r\n"
END = b"\r\n\r\n"
# 19 digits hold every length up to 2^63; no machine holds a longer body.
MAX_LENGTH_DIGITS = 19
# Clients repeat most of their heads, and most lines of the others; parsing costs many times as much as a cache lookup.
NUM_REMEMBERED = 256
MAX_REMEMBERED_BYTES = 1024
_MAX_METHOD_BYTES = 32
# A method, two spaces and "HTTP/1.1" around the target.
_AROUND_TARGET_BYTES = _MAX_METHOD_BYTES + 10

_TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# Bytes allowed in a line: visible characters, spaces, tabs and the bytes above ASCII.
_IN_LINE = bytes([0x09, *range(0x20, 0x7F), *range(0x80, 0x100)])
_METHOD = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32}"
_BEGUN = re.compile(_METHOD + rb"(?: |\Z)")
_REQUEST_LINE = re.compile(rb"(" + _METHOD + rb") ([\x21-\x7e]+) HTTP/1\.([01])")
_GLIMPSE = re.compile(rb"(" + _METHOD + rb") (?:(?i:http)://[^/?# ]{0,255})?(/[\x21-\x3e\x40-\x7e]{0,255})?")
_AUTHORITY = re.compile(rb"[^ ]+ (?i:http)://([^/? ]+)")
_ABSOLUTE = re.compile(rb"(?i:http)://[A-Za-z0-9.\-_~:\[\]]+(/.*|\?.*)?")
_HOST = re.compile(rb"(?:[A-Za-z0-9.\-_~!$&'()*+,;=%]*|\[[0-9A-Fa-fv:.]+\])(?::[0-9]*)?")


class RequestLine(NamedTuple):
    method: str
    path: str
    """Decoded; `*` for OPTIONS *."""
    raw_path: bytes
    query: bytes
    version: str


class Head(NamedTuple):
    """A request before its body. `length` is None for a body in chunks. Requests may share a cached Head: never change it."""

    line: RequestLine
    fields: list[tuple[bytes, bytes]]
    named: HeaderFields
    """The same fields by name."""
    length: int | None
    keeps_alive: bool
    expects_continue: bool
    authority: bytes
    """The host of a target that is a whole URL; else empty."""


def read_head(head: bytes, limits: ConnectionLimits) -> Head:
    """Parse a whole head, without the empty line at its end. Raises BadRequest, TargetTooLong or HeadersTooLarge."""
    read = _remembered if len(head) <= MAX_REMEMBERED_BYTES else _read_head
    return read(head, limits.max_target_bytes, limits.max_header_bytes, limits.max_headers)


def _read_head(head: bytes, max_target_bytes: int, max_header_bytes: int, max_headers: int) -> Head:
    line, _, block = head.partition(CRLF)
    request_line = read_request_line(line, max_target_bytes)
    if len(block) > max_header_bytes:
        raise _too_large(max_header_bytes)
    if not is_clean(head):
        raise _unclean()
    lines = block.split(CRLF) if block else []
    if len(lines) > max_headers:
        raise HeadersTooLarge(f"a request may have at most {max_headers:,} header fields")
    return _framed(request_line, [read_field(line) for line in lines], _authority(line))


_remembered = functools.lru_cache(NUM_REMEMBERED)(_read_head)


def check_begun(begun: bytes, limits: ConnectionLimits) -> None:
    """Raise the error that is already certain from the start of an incomplete head."""
    if begun == b"\r":  # the start of an empty line before the request
        return
    line, end, block = begun.partition(CRLF)
    if not is_clean(begun.removesuffix(b"\r")):
        raise _unclean()
    if end:
        read_request_line(line, limits.max_target_bytes)
    elif _BEGUN.match(begun) is None:
        raise BadRequest("a request must begin with a method, a target and a version")
    elif len(begun) > limits.max_target_bytes + _AROUND_TARGET_BYTES:
        raise _too_long(limits.max_target_bytes)
    if len(block) > limits.max_header_bytes + len(END):
        raise _too_large(limits.max_header_bytes)


def glimpse(begun: bytes) -> RequestLine:
    """Guess the request line of a refused request, for the error's format and the log line; the method may be `-`."""
    found = _GLIMPSE.match(begun)
    method, path = (b"-", b"") if found is None else found.groups(b"")
    return RequestLine(method.decode("ascii"), urllib.parse.unquote(path.decode("ascii")), path, b"", "1.1")


@functools.lru_cache(NUM_REMEMBERED)
def read_request_line(line: bytes, max_target_bytes: int) -> RequestLine:
    found = _REQUEST_LINE.fullmatch(line)
    # Check the length first: a target that is too long gets that error, whatever it contains.
    if len(line) > max_target_bytes and len(line.partition(b" ")[2].partition(b" ")[0]) > max_target_bytes:
        raise _too_long(max_target_bytes)
    if found is None:
        raise BadRequest("a request line must be a method, a target of visible ASCII and HTTP/1.1 or HTTP/1.0")
    method, target = found[1].decode("ascii"), found[2]
    if not target.startswith(b"/"):
        target = _other_target(method, target)
    if b"#" in target:
        raise BadRequest("a request target must not have a fragment")
    raw_path, _, query = target.partition(b"?")
    path = raw_path.decode("ascii")
    return RequestLine(
        method,
        urllib.parse.unquote(path) if "%" in path else path,
        raw_path,
        query,
        "1.1" if found[3] == b"1" else "1.0",
    )


def _other_target(method: str, target: bytes) -> bytes:
    """Return the path of a target that is a whole http URL, or `*` for OPTIONS (RFC 9112, section 3.2)."""
    if target == b"*" and method == "OPTIONS":
        return target
    found = _ABSOLUTE.fullmatch(target)
    if found is None:
        raise BadRequest("a request target must be a path, an http URL, or * for OPTIONS")
    rest: bytes = found[1] or b"/"
    return rest if rest.startswith(b"/") else b"/" + rest


@functools.lru_cache(NUM_REMEMBERED)
def read_field(line: bytes) -> tuple[bytes, bytes]:
    """Parse one header or trailer field. A name with a space is refused: it is a folded line or a smuggling attempt."""
    name, colon, value = line.partition(b":")
    if not colon or not name or name.translate(None, _TOKEN):
        raise BadRequest("a header field must be a name, a colon and a value on one line")
    return name.lower(), value.strip(BLANKS)


def _authority(line: bytes) -> bytes:
    """Return the host of a target that is a whole URL, which overrides Host (RFC 9112, section 3.2.2); else empty."""
    found = _AUTHORITY.match(line)
    if found is None:
        return b""
    _check_hosts([found[1]], is_needed=True)
    return found[1]


def _framed(line: RequestLine, fields: list[tuple[bytes, bytes]], authority: bytes) -> Head:
    """Decide where the body ends and whether the connection stays open after the response."""
    named = HeaderFields(fields)
    is_current = line.version == "1.1"
    _check_hosts(named[b"host"], is_needed=is_current)
    length = _length(named[b"content-length"], named[b"transfer-encoding"], may_be_chunked=is_current)
    # Before HTTP/1.1 there is no 100 Continue, so an expectation is ignored.
    expects = is_current and _expects_continue(named[b"expect"])
    keeps_alive = is_current and not _says_close(named[b"connection"])
    return Head(line, fields, named, length, keeps_alive, expects, authority)


def _check_hosts(hosts: Sequence[bytes], *, is_needed: bool) -> None:
    if len(hosts) > 1 or (is_needed and not hosts):
        raise BadRequest("a request must have exactly one Host")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise BadRequest("Host must be a name or an address, with an optional port")


def _expects_continue(expected: Sequence[bytes]) -> bool:
    for value in expected:
        if value.lower() != b"100-continue":
            raise BadRequest("the only supported expectation is 100-continue")
    return bool(expected)


def _says_close(options: Sequence[bytes]) -> bool:
    text = b",".join(options).lower()
    return b"close" in text and b"close" in [option.strip(BLANKS) for option in text.split(b",")]


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


def _unclean() -> BadRequest:
    return BadRequest("the lines of a request must end with CR LF and have no control characters")


def _too_long(max_target_bytes: int) -> TargetTooLong:
    return TargetTooLong(f"a request target may have at most {max_target_bytes:,} bytes")


def _too_large(max_header_bytes: int) -> HeadersTooLarge:
    return HeadersTooLarge(f"the header fields of a request may have at most {max_header_bytes:,} bytes together")
