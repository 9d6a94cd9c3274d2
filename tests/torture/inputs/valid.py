"""Valid requests of every form, drawn at random: what mutations start from, and what a soak is made of."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import safetensors.numpy

from tests.integration.forms import (
    AXES,
    BINARY,
    HEADS,
    WIDTH,
    Request,
    as_base64,
    as_inference,
    as_list,
    as_nested,
    as_safetensors,
)
from tests.torture.raw_connection import post

ATTENTION = "/v1/attention"
FORMS = ("nested", "list", "base64", "safetensors", "inference", "inference_binary")
DTYPES = ("float32", "float32", "float16", "float64")


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """One request before it becomes bytes."""

    path: str
    body: bytes
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    method: str = "POST"

    @property
    def is_inference(self) -> bool:
        path = self.path.split("?")[0]
        return path == "/v2" or path.startswith("/v2/")

    def wire(self) -> bytes:
        return post(self.path, self.body, self.headers, self.method)


def draw_request(rng: random.Random, max_rows: int = 12) -> Request:
    """For a layer that is WIDTH wide and has HEADS heads."""
    dtype = rng.choice(DTYPES)
    batch = rng.choice([None, None, 1, 2, 3])
    lead = () if batch is None else (batch,)
    num_rows = rng.randint(1, max_rows)
    num_keys = num_rows if rng.random() < 0.6 else rng.randint(1, max_rows)

    def tensor(rows: int) -> np.ndarray:
        count = int(np.prod(lead)) * rows * WIDTH
        values = [round(rng.uniform(-2, 2), 3) for _ in range(count)]
        return np.array(values, dtype).reshape(*lead, rows, WIDTH)

    request = Request(tensor(num_rows))
    if num_keys != num_rows or rng.random() < 0.3:
        request.key = tensor(num_keys)
        if rng.random() < 0.5:
            request.value = tensor(num_keys)
    request.masks = [draw_mask(rng, lead, num_rows, num_keys) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    if rng.random() < 0.3:
        request.weights = draw_weights(rng, num_keys)
    return request


def draw_mask(
    rng: random.Random, lead: tuple[int, ...], num_rows: int, num_keys: int
) -> tuple[dict[str, object], np.ndarray | None]:
    kind = rng.choice(["attend", "ignore", "bias", "lengths", "causal", "window"])
    if kind == "causal":
        return {"kind": kind, **rng.choice([{"align": "top_left"}, {"align": "bottom_right"}, {"offset": 1}])}, None
    if kind == "window":
        return {"kind": kind, "left": rng.randint(0, 3), "right": rng.choice([None, 0, 2]), "offset": 0}, None
    if kind == "lengths":
        return {"kind": kind}, np.array([rng.randint(0, num_keys) for _ in range(*lead or (1,))], "int64").reshape(lead)
    axes = rng.choice(AXES[bool(lead)])
    full = dict(zip("bhls", (*(lead or (1,)), HEADS, num_rows, num_keys), strict=True))
    shape = tuple(full[name] if rng.random() < 0.8 else 1 for name in axes)
    count = int(np.prod(shape))
    fields: dict[str, object] = {"kind": kind, "axes": axes}
    if kind == "bias":
        return fields, np.array([rng.uniform(-1, 1) for _ in range(count)], "float32").reshape(shape)
    return fields, np.array([rng.random() < 0.8 for _ in range(count)], "bool").reshape(shape)


def draw_weights(rng: random.Random, num_keys: int) -> dict:
    form = rng.choice(["heads", "mean", "top_k", "contributions"])
    more: dict = {"k": rng.randint(1, num_keys)} if form == "top_k" else {}
    return {"form": form, **more}


def write(request: Request, form: str, layer: str = "small") -> Input:
    """The request in one of FORMS; what the Open Inference Protocol cannot say becomes JSON."""
    path = f"/v1/layers/{layer}/attend"
    if form == "safetensors":
        return Input(path, as_safetensors(request), {"Content-Type": BINARY})
    if form.startswith("inference") and request.has_inference_form:
        if form == "inference" and any(x.dtype.name in ("float16", "bfloat16") for x in request.tensors.values()):
            form = "inference_binary"
        body, length = as_inference(request, binary=form == "inference_binary")
        headers = {"Inference-Header-Content-Length": str(length)} if form == "inference_binary" else {}
        return Input(f"/v2/models/{layer}/infer", body, headers)
    how = {"nested": as_nested, "list": as_list}.get(form, as_base64)
    return Input(path, json.dumps(request.fields(how)).encode())


def draw_attention(rng: random.Random, max_rows: int = 12) -> Input:
    """A request to attention without a layer."""
    layout = rng.choice(["ld", "bld", "hld", "lhd", "bhld", "blhd"])
    kv_heads, shared = (rng.randint(1, 3), rng.randint(1, 3)) if "h" in layout else (1, 1)
    queries, keys, width = rng.randint(1, max_rows), rng.randint(1, max_rows), rng.randint(1, 9)
    batch = rng.randint(1, 3)

    def tensor(heads: int, rows: int, width: int) -> np.ndarray:
        sizes = {"b": batch, "h": heads, "l": rows, "d": width}
        shape = [sizes[axis] for axis in layout]
        return np.array([round(rng.uniform(-2, 2), 3) for _ in range(int(np.prod(shape)))], "float32").reshape(shape)

    value_width = rng.choice([width, width, 3])
    tensors = {
        "query": tensor(kv_heads * shared, queries, width),
        "key": tensor(kv_heads, keys, width),
        "value": tensor(kv_heads, keys, value_width),
    }
    if rng.random() < 0.2:
        tensors["sinks"] = np.array([rng.uniform(-1, 1) for _ in range(kv_heads * shared)], "float32")
    options: dict[str, object] = {
        "scale": rng.uniform(0.1, 2),
        "softcap": rng.uniform(1, 9),
        "lse": True,
        "entropy": True,
        "present": True,
    }
    options |= {"scores": {"stage": rng.choice(["scaled", "capped", "masked"])}, "weights": draw_weights(rng, keys)}
    options["masks"] = [{"kind": "causal", "align": rng.choice(["top_left", "bottom_right"])}]
    chosen = {name: option for name, option in options.items() if rng.random() < 0.3}
    fields: dict[str, object] = {"layout": layout, **chosen}
    if rng.random() < 0.5:
        return Input(
            ATTENTION, safetensors.numpy.save(tensors, {"request": json.dumps(fields)}), {"Content-Type": BINARY}
        )
    return Input(ATTENTION, json.dumps({name: x.tolist() for name, x in tensors.items()} | fields).encode())


def draw(rng: random.Random, max_rows: int = 12) -> Input:
    if rng.random() < 0.2:
        return draw_attention(rng, max_rows)
    return write(draw_request(rng, max_rows), rng.choice(FORMS))
