"""The plain server that most would write: FastAPI, pydantic and torch's own module, a thread a request, no batching.

From the environment: LAYER, the file of its weights.
"""

from __future__ import annotations

import os

import torch
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from safetensors.torch import load_file
from starlette.concurrency import run_in_threadpool

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
app = FastAPI()
tensors = load_file(os.environ["LAYER"])
module = torch.nn.MultiheadAttention(tensors["out_proj.bias"].shape[0], 8, bias=True, batch_first=True).eval()
module.load_state_dict(tensors)


class AttendRequest(BaseModel):
    x: list[list[float]]


class AttendAnswer(BaseModel):
    y: list[list[float]]


@torch.inference_mode()
def _attend(x: torch.Tensor, *, need_weights: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    return module(x[None], x[None], x[None], need_weights=need_weights, average_attn_weights=False)


def _attend_bytes(body: bytes, *, need_weights: bool) -> bytes:
    x = torch.frombuffer(bytearray(body), dtype=torch.float32).view(-1, module.embed_dim)
    parts = _attend(x, need_weights=need_weights)
    return b"".join(part[0].numpy().tobytes() for part in parts if part is not None)


@app.get("/health")
def health() -> str:
    return "ok"


@app.post("/lists")
def lists(request: AttendRequest) -> AttendAnswer:
    return AttendAnswer(y=_attend(torch.tensor(request.x))[0][0].tolist())


@app.post("/binary")
@app.post("/weights")
async def binary(request: Request) -> Response:
    need_weights = request.scope["path"] == "/weights"
    body = await run_in_threadpool(_attend_bytes, await request.body(), need_weights=need_weights)
    return Response(body, media_type="application/octet-stream")
