"""Safetensors body: encodes and decodes named tensors and their metadata.

Invariants: the `safetensors` library writes and reads the bytes; it checks every length and offset and copies each tensor once.
Only the metadata is parsed here, after the library accepted the header, because the library does not return it from bytes. A
malformed body raises ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from attention_client.arrays import DTYPES, Entry, Raw

MEDIA_TYPE = "application/vnd.safetensors"
_LENGTH_BYTES = 8


def write(tensors: Mapping[str, Raw], metadata: Mapping[str, str]) -> bytes:
    # The pointers stay valid until `serialize` returns, because each Raw holds the owner of its memory.
    specs = {
        name: TensorSpec(dtype=raw.dtype, shape=raw.shape, data_ptr=raw.address, data_len=raw.num_bytes)
        for name, raw in tensors.items()
    }
    return serialize(specs, dict(metadata))


def read(body: bytes) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Return the tensors by name, and the metadata. Raises ValueError."""
    try:
        found = deserialize(body)  # type: ignore[no-untyped-call]
    except SafetensorError:
        raise ValueError("the body is no whole safetensors file") from None
    unknown = {tensor["dtype"] for _, tensor in found} - DTYPES.keys()
    if unknown:
        raise ValueError(f"a tensor is none of {', '.join(DTYPES.values())}")
    length = int.from_bytes(body[:_LENGTH_BYTES], "little")
    try:
        header = orjson.loads(memoryview(body)[_LENGTH_BYTES : _LENGTH_BYTES + length])
    except orjson.JSONDecodeError:
        raise ValueError("the header is no JSON") from None
    tensors = {name: Entry(DTYPES[tensor["dtype"]], tuple(tensor["shape"]), tensor["data"]) for name, tensor in found}
    return tensors, header.get("__metadata__", {})
