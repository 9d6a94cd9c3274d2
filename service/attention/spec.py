"""LayerSpec: the widths, head counts and options that define one attention layer, without its tensors.

Invariants: The module does not import torch, so that a spec is cheap to read. A spec that exists is consistent.
Only `tensor_shapes` says which tensors a layer has and how large they are. What every request needs is computed once.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

from service.errors import LayerError

PROJECTIONS = ("query", "key", "value", "output")
# Twice the width of the widest published layers. The memory of a forward pass, 1,024 rows a matrix, grows with the width.
MAX_WIDTH = 2**15
# Many times the heads of published layers. Each head of each sequence is a product of its own.
MAX_HEADS = 2**12
# The fields of format_version 1 are in every file and digest. A later field is there only if it is not at its default, so that a
# file without it loads, and no digest changes.
# fmt: off
WRITTEN_FIELDS = frozenset([
    "query_width", "key_width", "value_width", "out_width", "num_heads", "num_kv_heads", "head_width", "value_head_width",
    "scale", "biases", "has_output", "has_bias_kv", "add_zero_attn",
])
# fmt: on
MIN_SCALE, MAX_SCALE = 1e-45, 3.4e38  # kernels take the scale as a float32: less is 0 there, and for more they raise


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Widths in features, counts in heads; `scale` multiplies query·key before the softmax.

    `biases` names the projections with a bias. A layer without an output projection (`has_output` false) returns the
    concatenated heads. `has_bias_kv` and `add_zero_attn` append one key/value column each, as torch.nn.MultiheadAttention does.
    """

    query_width: int
    key_width: int
    value_width: int
    out_width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    value_head_width: int
    scale: float
    biases: tuple[str, ...] = ()
    has_output: bool = True
    has_bias_kv: bool = False
    add_zero_attn: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (type(value) is not int or value < 1):
                raise LayerError(f"{field.name} must be a whole number of at least 1")
        heads_widths = self.num_heads * self.head_width, self.num_heads * self.value_head_width
        widest = max(self.query_width, self.key_width, self.value_width, self.out_width, *heads_widths)
        if widest > MAX_WIDTH or self.num_heads > MAX_HEADS:
            found = f"{widest} features and {self.num_heads} heads"
            raise LayerError(f"the layer has {found}; expected at most {MAX_WIDTH} and {MAX_HEADS}")
        if self.num_heads % self.num_kv_heads:
            raise LayerError(f"{self.num_heads} heads must be a multiple of the {self.num_kv_heads} key/value heads")
        if not isinstance(self.scale, float) or not MIN_SCALE <= self.scale <= MAX_SCALE:
            raise LayerError("scale must be a decimal number above 0, in float32 neither 0 nor infinite")
        known = PROJECTIONS if self.has_output else PROJECTIONS[:3]
        if len(set(self.biases)) != len(self.biases) or not set(self.biases) <= set(known):
            raise LayerError(f"biases must be among {', '.join(known)}, each once")
        if not self.has_output and self.out_width != self.num_heads * self.value_head_width:
            raise LayerError("without an output projection, out_width must be num_heads times value_head_width")

    @cached_property
    def extra_keys(self) -> int:
        """Number of columns that the layer appends to the caller's keys (`bias_k`, `add_zero_attn`)."""
        return int(self.has_bias_kv) + int(self.add_zero_attn)

    @cached_property
    def needs_key(self) -> bool:
        """Whether a call must have keys: their width differs, so queries cannot replace them."""
        return self.key_width != self.query_width

    @cached_property
    def needs_value(self) -> bool:
        """Whether a call must have values: their width differs, so keys cannot replace them."""
        return self.value_width != self.key_width

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of this layer by canonical name; Linear weights are [out, in]."""
        keys, values = self.num_kv_heads * self.head_width, self.num_kv_heads * self.value_head_width
        sizes = {
            "query": (self.num_heads * self.head_width, self.query_width),
            "key": (keys, self.key_width),
            "value": (values, self.value_width),
        }
        if self.has_output:
            sizes["output"] = (self.out_width, self.num_heads * self.value_head_width)
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in sizes.items()}
        shapes |= {f"{name}.bias": (sizes[name][0],) for name in sizes if name in self.biases}
        if self.has_bias_kv:
            shapes |= {"bias_k": (keys,), "bias_v": (values,)}
        return shapes

    def to_json(self) -> dict[str, Any]:
        """Return the fields that a file and its digest have."""
        values = {**dataclasses.asdict(self), "biases": list(self.biases)}
        return {
            field.name: values[field.name]
            for field in dataclasses.fields(self)
            if field.name in WRITTEN_FIELDS or getattr(self, field.name) != field.default
        }

    @classmethod
    def from_json(cls, value: object) -> LayerSpec:
        """Invert `to_json`; raise LayerError that names missing and surplus fields."""
        if not isinstance(value, dict):
            raise LayerError("the layer's spec must be a JSON object")
        known = {field.name for field in dataclasses.fields(cls)}
        if missing := sorted(WRITTEN_FIELDS - value.keys()):
            raise LayerError(f"the layer's spec lacks {', '.join(missing)}")
        if surplus := sorted(value.keys() - known):
            raise LayerError(f"the layer's spec has unknown fields {', '.join(map(ascii, surplus))}")
        biases = value["biases"]
        if not isinstance(biases, list) or not all(isinstance(name, str) for name in biases):
            raise LayerError("biases must be a list of projection names")
        if not all(isinstance(value[flag], bool) for flag in ("has_output", "has_bias_kv", "add_zero_attn")):
            raise LayerError("has_output, has_bias_kv and add_zero_attn must be true or false")
        return cls(**{**value, "biases": tuple(biases)})
