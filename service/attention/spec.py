"""LayerSpec: the widths, head counts, options and parts that define one attention layer, without its tensors.

A part is what newer models add to a layer: rotary positions, norms of query and key, a relative bias, a window, a softcap, sinks.

Invariants: The module does not import torch, so that a spec is cheap to read. A spec that exists is consistent, and so is each
part. Only `tensor_shapes` says which tensors a layer has and how large they are. What every request needs is computed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, get_args

from service.errors import LayerError

PROJECTIONS = ("query", "key", "value", "output")
NORMS = ("query_norm", "key_norm")
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
# Four times the widest rotated heads of published layers; the frequencies are in the header of a layer's file.
MAX_ROTATED = 2**10
MAX_BUCKETS = 2**12
# Positions are below this, so that float32 holds each exactly.
MAX_POSITION = 2**24
# 512 times that of T5. A layer that is loaded finds the bucket of each distance.
MAX_DISTANCE = 2**16

Layout = Literal["half", "interleaved"]
NormKind = Literal["rms", "layer"]
NormOver = Literal["head", "width"]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions (Su et al. 2021): the first `width` features of each head of query and key turn with the row's position.

    Pair j turns by position · inverse_frequencies[j] radians, and `attention_factor` multiplies its cosine and sine. The layout
    `half` pairs feature j with j + width/2, `interleaved` 2j with 2j + 1.
    """

    layout: Layout
    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_word("rotary.layout", self.layout, Layout)
        if type(self.inverse_frequencies) is not tuple or not 1 <= len(self.inverse_frequencies) <= MAX_ROTATED // 2:
            raise LayerError(f"rotary.inverse_frequencies must have 1 to {MAX_ROTATED // 2} numbers")
        for number in self.inverse_frequencies:
            _check_number("each of rotary.inverse_frequencies", number)
        _check_number("rotary.attention_factor", self.attention_factor)

    @property
    def width(self) -> int:
        return 2 * len(self.inverse_frequencies)


@dataclasses.dataclass(frozen=True)
class Norm:
    """Norm of query and key after their projections and before the rotation, with weights of their own.

    `rms` divides by the root of the mean square (Zhang and Sennrich 2019); `layer` subtracts the mean first (Ba et al. 2016). It
    runs over each `head`, or over the `width` of all heads. With `plus_one` the factor is 1 + weight. With `has_head_weights`
    each head has its own weights, else all share those of one head.
    """

    kind: NormKind
    over: NormOver
    eps: float
    plus_one: bool = False
    has_bias: bool = False
    has_head_weights: bool = False

    def __post_init__(self) -> None:
        _check_word("norm.kind", self.kind, NormKind)
        _check_word("norm.over", self.over, NormOver)
        _check_number("norm.eps", self.eps, least=0.0)
        for flag in ("plus_one", "has_bias", "has_head_weights"):
            _check_flag(f"norm.{flag}", getattr(self, flag))
        if self.has_head_weights and self.over != "head":
            raise LayerError("norm.has_head_weights goes with a norm over each head")

    def weight_shape(self, heads: int, head_width: int) -> tuple[int, ...]:
        if self.over == "width":
            return (heads * head_width,)
        return (heads, head_width) if self.has_head_weights else (head_width,)


@dataclasses.dataclass(frozen=True)
class RelativeBias:
    """A bias by head and distance (Raffel et al. 2020, T5), added to the scores: distances share `buckets` numbers a head.

    Beyond `max_distance` all distances are in the last bucket. If `is_bidirectional`, half of the buckets are for later keys.
    """

    buckets: int
    max_distance: int
    is_bidirectional: bool

    def __post_init__(self) -> None:
        _check_flag("relative_bias.is_bidirectional", self.is_bidirectional)
        exact = self.buckets // (4 if self.is_bidirectional else 2) if type(self.buckets) is int else 0
        if not exact or self.buckets > MAX_BUCKETS or self.buckets % (2 * self.is_bidirectional or 1):
            raise LayerError(
                f"relative_bias.buckets must be a whole number from 4 to {MAX_BUCKETS}, even if bidirectional"
            )
        if type(self.max_distance) is not int or not exact < self.max_distance <= MAX_DISTANCE:
            raise LayerError(f"relative_bias.max_distance must be a whole number above {exact}, at most {MAX_DISTANCE}")


@dataclasses.dataclass(frozen=True)
class Window:
    """The layer's own mask: a query at position p sees the keys at positions p - left to p + right, both included.

    None = open. A causal layer has a `right` of 0.
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < MAX_POSITION):
                raise LayerError(f"window.{name} must be null or a whole number from 0, below {MAX_POSITION}")
        if self.left is None and self.right is None:
            raise LayerError("a window must have a left or a right side")


PARTS: Mapping[str, type[Rotary | Norm | RelativeBias | Window]] = {
    "rotary": Rotary,
    "norm": Norm,
    "relative_bias": RelativeBias,
    "window": Window,
}
"""The fields of a spec that are objects."""


def _check_word(name: str, value: object, words: Any) -> None:
    if value not in get_args(words):
        raise LayerError(f"{name} must be {' or '.join(get_args(words))}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise LayerError(f"{name} must be true or false")


def _check_number(name: str, value: object, least: float = MIN_SCALE) -> None:
    if not isinstance(value, float) or not least <= value <= MAX_SCALE:
        raise LayerError(
            f"{name} must be a decimal number {'of at least' if least == 0 else 'above'} 0, in float32 finite"
        )


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Widths in features, counts in heads; `scale` multiplies query·key before the softmax.

    `biases` names the projections with a bias. A layer without an output projection (`has_output` false) returns the
    concatenated heads. `has_bias_kv` and `add_zero_attn` append one key/value column each, as torch.nn.MultiheadAttention does.
    Scores are scaled, then capped (`softcap` c turns a score s into c·tanh(s/c)), then biased, then masked. With `has_sinks` each
    head has a logit that counts only in the softmax's denominator.
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
    rotary: Rotary | None = None
    norm: Norm | None = None
    relative_bias: RelativeBias | None = None
    window: Window | None = None
    softcap: float | None = None
    has_sinks: bool = False

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
        if self.rotary is not None and self.rotary.width > self.head_width:
            raise LayerError(f"{self.rotary.width} features are rotated in heads of {self.head_width}")
        if self.softcap is not None:
            _check_number("softcap", self.softcap)

    @cached_property
    def extra_keys(self) -> int:
        """Number of columns that the layer appends to the caller's keys (`bias_k`, `add_zero_attn`)."""
        return int(self.has_bias_kv) + int(self.add_zero_attn)

    @cached_property
    def has_parts(self) -> bool:
        """Whether the layer has any part of newer models."""
        return self.uses_positions or self.norm is not None or self.is_explicit

    @cached_property
    def is_explicit(self) -> bool:
        """Whether each sequence is computed by the definition: torch's fused kernel has neither softcap nor sinks."""
        return self.softcap is not None or self.has_sinks

    @cached_property
    def uses_positions(self) -> bool:
        """Whether an answer depends on the positions of the rows."""
        return any(part is not None for part in (self.rotary, self.relative_bias, self.window))

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
        if self.norm is not None:
            for name, heads in zip(NORMS, (self.num_heads, self.num_kv_heads), strict=True):
                shape = self.norm.weight_shape(heads, self.head_width)
                shapes |= {f"{name}.{kind}": shape for kind in ("weight", "bias")[: 1 + self.norm.has_bias]}
        if self.relative_bias is not None:
            shapes["relative_bias"] = (self.relative_bias.buckets, self.num_heads)
        if self.has_sinks:
            shapes["sinks"] = (self.num_heads,)
        return shapes

    def to_json(self) -> dict[str, Any]:
        """Return the fields that a file and its digest have."""
        values = {**dataclasses.asdict(self), "biases": list(self.biases)}
        if self.rotary is not None:
            values["rotary"]["inverse_frequencies"] = list(self.rotary.inverse_frequencies)
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
        for flag in ("has_output", "has_bias_kv", "add_zero_attn", "has_sinks"):
            _check_flag(flag, value.get(flag, False))
        parts = {name: _part(name, kind, value[name]) for name, kind in PARTS.items() if name in value}
        return cls(**{**value, **parts, "biases": tuple(biases)})


def _part(name: str, kind: type[Rotary | Norm | RelativeBias | Window], value: object) -> Any:
    """Return the part in a JSON object; raise LayerError unless it has exactly the part's fields."""
    fields = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(value, dict) or value.keys() != fields:
        raise LayerError(f"{name} must be an object of {', '.join(sorted(fields))}")
    if isinstance(numbers := value.get("inverse_frequencies"), list):
        value = {**value, "inverse_frequencies": tuple(numbers)}
    return kind(**value)
