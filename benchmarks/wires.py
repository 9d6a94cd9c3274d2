"""Wires: how a subject wants a request written, and how its answer is read back.

Laws: a wire knows bytes and headers, never a socket; what it reads is one row of numbers, output first and the weights
behind it, so that one check serves all.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Mapping

import numpy as np
from safetensors.numpy import load, save

from benchmarks.workloads import Array

Headers = Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Wire:
    """`write` gives headers and body; `read` takes the answer's body and its headers by lower-case name."""

    name: str
    path: str
    write: Callable[[Array], tuple[dict[str, str], bytes]]
    read: Callable[[bytes, Headers], Array]


def _row(value: object) -> Array:
    return np.array(value, dtype=np.float32).ravel()


def _read_safetensors(body: bytes, _: Headers) -> Array:
    found = load(body)
    return np.concatenate([found[name].ravel() for name in ("output", "weights") if name in found])


def service_wires(layer: str) -> dict[str, Wire]:
    """This service: safetensors, without and with the weights of every head, and nested lists."""
    path, kind = f"/v1/layers/{layer}/attend", {"Content-Type": "application/vnd.safetensors"}
    asked = {"request": json.dumps({"weights": {"form": "heads"}})}
    return {
        "binary": Wire("safetensors", path, lambda x: (kind, save({"query": x})), _read_safetensors),
        "weights": Wire("safetensors, weights", path, lambda x: (kind, save({"query": x}, asked)), _read_safetensors),
        "lists": _lists(path, "query", "output"),
    }


def _lists(path: str, asked: str, answered: str) -> Wire:
    return Wire(
        "nested lists",
        path,
        lambda x: ({"Content-Type": "application/json"}, json.dumps({asked: x.tolist()}).encode()),
        lambda body, _: _row(json.loads(body)[answered]),
    )


def plain_wires() -> dict[str, Wire]:
    """The frameworks where the endpoint is the user's own: raw float32, and the plainest JSON."""

    def write(x: Array) -> tuple[dict[str, str], bytes]:
        return {"Content-Type": "application/octet-stream"}, x.tobytes()

    def read(body: bytes, _: Headers) -> Array:
        return np.frombuffer(body, np.float32)

    return {
        "binary": Wire("raw float32", "/raw", write, read),
        "weights": Wire("raw float32, weights", "/raw_weights", write, read),
        "lists": _lists("/lists", "x", "y"),
    }


def triton_wires() -> dict[str, Wire]:
    """The Open Inference Protocol: bytes as one BYTES element (FP32 of several lengths would not be batched), or JSON."""

    def write_bytes(x: Array) -> tuple[dict[str, str], bytes]:
        blob = struct.pack("<I", x.nbytes) + x.tobytes()
        asked = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(blob)}}
        outputs = [{"name": "y", "parameters": {"binary_data": True}}]
        head = json.dumps({"inputs": [asked], "outputs": outputs}, separators=(",", ":")).encode()
        kind = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
        return kind, head + blob

    def read_bytes(body: bytes, headers: Headers) -> Array:
        return np.frombuffer(body[int(headers["inference-header-content-length"]) + 4 :], np.float32)

    def write_lists(x: Array) -> tuple[dict[str, str], bytes]:
        asked = {"name": "x", "datatype": "FP32", "shape": [1, *x.shape], "data": x.ravel().tolist()}
        return {"Content-Type": "application/json"}, json.dumps({"inputs": [asked]}).encode()

    binary = Wire("Open Inference, BYTES", "/v2/models/bytes/infer", write_bytes, read_bytes)
    path = "/v2/models/numbers/infer"
    return {
        "binary": binary,
        "weights": dataclasses.replace(binary, name="Open Inference, BYTES, weights"),
        "lists": Wire(
            "Open Inference, JSON", path, write_lists, lambda body, _: _row(json.loads(body)["outputs"][0]["data"])
        ),
    }
