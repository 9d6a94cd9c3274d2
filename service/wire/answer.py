"""Answer of an attend request: its named tensors, the facts beside them, and its JSON in small pieces.

Invariants: Pieces are small, so that none holds the event loop for long and memory grows by one piece beside the tensors.
The joined pieces are always one valid JSON object. Every number reads back to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import orjson
import torch

from service.attention.call import Answer, TopK
from service.batching.job import BatchInfo
from service.wire.tensor_text import write_tensor
from service.wire.tensors import TensorForm

_TOP_K = ("values", "indices", "rest")


class AnswerFacts(NamedTuple):
    """The fields of an answer beside its tensors; `timing_ms` is called last, after the tensors are written."""

    masked_rows: int
    layer: str
    digest: str
    batch: BatchInfo
    timing_ms: Callable[[], dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        batch = self.batch
        return {
            "masked_rows": self.masked_rows,
            "layer": {"name": self.layer, "digest": self.digest},
            "batch": {"requests": batch.requests, "sequences": batch.sequences, "tokens": batch.tokens},
            "timing_ms": self.timing_ms(),
        }


def named_tensors(answer: Answer) -> dict[str, torch.Tensor]:
    """Return `output`, and `weights` or its parts `weights.values`, `weights.indices`, `weights.rest`; axis B is first."""
    found = {"output": answer.output}
    if isinstance(answer.weights, TopK):
        found |= {f"weights.{name}": getattr(answer.weights, name) for name in _TOP_K}
    elif answer.weights is not None:
        found["weights"] = answer.weights
    return found


def write_json(answer: Answer, facts: AnswerFacts, form: TensorForm, *, is_batch: bool) -> Iterator[bytes]:
    """Yield the JSON answer in pieces; fields are in the order of the contract."""
    tensors = named_tensors(answer)
    if not is_batch:
        tensors = {name: tensor[0] for name, tensor in tensors.items()}
    yield b'{"output":'
    yield from write_tensor(tensors["output"], form)
    yield b',"weights":'
    yield from _weights(tensors, form)
    yield b"," + orjson.dumps(facts.to_json())[1:]


def _weights(tensors: dict[str, torch.Tensor], form: TensorForm) -> Iterator[bytes]:
    if "weights" in tensors:
        yield from write_tensor(tensors["weights"], form)
        return
    if "weights.values" not in tensors:
        yield b"null"
        return
    opening = b"{"
    for name in _TOP_K:
        yield opening + f'"{name}":'.encode()
        yield from write_tensor(tensors[f"weights.{name}"], form)
        opening = b","
    yield b"}"
