"""Reference answers: each request sent alone before the load, in every form, and the digest of the answer's bits.

The service promises the same bits alone and in any batch, so an answer under load must have its reference's digest. Batch
sizes and times in an answer are not part of it. Lists carry no dtype: their numbers are float32 (the shortest text of a
float32 gives its bits back), their indices int32.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import safetensors.numpy

from attention_load.attend_requests import FORMS, SAFETENSORS, AttendRequest

Send = Callable[..., bytes]
"""`send(path, body, content_type)` returns the body of a 200 and raises for everything else; without a body it is a GET."""


def fetch_layers(send: Send, names: str) -> list[dict[str, Any]]:
    """The layers of these names (separated by commas), or all that the service lists."""
    listed = {layer["name"]: layer for layer in orjson.loads(send("/v1/layers"))["layers"]}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(listed)
    if not listed or not listed.keys() >= set(wanted):
        raise ValueError(f"the service has no layer {', '.join(sorted(set(wanted) - listed.keys()))}")
    return [listed[name] for name in wanted]


def fetch_digests(
    send: Send, requests: Sequence[AttendRequest], show: Callable[[str], None] = lambda _: None
) -> dict[str, str]:
    """The reference of each request, by its id. Raises ValueError where two forms have different bits."""
    found: dict[str, str] = {}
    for request in requests:
        show(f"references: {len(found)} of {len(requests)}")
        digests = [
            bits_digest(read_answer(send(request.path, request.bodies[form], content_type), content_type))
            for form, content_type in FORMS.items()
        ]
        for form, digest in zip(FORMS, digests, strict=True):
            if digest != digests[0]:
                raise ValueError(f"{request.kind} request to {request.layer}, alone: {form} and lists differ in bits")
        found[request.id] = digests[0]
    return found


def read_answer(body: bytes, content_type: str) -> dict[str, np.ndarray]:
    """`output`, and `weights` or `weights.values`, `weights.indices`, `weights.rest`. Raises ValueError."""
    try:
        if content_type == SAFETENSORS:
            return safetensors.numpy.load(body)
        answer = orjson.loads(body)
        found, weights = {"output": _array(answer["output"], np.float32)}, answer["weights"]
        if isinstance(weights, dict) and "values" in weights:
            for name in ("values", "indices", "rest"):
                found[f"weights.{name}"] = _array(weights[name], np.int32 if name == "indices" else np.float32)
        elif weights is not None:
            found["weights"] = _array(weights, np.float32)
    except Exception as error:
        # Any exception of the libraries: the bytes come from the network.
        raise ValueError(f"cannot read an answer of {len(body)} bytes: {type(error).__name__}") from error
    return found


def _array(value: Any, dtype: type[np.generic]) -> np.ndarray:
    if isinstance(value, dict):
        data = base64.b64decode(value["data"], validate=True)
        return np.frombuffer(data, np.dtype(value["dtype"]).newbyteorder("<")).reshape(value["shape"])
    return np.array(value, dtype)


def bits_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """The same for two answers only if names, dtypes, shapes and every bit are the same."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()


def difference(digest: str, body: bytes, content_type: str) -> str:
    """Why the answer is not the reference with this digest; empty if all bits are the same."""
    try:
        return "" if bits_digest(read_answer(body, content_type)) == digest else "bits differ from the reference"
    except ValueError as error:
        return str(error)
