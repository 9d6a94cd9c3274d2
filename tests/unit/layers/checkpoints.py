"""Tiny seeded checkpoints of every family, and layers made of them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from service.attention.spec import LayerSpec
from service.layers.store import StoredLayer


class Bomb:
    """Unpickled, it ends the process."""

    def __reduce__(self):
        return os._exit, (66,)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def spec(**changes) -> LayerSpec:
    plain = dict(query_width=6, key_width=6, value_width=6, out_width=6, num_heads=2, num_kv_heads=2, head_width=3)
    more = dict(value_head_width=3, scale=0.5, biases=("query", "key", "value", "output"))
    return LayerSpec(**{**plain, **more, **changes})


def stored(name: str = "tiny", *, dtype: torch.dtype = torch.float32, **changes) -> StoredLayer:
    made = spec(**changes)
    tensors = {key: random(*shape, seed=i, dtype=dtype) for i, (key, shape) in enumerate(made.tensor_shapes().items())}
    return StoredLayer(name, made, tensors, "a test (bert)", "bert")


def linear(module: str, rows: int, width: int, *, bias: bool = True, seed: int = 0) -> dict[str, torch.Tensor]:
    made = {f"{module}.weight": random(rows, width, seed=seed)}
    return made | ({f"{module}.bias": random(rows, seed=seed)} if bias else {})


def linears(prefix: str, *modules: str, width: int = 8, bias: bool = True) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for seed, module in enumerate(modules):
        made |= linear(prefix + module, width, width, bias=bias, seed=seed)
    return made


def bert(layers: int = 3, prefix: str = "bert.", width: int = 8) -> dict[str, torch.Tensor]:
    made = {
        f"{prefix}embeddings.word_embeddings.weight": random(10, width),
        "pooler.dense.weight": random(width, width),
    }
    for index in range(layers):
        below = f"{prefix}encoder.layer.{index}."
        names = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
        made |= {key: value + index for key, value in linears(below, *names, width=width).items()}
        made |= {f"{below}attention.output.LayerNorm.weight": random(width), f"{below}output.dense.bias": random(width)}
    return made


def mha(**options) -> dict[str, torch.Tensor]:
    """Return the state dict of a torch.nn.MultiheadAttention, with biases that are not zero."""
    torch.manual_seed(3)
    module = torch.nn.MultiheadAttention(8, 2, **options)
    return {key: value + 0.01 * random(*value.shape) for key, value in module.state_dict().items()}


def save_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return path


def save_directory(path: Path, tensors: dict[str, torch.Tensor], config: Mapping[str, object] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    save_safetensors(path / "model.safetensors", tensors)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def save_npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def raw_file(header: bytes | Mapping[str, object], data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with any header, also a wrong one; `length` is the length that it announces."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
