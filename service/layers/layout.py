"""Layout: derives a chosen layer's LayerSpec from its keys and shapes, before any tensor is read.

Invariants: A key of the module that the family does not know is refused, because a layer without that tensor would compute
something else. What no checkpoint shows (heads, add_zero_attn) comes from its config or the caller and is never guessed.
Every error names the keys, what was expected and what was found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from service.attention.spec import PROJECTIONS, LayerSpec
from service.errors import LayerError
from service.layers.families import Candidate, Family, Parts
from service.layers.source import Source
from service.layers.wording import listed, quoted, shape_text

HEADS_KEYS = ("num_attention_heads", "n_heads")
MAX_HEADS = 65_536
Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The caller's facts about a layer that its tensors do not show; None leaves them to the config or the default."""

    heads: int | None = None
    scale: float | None = None
    add_zero_attn: bool = False


def present_parts(chosen: Candidate, source: Source) -> Parts:
    """Return the family's parts that this layer has; raise LayerError for missing keys, incomplete groups and unknown keys."""
    family, prefix = chosen.family, chosen.prefix
    keys = {key.removeprefix(prefix) for key in source.entries if key.startswith(prefix)}
    for beginning, why in family.refused.items():
        if refused := sorted(prefix + key for key in keys if key.startswith(beginning)):
            raise LayerError(f"{listed(refused)}: {why}")
    optional = {key for group in family.optional for key in group}
    begun = {key for group in family.optional if not keys.isdisjoint(group) for key in group}
    wanted = (family.parts.keys() - optional) | begun
    if missing := sorted(prefix + key for key in wanted - keys):
        raise LayerError(f"keys of the {family.name} layer are missing: {listed(missing)}")
    unknown = {key for key in keys - family.parts.keys() if key.startswith(family.scope)}
    if extra := sorted(prefix + key for key in unknown if not key.startswith(family.ignored)):
        raise LayerError(f"the module has keys unknown to the family {family.name}: {listed(extra)}")
    return {key: names for key, names in family.parts.items() if key in keys}


def canonical_shapes(chosen: Candidate, present: Parts, source: Source) -> Shapes:
    """Return the shape of each canonical tensor, from the present parts; raise LayerError if a part's shape is wrong."""
    shapes: Shapes = {}
    for key, names in present.items():
        shape = source.shape(chosen.prefix + key)
        found = f"{quoted(chosen.prefix + key)} has the shape {shape_text(shape)}"
        is_weight, is_bias_kv = names[0].endswith(".weight"), names[0].startswith("bias_")
        if is_bias_kv:
            shape = shape[2:] if shape[:-1] == (1, 1) else ()
        if len(shape) != (2 if is_weight else 1) or 0 in shape:
            expected = "two widths" if is_weight else "[1, 1, width]" if is_bias_kv else "one width"
            raise LayerError(f"{found}, expected {expected}")
        if chosen.family.transposed:
            shape = shape[::-1]
        if shape[0] % len(names):
            raise LayerError(f"{found}; {shape[0]} rows do not divide into {len(names)} projections")
        shapes |= dict.fromkeys(names, (shape[0] // len(names), *shape[1:]))
    return shapes


def derive_spec(chosen: Candidate, shapes: Shapes, config: Mapping[str, object] | None, options: Options) -> LayerSpec:
    """Return the spec that the query's weight, the family, the config and the options imply; `check_fit` checks all shapes."""
    family = chosen.family
    if options.add_zero_attn and not family.takes_zero_attn:
        raise LayerError(f"add_zero_attn is for the family torch-mha; this layer has the family {family.name}")
    heads, sizes = _heads(family, config, options.heads), _sizes(family, shapes)
    for name in ("query", "value"):
        if sizes[f"{name}_rows"] % heads:
            raise LayerError(f"{heads} heads do not divide the {sizes[f'{name}_rows']} out features of {name}")
    head_width = sizes["query_rows"] // heads
    return LayerSpec(
        query_width=sizes["query_width"],
        key_width=sizes["key_width"],
        value_width=sizes["value_width"],
        out_width=sizes["out_width"],
        num_heads=heads,
        num_kv_heads=heads,
        head_width=head_width,
        value_head_width=sizes["value_rows"] // heads,
        scale=1.0 / math.sqrt(head_width) if options.scale is None else float(options.scale),
        biases=tuple(name for name in PROJECTIONS if f"{name}.bias" in shapes),
        has_output="output.weight" in shapes,
        has_bias_kv="bias_k" in shapes,
        add_zero_attn=options.add_zero_attn,
    )


def check_fit(spec: LayerSpec, chosen: Candidate, present: Parts, shapes: Shapes) -> None:
    """Raise LayerError if a tensor does not have the shape that the spec expects."""
    keys = {name: chosen.prefix + key for key, names in present.items() for name in names}
    for name, expected in spec.tensor_shapes().items():
        if shapes[name] != expected:
            transposed = ", transposed" if chosen.family.transposed else ""
            found = f"{name} (from {quoted(keys[name])}{transposed}) has the shape {shape_text(shapes[name])}"
            raise LayerError(f"{found}, expected {shape_text(expected)}")


def _sizes(family: Family, shapes: Shapes) -> dict[str, int]:
    """Return input widths and output rows; the query's width replaces those that the family declares equal to it."""
    sizes = {f"{name}_width": shapes[f"{name}.weight"][1] for name in PROJECTIONS[:3]}
    sizes |= {f"{name}_rows": shapes[f"{name}.weight"][0] for name in ("query", "value")}
    sizes["out_width"] = shapes.get("output.weight", (sizes["value_rows"],))[0]
    return sizes | dict.fromkeys(family.equal, sizes["query_width"])


def _heads(family: Family, config: Mapping[str, object] | None, asked: int | None) -> int:
    named = {key: config[key] for key in HEADS_KEYS if config is not None and key in config}
    if family.is_single_head:
        named = {f"the family {family.name}": 1}
    if asked is not None:
        named["the caller"] = asked
    if not named:
        raise LayerError("this checkpoint does not record its number of heads; give it with --heads H")
    for origin, number in named.items():
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_HEADS:
            raise LayerError(f"the number of heads given by {origin} must be a whole number from 1 to {MAX_HEADS}")
    if len(set(named.values())) > 1:
        given = ", ".join(f"{number} by {origin}" for origin, number in named.items())
        raise LayerError(f"the number of heads is contradictory: {given}")
    return next(number for number in named.values() if isinstance(number, int))
