"""A target that answers from the float64 reference of the tests, and as many wrong bits as a test wants."""

import base64

import numpy as np
import orjson
import safetensors.numpy

from attention_load.layer import LayerFacts
from attention_load.question import SAFETENSORS
from service.attention.spec import LayerSpec
from tests import reference

WIDTHS = {"query_width": 8, "key_width": 6, "value_width": 10, "out_width": 8}


def spec(**changes) -> LayerSpec:
    shape = dict(
        **WIDTHS, num_heads=4, num_kv_heads=2, head_width=2, value_head_width=3, scale=0.5,
        biases=("query", "value", "output"), has_bias_kv=True, add_zero_attn=True,
    )  # fmt: skip
    return LayerSpec(**{**shape, **changes})


def tensors(layer: LayerSpec) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in layer.tensor_shapes().items()}


def facts(layer: LayerSpec, *, name="odd", digest="sha256:1", **limits) -> LayerFacts:
    numbers = {"max_body_bytes": 16 << 20, "max_tokens": 65536, "max_cells": 1 << 28} | limits
    widths = (layer.query_width, layer.key_width, layer.value_width)
    return LayerFacts(name, digest, *widths, layer.num_heads, {"dtype": "float32"}, **numbers)


def answered(layer: LayerSpec, parameters, question) -> dict[str, np.ndarray]:
    """What the service would answer, computed by the tests' own reference."""
    query = question.tensors["query"]
    key = question.tensors.get("key", query)
    masks = [reference.Causal(0)] if question.is_causal else []
    inputs = (query[None], key[None], question.tensors.get("value", key)[None])
    output, weights = reference.multi_head_attention(layer, parameters, inputs, masks)
    found = {"output": output[0].astype(np.float32)}
    match question.weights:
        case {"form": "heads"}:
            found["weights"] = weights[0].astype(np.float32)
        case {"form": "mean"}:
            found["weights"] = weights[0].mean(0).astype(np.float32)
        case {"form": "top_k", "k": k}:
            values, indices, rest = reference.top_k(weights[0], k)
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

    def told(array):
        if form == "lists":
            return array
        data = base64.b64encode(array.tobytes()).decode()
        return {"dtype": array.dtype.name, "shape": array.shape, "data": data}

    weights = {name.removeprefix("weights."): told(array) for name, array in arrays.items() if "." in name} or None
    if "weights" in arrays:
        weights = told(arrays["weights"])
    return orjson.dumps({"output": told(arrays["output"]), "weights": weights}, option=orjson.OPT_SERIALIZE_NUMPY)


class AnsweringTarget:
    """Instead of a Target. `damage(question, form, arrays)` may change an answer in place; `asked` counts them."""

    def __init__(self, layer: LayerSpec, parameters, questions) -> None:
        self.damage = lambda question, form, arrays: None
        self.asked: list[str] = []
        self._layer, self._parameters = layer, parameters
        self._by_body = {body: (question, form) for question in questions for form, body in question.bodies.items()}

    def attend(self, layer: str, body: bytes, content_type: str) -> bytes:
        question, form = self._by_body[body]
        assert (content_type == SAFETENSORS) == (form == "safetensors")
        self.asked.append(form)
        arrays = answered(self._layer, self._parameters, question)
        self.damage(question, form, arrays)
        return body_of(arrays, form)


def flip_last_bit(array: np.ndarray) -> None:
    array.view(np.uint32).reshape(-1)[-1] ^= 1
