"""Arrays: converts NumPy arrays and torch tensors to safetensors bodies and back.

Invariants: this module never imports torch; it uses the module that the caller has imported. A contiguous, little-endian array
on the CPU is copied once, into the body. Results have the kind of the query, NumPy or torch, and its device. The host must be
little-endian, as every machine with a wheel of torch is. The `safetensors` library writes and reads the bytes, and checks every
length and offset.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from attention_client.errors import BadDtype, InvalidInput

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", "npt.NDArray[Any]", "torch.Tensor")

MEDIA_TYPE = "application/vnd.safetensors"
_LENGTH_BYTES = 8
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "BOOL": "bool", "I32": "int32", "I64": "int64"}  # fmt: skip  # noqa: E501
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
INTEGERS = frozenset({"int32", "int64"})
VALUES = frozenset(_DTYPES.values())
# Dtypes that the wire format lacks, and the one that holds them without loss: 0/1 masks are often uint8.
_WIDENED = dict.fromkeys(("int8", "uint8", "int16", "uint16", "uint32"), "int64")


class Summarized:
    """A dataclass whose repr is one line: arrays by dtype and shape, and the other fields that are not None, False or empty."""

    __slots__ = ()

    def __repr__(self) -> str:
        names = [field.name for field in dataclasses.fields(self) if field.repr]  # type: ignore[arg-type]
        shown = [f"{name}={text}" for name in names if (text := _summary(getattr(self, name)))]
        return f"{type(self).__name__}({', '.join(shown)})"


def _summary(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "" if value is False or value in (None, (), {}) else repr(value)


class Raw(NamedTuple):
    """An array as a body holds it: contiguous, on the CPU. `bits` may have another dtype than `dtype`, of the same width."""

    dtype: str
    bits: npt.NDArray[Any]


def raw(array: object, param: str, allowed: frozenset[str]) -> Raw:
    """Return the array's bytes.

    Raises BadDtype, or InvalidInput unless it is a NumPy array or a torch tensor with plain values in memory.
    """
    name = param.lstrip("/")
    if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
        bits = np.asarray(array)
        dtype = bits.dtype.name
    elif (torch := sys.modules.get("torch")) is not None and isinstance(array, torch.Tensor):
        try:
            dtype, bits = _of_tensor(array, torch)
        except Exception as error:
            raise InvalidInput(f"{name} must be a dense tensor with values in memory", param=param) from error
    else:
        raise InvalidInput(f"{name} must be a NumPy array or a torch tensor, got {type(array).__name__}", param=param)
    wanted = _WIDENED.get(dtype, dtype)
    if wanted not in allowed:
        raise BadDtype(f"{name} must be {', '.join(sorted(allowed))}, got {dtype}", param=param)
    if wanted != dtype:
        return Raw(wanted, bits.astype(wanted, order="C"))
    # A dtype from an extension package, such as bfloat16 in NumPy, has only the host's byte order.
    return Raw(dtype, np.asarray(bits, bits.dtype.newbyteorder("<") if bits.dtype.kind in "fi" else None, order="C"))


def made_like(like: Array, found: Raw) -> Array:
    """Return the tensor of a body as an array of the kind of `like`, writable; on the CPU it uses the same memory."""
    if isinstance(like, np.ndarray):
        if found.dtype != "bfloat16":
            return found.bits
        # An optional dependency: it defines the dtype, so it is installed wherever a NumPy array of bfloat16 exists.
        import ml_dtypes  # noqa: PLC0415

        return found.bits.view(ml_dtypes.bfloat16)
    torch = sys.modules["torch"]
    return torch.from_numpy(found.bits).view(getattr(torch, found.dtype)).to(like.device)  # type: ignore[no-any-return]


def bits_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of the bits of values that come as bytes: int16 for bfloat16, which NumPy lacks."""
    return np.dtype("int16" if name == "bfloat16" else name).newbyteorder("<")


def _of_tensor(tensor: Any, torch: Any) -> tuple[str, npt.NDArray[Any]]:
    """Return dtype and bits. For a tensor without its own memory (meta, fake, sparse, in vmap) or a subclass, any exception."""
    found = tensor.detach()
    name = str(found.dtype).removeprefix("torch.")
    if name not in {*VALUES, *_WIDENED}:
        return name, np.empty(0)  # it is refused, and NumPy may not have it
    steps = sum((size - 1) * step for size, step in zip(found.shape, found.stride(), strict=True))
    end = (found.storage_offset() + steps + 1) * found.element_size()
    if found.numel() > 0 and end > found.untyped_storage().nbytes():
        raise ValueError("its storage was made smaller")  # as FSDP does; torch would read beyond the storage
    return name, (found.view(torch.int16) if name == "bfloat16" else found).numpy(force=True)


def write(tensors: Mapping[str, Raw], metadata: Mapping[str, str]) -> bytes:
    # The pointers stay valid until `serialize` returns, because each Raw holds its array.
    specs = {
        name: TensorSpec(dtype=raw.dtype, shape=raw.bits.shape, data_ptr=raw.bits.ctypes.data, data_len=raw.bits.nbytes)
        for name, raw in tensors.items()
    }
    return serialize(specs, dict(metadata))


def read(body: bytes) -> tuple[dict[str, Raw], dict[str, Any]]:
    """Return the tensors by name, each writable in memory of its own, and the metadata. ValueError for a malformed body."""
    try:
        found = deserialize(body)  # type: ignore[no-untyped-call]
        # The library accepted the header; it does not return the metadata.
        header = json.loads(body[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")])
        tensors = {}
        for name, tensor in found:
            dtype = _DTYPES[tensor["dtype"]]
            tensors[name] = Raw(dtype, np.frombuffer(tensor["data"], bits_dtype(dtype)).reshape(tensor["shape"]))
    except (SafetensorError, KeyError, RecursionError):
        raise ValueError("the body is not a complete safetensors file with dtypes of the service") from None
    return tensors, header.get("__metadata__") or {}
