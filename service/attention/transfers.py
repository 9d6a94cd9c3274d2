"""Transfers: copies between the host and a GPU, as few as possible of which the host waits for.

Invariants: on a CPU nothing is copied. What `to_host` returns is complete when the host next waits for the device, so a pass
ends with `awaited`. Memory of the host that a GPU copies beside the host is pinned; torch keeps it for the next copies, so
large tensors are copied from and to ordinary memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Most values of a tensor that is not one of a whole batch in pinned memory: 4 MiB of float32.
MAX_PINNED = 2**20


def on_host(shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Return new memory of the host for copies from and to the device of `like`."""
    return torch.empty(*shape, dtype=dtype, pin_memory=like.is_cuda)


def to_device(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy in the dtype and on the device of `like`, which is a GPU. The caller no longer writes to `values`."""
    return values.to(like.device, like.dtype, non_blocking=True)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Return the values on the host: at the latest when the host next waits for the device."""
    return x.to("cpu", non_blocking=x.numel() <= MAX_PINNED)


def awaited(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a whole batch on the host in `dtype`, after everything that the device was asked before."""
    return on_host(x.shape, dtype, x).copy_(x.to(dtype))
