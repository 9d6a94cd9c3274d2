"""Positions: where the rows and keys of a request stand, and the past before the keys.

Invariants: A request without these fields, to a layer that uses no positions, does not enter the module. Where two readings are
usual, the request must say which: no position is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from service.attention.call import POSITIONS, Call
from service.attention.spec import MAX_POSITION, LayerSpec
from service.errors import BadShape, InvalidInput, PositionsRequired
from service.wire.layouts import Layout
from service.wire.number_list import at, index_of
from service.wire.tensor_fields import TensorField, TensorKind, expect
from service.wire.tensors import decode_tensor

PAST_FIELDS = ("past_key", "past_value")
POSITION_FIELDS = {name: TensorField(f"/{name}", TensorKind.INT) for name in POSITIONS}


def positions_of(
    call: Call, given: Mapping[str, object], layer: str, spec: LayerSpec, *, is_batch: bool, has_window: bool
) -> dict[str, Any]:
    """Return the positions [B|1, L] and key positions [B|1, S] of a call; nothing if they are 0, 1, … each or change nothing.

    `given` are those of the request to `layer`; `has_window` says whether the layer's window applies. Raises PositionsRequired,
    InvalidInput, BadShape, and the errors of `decode_tensor`.
    """
    counts = {"positions": call.query.shape[1], "key_positions": call.num_past + call.source.shape[1]}
    rows, keys = counts.values()
    if given and not spec.uses_positions:
        words = f'changes nothing: layer "{layer}" uses no positions; leave it out'
        raise POSITION_FIELDS[next(iter(given))].error(InvalidInput, words)
    if given:
        found = {
            name: _decoded(value, name, [[counts[name]], [len(call.query), counts[name]]][: 1 + is_batch])
            for name, value in given.items()
        }
        if len(found) < len(POSITIONS):
            (missing,), (other,) = counts.keys() - found.keys(), found
            if rows != keys:
                raise _required(missing, rows, keys, layer, f"{other} came without it")
            # The keys of self-attention are its query rows; others have the default.
            found[missing] = found[other] if call.key is None else torch.arange(keys).unsqueeze(0)
        return found
    if not (spec.rotary or spec.relative_bias or has_window):
        return {}
    if rows != keys:
        raise _required("positions", rows, keys, layer, f"the number of query rows is {rows}, that of keys {keys}")
    return dict.fromkeys(POSITIONS, torch.arange(keys).unsqueeze(0)) if call.num_past else {}


def _decoded(value: object, name: str, shapes: list[list[int]]) -> torch.Tensor:
    field, tensor = POSITION_FIELDS[name], decode_tensor(value, POSITION_FIELDS[name])
    if list(tensor.shape) not in shapes:
        words = "one for each row of query" if name == "positions" else "one for each key, the past included"
        raise field.error(BadShape, f"must be {' or '.join(map(str, shapes))}, {words}, got {list(tensor.shape)}")
    wrong = (tensor < 0) | (tensor >= MAX_POSITION)
    if wrong.any():
        place = at(index_of(int(wrong.flatten().int().argmax()), tensor.shape))
        words = f"has a number out of range{place}, expected whole numbers from 0 to {MAX_POSITION - 1:,}"
        raise field.error(InvalidInput, words)
    return tensor.to(torch.int64).reshape(-1, tensor.shape[-1])


def _required(name: str, rows: int, keys: int, layer: str, why: str) -> PositionsRequired:
    end = max(rows, keys)
    return PositionsRequired(
        f'{name} is required: layer "{layer}" uses positions, and {why}. Usual are positions {_span(rows, rows)} with '
        f"key_positions {_span(keys, keys)} (top left: the first row at the first key), or positions "
        f"{_span(rows, end)} with key_positions {_span(keys, end)} (bottom right: the last row at the last key)",
        param=f"/{name}",
    )


def _span(count: int, end: int) -> str:
    return f"{end - count} to {end - 1}" if count > 1 else str(end - 1)


def past_of(tensors: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, Any]:
    """Return the past among the tensors as [B, Hkv, P, d]; raises BadShape, and InvalidInput for a half of it."""
    found = {name: layout.past(tensors[name], name) for name in PAST_FIELDS if name in tensors}
    if len(found) == 1:
        (missing,) = set(PAST_FIELDS) - found.keys()
        raise InvalidInput("past_key and past_value come together", param=f"/{missing}")
    return found


def check_past(
    past: Mapping[str, torch.Tensor], sequences: int, heads: int, widths: tuple[int, int], others: tuple[str, str]
) -> None:
    """Raise BadShape unless the past has so many sequences, key/value heads and features; `others` are what has them."""
    for (name, tensor), width, other in zip(past.items(), widths, others, strict=True):
        expect(name, "sequences", tensor.shape[0], sequences, "query")
        expect(name, "key/value heads", tensor.shape[1], heads, other)
        expect(name, "features a head", tensor.shape[3], width, other)
    expect("past_value", "rows", past["past_value"].shape[2], past["past_key"].shape[2], "past_key")
