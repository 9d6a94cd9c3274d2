"""Readings: the combinations of conventions with which a kernel may have computed the output of a case.

Legend: B sequences, H query heads, Hkv key and value heads, L query rows, S key rows. Invariants: Every reading is computed in
float64, so that only the other kernel's rounding counts. The service computes it, but the reference computes a softcap after the
masks, because the service has no such order. Readings with the same numbers are computed once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from attention_client.cli.arguments import tensor_field
from attention_client.cli.asking import Ask
from attention_client.cli.case_file import CASE_TENSORS, LAYOUTS, CaseFile, errors, widened
from attention_client.cli.reference import added_by, scaled_dot_product
from attention_client.errors import InvalidInput

AXES = {1: ("s",), 2: ("ls", "bs"), 3: ("hls", "bls"), 4: ("bhls",)}
Arrays = dict[str, np.ndarray]
Masks = list[dict[str, Any]]
"""The masks of a request, their values as arrays."""


class Reading(NamedTuple):
    """One combination: query [B, H, L, d], key and value [B, Hkv, S, …], output [B, H, L, V] in float64.

    `added` [B|1, H|1, L, S] is what the masks add to the scores.
    """

    words: tuple[str, ...]
    arrays: Arrays
    masks: Masks
    added: np.ndarray
    scale: float
    softcap: float | None
    is_capped_last: bool


class Found(NamedTuple):
    """How far a reading's answer is from the output: the largest absolute error, and the largest in ULP."""

    absolute: float
    ulps: float
    words: str


def readings_of(case: CaseFile, scales: list[float]) -> Iterator[Reading]:
    """Yield each combination of conventions that the case leaves open; raises InvalidInput if shapes fit none."""
    request, softcap, seen, tried = case.request, case.request.get("softcap"), set(), []
    for layout, grouping, arrays in _arrays(case):
        factors = [request["scale"]] if "scale" in request else [arrays["query"].shape[3] ** -0.5, 1.0, *scales]
        sizes = (*arrays["query"].shape[:3], arrays["key"].shape[2])
        tried.append(str(list(sizes)))
        tables, positions = _tables(case, sizes), _positions(sizes, request.get("window"))
        combinations = itertools.product(tables, positions, factors, (False, True))
        for (table, given), (position, placed), scale, is_last in combinations:
            masks = given + placed
            added = np.zeros((1, 1, *sizes[2:])) + sum(added_by(mask, *sizes[2:]) for mask in masks)
            same = (layout, grouping, added.shape, hashlib.sha256(added.tobytes()).digest(), scale, is_last)
            if same in seen or (is_last and (softcap is None or not added.any())):
                continue
            seen.add(same)
            cap = "" if softcap is None else f"softcap {'after' if is_last else 'before'} masks"
            words = (layout, grouping, table, position, f"scale {scale:.6g}", cap)
            yield Reading(words, arrays, masks, added, scale, softcap, is_last)
    if not seen:
        fitting, mask = " or ".join(dict.fromkeys(tried)), case.tensors["mask"].bits
        raise InvalidInput(f"mask {list(mask.shape)} fits no axes of [B, H, L, S] = {fitting}, or is not 0 and 1")


def found_in(ask: Ask, reading: Reading, dtype: str) -> Iterator[Found]:
    """Yield how far the reading's answer is from the output, for each convention for rows that may attend to no key."""
    inputs, added = [reading.arrays[name] for name in CASE_TENSORS[:3]], reading.added
    options: dict[str, Any] = {"scale": reading.scale, "softcap": reading.softcap}
    is_masked = np.isneginf(added).all(axis=-1, keepdims=True) & (not reading.is_capped_last)
    if reading.is_capped_last:
        answer, _ = scaled_dot_product(inputs, added, **options, is_capped_last=True)
    else:
        body = {name: tensor_field(array) for name, array in zip(CASE_TENSORS, inputs, strict=False)}
        masks = [m | {"values": tensor_field(m["values"])} if "values" in m else m for m in reading.masks]
        reply = ask(None, body | options | {"layout": "bhld", "masks": masks})
        answer = reply.array("output", reading.arrays["output"].shape)
    mean = inputs[2].mean(axis=2, keepdims=True).repeat(answer.shape[1] // inputs[2].shape[1], axis=1)
    fills = {"masked rows zero": answer, "masked rows mean of values": mean, "masked rows NaN": np.array(np.nan)}
    for rows, filled in fills.items() if is_masked.any() else [("", answer)]:
        words = ", ".join(word for word in (*reading.words, rows) if word)
        yield Found(*errors(reading.arrays["output"], np.where(is_masked, filled, answer), dtype), words)


def _arrays(case: CaseFile) -> Iterator[tuple[str, str, Arrays]]:
    """Yield layouts and groupings with their arrays: query head h uses key head h // (H / Hkv) ("repeat") or h % Hkv ("tile")."""
    arrays, request = {name: widened(case.tensors[name]) for name in CASE_TENSORS}, case.request
    heads, kv_heads = (request.get(name, request.get("num_heads")) for name in ("num_heads", "num_kv_heads"))
    known = ("packed",) if heads else LAYOUTS.get(arrays["query"].ndim, ())
    found = False
    for layout in known if "layout" not in request else (request["layout"],):
        part = {name: _rows(x, layout, kv_heads if name in ("key", "value") else heads) for name, x in arrays.items()}
        shapes = [part[name].shape for name in CASE_TENSORS]
        (b, h, rows, width), (_, shared, keys, _), (*_, value_width), _ = shapes
        expected = [(b, shared, keys, width), (b, shared, keys, value_width), (b, h, rows, value_width)]
        if 0 in shapes[0] or h % shared or shapes[1:] != expected:
            continue
        found = True
        yield layout, "repeat" * (h != shared), part
        if 1 < shared < h:
            used = np.arange(h) % shared
            yield layout, "tile", part | {name: part[name][:, used] for name in ("key", "value")}
    if not found:
        given = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise InvalidInput(f"no layout fits {given}; a packed layout needs num_heads in the metadata request")


def _rows(array: np.ndarray, layout: str, heads: int | None) -> np.ndarray:
    """Return [B, H, L, d], or an empty array if it does not fit the layout."""
    axes = layout
    if layout == "packed" and heads and array.ndim in LAYOUTS and array.size and array.shape[-1] % heads == 0:
        axes, array = "blhd"[3 - array.ndim :], array.reshape(*array.shape[:-1], heads, -1)
    if axes == "packed" or array.ndim != len(axes) or 0 in array.shape:
        return np.empty((0, 1, 0, 0))
    array = array.transpose([axes.index(axis) for axis in "bhld" if axis in axes])
    return np.expand_dims(array, tuple(place for place, axis in enumerate("bhld") if axis not in axes))


def _tables(case: CaseFile, sizes: tuple[int, ...]) -> list[tuple[str, Masks]]:
    """Return words and masks for each kind (attend, ignore, bias) and axes that the mask's values and shape allow, if any."""
    if "mask" not in case.tensors:
        return [("", [])]
    numbers = widened(case.tensors["mask"])
    kinds = ["attend", "ignore"] if np.isin(numbers, (0, 1)).all() else []
    kinds += ["bias"] * ("float" in case.tensors["mask"].dtype)
    found: list[tuple[str, Masks]] = []
    for axes in AXES.get(numbers.ndim, ()):
        have = dict(zip(axes, numbers.shape, strict=True))
        if all(have.get(axis, 1) in (1, size) for axis, size in zip("bhls", sizes, strict=True)):
            for kind in kinds:
                values = numbers if kind == "bias" else numbers.astype(bool)
                found.append((f"{kind} {axes}", [{"kind": kind, "values": values, "axes": axes}]))
    return found


def _positions(sizes: tuple[int, ...], window: int | None) -> Iterator[tuple[str, Masks]]:
    """Yield no mask and a causal one, for both alignments; if there is a window, with it and with one key less and more."""
    rows, keys = sizes[2:]
    widths = [None] if window is None else [width for width in (window, window - 1, window + 1) if width >= 0]
    for align, is_causal, width in itertools.product(("top_left", "bottom_right"), (False, True), widths):
        masks: Masks = [{"kind": "causal", "align": align}] * is_causal
        words = ["causal"] * is_causal
        if width is not None:
            masks.append({"kind": "window", "left": width, "right": width, "align": align})
            words.append(f"window {width}")
        yield " ".join([*words, *[align] * bool(words and rows != keys)]), masks
