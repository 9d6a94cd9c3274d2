"""Mosec with batches: raw float32, with the weights if the form asks for them, or nested lists.

From the environment: PORT, LAYER (the file of its weights), FORM (the one it serves), WORKERS, BATCH (processes and batch size).
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

import torch
from mosec import Runtime, Server, Worker

from benchmarks.packed import PackedLayer

warnings.filterwarnings("ignore", message=".*writable.*")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# What Mosec takes from the environment is read when its server is made.
os.environ |= {"MOSEC_ADDRESS": "127.0.0.1", "MOSEC_PORT": os.environ["PORT"], "MOSEC_TIMEOUT": "60000"}
os.environ |= {"MOSEC_LOG_LEVEL": "warning"}
FORM, WAIT_MS = os.environ["FORM"], 2


class Binary(Worker):
    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self.layer = PackedLayer.load(os.environ["LAYER"])

    def deserialize(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(data, dtype=torch.float32).view(-1, self.layer.width)

    def forward(self, data: list[torch.Tensor]) -> list[Any]:
        return self.layer.forward(data, with_weights=FORM == "weights")

    def serialize(self, data: tuple[torch.Tensor, ...]) -> bytes:
        return b"".join(part.numpy().tobytes() for part in data)


class Lists(Binary):
    resp_mime_type = "application/json"

    def deserialize(self, data: bytes) -> torch.Tensor:
        return torch.tensor(json.loads(data)["x"])

    def serialize(self, data: tuple[torch.Tensor, ...]) -> bytes:
        return json.dumps({"y": data[0].tolist()}).encode()


if __name__ == "__main__":
    served = Lists if FORM == "lists" else Binary
    num, batch = int(os.environ["WORKERS"]), int(os.environ["BATCH"])
    runtime = Runtime(served, num=num, max_batch_size=batch, max_wait_time=WAIT_MS, timeout=60)
    server = Server()
    server.register_runtime({f"/{FORM}": [runtime]})
    server.run()
