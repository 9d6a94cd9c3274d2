"""Derivation: the spec of one layer, from the shapes of its tensors, its family, its config and the caller.

Invariants: Shapes decide and the config explains: one that contradicts them is refused. No tensor is read. Every error names the
keys, what was expected and what was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from service.attention.spec import PROJECTIONS, LayerSpec, Norm, RelativeBias
from service.errors import LayerError
from service.layers.family import Candidate, Family, Parts
from service.layers.heads import check_head_width, num_heads, num_kv_heads
from service.layers.options import Options, agreed, options_of, shown
from service.layers.rotary import rotary
from service.layers.source import Source
from service.layers.windows import kind_of, window
from service.layers.wording import quoted, shape_text

Shapes = dict[str, tuple[int, ...]]


def derive(
    chosen: Candidate, present: Parts, source: Source, *, heads: int | None, scale: float | None, add_zero_attn: bool
) -> LayerSpec:
    """Return the spec that shapes, family, config and caller imply; raise LayerError if they contradict each other."""
    if add_zero_attn and not chosen.family.takes_zero_attn:
        raise LayerError(f"add_zero_attn is for the family torch-mha; this layer has the family {chosen.family.name}")
    options = options_of(chosen, source.config or {})
    check_flags(chosen, options, present)
    raw = {name: source.entries[key].shape for key, names in present.items() for name in names}
    num = num_heads(chosen, options, heads, raw)
    counts = {"query": num} | dict.fromkeys(("key", "value"), num_kv_heads(chosen, options, num, raw))
    shapes = canonical_shapes(chosen.family, present, source, counts)
    spec = derive_spec(chosen, shapes, options, counts, scale=scale, add_zero_attn=add_zero_attn)
    check_fit(spec, chosen, present, shapes)
    return spec


def check_flags(chosen: Candidate, options: Options, present: Parts) -> None:
    """Raise LayerError if an option says that tensors exist, and they do not, or the reverse."""
    for name, key in chosen.family.flags.items():
        is_on, is_there = options.get(name), chosen.prefix + key in present
        if is_on is not None and bool(is_on) != is_there:
            found = "it is there" if is_there else "it is missing"
            raise LayerError(f"config.json has {name} {shown(is_on)}, but of {quoted(chosen.prefix + key)} {found}")


def shares(names: tuple[str, ...], counts: Mapping[str, int]) -> tuple[int, ...]:
    """Return in which proportion the names share their key's rows."""
    units = tuple(counts[name.partition(".")[0]] for name in names) if len(names) > 1 else (1,)
    return (1,) * len(names) if len(set(units)) == 1 else units


def canonical_shapes(family: Family, present: Parts, source: Source, counts: Mapping[str, int]) -> Shapes:
    """Return the shape of each canonical tensor, from the present parts; raise LayerError if a part's shape is wrong."""
    shapes: Shapes = {}
    for key, names in present.items():
        shape = source.entries[key].shape
        found = f"{quoted(key)} has the shape {shape_text(shape)}"
        is_projection, is_bias_kv = names[0].partition(".")[0] in PROJECTIONS, names[0].startswith("bias_")
        is_weight = is_projection and names[0].endswith(".weight")
        if is_bias_kv:
            shape = shape[2:] if shape[:-1] == (1, 1) else ()
        if family.has_kernels and is_projection:
            shape = flat(shape, names[0])
        is_plain = is_projection or is_bias_kv
        if (is_plain and len(shape) != (2 if is_weight else 1)) or 0 in shape or not shape:
            expected = "two widths" if is_weight else "[1, 1, width]" if is_bias_kv else "one width"
            raise LayerError(f"{found}, expected {expected}")
        if family.transposed or (family.has_kernels and is_weight):
            shape = shape[::-1]
        parts = shares(names, counts)
        if shape[0] % sum(parts):
            raise LayerError(f"{found}; {shape[0]} rows do not divide into {sum(parts)} projections")
        shapes |= {name: (shape[0] // sum(parts) * unit, *shape[1:]) for name, unit in zip(names, parts, strict=True)}
    return shapes


def flat(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Return the shape of a kernel or of its bias with heads and their width in one, or () if it has another rank."""
    if name == "output.bias":
        return shape
    is_weight = name.endswith(".weight")
    if len(shape) != 2 + is_weight:
        return ()
    first = 1 if is_weight and name != "output.weight" else 0
    return (*shape[:first], shape[first] * shape[first + 1], *shape[first + 2 :])


def derive_spec(
    chosen: Candidate, shapes: Shapes, options: Options, counts: Mapping[str, int], *, scale: float | None, **more: bool
) -> LayerSpec:
    """Return the spec that the query's weight, the family, the config and the caller imply; `check_fit` checks all shapes."""
    family, kind = chosen.family, kind_of(chosen, options)
    sizes = _sizes(family, shapes, counts)
    rows, query_width = sizes.pop("query_rows"), sizes["query_width"]
    value_head_width = sizes.pop("value_rows") // counts["value"]
    head_width = rows // counts["query"]
    check_head_width(chosen, options, heads=counts["query"], rows=rows, query_width=query_width)
    said = {key: options.said[key] for key in ("hidden_size", "d_model") if key in options.said and not family.is_open}
    agreed(said | ({"the width of query": query_width} if said else {}))
    return LayerSpec(
        **sizes,
        num_heads=counts["query"],
        num_kv_heads=counts["key"],
        head_width=head_width,
        value_head_width=value_head_width,
        scale=_scale(chosen, options, head_width) if scale is None else float(scale),
        biases=tuple(name for name in PROJECTIONS if f"{name}.bias" in shapes),
        has_output="output.weight" in shapes,
        has_bias_kv="bias_k" in shapes,
        rotary=rotary(family.rotary, options, kind, head_width),
        norm=_norm(family, options, shapes),
        relative_bias=_relative_bias(family, options, shapes),
        window=window(family, options, kind),
        softcap=_softcap(family, options),
        has_sinks="sinks" in shapes,
        **more,
    )


def _sizes(family: Family, shapes: Shapes, counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the widths, and the rows of query and value, with those that the family makes equal to the query's width."""
    sizes: dict[str, Any] = {f"{name}_width": shapes[f"{name}.weight"][1] for name in PROJECTIONS[:3]}
    sizes |= {f"{name}_rows": shapes[f"{name}.weight"][0] for name in ("query", "value")}
    sizes["out_width"] = shapes.get("output.weight", (sizes["value_rows"],))[0]
    sizes |= dict.fromkeys(family.equal, sizes["query_width"])
    for name in ("query", "value"):
        if sizes[f"{name}_rows"] % counts[name]:
            raise LayerError(f"{counts[name]} heads do not divide the {sizes[f'{name}_rows']} out features of {name}")
    return sizes


def _norm(family: Family, options: Options, shapes: Shapes) -> Norm | None:
    rule = family.norm
    if rule is None or "query_norm.weight" not in shapes:
        return None
    eps = options.number(rule.eps) if isinstance(rule.eps, str) else rule.eps
    has_bias = "query_norm.bias" in shapes
    return Norm(rule.kind, rule.over, float(eps), rule.plus_one, has_bias, rule.has_head_weights)


def _relative_bias(family: Family, options: Options, shapes: Shapes) -> RelativeBias | None:
    """Return the relative bias, whose number of buckets is that of its table; raise LayerError if the config has another."""
    rule = family.table
    if rule is None:
        return None
    buckets = shapes["relative_bias"][0]
    for said in (rule.buckets or None, options.get("relative_attention_num_buckets")):
        if said not in (None, buckets):
            raise LayerError(f"the table of relative positions has {buckets} buckets, expected {shown(said)}")
    return RelativeBias(buckets, options.count(rule.max_distance), rule.is_bidirectional)


def _softcap(family: Family, options: Options) -> float | None:
    """Return the cap of the scores; null in the config is none."""
    is_none = not family.softcap or (family.softcap in options.said and options.said[family.softcap] is None)
    return None if is_none else float(options.number(family.softcap))


def check_fit(spec: LayerSpec, chosen: Candidate, present: Parts, shapes: Shapes) -> None:
    """Raise LayerError if a tensor does not have the shape that the spec expects."""
    keys = {name: key for key, names in present.items() for name in names}
    for name, expected in spec.tensor_shapes().items():
        if shapes[name] != expected:
            transposed = ", transposed" if chosen.family.transposed else ""
            found = f"{name} (from {quoted(keys[name])}{transposed}) has the shape {shape_text(shapes[name])}"
            raise LayerError(f"{found}, expected {shape_text(expected)}")


def _scale(chosen: Candidate, options: Options, head_width: int) -> float:
    """Return the family's scale, or 1/sqrt(head width), changed as the `scale_attn_…` options of GPT-2's config.json say."""
    rule = chosen.family.scale
    if isinstance(rule, float):
        return rule
    scale = 1.0 / math.sqrt(options.number(rule) if rule else head_width)
    if options.get("scale_attn_weights") is False:
        scale = 1.0
    if not options.get("scale_attn_by_inverse_layer_idx"):
        return scale
    if chosen.number is None:
        raise LayerError("scale_attn_by_inverse_layer_idx needs the layer's number, which its keys lack; give --scale")
    return scale / (chosen.number + 1)
