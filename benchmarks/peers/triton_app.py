"""NVIDIA Triton through PyTriton: bytes as one element a request, and numbers for its JSON, batched with a timer of 1 ms.

python triton_app.py PORT LAYER    WORKERS: functions that run at once; WITH_WEIGHTS: answer the weights too
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.packed import PackedLayer

warnings.filterwarnings("ignore", message=".*writable.*")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
DELAY_US = 1000
MAX_BATCH = 32
layer = PackedLayer.load(Path(sys.argv[2]))


def of_bytes(requests: list[Any]) -> list[dict[str, Any]]:
    """x: `[1, 1]` of bytes, whatever the length of the sequence, so that all are batched together."""
    xs = [torch.frombuffer(request["x"][0, 0], dtype=torch.float32).view(-1, layer.width) for request in requests]
    if os.environ.get("WITH_WEIGHTS"):
        answers = [b"".join(part.numpy().tobytes() for part in parts) for parts in layer.outputs_and_weights(xs)]
    else:
        answers = [output.numpy().tobytes() for output in layer.outputs(xs)]
    return [{"y": np.array([[answer]], dtype=np.object_)} for answer in answers]


def of_numbers(requests: list[Any]) -> list[dict[str, Any]]:
    """x: `[1, L, D]`."""
    outputs = layer.outputs([torch.from_numpy(np.ascontiguousarray(request["x"][0])) for request in requests])
    return [{"y": output.numpy()[None]} for output in outputs]


def main() -> None:
    port, workers = int(sys.argv[1]), int(os.environ["WORKERS"])
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=port,
        allow_grpc=False,
        allow_metrics=False,
        log_verbose=0,
    )
    batching = ModelConfig(max_batch_size=MAX_BATCH, batcher=DynamicBatcher(max_queue_delay_microseconds=DELAY_US))
    models = (("bytes", of_bytes, np.bytes_, (1,)), ("numbers", of_numbers, np.float32, (-1, layer.width)))
    with Triton(config=config) as triton:
        for name, function, dtype, shape in models:
            inputs, outputs = ([Tensor(name=side, dtype=dtype, shape=shape)] for side in "xy")
            functions = [function] * workers if workers > 1 else function
            triton.bind(name, functions, inputs=inputs, outputs=outputs, config=batching, strict=False)
        triton.serve()


if __name__ == "__main__":
    main()
