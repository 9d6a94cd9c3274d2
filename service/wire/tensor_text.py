"""Tensor text: writes the tensors of an answer as pieces of JSON text.

Invariants: Every number reads back into its dtype to the same bits. A value that is not finite is the string "nan", "inf" or
"-inf" in lists, and its bits in base64. A piece has at most about 256 KiB, so that the event loop is free between two pieces.
The joined pieces are one JSON value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pybase64
import torch

from service.wire.tensors import TensorForm, bytes_of

Array: TypeAlias = npt.NDArray[np.generic]

PIECE_VALUES = 8 * 1024
"""A number takes up to 25 characters and a comma, so a piece takes at most 208 KiB."""
PIECE_BYTES = 192 * 1024  # a multiple of 3, so that base64 pieces join without padding

_WORDS = {"nan": b'"nan"', "inf": b'"inf"', "-inf": b'"-inf"'}


def write_tensor(tensor: torch.Tensor, form: TensorForm) -> Iterator[bytes]:
    """Yield the JSON of a CPU tensor in `form`, the form of a request's tensor."""
    if form is TensorForm.NESTED:
        return _nested(_as_array(tensor))
    return _object(tensor, is_base64=form is TensorForm.BASE64)


def _object(tensor: torch.Tensor, *, is_base64: bool) -> Iterator[bytes]:
    head = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    yield orjson.dumps(head)[:-1] + b',"data":'
    if is_base64:
        yield b'"'
        yield from _base64(tensor)
        yield b'"}'
    else:
        yield from _nested(_as_array(tensor).reshape(-1))
        yield b"}"


def _as_array(tensor: torch.Tensor) -> Array:
    """Return the tensor in a dtype that NumPy has; half precision widens to float32, which changes no value."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.to(torch.float32)
    array: Array = tensor.numpy()
    return array


def _nested(array: Array) -> Iterator[bytes]:
    """Yield runs of whole entries if an entry fits into a piece; else split each entry."""
    if array.ndim == 0:
        yield _text(array.reshape(1))[1:-1]
        return
    entry_values = math.prod(array.shape[1:])
    if entry_values > PIECE_VALUES:
        for index, entry in enumerate(array):
            yield b"," if index else b"["
            yield from _nested(entry)
        yield b"]"
        return
    run = PIECE_VALUES // max(entry_values, 1)
    start = 0
    while len(array) - start > run:
        yield (b"," if start else b"[") + _text(array[start : start + run])[1:-1]
        start += run
    last = _text(array[start:])
    yield b"," + last[1:] if start else last


def _text(array: Array) -> bytes:
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    if array.dtype.kind != "f":
        return text
    # orjson writes null for values that are not finite, and for nothing else.
    words = [_WORDS[str(value)] for value in array[~np.isfinite(array)].tolist()]
    if not words:
        return text
    between = text.split(b"null")
    return b"".join(itertools.chain.from_iterable(zip(between, [*words, b""], strict=True)))


def _base64(tensor: torch.Tensor) -> Iterator[bytes]:
    data = bytes_of(tensor)
    for start in range(0, len(data), PIECE_BYTES):
        yield pybase64.b64encode(data[start : start + PIECE_BYTES])
