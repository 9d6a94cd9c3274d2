"""Test double of the service: reads requests and writes answers with safetensors and none of the client's code.

By default it echoes: the output is the query, and weights have the requested shape, filled with 0.25.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import safetensors.torch
import torch

MEDIA_TYPE = "application/vnd.safetensors"
FACTS: dict[str, Any] = {
    "masked_rows": 1,
    "layer": {"name": "small", "digest": "sha256:00"},
    "batch": {"requests": 2, "sequences": 3, "tokens": 4},
    "timing_ms": {"decode": 0.5, "queue": 1, "compute": 2.5, "total": 4.25},
}
LAYER: dict[str, Any] = {
    "name": "small", "digest": "sha256:00", "query_width": 16, "key_width": 16, "value_width": 16, "out_width": 16,
    "num_heads": 4, "limits": {"tokens": 99}, "family": "torch-mha",
}  # fmt: skip

Step = httpx2.Response | Exception | Callable[[httpx2.Request], Awaitable[httpx2.Response]]


def metadata_of(body: bytes) -> Any:
    length = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + length]).get("__metadata__", {})


def file_of(tensors: dict[str, torch.Tensor], facts: Any = FACTS) -> bytes:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(tensors, {"response": facts if isinstance(facts, str) else json.dumps(facts)})


def answer_of(tensors: dict[str, torch.Tensor], facts: Any = FACTS, **headers: str) -> httpx2.Response:
    named = {"content-type": MEDIA_TYPE, "x-request-id": "theirs", **headers}
    return httpx2.Response(200, content=file_of(tensors, facts), headers=named)


def problem_of(status: int, code: str, detail: str = "words", *, param: str | None = None, **headers: str):
    body = {"type": "urn:x", "title": "x", "status": status, "detail": detail, "code": code, "param": param}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.Response(
        status,
        content=json.dumps({**body, "request_id": "theirs"}).encode(),
        headers={"content-type": "application/problem+json", "x-request-id": "theirs", **named},
    )


def weights_for(query: torch.Tensor, wanted: Any, *, num_heads: int = 4) -> dict[str, torch.Tensor]:
    if wanted is None:
        return {}
    wanted = {"form": wanted} if isinstance(wanted, str) else wanted
    *batch, length, _ = query.shape
    rows = len(wanted.get("queries", range(length)))
    heads = len(wanted.get("heads", range(num_heads)))
    if wanted["form"] == "mean":
        return {"weights": torch.full((*batch, rows, length), 0.25)}
    if wanted["form"] == "heads":
        return {"weights": torch.full((*batch, heads, rows, length), 0.25)}
    k = wanted["k"]
    return {
        "weights.values": torch.full((*batch, heads, rows, k), 0.25),
        "weights.indices": torch.zeros((*batch, heads, rows, k), dtype=torch.int32),
        "weights.rest": torch.full((*batch, heads, rows), 0.5),
    }


class Answering:
    """The handler of an httpx2.MockTransport; `script` holds the steps before the echoes, `seen` the requests."""

    def __init__(self, *script: Step) -> None:
        self.script = list(script)
        self.seen: list[httpx2.Request] = []

    @property
    def transport(self) -> httpx2.MockTransport:
        return httpx2.MockTransport(self)

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.seen.append(request)
        if self.script:
            step = self.script.pop(0)
            if isinstance(step, Exception):
                raise step
            return step if isinstance(step, httpx2.Response) else await step(request)
        if request.url.path == "/v1/layers":
            return httpx2.Response(200, json={"layers": [LAYER]})
        if request.method == "GET":
            return httpx2.Response(200, json=LAYER if "layers" in request.url.path else {"status": "ready"})
        if request.headers["content-type"] == "application/json":
            return httpx2.Response(200, json={"echo": json.loads(request.content)})
        return echo(request)


class Hanging:
    """A step that never answers; the events are set when a request has come and when it is cancelled."""

    def __init__(self) -> None:
        self.has_begun, self.is_cancelled = threading.Event(), threading.Event()

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled.set()
        raise AssertionError


def echo(request: httpx2.Request) -> httpx2.Response:
    tensors, fields = read_request(request)
    query = tensors["query"]
    return answer_of({"output": query, **weights_for(query, fields.get("weights"))})


def read_request(request: httpx2.Request) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    metadata = metadata_of(request.content)
    assert metadata.keys() == {"request"}
    return safetensors.torch.load(request.content), json.loads(metadata["request"])
