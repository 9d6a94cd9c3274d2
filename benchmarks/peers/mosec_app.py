"""Mosec with batches: raw float32 (with the weights where its route says so) and nested lists.

python mosec_app.py PORT LAYER    WORKERS, BATCH: its processes and its batch; WAIT_MS: its timer; ROUTE: the one that is served
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from mosec import Runtime, Server, Worker

from benchmarks.packed import PackedLayer

warnings.filterwarnings("ignore", message=".*writable.*")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# Mosec reads the command line itself, in every process: what is ours is taken out once.
if len(sys.argv) > 2 and sys.argv[1].isdigit():
    os.environ["LAYER"] = sys.argv[2]
    quiet = ["--timeout", "60000", "--log-level", "warning"]
    sys.argv = [sys.argv[0], "--address", "127.0.0.1", "--port", sys.argv[1], *quiet]


class Raw(Worker):
    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self.layer = PackedLayer.load(Path(os.environ["LAYER"]))

    def deserialize(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(data, dtype=torch.float32).view(-1, self.layer.width)

    def forward(self, data: list[torch.Tensor]) -> list[Any]:
        return list(self.layer.outputs(data))

    def serialize(self, data: Any) -> bytes:
        return data.numpy().tobytes()


class RawWeights(Raw):
    def forward(self, data: list[torch.Tensor]) -> list[Any]:
        return list(self.layer.outputs_and_weights(data))

    def serialize(self, data: Any) -> bytes:
        return b"".join(part.numpy().tobytes() for part in data)


class Lists(Raw):
    resp_mime_type = "application/json"

    def deserialize(self, data: bytes) -> torch.Tensor:
        return torch.tensor(json.loads(data)["x"])

    def serialize(self, data: Any) -> bytes:
        return json.dumps({"y": data.tolist()}).encode()


if __name__ == "__main__":
    served = {"/raw": Raw, "/raw_weights": RawWeights, "/lists": Lists}[os.environ.get("ROUTE", "/raw")]
    runtime = Runtime(
        served,
        num=int(os.environ["WORKERS"]),
        max_batch_size=int(os.environ["BATCH"]),
        max_wait_time=int(os.environ.get("WAIT_MS", "2")),
        timeout=60,
    )
    server = Server()
    server.register_runtime({os.environ.get("ROUTE", "/raw"): [runtime]})
    server.run()
