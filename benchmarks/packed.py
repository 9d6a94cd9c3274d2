"""PackedLayer: multi-head self-attention in plain torch on packed sequences, without padding and without a server.

The upper bound and the peers run it. It imports nothing of the service, because the environments of peers lack that.
Legend: T packed rows, L rows of one sequence, D width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

HEADS = 8


class PackedLayer:
    """Tensors are named as in `torch.nn.MultiheadAttention`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.width = tensors["out_proj.bias"].shape[0]
        self._head_width = self.width // HEADS
        self._in = tensors["in_proj_weight"], tensors["in_proj_bias"]
        self._out = tensors["out_proj.weight"], tensors["out_proj.bias"]

    @classmethod
    def load(cls, path: str | Path) -> PackedLayer:
        return cls(load_file(path))

    @torch.inference_mode()
    def forward(self, xs_LD: Sequence[torch.Tensor], *, with_weights: bool = False) -> list[tuple[torch.Tensor, ...]]:
        """Return for each sequence its output `[L, D]` and, if asked for, the weights `[N, L, L]` of every head."""
        lengths = [x.shape[0] for x in xs_LD]
        packed_TD = torch.cat(list(xs_LD)) if len(xs_LD) > 1 else xs_LD[0]
        qkv = F.linear(packed_TD, *self._in)
        context_TD, weights, start = torch.empty_like(packed_TD), [], 0
        for length in lengths:
            part = qkv[start : start + length].view(1, length, 3, HEADS, self._head_width)
            q_1NLH, k, v = part.permute(2, 0, 3, 1, 4).unbind(0)
            if with_weights:
                weights.append(torch.softmax((q_1NLH[0] * self._head_width**-0.5) @ k[0].transpose(1, 2), -1))
                heads_NLH = weights[-1] @ v[0]
            else:
                heads_NLH = F.scaled_dot_product_attention(q_1NLH, k, v)[0]
            context_TD[start : start + length] = heads_NLH.transpose(0, 1).reshape(length, self.width)
            start += length
        outputs = F.linear(context_TD, *self._out).split(lengths)
        return list(zip(outputs, weights, strict=True)) if with_weights else [(output,) for output in outputs]
