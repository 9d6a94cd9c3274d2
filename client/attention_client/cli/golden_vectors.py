"""Golden vectors: seeded inputs of attention calls, with float64 references of output and log-sum-exp.

Legend: B sequences, H query heads, Hkv key and value heads, L query rows, S key rows with P past ones, d and V head widths.
Invariants: The reference is computed from the rounded inputs, as the file holds them. A key that no row may attend to is
poisoned: its value is large, and a kernel that reads it gives it weight in every row. The same seed gives the same bytes on one
machine.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention_client.arrays import Raw, write
from attention_client.cli.arguments import tensor_field
from attention_client.cli.case_file import rounded, widened
from attention_client.cli.reference import added_by, scaled_dot_product
from attention_client.errors import InvalidInput
from attention_client.masks import given

QUERIES, KEYS, WIDTH, VALUE_WIDTH = 5, 7, 8, 6
LEFT, BLOCKED = 2, 0.3  # keys to the left in a window; the fraction of keys that a table of booleans blocks
# The value in a poisoned key, by dtype: its product with a query row is finite, so that no score is infinite or NaN before the
# mask blocks it.
POISON = {"float16": 1e3, "bfloat16": 1e30, "float32": 1e30, "float64": 1e30}


class Vector(NamedTuple):
    """The options of one test vector; `masks` are names that `_mask` takes. A `past` needs a layout with B."""

    name: str
    layout: str = "bhld"
    dtype: str = "float32"
    masks: tuple[str, ...] = ()
    scale: float | None = None
    softcap: float | None = None
    past: int = 0
    has_sinks: bool = False


class Golden(NamedTuple):
    """Inputs and other fields of a vector's request by name, the output in its layout, and the log-sum-exp [B, H, L]."""

    vector: Vector
    inputs: dict[str, Raw]
    request: dict[str, Any]
    output: np.ndarray
    lse: np.ndarray
    description: str

    def body(self) -> dict[str, Any]:
        """Return the request body in JSON, its tensors in base64."""
        fields = {name: tensor_field(raw.bits) | {"dtype": raw.dtype} for name, raw in self.inputs.items()}
        masks = []
        for place, mask in enumerate(self.request["masks"]):
            values = fields.pop(f"masks.{place}.values", None)
            masks.append(mask if values is None else mask | {"values": values})
        return self.request | fields | {"masks": masks}

    def write(self, out: Path, seed: int) -> None:
        """Write inputs and references. The metadata is one key, because the library orders several keys at random."""
        data = b"".join(self.inputs[name].bits.tobytes() for name in sorted(self.inputs))
        about = {
            "name": self.vector.name,
            "description": self.description,
            "request": self.request,
            "seed": seed,
            "sha256": hashlib.sha256(data).hexdigest(),
            "made_by": {name: version(name) for name in ("attention-service-client", "numpy")},
        }
        references = {"output": rounded(self.output, "float64"), "lse": rounded(self.lse, "float64")}
        path = out / f"{self.vector.name}.safetensors"
        try:
            out.mkdir(parents=True, exist_ok=True)
            path.write_bytes(write(self.inputs | references, {"golden": json.dumps(about, separators=(",", ":"))}))
        except OSError as error:
            raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None


_LAYOUTS = ("ld", "bld", "hld", "lhd", "bhld", "blhd", "packed")
VECTORS = (
    *(Vector(f"layout_{name}", name, masks=("top_left",)) for name in _LAYOUTS),
    *(Vector(name, dtype=name, masks=("ignore", "bottom_right")) for name in ("float16", "bfloat16", "float64")),
    Vector("no_mask"),
    Vector("causal_bottom_right", masks=("bottom_right",)),
    Vector("window", masks=("window", "lengths")),
    Vector("attend", masks=("attend",)),
    Vector("ignore", masks=("ignore",)),
    Vector("lengths", masks=("lengths",)),
    Vector("bias", masks=("bias",)),
    Vector("masked_rows", masks=("masked_rows",)),
    Vector("scale", masks=("top_left",), scale=1.0),
    Vector("softcap", masks=("top_left",), softcap=1.5),
    Vector("sinks", masks=("attend",), has_sinks=True),
    Vector("sinks_masked_rows", masks=("masked_rows",), has_sinks=True),
    Vector("past", masks=("ignore", "bottom_right"), past=3),
    Vector("past_float16", "blhd", "float16", ("lengths",), past=3),
    Vector("all_bfloat16", "packed", "bfloat16", ("lengths", "window", "bias"), 0.5, 2.0, 3, has_sinks=True),
)


def golden_of(vector: Vector, seed: int) -> Golden:
    """Return inputs and references; the random numbers follow from the seed and the vector's name."""
    random = np.random.default_rng([seed, *vector.name.encode()])
    axes = "blhd" if vector.layout == "packed" else vector.layout
    b, h, g = 2 if "b" in axes else 1, *((4, 2) if "h" in axes else (1, 1))
    masks = [_mask(name, random, b, h) for name in vector.masks]
    added = np.zeros((b, h, QUERIES, KEYS)) + sum(added_by(mask, QUERIES, KEYS) for mask in masks)
    query = random.standard_normal((b, h, QUERIES, WIDTH))
    key, value = (random.standard_normal((b, g, KEYS, width)) for width in (WIDTH, VALUE_WIDTH))
    # The first number of a query row is positive, so a large one makes the score of a poisoned key the row's largest.
    query[..., 0] = 0.5 + np.abs(query[..., 0])
    unread = np.isneginf(added).reshape(b, g, -1, KEYS).all(axis=2)
    key[unread, 0] = value[unread] = POISON[vector.dtype]
    arrays = [widened(rounded(array, vector.dtype)) for array in (query, key, value)]
    inputs = dict(zip(("query", "key", "value"), arrays, strict=True))
    if vector.past:
        for name in ("key", "value"):
            inputs[f"past_{name}"], inputs[name] = np.split(inputs[name], [vector.past], axis=2)
    for name in ("query", "key", "value"):
        inputs[name] = _laid_out(inputs[name], vector.layout, axes)
    sinks = None
    if vector.has_sinks:
        inputs["sinks"] = sinks = widened(rounded(random.standard_normal(h), vector.dtype))
    raws = {name: rounded(array, vector.dtype) for name, array in inputs.items()}
    values = {f"masks.{place}.values": mask.pop("values") for place, mask in enumerate(masks) if "values" in mask}
    raws |= {name: rounded(array, array.dtype.name) for name, array in values.items()}
    scale = WIDTH**-0.5 if vector.scale is None else vector.scale
    output, lse = scaled_dot_product(arrays, added, scale=scale, softcap=vector.softcap, sinks=sinks)
    lse = lse[tuple(slice(None) if axis in axes else 0 for axis in "bh")]
    about = (
        f"masks {', '.join(vector.masks) or 'none'}; {unread.sum()} of {unread.size} keys hold {POISON[vector.dtype]:g}"
    )
    laid_out = _laid_out(output, vector.layout, axes)
    return Golden(vector, raws, _request(vector, masks, (h, g)), laid_out, lse, about)


def _request(vector: Vector, masks: list[dict[str, Any]], heads: tuple[int, int]) -> dict[str, Any]:
    request = {"layout": vector.layout, "masks": masks, "lse": True}
    if vector.layout == "packed":
        request |= dict(zip(("num_heads", "num_kv_heads"), heads, strict=True))
    return request | given(scale=vector.scale, softcap=vector.softcap)


def _laid_out(array: np.ndarray, layout: str, axes: str) -> np.ndarray:
    """Return [B, H, L, d] in a layout; an axis that the layout lacks has size 1."""
    array = np.einsum(f"bhld->{axes}", array)
    return array.reshape(*array.shape[:-2], -1) if layout == "packed" else array


def _mask(name: str, random: np.random.Generator, b: int, h: int) -> dict[str, Any]:
    """Return the mask called `name`: a causal alignment, "window", "lengths", "bias", "attend", "ignore" or "masked_rows"."""
    if name in ("top_left", "bottom_right"):
        return {"kind": "causal", "align": name}
    if name == "window":
        return {"kind": "window", "left": LEFT, "right": 0, "align": "bottom_right"}
    if name == "lengths":
        return {"kind": "lengths", "values": np.arange(KEYS - 1, KEYS - 1 - b, -1)}
    if name == "bias":
        values = random.standard_normal((h, QUERIES, KEYS)).astype(np.float32)
        values[:, :, 1] = -np.inf
        return {"kind": "bias", "axes": "hls", "values": values}
    # Booleans: key 1 is blocked for all rows, and in "masked_rows" row 2 may attend to nothing.
    blocked = random.random((QUERIES, KEYS)) < BLOCKED
    blocked[:, 0], blocked[:, 1] = False, True
    blocked[2] |= name == "masked_rows"
    kind = "ignore" if name == "ignore" else "attend"
    return {"kind": kind, "axes": "ls", "values": blocked == (kind == "ignore")}
