"""POST /v1/attention for conformance tests: one service for many of them, tensors there and back as bytes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.integration.running import Running, prepare, running

HEADERS = {"content-type": "application/vnd.safetensors"}
Masks = list[dict[str, object]]


@dataclasses.dataclass(frozen=True)
class AttentionRoute:
    """Sends requests to a running service, whose event loop runs only during a request."""

    runner: asyncio.Runner
    service: Running

    def __call__(
        self, tensors: Mapping[str, torch.Tensor], masks: Masks | None = None, **fields: Any
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of the answer; the values of a mask are a tensor or a number."""
        body, sent = dict(tensors), []
        for index, mask in enumerate(masks or ()):
            sent.append({name: value for name, value in mask.items() if not isinstance(value, torch.Tensor)})
            if isinstance(values := mask.get("values"), torch.Tensor):
                body[f"masks.{index}.values"] = values
        # A clone, because safetensors refuses tensors that share memory.
        content = safetensors.torch.save(
            {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in body.items()},
            {"request": json.dumps(fields | {"masks": sent})},
        )
        reply = self.runner.run(self.service.client.post("/v1/attention", content=content, headers=HEADERS))
        assert reply.status_code == 200, reply.text
        return safetensors.torch.load(reply.content)


@contextmanager
def attention_route(directory: Path) -> Iterator[AttentionRoute]:
    """A service without stored layers in an empty directory."""
    prepare(directory, [])
    with asyncio.Runner() as runner:
        whole = running(directory)
        yield AttentionRoute(runner, runner.run(whole.__aenter__()))
        runner.run(whole.__aexit__(None, None, None))
