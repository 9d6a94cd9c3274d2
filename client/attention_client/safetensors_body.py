"""Safetensors body: encodes and decodes named tensors and their metadata.

Invariants: the `safetensors` library writes and reads the bytes; it checks every length and offset and copies each tensor once.
Only the metadata is parsed here, after the library accepted the header, because the library does not return it from bytes. A
malformed body raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from attention_client.arrays import Raw, bits_dtype

MEDIA_TYPE = "application/vnd.safetensors"
_LENGTH_BYTES = 8
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "BOOL": "bool", "I32": "int32", "I64": "int64"}  # fmt: skip  # noqa: E501


def write(tensors: Mapping[str, Raw], metadata: Mapping[str, str]) -> bytes:
    # The pointers stay valid until `serialize` returns, because each Raw holds its array.
    specs = {
        name: TensorSpec(dtype=raw.dtype, shape=raw.bits.shape, data_ptr=raw.bits.ctypes.data, data_len=raw.bits.nbytes)
        for name, raw in tensors.items()
    }
    return serialize(specs, dict(metadata))


def read(body: bytes) -> tuple[dict[str, Raw], dict[str, Any]]:
    """Return the tensors by name, each writable in memory of its own, and the metadata. Raises ValueError."""
    try:
        found = deserialize(body)  # type: ignore[no-untyped-call]
        header = json.loads(body[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")])
        tensors = {}
        for name, tensor in found:
            dtype = _DTYPES[tensor["dtype"]]
            tensors[name] = Raw(dtype, np.frombuffer(tensor["data"], bits_dtype(dtype)).reshape(tensor["shape"]))
    except (SafetensorError, KeyError, RecursionError):
        raise ValueError("the body is not a complete safetensors file with dtypes of the service") from None
    return tensors, header.get("__metadata__") or {}
