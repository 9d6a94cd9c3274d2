"""LitServe with batches and no timer: raw float32, with the weights if the form asks for them, or nested lists.

From the environment: PORT, LAYER (the file of its weights), FORM (the one it serves).

Annotations are not postponed: FastAPI evaluates those of `decode_request` where their names are unknown.
"""

import os
import warnings
from typing import Annotated, Any

import litserve
import torch
from fastapi import Body, Response

from benchmarks.packed import PackedLayer

warnings.filterwarnings("ignore", message=".*writable.*")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
FORM, MAX_BATCH = os.environ["FORM"], 32


class Binary(litserve.LitAPI):
    def setup(self, device: str) -> None:  # noqa: ARG002 (LitServe names it)
        self.layer = PackedLayer.load(os.environ["LAYER"])

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> torch.Tensor:
        return torch.frombuffer(request, dtype=torch.float32).view(-1, self.layer.width)

    def batch(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return inputs

    def predict(self, x: list[torch.Tensor]) -> list[Any]:
        return self.layer.forward(x, with_weights=FORM == "weights")

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> Response:
        content = b"".join(part.numpy().tobytes() for part in output)
        return Response(content, media_type="application/octet-stream")


class Lists(Binary):
    def decode_request(self, request: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(request["x"])

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"y": output[0].tolist()}


if __name__ == "__main__":
    served = Lists if FORM == "lists" else Binary
    api = served(api_path=f"/{FORM}", max_batch_size=MAX_BATCH, batch_timeout=0)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, timeout=60)
    options = {"log_level": "warning", "access_log": False, "generate_client_file": False}
    server.run(host="127.0.0.1", port=int(os.environ["PORT"]), **options)
