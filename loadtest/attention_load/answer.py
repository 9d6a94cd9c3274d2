"""Answers as arrays: the tensors of a body in any of the three forms, and where two answers differ in a bit.

Laws: what tells of the batch and of times is not looked at, it is never the same twice; lists have no dtype, so numbers in them
are float32 (the shortest text of a float32 gives its bits back) and indices int32.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import safetensors.numpy

from attention_load.question import SAFETENSORS


class Unreadable(Exception):
    """It is not an answer to what was asked."""


def read_answer(body: bytes, content_type: str) -> dict[str, np.ndarray]:
    """`output`, and `weights` or `weights.values`, `weights.indices`, `weights.rest`."""
    try:
        if content_type == SAFETENSORS:
            return safetensors.numpy.load(body)
        told = orjson.loads(body)
        found = {"output": _array(told["output"], np.float32)}
        weights = told["weights"]
        if isinstance(weights, dict) and "values" in weights:
            for name in ("values", "indices", "rest"):
                found[f"weights.{name}"] = _array(weights[name], np.int32 if name == "indices" else np.float32)
        elif weights is not None:
            found["weights"] = _array(weights, np.float32)
    except Exception as error:
        # Whatever the libraries raise: these bytes come from the network.
        raise Unreadable(f"an answer of {len(body)} bytes cannot be read: {type(error).__name__}") from error
    return found


def _array(told: Any, dtype: type[np.generic]) -> np.ndarray:
    if isinstance(told, dict):
        data = base64.b64decode(told["data"], validate=True)
        return np.frombuffer(data, np.dtype(told["dtype"]).newbyteorder("<")).reshape(told["shape"])
    return np.array(told, dtype)


def differing_bits(expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> str:
    """In words where the two are not the same to the last bit; empty where they are."""
    if expected.keys() != found.keys():
        return f"has {', '.join(sorted(found))} instead of {', '.join(sorted(expected))}"
    for name, wanted in expected.items():
        array = found[name]
        if wanted.shape != array.shape or wanted.dtype != array.dtype:
            return f"{name} is {array.dtype}{list(array.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
        if wanted.tobytes() != array.tobytes():
            bits = np.dtype(f"u{wanted.itemsize}")
            other = int(
                np.count_nonzero(np.ascontiguousarray(wanted).view(bits) != np.ascontiguousarray(array).view(bits))
            )
            return f"{other} of {wanted.size} values of {name} have other bits"
    return ""
