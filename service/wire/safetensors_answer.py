"""Safetensors answer: writes a header with the other fields in its metadata, then the tensors' bytes.

Invariants: No tensor is copied: a piece is a view of its memory. Tensors of wider dtypes come first, so that each one is aligned
for a reader that maps the bytes. The bits arrive unchanged, whatever the values are.
"""

from __future__ import annotations

from typing import Any

import orjson

from service.attention.call import Answer
from service.wire.answer import AnswerFacts, named_tensors
from service.wire.dtypes import BY_TORCH
from service.wire.tensors import bytes_of

_ALIGNMENT = 8


def write_safetensors(answer: Answer, facts: AnswerFacts, *, is_batch: bool) -> list[bytes | memoryview]:
    """Return the parts of the body: length and header, then each tensor's bytes."""
    tensors = named_tensors(answer)
    header: dict[str, Any] = {"__metadata__": {"response": orjson.dumps(facts.to_json()).decode()}}
    parts, offset = [], 0
    if len(tensors) > 1:
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    for name, tensor in tensors.items():
        data = bytes_of(tensor)
        header[name] = {
            "dtype": BY_TORCH[tensor.dtype].safetensors,
            "shape": list(tensor.shape if is_batch else tensor.shape[1:]),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    text = orjson.dumps(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return [len(text).to_bytes(8, "little") + text, *parts]
