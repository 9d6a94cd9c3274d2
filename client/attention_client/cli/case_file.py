"""Case file: the tensors and the request of one attention call in a safetensors file, and how far an output is from another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention_client.arrays import Raw, bits_dtype, read
from attention_client.errors import InvalidInput

CASE_TENSORS = ("query", "key", "value", "output")
# The layouts of tensors that are not packed, by their number of axes.
LAYOUTS = {2: ("ld",), 3: ("bld", "hld", "lhd"), 4: ("bhld", "blhd")}
# By dtype: bits of the fraction, least exponent, and the tolerance as a fraction of the output's largest magnitude.
_FLOATS = {
    "float16": (10, -14, 4e-3),
    "bfloat16": (7, -126, 3e-2),
    "float32": (23, -126, 1e-5),
    "float64": (52, -1022, 1e-9),
}


class CaseFile(NamedTuple):
    """`request` is the JSON object in the metadata `request`, or a golden vector's request; `sha256` is the hash of the file."""

    tensors: dict[str, Raw]
    request: dict[str, Any]
    sha256: str


def read_case(path: Path) -> CaseFile:
    """Return the case.

    Raises InvalidInput if the file is not a safetensors file, a tensor is missing or not of floats, or its `request` is not a
    JSON object of fields that a case can fix.
    """
    try:
        body = path.read_bytes()
        tensors, metadata = read(body)
        request = json.loads(metadata.get("request", "{}"))
        if "golden" in metadata:  # a vector of the command `golden`; `compare` finds its masks itself
            request = dict(json.loads(metadata["golden"])["request"])
            del request["masks"], request["lse"]
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
    except (LookupError, TypeError, ValueError, RecursionError):
        raise InvalidInput(f"{path} is not a readable safetensors file with JSON in the metadata request") from None
    if not isinstance(request, dict):
        raise InvalidInput(f"the metadata request of {path} must be a JSON object")
    tensors = {name.replace("masks.0.values", "mask"): tensor for name, tensor in tensors.items()}
    for name in CASE_TENSORS:
        if name not in tensors or "float" not in tensors[name].dtype:
            raise InvalidInput(f"the case has no tensor {name} of floats")
    for name, fixed in request.items():
        if not _can_fix(name, fixed):
            names = "num_heads, num_kv_heads, window, layout, scale, softcap"
            raise InvalidInput(f"the request of a case can fix {names} with its own kind of value, got {name}")
    return CaseFile(tensors, request, hashlib.sha256(body).hexdigest())


def _can_fix(name: str, value: Any) -> bool:
    match name, value:
        case _, bool():
            return False
        case "num_heads" | "num_kv_heads", int():
            return value >= 1
        case "window", int():
            return value >= 0
        case "layout", str():
            return value == "packed" or any(value in known for known in LAYOUTS.values())
        case "scale" | "softcap", int() | float():
            return value != 0 and abs(value) <= 1e300  # noqa: PLR2004 (none is NaN, infinite or an integer that no float holds)
    return False


def rounded(array: np.ndarray, dtype: str) -> Raw:
    """Return the numbers rounded to a dtype, ties to even; bfloat16 is rounded from float32 and held as its bits."""
    if dtype != "bfloat16":
        return Raw(dtype, np.ascontiguousarray(array, bits_dtype(dtype)).reshape(array.shape))
    bits = array.astype(np.float32).view(np.uint32)
    return Raw(dtype, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(bits_dtype(dtype)))


def widened(raw: Raw) -> np.ndarray:
    """Return the numbers in float64; booleans are 0 and 1."""
    bits = raw.bits if raw.dtype != "bfloat16" else (raw.bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float64)


def tolerance(output: np.ndarray, dtype: str) -> float:
    """Return the largest absolute error with which an answer still reproduces `output`."""
    return _FLOATS[dtype][2] * float(np.abs(output[np.isfinite(output)]).max(initial=0.0))


def errors(output: np.ndarray, expected: np.ndarray, dtype: str) -> tuple[float, float]:
    """Return the largest absolute error, and the largest in units in the last place of the expected number in `dtype`.

    NaN equals NaN, and an infinity equals itself; the error between either and any other number is infinite.
    """
    fraction, least, _ = _FLOATS[dtype]
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.nan_to_num(np.abs(output - expected), nan=np.inf, posinf=np.inf)
        off = np.where((output == expected) | (np.isnan(output) & np.isnan(expected)), 0.0, off)
        exponent = np.where(expected == 0, least, np.frexp(expected)[1] - 1)
        ulps = off / np.ldexp(1.0, np.maximum(exponent, least) - fraction)
    return float(off.max()), float(ulps.max())
