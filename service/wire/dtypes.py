"""Dtypes: the names of each dtype in every form of a request, and the bytes per value.

Invariants: Every other module of `wire` takes its dtype names from this table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Dtype(NamedTuple):
    """A dtype with its names in the contract (those of torch), in safetensors and in Open Inference."""

    name: str
    torch: torch.dtype
    safetensors: str
    inference: str

    @property
    def item_bytes(self) -> int:
        return self.torch.itemsize


DTYPES = (
    Dtype("float16", torch.float16, "F16", "FP16"),
    Dtype("bfloat16", torch.bfloat16, "BF16", "BF16"),
    Dtype("float32", torch.float32, "F32", "FP32"),
    Dtype("float64", torch.float64, "F64", "FP64"),
    Dtype("bool", torch.bool, "BOOL", "BOOL"),
    Dtype("int32", torch.int32, "I32", "INT32"),
    Dtype("int64", torch.int64, "I64", "INT64"),
)
FLOATS = tuple(dtype for dtype in DTYPES if dtype.torch.is_floating_point)
WHOLES = tuple(dtype for dtype in DTYPES if dtype.name in ("int32", "int64"))
BY_TORCH = {dtype.torch: dtype for dtype in DTYPES}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES}
BY_INFERENCE = {dtype.inference: dtype for dtype in DTYPES}
