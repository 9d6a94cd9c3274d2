"""A layer as `GET /v1/layers` describes it, and a service that answers from the float64 oracle."""

import base64
from typing import Any

import numpy as np
import orjson
import safetensors.numpy

from service.attention.spec import LayerSpec
from tests import oracle

WIDTHS: dict[str, Any] = {"query_width": 8, "key_width": 6, "value_width": 10, "out_width": 8}


def spec() -> LayerSpec:
    return LayerSpec(
        **WIDTHS, num_heads=4, num_kv_heads=2, head_width=2, value_head_width=3, scale=0.5,
        biases=("query", "value", "output"), has_bias_kv=True, add_zero_attn=True,
    )  # fmt: skip


def tensors(layer: LayerSpec) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in layer.tensor_shapes().items()}


def listed(*, limits=None, **changes) -> dict:
    """The layer in the answer to `GET /v1/layers`."""
    sizes = {"body_bytes": 16 << 20, "tokens": 65536, "cells": 1 << 28} | (limits or {})
    return {"name": "odd", "digest": "sha256:1", **WIDTHS, "num_heads": 4, "limits": sizes} | changes


def answered(layer: LayerSpec, parameters, request) -> dict[str, np.ndarray]:
    """The tensors of the service's answer, computed by the oracle."""
    query = request.tensors["query"]
    key = request.tensors.get("key", query)
    masks = [oracle.Causal(0)] if request.is_causal else []
    inputs = (query[None], key[None], request.tensors.get("value", key)[None])
    output, weights = oracle.multi_head_attention(layer, parameters, inputs, masks)
    found = {"output": output[0].astype(np.float32)}
    match request.weights:
        case {"form": "heads"}:
            found["weights"] = weights[0].astype(np.float32)
        case {"form": "mean"}:
            found["weights"] = weights[0].mean(0).astype(np.float32)
        case {"form": "top_k", "k": k}:
            values, indices, rest = oracle.top_k(weights[0], k)
            found |= {
                "weights.values": values.astype(np.float32),
                "weights.indices": indices.astype(np.int32),
                "weights.rest": rest.astype(np.float32),
            }
    return found


def body_of(arrays, form: str) -> bytes:
    """An answer in one of the three forms, as the service writes it."""
    if form == "safetensors":
        return safetensors.numpy.save(arrays)

    def encoded(array):
        if form == "lists":
            return array
        data = base64.b64encode(array.tobytes()).decode()
        return {"dtype": array.dtype.name, "shape": array.shape, "data": data}

    weights = {name.removeprefix("weights."): encoded(array) for name, array in arrays.items() if "." in name} or None
    if "weights" in arrays:
        weights = encoded(arrays["weights"])
    return orjson.dumps({"output": encoded(arrays["output"]), "weights": weights}, option=orjson.OPT_SERIALIZE_NUMPY)


class AnsweringService:
    """A `Send`. `damage(request, form, arrays)` may change an answer in place; `forms` lists what was sent."""

    def __init__(self, layer: LayerSpec, parameters, requests) -> None:
        self.damage = lambda request, form, arrays: None
        self.forms: list[str] = []
        self._layer, self._parameters = layer, parameters
        self._by_body = {body: (request, form) for request in requests for form, body in request.bodies.items()}

    def __call__(self, path: str, body: bytes | None = None, content_type: str = "") -> bytes:
        if body is None:
            return orjson.dumps({"layers": [listed(), listed(name="even")]})
        request, form = self._by_body[body]
        assert path == f"/v1/layers/{request.layer}/attend"
        assert (content_type == "application/vnd.safetensors") == (form == "safetensors")
        self.forms.append(form)
        arrays = answered(self._layer, self._parameters, request)
        self.damage(request, form, arrays)
        return body_of(arrays, form)


def flip_last_bit(array: np.ndarray) -> None:
    array.view(np.uint32).reshape(-1)[-1] ^= 1
