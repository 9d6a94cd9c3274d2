"""Arrays: converts NumPy arrays and torch tensors to raw bytes and back.

Invariants: this module never imports torch; it uses the module that the caller has imported. A contiguous, little-endian array
on the CPU is not copied. A subclass is viewed as its base class, so its own shape and dtype are not trusted. An address is read
only if torch's storage covers it. Results have the kind of the query, NumPy or torch, and its device. Little-endian hosts only,
like every machine torch ships wheels for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from attention_client.errors import BadDtype, InvalidInput

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", "npt.NDArray[Any]", "torch.Tensor")

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
VALUES = FLOATS | {"bool", "int32", "int64"}
# Dtypes that the wire format lacks, and the one that holds them without loss: 0/1 masks are often uint8.
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
    """An array's memory, not copied: `num_bytes` bytes from `address`, valid as long as `owner` is alive."""

    dtype: str
    shape: tuple[int, ...]
    address: int
    num_bytes: int
    owner: object


class Entry(NamedTuple):
    """One tensor of a safetensors body, with its own copy of the data; `dtype` is one of the values of `DTYPES`."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray


def shape_of(array: object, param: str) -> tuple[int, ...]:
    """Return the shape. Raises InvalidInput unless it is a NumPy array or a torch tensor with plain bytes."""
    return tuple(_plain(array, param).shape)


def dtype_of(array: Any) -> str:
    """Return the dtype's name (float16, bfloat16, int64 …), which is the same in NumPy and torch."""
    plain = _plain(array, "/query")
    return str(plain.dtype).removeprefix("torch.") if _is_tensor(plain) else str(plain.dtype.name)


def raw(array: object, param: str, allowed: frozenset[str]) -> Raw:
    """Return the array's bytes. Raises BadDtype, or InvalidInput unless it is an array with plain bytes (not sparse, masked)."""
    plain = _plain(array, param)
    held = _of_tensor(plain, param) if _is_tensor(plain) else _of_numpy(plain)
    dtype = dtype_of(held)
    if dtype not in allowed:
        raise BadDtype(f"{_name(param)} must be {', '.join(sorted(allowed))}, got {dtype_of(plain)}", param=param)
    address = held.ctypes.data if isinstance(held, np.ndarray) else held.data_ptr()
    return Raw(dtype, tuple(held.shape), address, held.nbytes, held)


def maker(like: Array) -> Callable[[Entry], Array]:
    """Return a function that makes arrays of the kind of `like` from entries; they are writable and share no memory."""
    if _is_tensor(like):
        torch, device = sys.modules["torch"], _plain(like, "/query").device

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


def _plain(array: object, param: str) -> Any:
    """View the same memory as exactly an ndarray or a Tensor, because a subclass may misreport its shape and dtype."""
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidInput(f"{_name(param)} is a masked array: pass its data, and its mask as a mask", param=param)
    if isinstance(array, np.ndarray):
        return np.asarray(array)
    if not _is_tensor(array):
        words = f"{_name(param)} must be a NumPy array or a torch tensor, got {type(array).__name__}"
        raise InvalidInput(words, param=param)
    torch = sys.modules["torch"]
    with _torch_may_refuse(param):
        plain: Any = array if type(array) is torch.Tensor else torch.Tensor.as_subclass(array, torch.Tensor)
        if plain.layout is not torch.strided or plain.is_quantized or plain.is_nested or plain.is_meta:
            raise _no_memory(param)
        return plain


def _of_tensor(tensor: Any, param: str) -> Any:
    """Return it contiguous on the CPU. Raises InvalidInput if it has no memory, or less than its shape needs."""
    torch, widened = sys.modules["torch"], _WIDENED.get(dtype_of(tensor))
    with _torch_may_refuse(param):
        found = tensor.detach().cpu()
        # Check before anything copies it: torch reads beyond the end of a storage that was made smaller.
        if not _is_in_memory(found):
            raise _no_memory(param)
        found = found.resolve_conj().resolve_neg()
        found = (found if widened is None else found.to(getattr(torch, widened))).contiguous()
        if not _is_in_memory(found):
            raise _no_memory(param)
        return found


def _is_in_memory(tensor: Any) -> bool:
    """Whether all its values lie in its storage; a fake, wrapped or freed tensor has no storage."""
    if type(tensor) is not sys.modules["torch"].Tensor:
        return False
    if tensor.numel() == 0:
        return True
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed_bytes = (tensor.storage_offset() + steps + 1) * tensor.element_size()
    return bool(tensor.data_ptr() != 0 and needed_bytes <= tensor.untyped_storage().nbytes())


@contextlib.contextmanager
def _torch_may_refuse(param: str) -> Iterator[None]:
    """Raise any error as InvalidInput: in a transform (vmap) or a mode, or for some subclasses, torch may raise anything."""
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:
        raise _no_memory(param) from error


def _no_memory(param: str) -> InvalidInput:
    return InvalidInput(f"{_name(param)} must be a dense tensor with values in memory", param=param)


def _of_numpy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    dtype = array.dtype
    if dtype.name in _WIDENED:
        return array.astype(_WIDENED[dtype.name], order="C")
    return np.asarray(array, dtype=dtype.newbyteorder("<") if dtype.kind in "fi" else dtype, order="C")


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    # An optional dependency: it defines the dtype, so it is installed wherever a NumPy array of bfloat16 exists.
    import ml_dtypes  # noqa: PLC0415

    return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]  # it may not be installed


def _name(param: str) -> str:
    return param.lstrip("/") or "the array"
