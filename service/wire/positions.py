"""Positions: where the rows and keys of a request stand: their positions, the layer's own window, and the past before the keys.

Invariants: A request without these fields, to a layer that uses no positions, does not enter the module. Where two readings are
usual, the request must say which: no position is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from service.attention import masks
from service.attention.call import POSITIONS, Call
from service.attention.masks import Mask, Sizes
from service.attention.spec import MAX_POSITION, LayerSpec, Window
from service.errors import BadShape, InvalidInput, PositionsRequired
from service.wire.layouts import Layout
from service.wire.number_list import at, index_of
from service.wire.tensor_fields import TensorField, TensorKind, expect
from service.wire.tensors import decode_tensor

PAST_FIELDS = ("past_key", "past_value")
POSITION_FIELDS = {name: TensorField(f"/{name}", TensorKind.INT) for name in POSITIONS}


class Place(NamedTuple):
    """What positions must fit; the keys of `sizes` count the past. With `has_own_keys` the keys are not the query rows."""

    layer: str
    spec: LayerSpec
    sizes: Sizes
    is_batch: bool
    has_past: bool
    has_own_keys: bool

    def positions(self, given: Mapping[str, object], window: Window | None) -> dict[str, Any]:
        """Return the positions [B|1, L] and key positions [B|1, S]; nothing if they are 0, 1, … each or change nothing.

        `given` are those of the request, `window` that of the layer where it applies. Raises PositionsRequired, InvalidInput,
        BadShape, and the errors of `decode_tensor`.
        """
        if given and not self.spec.uses_positions:
            words = f'changes nothing: layer "{self.layer}" uses no positions; leave it out'
            raise POSITION_FIELDS[next(iter(given))].error(InvalidInput, words)
        if not given:
            return self._default(window)
        counts = dict(zip(POSITIONS, self.sizes[2:], strict=True))
        found = {name: self._decoded(value, name, counts[name]) for name, value in given.items()}
        if "positions" in found and not self.has_past and not self.has_own_keys:
            found.setdefault("key_positions", found["positions"])
        for name, other in (POSITIONS, POSITIONS[::-1]):
            if name not in found:
                raise self._required(name, f"{other} came without it")
        return found

    def _default(self, window: Window | None) -> dict[str, torch.Tensor]:
        if self.spec.rotary is None and self.spec.relative_bias is None and window is None:
            return {}
        _, _, rows, keys = self.sizes
        if rows != keys:
            raise self._required("positions", f"the number of query rows is {rows}, that of keys {keys}")
        return dict.fromkeys(POSITIONS, torch.arange(keys).unsqueeze(0)) if self.has_past else {}

    def _decoded(self, value: object, name: str, count: int) -> torch.Tensor:
        field, tensor = POSITION_FIELDS[name], decode_tensor(value, POSITION_FIELDS[name])
        shapes = [[count], [self.sizes.sequences, count]][: 1 + self.is_batch]
        if list(tensor.shape) not in shapes:
            words = "one for each row of query" if name == "positions" else "one for each key, the past included"
            raise field.error(BadShape, f"must be {' or '.join(map(str, shapes))}, {words}, got {list(tensor.shape)}")
        wrong = (tensor < 0) | (tensor >= MAX_POSITION)
        if wrong.any():
            place = at(index_of(int(wrong.flatten().int().argmax()), tensor.shape))
            words = f"has a number out of range{place}, expected whole numbers from 0 to {MAX_POSITION - 1:,}"
            raise field.error(InvalidInput, words)
        return tensor.to(torch.int64).reshape(-1, count)

    def _required(self, name: str, why: str) -> PositionsRequired:
        _, _, rows, keys = self.sizes
        usual = f"positions {_span(0, rows)} with key_positions {_span(0, keys)}"
        if rows == keys:
            usual = f"Usual are {usual}"
        else:
            first, last = max(keys - rows, 0), max(rows - keys, 0)
            usual = (
                f"Usual are {usual} (top left: the first row at the first key), or positions {_span(first, rows)} with "
                f"key_positions {_span(last, keys)} (bottom right: the last row at the last key)"
            )
        words = f'{name} is required: layer "{self.layer}" uses positions, and {why}. {usual}'
        return PositionsRequired(words, param=f"/{name}")


def _span(start: int, count: int) -> str:
    return f"{start} to {start + count - 1}" if count > 1 else str(start)


def window_mask(window: Window, call: Call, sizes: Sizes) -> Mask:
    """Return the layer's own mask for a call with its positions."""
    if call.positions is None or call.key_positions is None:
        return masks.window(sizes, 0, window.left, window.right)
    return masks.of_positions(window, call.positions, call.key_positions)


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
