"""Answers of Keras, Flax and JAX to arrays in float64, computed in their own environment: python parity_answers.py DIRECTORY.

DIRECTORY has `cases.json`, a list of calls with their plain arguments, and `arrays.npz`, whose names are the place in that list
and the argument: `3/query`. `answers.npz` is written beside them, an output a call. This program imports nothing of the service.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
from flax import linen, nnx

PROJECTIONS = ("wq", "wk", "wv", "wo")


def linen_layer(query: Any, key: Any, value: Any, wq: Any, wk: Any, wv: Any, wo: Any, **options: Any) -> Any:
    layer = linen.MultiHeadDotProductAttention(
        wq.shape[1], qkv_features=wq.shape[1] * wq.shape[2], use_bias=False, deterministic=True
    )
    kernels = {"query": wq, "key": wk, "value": wv, "out": wo}
    parameters = {"params": {name: {"kernel": kernel} for name, kernel in kernels.items()}}
    return layer.apply(parameters, query, key, value, **options)


def nnx_layer(query: Any, key: Any, value: Any, wq: Any, wk: Any, wv: Any, wo: Any, **options: Any) -> Any:
    width, heads = wq.shape[0], wq.shape[1]
    layer = nnx.MultiHeadAttention(
        heads, width, heads * wq.shape[2], use_bias=False, decode=False, param_dtype=jax.numpy.float64, rngs=nnx.Rngs(0)
    )
    for part, kernel in ((layer.query, wq), (layer.key, wk), (layer.value, wv), (layer.out, wo)):
        part.kernel[...] = kernel
    return layer(query, key, value, **options)


def keras_layer(layer: Any, query: Any, key: Any, value: Any, kernels: tuple[Any, ...], **options: Any) -> Any:
    layer.build(query.shape, value.shape, key.shape)
    for part, kernel in zip(("query", "key", "value", "output"), kernels, strict=True):
        getattr(layer, f"_{part}_dense").set_weights([kernel])
    return layer(query, value, key, **options)


def keras_mha(query: Any, key: Any, value: Any, wq: Any, wk: Any, wv: Any, wo: Any, **options: Any) -> Any:
    layer = keras.layers.MultiHeadAttention(wq.shape[1], wq.shape[2], use_bias=False, dtype="float64")
    return keras_layer(layer, query, key, value, (wq, wk, wv, wo), **options)


def keras_gqa(query: Any, key: Any, value: Any, wq: Any, wk: Any, wv: Any, wo: Any, **options: Any) -> Any:
    layer = keras.layers.GroupQueryAttention(wq.shape[2], wq.shape[1], wk.shape[1], use_bias=False, dtype="float64")
    return keras_layer(layer, query, key, value, (wq, wk, wv, wo), **options)


CALLS = {
    "jax.nn.dot_product_attention": jax.nn.dot_product_attention,
    "flax.linen.dot_product_attention": linen.dot_product_attention,
    "flax.nnx.dot_product_attention": nnx.dot_product_attention,
    "flax.linen.MultiHeadDotProductAttention": linen_layer,
    "flax.nnx.MultiHeadAttention": nnx_layer,
    "keras.ops.dot_product_attention": keras.ops.dot_product_attention,
    "keras.layers.MultiHeadAttention": keras_mha,
    "keras.layers.GroupQueryAttention": keras_gqa,
}


def answer(call: str, arguments: dict[str, Any]) -> np.ndarray:
    """Return the output in float64, whatever the system computed in."""
    plain = {
        name: tuple(x) if isinstance(x, list) else x for name, x in arguments.items() if not isinstance(x, np.ndarray)
    }
    arrays = {name: jax.numpy.asarray(x) for name, x in arguments.items() if isinstance(x, np.ndarray)}
    output = CALLS[call](**arrays, **plain)
    # Keras gives two with return_attention_scores.
    return np.asarray(output[0] if isinstance(output, tuple) else output, np.float64)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    directory = Path(sys.argv[1])
    with np.load(directory / "arrays.npz") as arrays:
        cases = json.loads((directory / "cases.json").read_text(encoding="utf-8"))
        for place, case in enumerate(cases):
            prefix = f"{place}/"
            case["arguments"] |= {
                name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)
            }
    np.savez(
        directory / "answers.npz",
        allow_pickle=False,
        **{str(i): answer(case["call"], case["arguments"]) for i, case in enumerate(cases)},
    )


if __name__ == "__main__":
    main()
