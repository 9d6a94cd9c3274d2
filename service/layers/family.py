"""Family: the words in which a row of the table of checkpoint families says how its models name, order and mask a layer.

Invariants: A row is data; the importer, `options.py`, `heads.py`, `rotary.py` and `derivation.py` read it and know no family. An
option is a name in config.json. A row that is not `is_open` is used only if the config names one of its models, because
other models have the same names of tensors.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from service.attention.spec import PROJECTIONS, Layout, NormKind, NormOver

Parts = dict[str, tuple[str, ...]]
QKV_WEIGHT = ("query.weight", "key.weight", "value.weight")
QKV_BIAS = ("query.bias", "key.bias", "value.bias")
# Widths that equal the query's: of the tokens only, or also of all heads together (`rows` = out features of a projection).
TOKENS = ("key_width", "value_width", "out_width")
EVERYTHING = (*TOKENS, "query_rows", "value_rows")
NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.)")
# Kinds of layers in `layer_types` of a config.
FULL, SLIDING = "full_attention", "sliding_attention"
SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RotaryRule:
    layout: Layout = "half"
    theta: str = "rope_theta"  # option of the base
    sliding_theta: str = ""  # the same of sliding layers, if it is another
    partial: str = ""  # option of the rotated share of a head; without one whole heads are rotated
    is_whole: bool = False  # another share than 1 is refused, because codes of the family disagree on it
    scalings: tuple[str, ...] = SCALINGS
    scaled: tuple[str, ...] = (FULL, SLIDING)  # kinds of layers that `rope_scaling` changes
    kinds: tuple[str, ...] = (FULL, SLIDING)  # kinds of layers that rotate
    switch: str = ""  # option that is "rotary" if the model rotates, and "absolute" if it does not


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormRule:
    kind: NormKind = "rms"
    over: NormOver = "head"
    eps: str | float = "rms_norm_eps"  # an option, or the number
    plus_one: bool = False
    has_head_weights: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WindowRule:
    """Which layers are sliding, and how many keys they see; `layer_types` of a config wins over `first` and `period`."""

    size: str = "sliding_window"  # option: the keys that a causal query sees, with its own
    switch: str = ""  # option without which no layer is sliding
    first: str = ""  # option: the first sliding layer
    period: str | int = 0  # an option or the number: layer i is full if i + offset is a multiple of it
    offset: int = 1
    is_centred: bool = False  # a query sees half of the size on each side


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableRule:
    """T5's relative bias: its key, with the groups of the match of `below`, and its reach."""

    key: str
    max_distance: str | int  # an option or the number
    buckets: int = 0  # the only number of buckets that the family computes with, if there is one
    is_bidirectional: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    parts: Parts
    models: tuple[str, ...] = ()  # as `model_type` in config.json
    about: str = ""  # in words, for the docs
    is_open: bool = True  # the names of its tensors identify it
    needs: tuple[str, ...] = ()  # keys that must exist beside an anchor
    below: re.Pattern[str] = re.compile("")  # the prefix must end in a match; its group `n` is the layer's number
    scope: str = ""  # the attention module below the prefix; each of its keys must be known
    ignored: tuple[str, ...] = ()  # beginnings of keys in the module (with a dot at the end) that are not attention
    optional: tuple[tuple[str, ...], ...] = ()  # keys that come together or not at all
    equal: tuple[str, ...] = TOKENS
    transposed: bool = False
    stacks_columns: bool = False  # the anchor has three times as many columns as rows, which identifies the family
    is_by_head: bool = False  # a fused weight has the rows of query, key and value of each head together
    is_grouped: bool = False  # it may have fewer heads of key and value
    has_kernels: bool = False  # weights are [in, heads, width], and of the output [heads, width, out]
    is_single_head: bool = False
    takes_zero_attn: bool = False
    is_shared_by_depths: bool = False  # one layer's tensors serve every depth of the model
    causal: bool | str = False  # or the option that makes it causal
    bidirectional: str = ""  # option that makes it see half of its window on each side
    window: WindowRule | None = None
    rotary: RotaryRule | None = None
    norm: NormRule | None = None
    table: TableRule | None = None
    scale: str | float = ""  # a number, or the option whose root divides; else 1/sqrt(head width)
    softcap: str = ""  # option
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)  # options and the keys that exist if they are on
    off: tuple[str, ...] = ()  # options that must be off
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)  # of its class, for what a config lacks

    @property
    def anchors(self) -> tuple[str, ...]:
        """The weights of query, key and value; any of these keys marks a layer of the family."""
        return tuple(key for key, names in self.parts.items() if names[0] in QKV_WEIGHT)

    @property
    def is_plain(self) -> bool:
        """Whether a layer with other names, but the same projections, computes the same."""
        return self.rotary is None and self.table is None and self.norm is None and not self.scale

    @property
    def options(self) -> frozenset[str]:
        """The options that the importer reads for this family and may otherwise not ignore."""
        found = {self.softcap, *self.flags, *self.off, *self.defaults}
        if self.rotary:
            found |= {self.rotary.theta, self.rotary.sliding_theta, self.rotary.partial, self.rotary.switch}
            found |= {"rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor"}
        if self.table:
            found.add("relative_attention_num_buckets")
        return frozenset(found - {""})


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
    def groups(self) -> dict[str, str]:
        """The named groups of the prefix's match."""
        match = self.family.below.search(self.prefix)
        return {name: text or "" for name, text in match.groupdict().items()} if match else {}

    @property
    def number(self) -> int | None:
        """The number by which the layer is usually named: the last one in the prefix, unless the family says which."""
        numbers = [self.groups["n"]] if self.groups.get("n") else NUMBER.findall(self.prefix)
        return int(numbers[-1][:18]) if numbers else None  # cut, because int() refuses thousands of digits

    @property
    def table(self) -> str | None:
        """The key of the relative bias."""
        rule = self.family.table
        return rule.key.format(prefix=self.prefix, **self.groups) if rule else None


def linears(
    modules: str, biases: str = " ".join(PROJECTIONS), *, weight: str = "weight", roles: tuple[str, ...] = PROJECTIONS
) -> Parts:
    """Return the parts of modules with a weight each, in the order of their roles; those whose role is in `biases` have one."""
    pairs = list(zip(modules.split(), roles, strict=True))
    parts: Parts = {f"{module}.{weight}": (f"{role}.weight",) for module, role in pairs}
    return parts | {f"{module}.bias": (f"{role}.bias",) for module, role in pairs if role in biases.split()}


def fused(module: str, output: str, kinds: str = "weight bias") -> Parts:
    """Return the parts of a Linear with the rows of query, key and value, and of the output's."""
    rows: Parts = {f"{module}.{kind}": tuple(f"{name}.{kind}" for name in PROJECTIONS[:3]) for kind in kinds.split()}
    return rows | {f"{output}.{kind}": (f"output.{kind}",) for kind in kinds.split()}


def biases(parts: Parts) -> tuple[str, ...]:
    return tuple(key for key in parts if key.endswith("bias"))


def has_stacked_columns(shape: tuple[int, ...]) -> bool:
    """Return whether the matrix has the columns of query, key and value side by side."""
    return len(shape) == 2 and shape[1] == len(QKV_WEIGHT) * shape[0]  # noqa: PLR2004 (a matrix)
