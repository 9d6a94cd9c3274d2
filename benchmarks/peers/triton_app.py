"""NVIDIA Triton through PyTriton: bytes as one element a request, or numbers for its JSON, batched with a timer of 1 ms.

From the environment: PORT, LAYER (the file of its weights), FORM (the one it serves), WORKERS (functions that run at once; for
lists one with two threads).
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import torch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.packed import PackedLayer

warnings.filterwarnings("ignore", message=".*writable.*")
FORM, DELAY_US, MAX_BATCH = os.environ["FORM"], 1000, 32
WORKERS, THREADS = (1, 2) if FORM == "lists" else (int(os.environ["WORKERS"]), int(os.environ["OMP_NUM_THREADS"]))
torch.set_num_threads(THREADS)
layer = PackedLayer.load(os.environ["LAYER"])


def of_bytes(requests: list[Any]) -> list[dict[str, Any]]:
    """x: `[1, 1]` of bytes at any length of the sequence, so that all are batched together."""
    xs = [torch.frombuffer(request["x"][0, 0], dtype=torch.float32).view(-1, layer.width) for request in requests]
    found = layer.forward(xs, with_weights=FORM == "weights")
    answers = [b"".join(part.numpy().tobytes() for part in parts) for parts in found]
    return [{"y": np.array([[answer]], dtype=np.object_)} for answer in answers]


def of_numbers(requests: list[Any]) -> list[dict[str, Any]]:
    """x: `[1, L, D]`."""
    found = layer.forward([torch.from_numpy(np.ascontiguousarray(request["x"][0])) for request in requests])
    return [{"y": output.numpy()[None]} for (output,) in found]


if __name__ == "__main__":
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=int(os.environ["PORT"]),
        allow_grpc=False,
        allow_metrics=False,
        log_verbose=0,
    )
    batching = ModelConfig(max_batch_size=MAX_BATCH, batcher=DynamicBatcher(max_queue_delay_microseconds=DELAY_US))
    is_lists = FORM == "lists"
    dtype, shape = (np.float32, (-1, layer.width)) if is_lists else (np.bytes_, (1,))
    inputs, outputs = ([Tensor(name=side, dtype=dtype, shape=shape)] for side in "xy")
    function = of_numbers if is_lists else of_bytes
    functions = [function] * WORKERS if WORKERS > 1 else function
    with Triton(config=config) as triton:
        triton.bind("attention", functions, inputs=inputs, outputs=outputs, config=batching, strict=False)
        triton.serve()
