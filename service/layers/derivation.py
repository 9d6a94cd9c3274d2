"""Derivation: the spec of one layer, from the shapes of its tensors, its family, its config and the caller.

Invariants: Shapes decide and the config explains: one that contradicts them is refused. Its `layer_types` decides where a family
has kinds of layers, and must agree where it has none. No tensor is read. Every error names the keys, what was expected and what
was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from service.attention.spec import PROJECTIONS, LayerSpec, Norm, RelativeBias, Window
from service.errors import LayerError
from service.layers.family import FULL, SLIDING, Candidate, Family, Parts
from service.layers.heads import check_head_width, num_heads, num_kv_heads
from service.layers.options import Options, agreed, options_of, shown
from service.layers.rotary import rotary
from service.layers.source import Source
from service.layers.wording import quoted, shape_text

Shapes = dict[str, tuple[int, ...]]
WEIGHTS = {f"{name}.weight" for name in PROJECTIONS}


def derive(
    chosen: Candidate, present: Parts, source: Source, *, heads: int | None, scale: float | None, add_zero_attn: bool
) -> LayerSpec:
    """Return the spec that shapes, family, config and caller imply; raise LayerError if they contradict each other."""
    family, options = chosen.family, options_of(chosen, source.config or {})
    if add_zero_attn and not family.takes_zero_attn:
        raise LayerError(f"add_zero_attn is for the family torch-mha; this layer has the family {family.name}")
    _check_flags(chosen, options, present)
    raw = {name: source.entries[key].shape for key, names in present.items() for name in names}
    num = num_heads(chosen, options, heads, raw)
    kv_heads = num_kv_heads(chosen, options, num, raw)
    shapes = _canonical_shapes(family, present, source, {"query": num, "key": kv_heads, "value": kv_heads})
    sizes, kind = _sizes(family, shapes, num, kv_heads), _kind(chosen, options)
    check_head_width(chosen, options, num, sizes["head_width"], sizes["query_width"])
    said = {key: options.said[key] for key in ("hidden_size", "d_model") if key in options.said and not family.is_open}
    agreed(said | {"the width of query": sizes["query_width"]})
    spec = LayerSpec(
        **sizes,
        num_heads=num,
        num_kv_heads=kv_heads,
        scale=_scale(chosen, options, sizes["head_width"]) if scale is None else float(scale),
        biases=tuple(name for name in PROJECTIONS if f"{name}.bias" in shapes),
        has_output="output.weight" in shapes,
        has_bias_kv="bias_k" in shapes,
        add_zero_attn=add_zero_attn,
        rotary=rotary(family.rotary, options, kind, sizes["head_width"]),
        norm=_norm(family, options, shapes),
        relative_bias=_relative_bias(family, options, shapes),
        window=_window(family, options, kind),
        softcap=_softcap(family, options),
        has_sinks="sinks" in shapes,
    )
    _check_fit(spec, family, present, shapes)
    return spec


def _check_flags(chosen: Candidate, options: Options, present: Parts) -> None:
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


def _canonical_shapes(family: Family, present: Parts, source: Source, counts: Mapping[str, int]) -> Shapes:
    """Return the shape of each canonical tensor, from the present parts; raise LayerError if a part's shape is wrong."""
    shapes: Shapes = {}
    for key, names in present.items():
        shape, is_weight = source.entries[key].shape, names[0] in WEIGHTS
        found, expected = f"{quoted(key)} has the shape {shape_text(shape)}", "two widths" if is_weight else "one width"
        is_projection = names[0].partition(".")[0] in PROJECTIONS
        if is_bias_kv := names[0].startswith("bias_"):
            shape, expected = shape[2:] if shape[:-1] == (1, 1) else (), "[1, 1, width]"
        if family.has_kernels and is_projection:
            shape = flat(shape, names[0])
        if not shape or 0 in shape or ((is_projection or is_bias_kv) and len(shape) != 1 + is_weight):
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


def _sizes(family: Family, shapes: Shapes, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return the widths; those that the family makes equal are the query's."""
    sizes: dict[str, Any] = {f"{name}_width": shapes[f"{name}.weight"][1] for name in PROJECTIONS[:3]}
    sizes |= {f"{name}_rows": shapes[f"{name}.weight"][0] for name in ("query", "value")}
    sizes["out_width"] = shapes.get("output.weight", (sizes["value_rows"],))[0]
    sizes |= dict.fromkeys(family.equal, sizes["query_width"])
    for name, width, count in (("query", "head_width", heads), ("value", "value_head_width", kv_heads)):
        sizes[width], rest = divmod(rows := sizes.pop(f"{name}_rows"), count)
        if rest:
            raise LayerError(f"{count} heads do not divide the {rows} out features of {name}")
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
    is_none = not family.softcap or options.said.get(family.softcap, 0) is None
    return None if is_none else float(options.number(family.softcap))


def _check_fit(spec: LayerSpec, family: Family, present: Parts, shapes: Shapes) -> None:
    """Raise LayerError if a tensor does not have the shape that the spec expects."""
    keys = {name: key for key, names in present.items() for name in names}
    for name, expected in spec.tensor_shapes().items():
        if shapes[name] != expected:
            found = f"{name} (from {quoted(keys[name])}{', transposed' * family.transposed})"
            raise LayerError(f"{found} has the shape {shape_text(shapes[name])}, expected {shape_text(expected)}")


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


def _kind(chosen: Candidate, options: Options) -> str:
    """Return FULL or SLIDING; raise LayerError for another kind, and if the layer's number is needed and missing."""
    family, rule, types = chosen.family, chosen.family.window, options.get("layer_types")
    if types is None or (rule is None and family.rotary is None):
        return _kind_by_rule(chosen, options)
    number = _number(chosen)
    if not isinstance(types, list) or number >= len(types):
        raise LayerError(f"layer_types in config.json has no entry for layer {number}")
    kind = FULL if types[number] == "attention" else types[number]
    if kind not in (FULL, SLIDING):
        raise LayerError(f"layer_types in config.json has {shown(kind)}, which a served layer does not support")
    if not (rule and (rule.period or rule.first)) and kind != _kind_by_rule(chosen, options):
        raise LayerError(f"layer_types in config.json has {shown(kind)}, which contradicts the family {family.name}")
    return str(kind)


def _kind_by_rule(chosen: Candidate, options: Options) -> str:
    rule = chosen.family.window
    if rule is None or (rule.switch and not options.get(rule.switch)):
        return FULL
    if rule.period:
        return SLIDING if (_number(chosen) + rule.offset) % options.count(rule.period) else FULL
    if rule.size not in {**options.said, **options.defaults}:
        options.number(rule.size)  # raises
    if options.get(rule.size) is None:
        return FULL
    return FULL if rule.first and options.get(rule.first) and _number(chosen) < options.count(rule.first) else SLIDING


def _number(chosen: Candidate) -> int:
    if chosen.number is None:
        raise LayerError("the layer's number decides which keys it sees, and its keys lack it")
    return chosen.number


def _window(family: Family, options: Options, kind: str) -> Window | None:
    """Return the layer's own mask, or None if every query sees every key."""
    rule, causal = family.window, options.get(family.causal) if isinstance(family.causal, str) else family.causal
    is_centred = bool(family.bidirectional and options.get(family.bidirectional))
    is_causal = bool(causal) and options.get("is_causal") is not False and not is_centred
    if kind == FULL or rule is None:
        return Window(None, 0) if is_causal else None
    size = options.count(rule.size)
    if rule.switch and not options.get(rule.switch):
        raise LayerError(f"layer_types in config.json has {SLIDING}, but {rule.switch} is off")
    if is_causal:
        return Window(size - 1, 0)
    if is_centred and size % 2:
        raise LayerError(f"{rule.size} is {size}; with {family.bidirectional} it is halved, so it must be even")
    edge = size // 2 if is_centred or rule.is_centred else size
    return Window(edge, edge)
