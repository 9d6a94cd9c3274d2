"""Raw bytes that are no request, or could be read as another one: what a client sends, and the code of its one answer."""

ATTEND = b"/v1/layers/small/attend"
HOST = b"Host: x\r\n"
JSON = b"Content-Type: application/json\r\n"


def post(*fields: bytes, body: bytes = b"", version: bytes = b"HTTP/1.1", target: bytes = ATTEND) -> bytes:
    return b"".join(
        [b"POST ", target, b" ", version, b"\r\n", HOST, JSON, *(f + b"\r\n" for f in fields), b"\r\n", body]
    )


def get(line: bytes = b"GET /v1/layers HTTP/1.1", *fields: bytes, host: bytes = HOST) -> bytes:
    return b"".join([line, b"\r\n", host, *(field + b"\r\n" for field in fields), b"\r\n"])


def chunked(body: bytes, *fields: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked", *fields, body=body)


SMUGGLED = b"GET /healthz HTTP/1.1\r\nHost: smuggled\r\n\r\n"

LENGTHS = {
    "minus": b"-1",
    "plus": b"+5",
    "hex": b"0x10",
    "list": b"5,5",
    "list-of-two": b"5, 6",
    "empty": b"",
    "inner-space": b"1 0",
    "float": b"2.0",
    "exponent": b"1e1",
    "underscore": b"1_0",
    "unicode": "٢".encode(),
    "letters": b"two",
    "semicolon": b"2;",
    "quoted": b'"2"',
    "digits-40": b"9" * 40,
    "zeros": b"0" * 30 + b"2",
}

CODINGS = {
    "gzip": b"gzip",
    "gzip-chunked": b"gzip, chunked",
    "chunked-identity": b"chunked, identity",
    "twice": b"chunked, chunked",
    "identity": b"identity",
    "quoted": b'"chunked"',
    "x": b"xchunked",
    "parameter": b"chunked;q=1",
    "empty": b"",
    "comma": b",chunked",
    "vertical-tab": b"\x0bchunked",
    "newline": b"\r\n chunked",
}

CHUNKS = {
    "no-size": b"\r\n{}\r\n0\r\n\r\n",
    "minus": b"-2\r\n{}\r\n0\r\n\r\n",
    "0x": b"0x2\r\n{}\r\n0\r\n\r\n",
    "space": b" 2\r\n{}\r\n0\r\n\r\n",
    "space-after": b"2 \r\n{}\r\n0\r\n\r\n",
    "letters": b"zz\r\n{}\r\n0\r\n\r\n",
    "too-long": b"2\r\n{}}\r\n0\r\n\r\n",
    "17-digits": b"0" * 16 + b"2\r\n{}\r\n0\r\n\r\n",
    "bare-LF": b"2\n{}\n0\n\n",
    "bare-LF-after-data": b"2\r\n{}\n0\r\n\r\n",
    "bare-LF-in-extension": b"2;\n\r\n{}\r\n0\r\n\r\n",
    "CR-in-size": b"2\rx\r\n{}\r\n0\r\n\r\n",
    "NUL-in-extension": b"2;\0\r\n{}\r\n0\r\n\r\n",
    "long-extension": b"2;" + b"x" * 2000,
    "trailer-no-name": b"2\r\n{}\r\n0\r\n: x\r\n\r\n",
    "trailer-folded": b"0\r\nA: b\r\n c\r\n\r\n",
    "trailer-NUL": b"0\r\nA: \0\r\n\r\n",
    "trailers-endless": b"0\r\n" + b"A: b\r\n" * 4000,
    "tiny": b"1\r\n \r\n" * 20_000,
}

BAD_REQUESTS = {
    "H28-no-host": b"GET /v1/layers HTTP/1.1\r\n\r\n",
    "H28-two-hosts": get(host=b"Host: a\r\nHost: a\r\n"),
    "H28-host-with-path": get(host=b"Host: a/b\r\n"),
    "H28-host-with-user": get(host=b"Host: u@a\r\n"),
    "H28-host-list": get(host=b"Host: a, b\r\n"),
    "H28-two-hosts-on-1.0": get(b"GET /v1/layers HTTP/1.0", host=b"Host: a\r\nHost: b\r\n"),
    "H28-http-0.9": b"GET /v1/layers\r\n",
    "H28-http-9.9": get(b"GET /v1/layers HTTP/9.9"),
    "H28-http-1.2": get(b"GET /v1/layers HTTP/1.2"),
    "H28-http-2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "H28-lower-case": get(b"GET /v1/layers http/1.1"),
    "H28-long-version": get(b"GET /v1/layers HTTP/1.10"),
    **{
        f"H4-length-{name}": post(b"Content-Length: " + length, body=b"{}" + SMUGGLED)
        for name, length in LENGTHS.items()
    },
    "H4-two-lengths": post(b"Content-Length: 2", b"Content-Length: 5", body=b"{}" + SMUGGLED),
    "H4-two-equal-lengths": post(b"Content-Length: 2", b"Content-Length: 2", body=b"{}"),
    "H4-two-spellings": post(b"Content-Length: 2", b"content-length: 2", body=b"{}"),
    "TE-CL": chunked(b"2\r\n{}\r\n0\r\n\r\n" + SMUGGLED, b"Content-Length: 2"),
    "CL-TE": post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "CL-TE-zero": post(b"Content-Length: 0", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    **{
        f"TE-{name}": post(b"Transfer-Encoding: " + coding, body=b"0\r\n\r\n" + SMUGGLED)
        for name, coding in CODINGS.items()
    },
    "TE-two-fields": chunked(b"0\r\n\r\n" + SMUGGLED, b"Transfer-Encoding: chunked"),
    "TE-two-fields-differ": chunked(b"0\r\n\r\n" + SMUGGLED, b"Transfer-Encoding: x"),
    "TE-space-before-colon": post(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "TE-on-1.0": post(b"Transfer-Encoding: chunked", version=b"HTTP/1.0", body=b"0\r\n\r\n" + SMUGGLED),
    "line-bare-LF": b"GET /v1/layers HTTP/1.1\nHost: x\n\n",
    "line-bare-LF-in-fields": b"GET /v1/layers HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    "line-bare-LF-at-the-end": b"GET /v1/layers HTTP/1.1\r\nHost: x\r\n\n",
    "line-bare-CR": b"GET /v1/layers HTTP/1.1\r\nHost: x\r\nA: b\rC: d\r\n\r\n",
    "line-bare-CR-after-the-first": b"GET /v1/layers HTTP/1.1\rHost: x\r\n\r\n",
    "line-two-empty-before": b"\r\n\r\n" + get(),
    "line-folded": get(b"GET /v1/layers HTTP/1.1", b"A: b", b" c: d"),
    "line-folded-tab": get(b"GET /v1/layers HTTP/1.1", b"A: b", b"\tc"),
    "line-folded-first": get(host=b" Host: x\r\nHost: x\r\n"),
    "field-space-before-colon": get(b"GET /v1/layers HTTP/1.1", b"A : b"),
    "field-no-colon": get(b"GET /v1/layers HTTP/1.1", b"nonsense"),
    "field-no-name": get(b"GET /v1/layers HTTP/1.1", b": b"),
    "field-NUL-in-name": get(b"GET /v1/layers HTTP/1.1", b"A\0: b"),
    "field-NUL-in-value": get(b"GET /v1/layers HTTP/1.1", b"A: b\0c"),
    "field-DEL-in-value": get(b"GET /v1/layers HTTP/1.1", b"A: b\x7fc"),
    "field-escape-in-value": get(b"GET /v1/layers HTTP/1.1", b"A: \x1b[31m"),
    "field-name-beyond-ascii": get(b"GET /v1/layers HTTP/1.1", "É: b".encode()),
    "field-bracket-in-name": get(b"GET /v1/layers HTTP/1.1", b"A(b): c"),
    "target-empty": get(b"GET  HTTP/1.1"),
    "target-two-spaces": get(b"GET  /v1/layers HTTP/1.1"),
    "target-space-inside": get(b"GET /v1/layers x HTTP/1.1"),
    "target-tab": get(b"GET\t/v1/layers\tHTTP/1.1"),
    "target-NUL": get(b"GET /v1/\0 HTTP/1.1"),
    "target-beyond-ascii": get("GET /v1/é HTTP/1.1".encode()),
    "target-fragment": get(b"GET /v1/layers#x HTTP/1.1"),
    "target-relative": get(b"GET v1/layers HTTP/1.1"),
    "target-star": get(b"GET * HTTP/1.1"),
    "target-other-scheme": get(b"GET ftp://x/v1/layers HTTP/1.1"),
    "target-with-user": get(b"GET http://u:p@x/v1/layers HTTP/1.1"),
    "target-no-authority": get(b"GET http:///v1/layers HTTP/1.1"),
    "target-authority": get(b"CONNECT example.com:443 HTTP/1.1"),
    "method-empty": get(b" /v1/layers HTTP/1.1"),
    "method-strange": get(b"GE(T /v1/layers HTTP/1.1"),
    "method-long": get(b"A" * 33 + b" /v1/layers HTTP/1.1"),
    "not-http-tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "not-http-letters": b"A" * 4000,
    "not-http-nothing": b"\0" * 10,
    **{f"chunk-{name}": chunked(body) for name, body in CHUNKS.items()},
    "H25-expect-other": post(b"Content-Length: 2", b"Expect: 200-ok", body=b"{}"),
    "H25-expect-list": post(b"Content-Length: 2", b"Expect: 100-continue, x", body=b"{}"),
    "H30-id-with-a-bare-LF": get(b"GET /v1/layers HTTP/1.1", b"X-Request-ID: a\nb"),
    "H30-id-with-a-bare-CR": get(b"GET /v1/layers HTTP/1.1", b"X-Request-ID: a\rb"),
}

# For the wiring, end to end: the first bytes, a whole head, the framing and a chunk; all others are sent in tests/unit/http.
WIRED = {name: BAD_REQUESTS[name] for name in ("not-http-tls", "H28-no-host", "TE-CL", "chunk-tiny")}

TOO_MUCH = {
    "H11-target": (get(b"GET /" + b"a" * 2**20 + b" HTTP/1.1"), "target_too_long"),
    "headers": (get(b"GET /v1/layers HTTP/1.1", *[b"A: b"] * 100), "headers_too_large"),
    "chunk-endless": (chunked(b"fffffff\r\n" + b" " * 3 * 2**20), "body_too_large"),
}
