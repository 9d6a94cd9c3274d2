"""Calls of Keras, Flax and JAX, and each of them as arguments of `attention_client.conventions`.

A case has the system's own arguments: `parity_answers.py` gives them to the system, the test gives them to the convention.
Legend: B sequences, H query heads, G key and value heads, L query rows, S key rows, d head width, E model width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from attention_client import conventions as typed_conventions

conventions: Any = typed_conventions
MODEL_WIDTH = 12
PROJECTIONS = {"query": "wq", "key": "wk", "value": "wv"}
DTYPES = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5}
FLOAT32_SOFTMAX, FLOAT32 = 2e-6, 1e-5


class Shape(NamedTuple):
    """Sizes; without a batch the arrays are [L, H, d]."""

    b: int | None
    h: int
    g: int
    rows: int
    keys: int
    width: int = 8

    @property
    def words(self) -> str:
        sizes = [size for size in (self.b, self.rows, self.h, self.width) if size is not None]
        return f"{sizes}, G = {self.g}, S = {self.keys}"


SHAPES = {
    "square": Shape(2, 4, 4, 6, 6),
    "cross": Shape(2, 4, 4, 3, 7),
    "grouped": Shape(2, 6, 2, 5, 7),
    "one-key-head": Shape(3, 4, 1, 7, 4, 16),
    "no-batch": Shape(None, 3, 3, 4, 6),
}


def _mask(shape: Shape, random: np.random.Generator, lead: tuple[int, ...]) -> np.ndarray:
    """Booleans [*lead, L, S]; every row may attend to key 0."""
    found = random.random((*lead, shape.rows, shape.keys)) < 0.6
    found[..., 0] = True
    return found


def _full(shape: Shape) -> tuple[int, ...]:
    return (shape.h,) if shape.b is None else (shape.b, shape.h)


def _lengths(shape: Shape) -> dict[str, Any]:
    counts = np.arange(shape.b or 1, dtype=np.int32)
    return {"query_seq_lengths": shape.rows - counts, "key_value_seq_lengths": shape.keys - counts}


def _padding(shape: Shape) -> dict[str, Any]:
    """Keras' three masks: true = a position that counts; the first key counts in both."""
    counts = np.arange(shape.b or 1)[:, None]
    keys = np.arange(shape.keys) < shape.keys - counts
    return {"value_mask": keys, "key_mask": np.arange(shape.keys) != 1 + counts}


# What a call is given beside its arrays, by the system's own names.
OPTIONS: dict[str, Callable[[Shape, np.random.Generator], dict[str, Any]]] = {
    "none": lambda _s, _r: {},
    "is_causal": lambda _s, _r: {"is_causal": True},
    "use_causal_mask": lambda _s, _r: {"use_causal_mask": True},
    "scale": lambda _s, _r: {"scale": 0.3},
    "mask": lambda s, r: {"mask": _mask(s, r, _full(s))},
    "mask-ls": lambda s, r: {"mask": _mask(s, r, (1,) * len(_full(s)))},
    "mask-causal": lambda s, r: {"mask": _mask(s, r, _full(s)), "is_causal": True},
    "bias": lambda s, r: {"bias": r.standard_normal((*_full(s), s.rows, s.keys))},
    "bias-mask": lambda s, r: {
        "bias": r.standard_normal((*_full(s), s.rows, s.keys)),
        "mask": _mask(s, r, _full(s)),
    },
    "attention_mask": lambda s, r: {"attention_mask": _mask(s, r, _full(s)[:1])},
    "padding": lambda s, _r: _padding(s),
    "attention_mask-padding-causal": lambda s, r: {
        "attention_mask": _mask(s, r, _full(s)[:1]),
        "use_causal_mask": True,
        **_padding(s),
    },
    "window": lambda _s, _r: {"local_window_size": 1},
    "window-sides": lambda _s, _r: {"local_window_size": (2, 0)},
    "lengths": lambda s, _r: _lengths(s),
    "lengths-causal": lambda s, _r: {**_lengths(s), "is_causal": True},
}


class System(NamedTuple):
    """The calls of one system; `tolerance` is that of float64; a layer has projections."""

    shapes: tuple[str, ...]
    options: tuple[str, ...]
    tolerance: float = 1e-12
    is_layer: bool = False
    differs: str = "nothing"


_EQUAL_HEADS = ("square", "cross", "no-batch")
_KERAS = "Keras on JAX computes in float32, here float64 for float64"
_SINGLE = "its softmax is float32, here float64 for float64"
_KERAS_LAYER = System(
    ("square", "cross"),
    ("none", "use_causal_mask", "attention_mask", "padding", "attention_mask-padding-causal"),
    FLOAT32,
    is_layer=True,
    differs=_KERAS,
)
SYSTEMS = {
    "jax.nn.dot_product_attention": System(
        tuple(SHAPES),
        ("none", "is_causal", "scale", "mask", "mask-ls", "mask-causal", "bias", "bias-mask", "window", "window-sides",
         "lengths", "lengths-causal"),
        FLOAT32_SOFTMAX,
        differs=_SINGLE,
    ),
    "flax.linen.dot_product_attention": System(_EQUAL_HEADS, ("none", "mask", "mask-ls", "bias", "bias-mask")),
    "flax.nnx.dot_product_attention": System(
        _EQUAL_HEADS, ("none", "is_causal", "mask", "mask-ls", "mask-causal", "bias", "bias-mask"), FLOAT32_SOFTMAX,
        differs=_SINGLE,
    ),
    "flax.linen.MultiHeadDotProductAttention": System(("square", "cross"), ("none", "mask", "mask-ls"), is_layer=True),
    "flax.nnx.MultiHeadAttention": System(
        ("square", "cross"), ("none", "is_causal", "mask", "mask-causal"), FLOAT32_SOFTMAX, is_layer=True, differs=_SINGLE
    ),
    "keras.ops.dot_product_attention": System(
        ("square", "cross", "grouped", "one-key-head"),
        ("none", "is_causal", "scale", "mask", "mask-causal", "bias", "bias-mask"),
        FLOAT32,
        differs=_KERAS,
    ),
    "keras.layers.MultiHeadAttention": _KERAS_LAYER,
    "keras.layers.GroupQueryAttention": _KERAS_LAYER._replace(shapes=("grouped", "one-key-head")),
}  # fmt: skip


class ParityCase(NamedTuple):
    """One call of one system."""

    call: str
    shape_name: str
    options: str

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def system(self) -> System:
        return SYSTEMS[self.call]

    @property
    def name(self) -> str:
        return f"{self.call}, {self.shape_name}, {self.options}"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """A layer projects, so its 16-bit numbers would be rounded on the way."""
        return tuple(DTYPES)[: 2 if self.system.is_layer else 4]

    def given(self, dtype: str) -> dict[str, Any]:
        """The system's arguments: arrays in float64 that are exact in `dtype`, booleans, integers."""
        shape, random = self.shape, np.random.default_rng(list(self.name.encode()))
        lead = () if shape.b is None else (shape.b,)
        if self.system.is_layer:
            sizes = {"query": (*lead, shape.rows, MODEL_WIDTH)} | dict.fromkeys(
                ("key", "value"), (*lead, shape.keys, MODEL_WIDTH)
            )
            sizes |= {"wq": (MODEL_WIDTH, shape.h, shape.width), "wo": (shape.h, shape.width, MODEL_WIDTH)}
            sizes |= dict.fromkeys(("wk", "wv"), (MODEL_WIDTH, shape.g, shape.width))
        else:
            sizes = {"query": (*lead, shape.rows, shape.h, shape.width)}
            sizes |= dict.fromkeys(("key", "value"), (*lead, shape.keys, shape.g, shape.width))
        found: dict[str, Any] = {name: random.standard_normal(size) for name, size in sizes.items()}
        found |= OPTIONS[self.options](shape, random)
        kind = numpy_dtype(dtype)
        return {
            name: value.astype(kind).astype(np.float64) if getattr(value, "dtype", None) == np.float64 else value
            for name, value in found.items()
        }

    def asked(self, dtype: str, given: dict[str, Any] | None = None) -> Any:
        """The same as arguments of `Client.attention`, by the convention of the system."""
        given, kind = given or self.given(dtype), numpy_dtype(dtype)
        if self.system.is_layer:
            for name, projection in PROJECTIONS.items():
                given[name] = np.einsum("ble,ehd->blhd", given[name], given.pop(projection))
            given.pop("wo")
        given = {name: x.astype(kind) if getattr(x, "dtype", None) == np.float64 else x for name, x in given.items()}
        if not self.call.startswith("keras."):
            return conventions.flax(**given)
        # The convention has the layer's names but one: `use_causal_mask` is `is_causal`, as in the function.
        given = {
            {"mask": "attention_mask", "use_causal_mask": "is_causal"}.get(name, name): x for name, x in given.items()
        }
        return conventions.keras(**given)

    def with_masked_row(self, row: int) -> dict[str, Any]:
        """The system's arguments, with a mask that blocks every key of a row."""
        given = self.given("float64")
        given[self.options][..., row, :] = False
        return given

    def output(self, found: np.ndarray) -> np.ndarray:
        """The system's output from the service's: a layer's projection comes after it."""
        wide = found.astype(np.float64)
        return np.einsum("blhd,hde->ble", wide, self.given("float64")["wo"]) if self.system.is_layer else wide


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _fits(call: str, shape: str, options: str) -> bool:
    """JAX counts lengths of a batch alone; a window of a sequence with fewer keys leaves rows without any."""
    if shape == "no-batch":
        return not options.startswith("lengths")
    return not (shape == "one-key-head" and "window" in options)


CASES = [
    ParityCase(call, shape, options)
    for call, system in SYSTEMS.items()
    for shape, options in itertools.product(system.shapes, system.options)
    if _fits(call, shape, options)
]

# A call with a row that may attend to nothing, arguments beside, and whether the system gives zeros or the mean of all values.
MASKED_ROWS = [
    (ParityCase("jax.nn.dot_product_attention", "cross", "mask"), {}, "mean"),
    (ParityCase("flax.linen.dot_product_attention", "cross", "mask"), {}, "mean"),
    (ParityCase("flax.nnx.dot_product_attention", "cross", "mask"), {}, "mean"),
    (ParityCase("keras.ops.dot_product_attention", "cross", "mask"), {}, "mean"),
    (ParityCase("keras.layers.MultiHeadAttention", "cross", "attention_mask"), {}, "mean"),
    (
        ParityCase("keras.layers.MultiHeadAttention", "cross", "attention_mask"),
        {"return_attention_scores": True},
        "zeros",
    ),
]
