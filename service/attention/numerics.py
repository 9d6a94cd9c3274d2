"""Numerics fingerprint: what an answer's bits depend on besides the layer and the request.

Invariant: Bits are the same on one fingerprint only (P1), not across machines, torch builds or thread counts.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """`isa` is the widest instruction set that torch uses here, or the GPU's name."""

    isa: str
    torch: str
    threads: int
    dtype: str
    device: str


def fingerprint(device: torch.device, dtype: torch.dtype, threads: int) -> Fingerprint:
    isa = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return Fingerprint(isa, str(torch.__version__), threads, str(dtype).removeprefix("torch."), device.type)
