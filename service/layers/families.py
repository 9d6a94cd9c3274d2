"""Checkpoint families: a table of the names that each family gives to the tensors of an attention layer.

Invariants: No family has code of its own; a new family is a new row. Keys are written below the layer's prefix. A weight is
[out, in] unless the family is `transposed`. Several canonical names for one key share its rows evenly, in their order. The
importer refuses an unknown key inside the attention module, because a layer without that tensor would compute something else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from service.attention.spec import PROJECTIONS

Parts = Mapping[str, tuple[str, ...]]
QKV_WEIGHT = ("query.weight", "key.weight", "value.weight")
QKV_BIAS = ("query.bias", "key.bias", "value.bias")
# Widths that equal the query's: of the tokens only, or also of all heads together (`rows` = out features of a projection).
TOKENS = ("key_width", "value_width", "out_width")
EVERYTHING = (*TOKENS, "query_rows", "value_rows")
NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    parts: Parts
    needs: tuple[str, ...] = ()  # keys that must exist beside an anchor
    below: re.Pattern[str] = re.compile("")  # the prefix must end in a match
    scope: str = ""  # the attention module below the prefix; each of its keys must be known
    ignored: tuple[str, ...] = ()  # beginnings of keys in the module (with a dot at the end) that are not attention
    optional: tuple[tuple[str, ...], ...] = ()  # keys that come together or not at all
    equal: tuple[str, ...] = TOKENS
    transposed: bool = False
    stacks_columns: bool = False  # the anchor has three times as many columns as rows, which identifies the family
    is_causal: bool = False  # its models mask the future; a stored layer has no mask, so a request sends it
    is_single_head: bool = False
    takes_zero_attn: bool = False
    is_shared_by_depths: bool = False  # one layer's tensors serve every depth of the model

    @property
    def anchors(self) -> tuple[str, ...]:
        """The weights of query, key and value; any of these keys marks a layer of the family."""
        return tuple(key for key, names in self.parts.items() if names[0] in QKV_WEIGHT)


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A layer of `family` below `prefix` (empty, or ending in a dot)."""

    family: Family
    prefix: str

    @property
    def module(self) -> str:
        """The path of the attention module."""
        return (self.prefix + self.family.scope).rstrip(".")

    @property
    def number(self) -> int | None:
        """The last whole number in the prefix, by which the layer is usually named."""
        numbers = NUMBER.findall(self.prefix)
        return int(numbers[-1][:18]) if numbers else None  # cut, because int() refuses thousands of digits


def linears(*modules: str) -> dict[str, tuple[str, ...]]:
    """Return the parts of four torch Linears, in the order query, key, value, output."""
    pairs = zip(modules, PROJECTIONS, strict=True)
    return {f"{module}.{kind}": (f"{name}.{kind}",) for module, name in pairs for kind in ("weight", "bias")}


def biases(parts: Parts) -> tuple[str, ...]:
    return tuple(key for key in parts if key.endswith(".bias"))


_MHA_COMMON = {
    "in_proj_bias": QKV_BIAS,
    "out_proj.weight": ("output.weight",),
    "out_proj.bias": ("output.bias",),
    "bias_k": ("bias_k",),
    "bias_v": ("bias_v",),
}
_MHA_OPTIONAL = (("in_proj_bias", "out_proj.bias"), ("bias_k", "bias_v"))
_MHA_SEPARATE = {f"{letter}_proj_weight": (name,) for letter, name in zip("qkv", QKV_WEIGHT, strict=True)}
_DISTILBERT = linears(*(f"attention.{name}_lin" for name in ("q", "k", "v", "out")))
_ANNOTATED = linears(*(f"linears.{index}" for index in range(4)))
_CAPITALS = linears("W_Q", "W_K", "W_V", "fc")
_D2L = linears("W_q", "W_k", "W_v", "W_o")
_C_PROJ = {f"c_proj.{kind}": (f"output.{kind}",) for kind in ("weight", "bias")}
_GPT = {"c_attn.weight": QKV_WEIGHT, "c_attn.bias": QKV_BIAS, **_C_PROJ}
_BARE = {f"W_{letter}": (name,) for letter, name in zip("qkv", QKV_WEIGHT, strict=True)}
_GPT2 = Family(  # Conv1D, whose weight is [in, out]
    name="gpt2",
    parts=_GPT,
    below=re.compile(r"(?<!crossattention\.)$"),
    ignored=("bias.", "masked_bias."),  # buffers with the causal mask
    equal=EVERYTHING,
    transposed=True,
    stacks_columns=True,
    is_causal=True,
)

FAMILIES = (
    Family(
        name="torch-mha",
        parts={"in_proj_weight": QKV_WEIGHT, **_MHA_COMMON},
        optional=_MHA_OPTIONAL,
        equal=EVERYTHING,
        takes_zero_attn=True,
    ),
    Family(  # kdim or vdim given
        name="torch-mha",
        parts={**_MHA_SEPARATE, **_MHA_COMMON},
        optional=_MHA_OPTIONAL,
        equal=("out_width", "query_rows", "value_rows"),
        takes_zero_attn=True,
    ),
    Family(
        name="bert",
        parts=linears(*(f"attention.self.{name}" for name in PROJECTIONS[:3]), "attention.output.dense"),
        scope="attention.",
        ignored=("attention.output.LayerNorm.", "attention.self_attn_layer_norm."),
    ),
    Family(name="distilbert", parts=_DISTILBERT, scope="attention."),
    Family(
        name="albert",
        parts=linears(*(f"attention.{name}" for name in (*PROJECTIONS[:3], "dense"))),
        below=re.compile(r"(^|\.)albert_layers\.\d+\.$"),
        scope="attention.",
        ignored=("attention.LayerNorm.",),
        is_shared_by_depths=True,
    ),
    Family(
        name="vit",
        parts=linears(*(f"attention.attention.{name}" for name in PROJECTIONS[:3]), "attention.output.dense"),
        scope="attention.",
        optional=(tuple(f"attention.attention.{name}.bias" for name in PROJECTIONS[:3]),),
    ),
    Family(name="annotated", parts=_ANNOTATED, optional=(biases(_ANNOTATED),), equal=EVERYTHING),
    Family(name="wq-wk-wv-fc", parts=_CAPITALS, optional=(biases(_CAPITALS),)),
    Family(name="d2l", parts=_D2L, optional=(biases(_D2L),), equal=()),
    Family(name="numpy", parts={**_BARE, "W_o": ("output.weight",)}, needs=("W_o",), equal=EVERYTHING, transposed=True),
    # After numpy: these names without W_o.
    Family(name="single-head", parts=_BARE, equal=EVERYTHING, transposed=True, is_single_head=True),
    _GPT2,
    # After gpt2: Linear under the same names.
    dataclasses.replace(_GPT2, name="nanogpt", optional=(biases(_GPT),), transposed=False, stacks_columns=False),
)
FAMILY_NAMES = tuple(dict.fromkeys(family.name for family in FAMILIES))


def find_candidates(shapes: Mapping[str, tuple[int, ...]], name: str | None = None) -> list[Candidate]:
    """Return every layer of the named family, or of any; if several rows fit one prefix, the first row of the table wins."""
    found: dict[str, Candidate] = {}
    for family in FAMILIES:
        if name not in {None, family.name}:
            continue
        anchored = {key.removesuffix(anchor) for anchor in family.anchors for key in shapes if key.endswith(anchor)}
        for prefix in sorted(prefix for prefix in anchored if not prefix or prefix.endswith(".")):
            has_keys = shapes.keys() >= {prefix + key for key in family.needs}
            has_shape = not family.stacks_columns or has_stacked_columns(shapes[prefix + family.anchors[0]])
            if has_keys and has_shape and family.below.search(prefix):
                found.setdefault(prefix, Candidate(family, prefix))
    return sorted(
        found.values(), key=lambda candidate: (candidate.number is not None, candidate.number, candidate.prefix)
    )


def has_stacked_columns(shape: tuple[int, ...]) -> bool:
    """Return whether the matrix has the columns of query, key and value side by side."""
    return len(shape) == 2 and shape[1] == len(QKV_WEIGHT) * shape[0]  # noqa: PLR2004 (a matrix)
