"""Arrays: NumPy arrays and torch tensors as the bytes they are, and back.

Laws: torch is never imported here, only recognised where the caller has it already; the bytes of an array that is
contiguous, little-endian and on the CPU are not copied; what was given as one kind comes back as that kind, on the device of the
query. Little-endian hosts only, like every machine torch ships wheels for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from service.errors import BadDtype, InvalidInput

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", "npt.NDArray[Any]", "torch.Tensor")

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
VALUES = FLOATS | {"bool", "int32", "int64"}
# What the wire does not know but holds without loss: 0/1 masks are often uint8.
_WIDENED = dict.fromkeys(("int8", "uint8", "int16", "uint16", "uint32"), "int64")
DTYPES = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "BOOL": "bool",
    "I32": "int32",
    "I64": "int64",
}


class Raw(NamedTuple):
    """Bytes where they lie: `num_bytes` from `address` on, alive as long as `owner` is."""

    dtype: str
    shape: tuple[int, ...]
    address: int
    num_bytes: int
    owner: object


class Entry(NamedTuple):
    """One tensor of a safetensors body, in memory of its own; `dtype` is one of `DTYPES`' values."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray


def shape_of(array: object, param: str) -> tuple[int, ...]:
    """Raises InvalidInput for what is neither a NumPy array nor a torch tensor."""
    if isinstance(array, np.ndarray) or _is_tensor(array):
        return tuple(array.shape)  # type: ignore[attr-defined]  # of a tensor, whose type is not imported
    raise InvalidInput(
        f"{_name(param)} must be a NumPy array or a torch tensor, got {type(array).__name__}", param=param
    )


def dtype_of(array: Any) -> str:
    """float16, bfloat16, int64 …: the names of NumPy and torch are the same ones."""
    return str(array.dtype).removeprefix("torch.") if _is_tensor(array) else str(array.dtype.name)


def raw(array: object, param: str, allowed: frozenset[str]) -> Raw:
    """The array's bytes; raises BadDtype, or InvalidInput for what is no array or has no plain bytes (sparse, masked)."""
    shape = shape_of(array, param)
    plain = _of_tensor(array, param) if _is_tensor(array) else _of_numpy(array, param)
    dtype = dtype_of(plain)
    if dtype not in allowed:
        raise BadDtype(f"{_name(param)} must be {', '.join(sorted(allowed))}, got {dtype_of(array)}", param=param)
    if isinstance(plain, np.ndarray):
        return Raw(dtype, shape, plain.ctypes.data, plain.nbytes, plain)
    return Raw(dtype, shape, plain.data_ptr(), plain.nbytes, plain)


def maker(like: Array) -> Callable[[Entry], Array]:
    """What turns the tensors of an answer into arrays of the kind of `like`; they are writable and share no memory."""
    if _is_tensor(like):
        torch, device = sys.modules["torch"], like.device

        def tensor(entry: Entry) -> Any:
            flat = torch.frombuffer(entry.data, dtype=getattr(torch, entry.dtype))
            return flat.reshape(entry.shape).to(device)

        return tensor

    def array(entry: Entry) -> Any:
        return np.frombuffer(entry.data, dtype=_numpy_dtype(entry.dtype)).reshape(entry.shape)

    return array


def _is_tensor(array: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _of_tensor(tensor: Any, param: str) -> Any:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise InvalidInput(f"{_name(param)} must be a dense tensor with values", param=param)
    widened = _WIDENED.get(dtype_of(tensor))
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    return (plain if widened is None else plain.to(getattr(torch, widened))).contiguous()


def _of_numpy(array: Any, param: str) -> npt.NDArray[Any]:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidInput(f"{_name(param)} is a masked array: pass its data, and its mask as a mask", param=param)
    dtype = array.dtype
    if dtype.name in _WIDENED:
        return array.astype(_WIDENED[dtype.name], order="C")  # type: ignore[no-any-return]
    return np.asarray(array, dtype=dtype.newbyteorder("<") if dtype.kind in "fi" else dtype, order="C")


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    # Optional, and importable wherever a NumPy array of bfloat16 exists: it is what defines the dtype.
    import ml_dtypes  # noqa: PLC0415

    return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]  # it may not be installed


def _name(param: str) -> str:
    return param.lstrip("/") or "the array"
