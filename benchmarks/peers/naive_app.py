"""The plain server that anybody would write: FastAPI, pydantic and torch's own module, a thread a request, no batching.

python naive_app.py PORT LAYER    WORKERS: processes (1)
"""

from __future__ import annotations

import os
import sys

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from safetensors.torch import load_file
from starlette.concurrency import run_in_threadpool

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
torch.set_grad_enabled(False)
app = FastAPI()


def _module() -> torch.nn.MultiheadAttention:
    tensors = load_file(sys.argv[2])
    width = tensors["out_proj.bias"].shape[0]
    module = torch.nn.MultiheadAttention(width, 8, bias=True, batch_first=True).eval()
    module.load_state_dict(tensors)
    return module


class Question(BaseModel):
    x: list[list[float]]


class Reply(BaseModel):
    y: list[list[float]]


module = _module()


@torch.inference_mode()
def _attend(x: torch.Tensor) -> torch.Tensor:
    return module(x[None], x[None], x[None], need_weights=False)[0][0]


@torch.inference_mode()
def _attend_bytes(body: bytes) -> bytes:
    return _attend(_tensor(body)).numpy().tobytes()


@torch.inference_mode()
def _attend_weights(body: bytes) -> bytes:
    x = _tensor(body)[None]
    output, weights = module(x, x, x, need_weights=True, average_attn_weights=False)
    return output[0].numpy().tobytes() + weights[0].numpy().tobytes()


def _tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.float32).view(-1, module.embed_dim)


def _binary(content: bytes) -> Response:
    return Response(content, media_type="application/octet-stream")


@app.get("/health")
def health() -> str:
    return "ok"


@app.post("/raw")
async def raw(request: Request) -> Response:
    return _binary(await run_in_threadpool(_attend_bytes, await request.body()))


@app.post("/raw_weights")
async def raw_weights(request: Request) -> Response:
    return _binary(await run_in_threadpool(_attend_weights, await request.body()))


@app.post("/lists")
def lists(question: Question) -> Reply:
    return Reply(y=_attend(torch.tensor(question.x)).tolist())


if __name__ == "__main__":
    uvicorn.run(
        "benchmarks.peers.naive_app:app",
        host="127.0.0.1",
        port=int(sys.argv[1]),
        workers=int(os.environ.get("WORKERS", "1")),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )
