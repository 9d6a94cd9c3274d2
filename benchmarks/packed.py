"""The forward pass in plain torch, as the bound and the peers run it: sequences packed, no padding, no server.

Lives here: one layer of multi-head self-attention, `torch.nn.MultiheadAttention`'s formula with its tensors' names.
Must not know: the service; it runs in the peers' environments, which have torch and safetensors and nothing else of ours.
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
    """Every call is under inference mode; sequences are float32 `[L, D]`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.width = tensors["out_proj.bias"].shape[0]
        self._head_width = self.width // HEADS
        self._in = tensors["in_proj_weight"], tensors["in_proj_bias"]
        self._out = tensors["out_proj.weight"], tensors["out_proj.bias"]

    @classmethod
    def load(cls, path: Path) -> PackedLayer:
        return cls(load_file(path))

    @torch.inference_mode()
    def outputs(self, xs_LD: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        lengths = [x.shape[0] for x in xs_LD]
        packed_TD, qkv = self._projected(xs_LD)
        context_TD, start = torch.empty_like(packed_TD), 0
        for length in lengths:
            q_1NLH, k, v = self._heads(qkv[start : start + length])
            heads_NLH = F.scaled_dot_product_attention(q_1NLH, k, v)[0]
            context_TD[start : start + length] = heads_NLH.transpose(0, 1).reshape(length, self.width)
            start += length
        return list(F.linear(context_TD, *self._out).split(lengths))

    @torch.inference_mode()
    def outputs_and_weights(self, xs_LD: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The same with the weights `[N, L, L]` of every head."""
        lengths = [x.shape[0] for x in xs_LD]
        packed_TD, qkv = self._projected(xs_LD)
        context_TD, weights, start = torch.empty_like(packed_TD), [], 0
        for length in lengths:
            q_NLH, k, v = (part[0] for part in self._heads(qkv[start : start + length]))
            weights_NLL = torch.softmax((q_NLH * self._head_width**-0.5) @ k.transpose(1, 2), -1)
            context_TD[start : start + length] = (weights_NLL @ v).transpose(0, 1).reshape(length, self.width)
            weights.append(weights_NLL)
            start += length
        return list(zip(F.linear(context_TD, *self._out).split(lengths), weights, strict=True))

    def _projected(self, xs_LD: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        packed_TD = torch.cat(list(xs_LD)) if len(xs_LD) > 1 else xs_LD[0]
        return packed_TD, F.linear(packed_TD, *self._in)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v `[1, N, L, H]` of one sequence's rows of the fused projection."""
        return qkv.view(1, qkv.shape[0], 3, HEADS, self._head_width).permute(2, 0, 3, 1, 4).unbind(0)
