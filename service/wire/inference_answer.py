"""Open Inference Protocol V2 answers: writes an answer as JSON, or as JSON followed by the outputs' bytes.

Invariants: Outputs come in the requested order, and their bytes in the order of the outputs. No tensor's bytes are copied. The
fields of `/v1` beside the tensors are scalars in `parameters`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import torch

from service.attention.call import Answer
from service.wire.answer import AnswerFacts, named_tensors, write_tensor
from service.wire.dtypes import BY_TORCH
from service.wire.inference_codec import WantedAnswer
from service.wire.inference_schemas import VERSION
from service.wire.tensors import TensorForm, bytes_of


def write_inference(
    answer: Answer, facts: AnswerFacts, wanted: WantedAnswer
) -> tuple[int | None, Iterator[bytes] | list[bytes | memoryview]]:
    """Return the length of the JSON (None if no bytes follow it) and the pieces of the body.

    The length is sent before the JSON, so JSON that bytes follow is built completely first.
    """
    tensors = named_tensors(answer)
    pieces = _json(facts, wanted, tensors)
    blobs = [bytes_of(tensors[output.name]) for output in wanted.outputs if output.is_binary]
    if not blobs:
        return None, pieces
    head = list(pieces)
    return sum(map(len, head)), [*head, *blobs]


def _json(facts: AnswerFacts, wanted: WantedAnswer, tensors: dict[str, torch.Tensor]) -> Iterator[bytes]:
    opening: dict[str, Any] = {"model_name": facts.layer, "model_version": VERSION}
    if wanted.id is not None:
        opening["id"] = wanted.id
    yield orjson.dumps(opening)[:-1] + b',"outputs":'
    separator = b"["
    for output in wanted.outputs:
        tensor = tensors[output.name]
        fields: dict[str, Any] = {
            "name": output.name,
            "datatype": BY_TORCH[tensor.dtype].inference,
            "shape": list(tensor.shape),
        }
        yield separator
        separator = b","
        if output.is_binary:
            yield orjson.dumps({**fields, "parameters": {"binary_data_size": tensor.nbytes}})
            continue
        yield orjson.dumps(fields)[:-1] + b',"data":'
        yield from write_tensor(tensor.reshape(-1), TensorForm.NESTED)
        yield b"}"
    yield b'],"parameters":' + orjson.dumps(_scalars(facts)) + b"}"


def _scalars(facts: AnswerFacts) -> dict[str, str | int | float]:
    found = facts.to_json()
    return {
        "masked_rows": found["masked_rows"],
        "layer_digest": found["layer"]["digest"],
        **{f"batch_{name}": count for name, count in found["batch"].items()},
        **{f"{phase}_ms": ms for phase, ms in found["timing_ms"].items()},
    }
