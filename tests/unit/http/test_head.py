"""Request heads: what is parsed, and that two other parsers agree on every head that is accepted."""

import contextlib

import h11
import httptools
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from service.errors import BadRequest, HeadersTooLarge, Rejected, ServiceError, TargetTooLong
from service.http.connection import request_scope
from service.http.request_parser import (
    END,
    Bytes,
    HeadLimits,
    check_partial_head,
    fields_of,
    glimpse,
    read_head,
    take_head,
)

LIMITS = HeadLimits(max_header_bytes=1000, max_target_bytes=100, max_headers=20)


def head(*fields: bytes, line: bytes = b"POST /a/b?c=d HTTP/1.1", host: bytes = b"Host: x") -> bytes:
    return b"\r\n".join([line, *[host] * bool(host), *fields])


def test_a_head_gives_its_line_its_fields_and_the_framing_of_the_body():
    found = read_head(head(b"Content-Type:text/plain", b"X-Odd: \t a  b\xff \t", b"Content-Length: 007"), LIMITS)
    assert tuple(found.line) == ("POST", "/a/b", b"/a/b", b"c=d", "1.1")
    assert found.fields == [
        (b"host", b"x"), (b"content-type", b"text/plain"), (b"x-odd", b"a  b\xff"), (b"content-length", b"007")
    ]  # fmt: skip
    assert (found.length, found.keeps_alive, found.expects_continue) == (7, True, False)


def test_a_repeated_head_is_cached_and_immutable_for_applications():
    raw = head(b"X-Twice: a", b"x-twice: b", b"Content-Length: 2")
    found = read_head(raw, LIMITS)
    assert read_head(bytes(bytearray(raw)), LIMITS) is found
    first, second = (request_scope(found) for _ in range(2))
    first["headers"].append((b"x-late", b"c"))
    assert second["headers"] == found.fields
    assert not fields_of(first)[b"x-late"]
    as_any_server_says = {"headers": found.fields}
    for name in (b"x-twice", b"content-length", b"host", b"absent"):
        assert fields_of(second)[name] == fields_of(as_any_server_says)[name]
    with pytest.raises(HeadersTooLarge):  # a head cached under other limits is not used for these
        read_head(raw, LIMITS._replace(max_headers=1))


@pytest.mark.parametrize(
    ("fields", "length"),
    [([], 0), ([b"Transfer-Encoding: Chunked"], None), ([b"content-LENGTH: 9223372036854775808"], 2**63)],
)
def test_a_body_is_counted_or_chunked(fields, length):
    assert read_head(head(*fields), LIMITS).length == length


@pytest.mark.parametrize(
    ("line", "path", "query"),
    [
        (b"GET / HTTP/1.1", "/", b""),
        (b"GET //a HTTP/1.1", "//a", b""),
        (b"GET /%41%2F%00%ff?x?y HTTP/1.1", "/A/\0\ufffd", b"x?y"),
        (b"GET http://a.b:80/c?d HTTP/1.1", "/c", b"d"),
        (b"GET HTTP://[::1]:80 HTTP/1.1", "/", b""),
        (b"GET http://a?b HTTP/1.1", "/", b"b"),
        (b"OPTIONS * HTTP/1.1", "*", b""),
        (b"CONNECT /a HTTP/1.1", "/a", b""),
        (b"FOO /a HTTP/1.0", "/a", b""),
    ],
)
def test_a_target_is_a_path_or_contains_one(line, path, query):
    found = read_head(head(line=line), LIMITS).line
    assert (found.path, found.query) == (path, query)


@pytest.mark.parametrize("authority", [b"evil.example", b"EVIL:80", b"[::2]:8000", b"a:"])
@pytest.mark.parametrize("host", [b"Host: x", b"Host:", b"HOST: evil.example"])
@pytest.mark.parametrize("rest", [b"", b"/v1/layers", b"?a"])
def test_D9_a_whole_url_as_the_target_overrides_the_host_header(authority, host, rest):
    raw = head(b"A: b", line=b"GET http://" + authority + rest + b" HTTP/1.1", host=host)
    found = read_head(raw, LIMITS)
    scope = request_scope(found)
    assert fields_of(scope)[b"host"] == (authority,)
    assert sorted(scope["headers"]) == [(b"a", b"b"), (b"host", authority)]


def test_a_whole_url_names_one_readable_host_and_needs_host_beside_it():
    for authority in (b"a:b:c", b"a:80:80", b"[::1", b"a[b]"):
        with pytest.raises(BadRequest):
            read_head(head(line=b"GET http://" + authority + b"/ HTTP/1.1"), LIMITS)
    with pytest.raises(BadRequest):
        read_head(b"GET http://a/ HTTP/1.1\r\nA: b", LIMITS)
    assert read_head(b"GET http://a/ HTTP/1.0\r\nA: b", LIMITS).authority == b"a"
    for target in (b"/http://a/", b"/", b"/a?http://a/"):
        assert read_head(head(line=b"GET " + target + b" HTTP/1.1"), LIMITS).authority == b""


@pytest.mark.parametrize("host", [b"", b"a.b:80", b"[::1]:8000", b"127.0.0.1", b"a_b", b"a:"])
def test_H28_one_host_of_any_name_is_enough(host):
    assert read_head(head(host=b"Host: " + host), LIMITS)


def test_before_http_1_1_no_host_is_needed_and_nothing_is_kept_or_expected():
    found = read_head(head(b"Expect: nonsense", b"Connection: keep-alive", line=b"GET / HTTP/1.0", host=b""), LIMITS)
    assert (found.keeps_alive, found.expects_continue) == (False, False)


def test_limits_of_a_head_are_inclusive():
    target = b"/" + b"a" * 99
    field = b"A: " + b"b" * (1000 - len(b"Host: x\r\nA: "))
    assert read_head(head(field, line=b"GET " + target + b" HTTP/1.1"), LIMITS)
    assert read_head(head(*[b"A: b"] * 19), LIMITS)
    with pytest.raises(TargetTooLong):
        read_head(head(line=b"GET " + target + b"a HTTP/1.1"), LIMITS)
    with pytest.raises(HeadersTooLarge):
        read_head(head(field + b"b"), LIMITS)
    with pytest.raises(HeadersTooLarge):
        read_head(head(*[b"A: b"] * 20), LIMITS)


@pytest.mark.parametrize("target", [b"HTTPS://a:80/b", b"https://a:80?b", b"https://a:80"])
def test_a_whole_url_has_https_only_over_tls(target):
    raw = head(line=b"GET " + target + b" HTTP/1.1")
    over_tls = LIMITS._replace(is_tls=True)
    assert read_head(raw, over_tls).authority == b"a:80"
    with pytest.raises(BadRequest):
        read_head(raw, LIMITS)
    assert read_head(raw.replace(b"s://", b"://").replace(b"S://", b"://"), over_tls).authority == b"a:80"
    for scheme in (b"ftp", b"", b"httpss"):
        with pytest.raises(BadRequest):
            read_head(head(line=b"GET " + scheme + b"://a/b HTTP/1.1"), over_tls)


def test_a_line_of_the_largest_size_is_never_refused_while_it_arrives():
    whole = head(line=b"M" * 32 + b" /" + b"a" * 99 + b" HTTP/1.1")
    assert read_head(whole, LIMITS)
    for length in range(1, len(whole)):
        check_partial_head(whole[:length], LIMITS)
    with pytest.raises(BadRequest):
        read_head(b"M" + whole, LIMITS)


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 1000])
@pytest.mark.parametrize("before", [b"", b"\r\n", b"\r\n\r\n", b"\r\n" * 20, b"\n", b"\r\n\n", b"\r\r\n", b"\r\n "])
def test_one_empty_line_before_a_request_is_skipped_however_it_is_split(before, num_bytes):
    raw, partial_head, found = before + head() + END, b"", None
    is_refused = False
    for at in range(0, len(raw), num_bytes):
        assert found is None
        try:
            found, rest = take_head(partial_head + raw[at : at + num_bytes], LIMITS)
        except BadRequest:
            is_refused = True
            break
        partial_head = bytes(rest)
    assert is_refused == (before not in (b"", b"\r\n"))
    assert is_refused or (found, partial_head) == (read_head(head(), LIMITS), b"")


@pytest.mark.parametrize(
    ("partial_head", "seen"),
    [
        (b"GET /v2/x?y z", ("GET", "/v2/x")),
        (b"FOO /a%20b HTTP/9.9", ("FOO", "/a b")),
        (b"GET http://x:80/v2/y HTTP", ("GET", "/v2/y")),
        (b"GET \0", ("GET", "")),
        (b"GET https://x:80/v2/y HTTP", ("GET", "/v2/y")),
        (b"\r\nGET /a b", ("GET", "/a")),
        (b"\x16\x03", ("-", "")),
        (b"GET", ("-", "")),
    ],
)
def test_a_refused_request_has_its_method_and_path_where_readable(partial_head, seen):
    assert glimpse(partial_head)[:2] == seen


# Two other parsers as oracles, over valid, nearly valid and malformed heads.

BYTES = st.integers(0, 255).map(lambda byte: bytes([byte]))
RIGHT_LINES = [
    b"GET / HTTP/1.1",
    b"POST /a?b HTTP/1.1",
    b"OPTIONS * HTTP/1.1",
    b"PUT http://x/y HTTP/1.1",
    b"GET / HTTP/1.0",
]
WRONG_LINES = [
    b"GET /",
    b"GET  / HTTP/1.1",
    b"GET / HTTP/1.1 ",
    b"GET / HTTP/2.0",
    b"GET /\t HTTP/1.1",
    b"GET /\xc3 HTTP/1.1",
]
RIGHT_FIELDS = st.sampled_from(
    [b"Content-Length: 5", b"content-length:\t0", b"Transfer-Encoding: Chunked", b"Connection: a,close", b"X-Y:a\tb \t",
     b"Expect: 100-continue", b"A: \xff", b"A:", b"B: c: d"]
)  # fmt: skip
NAMES = st.sampled_from([b"Host", b"Content-Length", b"Transfer-Encoding", b"Transfer-Encoding\t", b"A", b"", b" A"])
VALUES = st.sampled_from(
    [b"x", b"+5", b"5,5", b"5 5", b"gzip, chunked", b"chunked, chunked", b"xchunked", b"", b"a\0b"]
)
SEPARATORS = st.sampled_from([b": ", b":", b" : ", b"", b":\x0b"])
WRONG_FIELDS = st.tuples(NAMES, SEPARATORS, VALUES).map(b"".join)
WRONG_ENDS = st.sampled_from([b"\n", b"\r", b"\r\n ", b"\r\n\t", b"\r\r\n"])


@st.composite
def heads(draw):
    """Draw heads with at most one error, besides conflicts between valid fields; in some, one byte is changed."""
    wrong = draw(st.sampled_from(["nothing"] * 3 + ["line", "field", "end", "byte", "byte"]))
    line = draw(st.sampled_from(WRONG_LINES if wrong == "line" else RIGHT_LINES))
    fields = [b"Host: x", *draw(st.lists(RIGHT_FIELDS, max_size=2, unique=True))]
    if wrong == "field":
        fields.insert(draw(st.integers(0, len(fields))), draw(WRONG_FIELDS))
    ends = [b"\r\n"] * len(fields)
    if wrong == "end":
        ends[draw(st.integers(0, len(ends) - 1))] = draw(WRONG_ENDS)
    raw = line + b"".join(end + field for field, end in zip(fields, ends, strict=True))
    if wrong == "byte":
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(BYTES) + raw[at + draw(st.integers(0, 1)) :]
    return raw


@given(heads())
def test_h11_reads_every_accepted_head_in_the_same_way(raw):
    """h11 is stricter about some targets and coding names, but never about where a body ends."""
    try:
        ours = read_head(raw.partition(END)[0], LIMITS)
    except ServiceError:
        return
    theirs = h11.Connection(h11.SERVER)
    theirs.receive_data(raw.partition(END)[0] + END)
    request = theirs.next_event()
    assert isinstance(request, h11.Request)
    assert (request.method.decode(), request.http_version.decode()) == (ours.line.method, ours.line.version)
    assert [(bytes(n), bytes(v)) for n, v in request.headers if n != b"content-length"] == [
        (name, value.lower() if name == b"transfer-encoding" else value)
        for name, value in ours.fields
        if name != b"content-length"
    ]
    theirs.receive_data(b"")
    event = theirs.next_event() if ours.length == 0 else None
    assert ours.length != 0 or isinstance(event, h11.EndOfMessage)


class Noted:
    def __init__(self) -> None:
        self.url, self.fields, self.is_complete, self.body = b"", list[tuple[bytes, bytes]](), False, b""

    def on_url(self, url):
        self.url += url

    def on_header(self, name, value):
        self.fields.append((name.lower(), value.rstrip(b" \t")))

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        self.is_complete = True


@given(heads())
def test_llhttp_reads_every_accepted_head_in_the_same_way(raw):
    try:
        ours = read_head(raw.partition(END)[0], LIMITS)
    except ServiceError:
        return
    noted = Noted()
    parser = httptools.HttpRequestParser(noted)
    try:
        parser.feed_data(raw.partition(END)[0] + END)
    except httptools.HttpParserInvalidMethodError:
        assume(False)  # llhttp knows a fixed list of methods, and treats CONNECT differently
    assert (parser.get_method().decode(), parser.get_http_version()) == (ours.line.method, ours.line.version)
    assert noted.fields == ours.fields
    assert noted.is_complete == (ours.length == 0)
    parser.feed_data(b"5\r\nhello\r\n0\r\n\r\n" if ours.length is None else b"x" * min(ours.length, 5))
    assert noted.is_complete == (ours.length is None or ours.length <= 5)
    assert len(noted.body) == (5 if ours.length is None else min(ours.length, 5))


@given(heads())
def test_a_valid_head_is_never_refused_while_it_arrives(raw):
    whole = raw.partition(END)[0]
    try:
        read_head(whole, LIMITS)
    except ServiceError:
        return
    for length in range(1, len(whole) + len(END)):
        check_partial_head((whole + END)[:length], LIMITS)


def found_in(pieces: list[bytes]) -> tuple[object, bytes] | None:
    """What `take_head` returns once the head is complete; None if it is refused before."""
    found: object = None
    rest: Bytes = b""
    for piece in pieces:
        try:
            found, rest = take_head(bytes(rest) + piece, LIMITS)
        except ServiceError:
            return None
        assert found is None or piece is pieces[-1]
    return found, bytes(rest)


@given(st.sampled_from([b"", b"\r\n", b"\r\n\r\n"]), heads(), st.integers(1, 40))
def test_how_a_head_is_split_never_decides_whether_it_is_accepted(before, raw, num_bytes):
    whole = before + (raw + END).partition(END)[0] + END
    assert found_in([whole[at : at + num_bytes] for at in range(0, len(whole), num_bytes)]) == found_in([whole])


@given(st.binary(max_size=300))
def test_any_input_raises_only_service_errors(raw):
    for read in (read_head, check_partial_head):
        with contextlib.suppress(Rejected):
            read(raw, LIMITS)
    glimpse(raw)
