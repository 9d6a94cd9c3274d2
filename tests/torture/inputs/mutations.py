"""Mutations of whole requests: body, binary forms, headers, path, method, compression.

Invariants: everything is drawn from the given generator, so an input is known by its number; words a caller may choose carry
MARK, which no answer may repeat.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import zlib
from collections.abc import Callable

import zstandard

from tests.integration.forms import BINARY
from tests.torture.answer_rules import MARK
from tests.torture.inputs import valid
from tests.torture.inputs.trees import mutate_text, mutate_tree
from tests.torture.inputs.valid import Input

LAYERS = [
    "nobody", MARK, "cross", "zero", "..", "../etc", "..%2f..%2fetc%2fpasswd", "%2e%2e", "small%00", "small/", "SMALL", " small",
    "x" * 300, "%E2%80%AE", "%ff", "%", "%zz", "small;v=1", "small?x=1", "small#x", "~", "a" * 9000,
]  # fmt: skip
PATHS = [
    "/", "//", f"/{MARK}", "/v1",
    "/v1/", "/v1/layers", "/v1/layers/", "/v1/layers/small", "/v1/attention", "/v2", "/v2/", "/v2/x",
    "/v2/health/live", "/v2/models/small", "/v2/models/small/ready", "/v2/models/small/versions/1/infer",
    "/v2/models/small/versions/2/infer", "/v2/models/small/versions/99999999999999999999/infer", "/v2/models/stats",
    "/v2/repository/index", "/v2/repository/models/small/load", "/metrics", "/docs", "/openapi.json", "/healthz", "/readyz",
    "/%2e%2e/%2e%2e/etc/passwd", f"/docs/{MARK}", "/v1/layers/small/attend/", "/v1//layers/small/attend", "*",
]  # fmt: skip
METHODS = ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "POST", "POST"]
HEADERS: dict[str, list[str]] = {
    "Content-Type": [
        "", "text/plain", "application/json; charset=utf-8", "application/json; charset=utf-16", "application/json;",
        "APPLICATION/JSON", "application/vnd.safetensors", "multipart/form-data; boundary=x", "application/x-python-pickle",
        "application/octet-stream", f"x/{MARK}", "application/json, text/plain", "a" * 2000, "application/json; charset=\xe9",
    ],
    "Accept": [
        "", "*/*", "*/*;q=0", "application/vnd.safetensors", "application/json;q=0, */*", "image/png", MARK, "a," * 2000,
        "application/json;q=NaN", "application/json;q=1e999", "text/*;q=0.5, application/vnd.safetensors;q=0.9",
    ],
    "Accept-Encoding": ["gzip", "zstd", "br", "gzip;q=0", "*", "identity;q=0", "gzip, zstd;q=x", MARK],
    "Content-Encoding": ["gzip", "zstd", "deflate", "br", "compress", "gzip, gzip", "identity", MARK, ""],
    "X-Request-Timeout-Ms": ["1", "0", "-1", "1.5", "1e3", "9" * 40, "abc", "", MARK, "\xb2", "10000"],
    "X-Request-ID": ["ok-1", "a b", "é", "x" * 10_000, "", "\t", "a\x7f"],
    "Inference-Header-Content-Length": ["0", "1", "-1", "99999999999", "2.5", "x", "", "9" * 50],
    "Host": ["", "a:b:c", "evil/..", "[::1", MARK, "x" * 1000],
    "Authorization": ["Bearer", f"Bearer {MARK}", "Basic \xe9", "Bearer " + "x" * 5000],
    "X-API-Key": [MARK, "\xe9"],
    "Range": ["bytes=0-0", "bytes=-1,0-99999"],
    "If-None-Match": ["*", MARK],
    "X-Forwarded-For": ["::1", MARK],
    "Expect": ["100-continue", "x"],
    "Upgrade": ["websocket", "h2c"],
}  # fmt: skip


def draw(rng: random.Random) -> Input:
    """One structured input: mostly one thing wrong, sometimes several, sometimes nothing."""
    found = valid.draw(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 1, 1, 2])):
        found = rng.choice(_KINDS)(found, rng)
    return found


def _body(found: Input, rng: random.Random) -> Input:
    return dataclasses.replace(found, body=mutate_body(found, rng))


def mutate_body(found: Input, rng: random.Random) -> bytes:
    if found.headers.get("Content-Type") == BINARY:
        return mutate_safetensors(found.body, rng)
    length = found.headers.get("Inference-Header-Content-Length")
    if length is None or not length.isdigit():
        return _json(found.body, rng)
    head, blobs = found.body[: int(length)], found.body[int(length) :]
    # The length in the header is left as it was now and then, so that it lies.
    head = _json(head, rng) if rng.random() < 0.5 else head
    blobs = mutate_bytes(blobs, rng) if rng.random() < 0.5 else blobs
    if rng.random() < 0.8:
        found.headers["Inference-Header-Content-Length"] = str(len(head))
    return head + blobs


def _json(text: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.25:
        return mutate_text(text, rng)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return mutate_text(text, rng)
    return json.dumps(mutate_tree(tree, rng)).encode("utf-8", "surrogatepass")


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(data))
    return rng.choice(
        [
            data[:at],
            data + rng.randbytes(rng.randint(1, 9)),
            data[:at] + rng.randbytes(4) + data[at + 4 :],
            data[:at] + b"\x00\x00\xc0\x7f" + data[at + 4 :],
            data[:at] + data[at + 1 :],
            b"",
        ]
    )


def mutate_safetensors(body: bytes, rng: random.Random) -> bytes:
    """The length, the header as JSON or as text, the data."""
    length = int.from_bytes(body[:8], "little")
    head, data = body[8 : 8 + length], body[8 + length :]
    kind = rng.randrange(6)
    if kind == 0:
        near = [length - 1, length + 1, len(body), len(body) - 8]
        lie = rng.choice([0, 1, 7, *near, 2**31, 2**32 - 1000, 2**63, 2**64 - 1, 10**8 + 1])
        return (lie % 2**64).to_bytes(8, "little") + body[8:]
    if kind == 1:
        return mutate_bytes(body, rng)
    if kind == 2:
        return body[: 8 + length] + mutate_bytes(data, rng)
    if kind == 3:
        head = mutate_text(head, rng)
    else:
        try:
            tree = json.loads(head)
        except (ValueError, RecursionError):
            return mutate_bytes(body, rng)
        # An earlier mutation may have left anything at all in any place.
        metadata = tree.get("__metadata__") if isinstance(tree, dict) else None
        if kind == 4 and isinstance(metadata, dict) and isinstance(metadata.get("request"), str):
            request = metadata["request"].encode("utf-8", "surrogatepass")
            metadata["request"] = _json(request, rng).decode("utf-8", "replace")
        else:
            tree = mutate_tree(tree, rng)
        head = json.dumps(tree).encode("utf-8", "surrogatepass")
    return len(head).to_bytes(8, "little") + head + data


def _header(found: Input, rng: random.Random) -> Input:
    name = rng.choice(list(HEADERS))
    value = rng.choice(HEADERS[name])
    return dataclasses.replace(found, headers={**found.headers, name: value})


def _path(found: Input, rng: random.Random) -> Input:
    if rng.random() < 0.5:
        return dataclasses.replace(found, path=rng.choice(PATHS))
    return dataclasses.replace(found, path=found.path.replace("small", rng.choice(LAYERS)))


def _method(found: Input, rng: random.Random) -> Input:
    return dataclasses.replace(found, method=rng.choice(METHODS), path=rng.choice([found.path, *PATHS]))


def _packed(found: Input, rng: random.Random) -> Input:
    """Compressed well, or damaged."""
    coding = rng.choice(list(_PACKS))
    body = _PACKS[coding](found.body)
    if rng.random() < 0.6:
        body = mutate_bytes(body, rng)
    return dataclasses.replace(found, body=body, headers={**found.headers, "Content-Encoding": coding})


_PACKS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "deflate": zlib.compress,
}
# Bodies are what most mutations are of.
_KINDS: list[Callable[[Input, random.Random], Input]] = [*[_body] * 5, *[_header] * 2, _path, _method, _packed]
