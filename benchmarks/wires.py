"""Wires: how a subject takes a request and writes its answer; and the request files that both load generators read.

Invariants: a wire knows bytes and headers and no socket; an answer is read as flat numbers, the output and then the weights, so
that one check serves all subjects.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from benchmarks.echo import SIZE_HEADER
from benchmarks.packed import HEADS
from benchmarks.workloads import Array

# As text, 11.7 on average.
_NUMBER_BYTES = {"binary": 4, "weights": 4, "lists": 12}
_JSON = {"Content-Type": "application/json"}
_BYTES = {"Content-Type": "application/octet-stream"}
Headers = Mapping[str, str]
Request = tuple[Headers, bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class Wire:
    """`write` returns headers and body; `read` takes the answer's body and headers, whose names ignore case."""

    path: str
    write: Callable[[Array], Request]
    read: Callable[[bytes, Headers], Array]


def service_wires(layer: str) -> dict[str, Wire]:
    """Return the wires of this service: safetensors, nested lists, and the bytes that both routes take."""
    path, kind = f"/v1/layers/{layer}/attend", {"Content-Type": "application/vnd.safetensors"}
    weights = {"request": json.dumps({"weights": {"form": "heads"}})}
    packed = {"request": json.dumps({"layout": "packed", "num_heads": HEADS})}

    def three(x: Array) -> dict[str, Array]:
        return dict.fromkeys(("query", "key", "value"), x)

    def read(body: bytes, _: Headers) -> Array:
        found = load(body)
        return np.concatenate([found[name].ravel() for name in ("output", "weights") if name in found])

    return {
        "binary": Wire(path, lambda x: (kind, save({"query": x})), read),
        "weights": Wire(path, lambda x: (kind, save({"query": x}, weights)), read),
        "lists": _lists(path, "query", "output"),
        "three": Wire(path, lambda x: (kind, save(three(x))), read),
        "sdpa": Wire("/v1/attention", lambda x: (kind, save(three(x), packed)), read),
    }


def _lists(path: str, request_name: str, answer_name: str) -> Wire:
    return Wire(
        path,
        lambda x: (_JSON, json.dumps({request_name: x.tolist()}).encode()),
        lambda body, _: np.array(json.loads(body)[answer_name], np.float32).ravel(),
    )


def echo_wires(layer: str) -> dict[str, Wire]:
    """Return the service's wires for the echo, which is asked for as many bytes as the numbers of an answer take."""
    return {form: _echo(wire, form) for form, wire in service_wires(layer).items() if form in _NUMBER_BYTES}


def _echo(wire: Wire, form: str) -> Wire:
    def write(x: Array) -> Request:
        headers, body = wire.write(x)
        num = x.size + (HEADS * len(x) ** 2 if form == "weights" else 0)
        return {**headers, SIZE_HEADER: str(num * _NUMBER_BYTES[form])}, body

    return Wire("/", write, lambda body, _: np.zeros(len(body) // _NUMBER_BYTES[form], np.float32))


def plain_wires() -> dict[str, Wire]:
    """Return the wires of frameworks whose endpoints are the user's own: raw float32, and the plainest JSON."""
    raw = Wire("/binary", lambda x: (_BYTES, x.tobytes()), lambda body, _: np.frombuffer(body, np.float32))
    return {"binary": raw, "weights": dataclasses.replace(raw, path="/weights"), "lists": _lists("/lists", "x", "y")}


def triton_wires(model: str) -> dict[str, Wire]:
    """Return Open Inference wires: one BYTES element, because FP32 of several lengths would not be batched, or JSON."""
    path = f"/v2/models/{model}/infer"

    def write(x: Array) -> Request:
        blob = struct.pack("<I", x.nbytes) + x.tobytes()
        query = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(blob)}}
        outputs = [{"name": "y", "parameters": {"binary_data": True}}]
        head = json.dumps({"inputs": [query], "outputs": outputs}, separators=(",", ":")).encode()
        return {**_BYTES, "Inference-Header-Content-Length": str(len(head))}, head + blob

    def read(body: bytes, headers: Headers) -> Array:
        return np.frombuffer(body[int(headers["inference-header-content-length"]) + 4 :], np.float32)

    def write_lists(x: Array) -> Request:
        query = {"name": "x", "datatype": "FP32", "shape": [1, *x.shape], "data": x.ravel().tolist()}
        return _JSON, json.dumps({"inputs": [query]}).encode()

    def read_lists(body: bytes, _: Headers) -> Array:
        return np.array(json.loads(body)["outputs"][0]["data"], np.float32)

    binary = Wire(path, write, read)
    return {"binary": binary, "weights": binary, "lists": Wire(path, write_lists, read_lists)}


def write_requests(directory: Path, wire: Wire, inputs: Iterable[Array]) -> Path:
    """Write whole HTTP requests as files 0, 1, … of a new directory, which appears when all are written; return it."""
    unfinished = directory.with_name(f"{directory.name}.new")
    unfinished.mkdir(parents=True, exist_ok=True)
    for i, x in enumerate(inputs):
        headers, body = wire.write(x)
        fields = {"Host": "127.0.0.1", **headers, "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        (unfinished / str(i)).write_bytes(f"POST {wire.path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
    return unfinished.rename(directory)
