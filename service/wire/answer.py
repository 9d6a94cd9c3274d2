"""Answer: what a caller reads, written piece by piece.

Laws: pieces are small, so that the event loop is never held for long and memory is bounded by one piece beside the tensors;
joined they are always one valid JSON object; every number reads back to the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import orjson
import torch

from service.attention.call import Answer, TopK, Weights
from service.batching.job import BatchInfo
from service.wire.tensor_text import write_tensor
from service.wire.tensors import TensorForm


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What goes beside the tensors; `timing_ms` is asked last, when everything else is written."""

    masked_rows: int
    layer: str
    digest: str
    batch: BatchInfo
    timing_ms: Callable[[], dict[str, float]]


def write_answer(answer: Answer, facts: AnswerFacts, form: TensorForm, *, is_batch: bool) -> Iterator[bytes]:
    """The pieces of the JSON answer, in the contract's order of fields."""
    yield b'{"output":'
    yield from write_tensor(_ranked(answer.output, is_batch), form)
    yield b',"weights":'
    yield from _weights(answer.weights, form, is_batch)
    rest = {
        "masked_rows": facts.masked_rows,
        "layer": {"name": facts.layer, "digest": facts.digest},
        "batch": {
            "requests": facts.batch.requests,
            "sequences": facts.batch.sequences,
            "tokens": facts.batch.tokens,
        },
        "timing_ms": facts.timing_ms(),
    }
    yield b"," + orjson.dumps(rest)[1:]


def _weights(weights: Weights | None, form: TensorForm, is_batch: bool) -> Iterator[bytes]:
    if weights is None:
        yield b"null"
    elif isinstance(weights, TopK):
        yield b'{"values":'
        yield from write_tensor(_ranked(weights.values, is_batch), form)
        yield b',"indices":'
        yield from write_tensor(_ranked(weights.indices, is_batch), form)
        yield b',"rest":'
        yield from write_tensor(_ranked(weights.rest, is_batch), form)
        yield b"}"
    else:
        yield from write_tensor(_ranked(weights, is_batch), form)


def _ranked(tensor: torch.Tensor, is_batch: bool) -> torch.Tensor:
    """The B axis is there only where the query had one."""
    return tensor if is_batch else tensor[0]
