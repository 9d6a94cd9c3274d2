"""LitServe with batches and no timer: raw float32 (with the weights where its route says so) and nested lists.

python litserve_app.py PORT LAYER    ROUTE: the one that is served; BATCH (32)

Without postponed annotations: FastAPI reads those of `decode_request` where their names are not known.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import litserve
import torch
from fastapi import Body, Response

from benchmarks.packed import PackedLayer

warnings.filterwarnings("ignore", message=".*writable.*")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


class Raw(litserve.LitAPI):
    def setup(self, device: str) -> None:  # noqa: ARG002 (LitServe names it)
        self.layer = PackedLayer.load(Path(sys.argv[2]))

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> torch.Tensor:
        return torch.frombuffer(request, dtype=torch.float32).view(-1, self.layer.width)

    def batch(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return inputs

    def predict(self, x: list[torch.Tensor]) -> list[Any]:
        return list(self.layer.outputs(x))

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> Response:
        return Response(output.numpy().tobytes(), media_type="application/octet-stream")


class RawWeights(Raw):
    def predict(self, x: list[torch.Tensor]) -> list[Any]:
        return list(self.layer.outputs_and_weights(x))

    def encode_response(self, output: Any) -> Response:
        content = b"".join(part.numpy().tobytes() for part in output)
        return Response(content, media_type="application/octet-stream")


class Lists(Raw):
    def decode_request(self, request: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(request["x"])

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"y": output.tolist()}


if __name__ == "__main__":
    route = os.environ.get("ROUTE", "/raw")
    served = {"/raw": Raw, "/raw_weights": RawWeights, "/lists": Lists}[route]
    api = served(api_path=route, max_batch_size=int(os.environ.get("BATCH", "32")), batch_timeout=0)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, timeout=60)
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False, generate_client_file=False
    )
