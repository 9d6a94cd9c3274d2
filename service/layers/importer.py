"""Importer: chooses one attention layer of a checkpoint, derives its LayerSpec, and returns it as a StoredLayer.

Invariants: Exactly one layer fits the caller's family, prefix and number, or a LayerError says how to choose. A number means
the number in the checkpoint's own names. Names and shapes decide which layer it is and whether its parts fit. After that the
tensors of that layer are read, and no others. Every key of its module is used, or its family or the caller says that it does not
change attention. Heads and add_zero_attn, which no tensor shows, come from the config or the caller and are never guessed. Every
error names the keys, what was expected and what was found. Tensors keep the source's dtype and bits; if its dtypes differ, all
get the narrowest dtype that holds every value exactly. What was read is one version of the source's files. The recorded source
contains no directory.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection, Mapping

import torch

from service.attention.spec import PROJECTIONS, LayerSpec
from service.errors import LayerError
from service.layers.directory import check_name
from service.layers.families import FAMILY_NAMES, Candidate, Parts, find_candidates
from service.layers.heads import Config, check_head_width, num_heads
from service.layers.key_map import existing_key, mapped, unknown_family_text
from service.layers.source import Source, open_source
from service.layers.store import MAX_SOURCE, StoredLayer
from service.layers.unsupported import IGNORE, check_config, check_names
from service.layers.wording import MAX_COPIED, about, bounded, listed, quoted, shape_text

MAX_DEPTH = 10_000
Shapes = dict[str, tuple[int, ...]]


def import_layer(
    source_path: str | os.PathLike[str] | Source,
    *,
    name: str,
    layer: int | None = None,
    prefix: str | None = None,
    family: str | None = None,
    heads: int | None = None,
    add_zero_attn: bool = False,
    scale: float | None = None,
    key_map: Mapping[str, str] | None = None,
    ignore: Collection[str] = (),
) -> StoredLayer:
    """Import one layer. `layer` is the number in the layer's prefix, `prefix` the path of its module or of a parent.

    `key_map` gives the layer's keys by role instead of `layer`, `prefix` and `family`. `ignore` has the keys of its module that
    do not change attention.
    `scale` defaults to 1/sqrt(head width), or to the config's. Raises LayerError with what was expected and what was found.
    """
    check_name(name)
    if key_map is not None and (layer, prefix, family) != (None, None, None):
        raise LayerError("--map names whole keys, so it goes without --layer, --prefix and --family")
    source = source_path if isinstance(source_path, Source) else open_source(source_path)
    with about(f"source {quoted(source.label)}"), source.files.unchanged():
        config = source.config or {}
        check_config(config)
        chosen = mapped(key_map, source) if key_map else choose(source, family=family, prefix=prefix, layer=layer)
        present = present_parts(chosen, source, ignore)
        shapes = canonical_shapes(chosen, present, source)
        spec = derive_spec(chosen, shapes, config, heads=heads, scale=scale, add_zero_attn=add_zero_attn)
        check_fit(spec, chosen, present, shapes)
        words = (source.label, chosen.module, f"({chosen.family.name})")
        origin = "".join(char if char.isprintable() else "?" for char in " ".join(filter(None, words)))
        return StoredLayer(name, spec, _read(chosen, present, source), bounded(origin, MAX_SOURCE), chosen.family.name)


def choose(source: Source, *, family: str | None, prefix: str | None, layer: int | None) -> Candidate:
    """Return the one layer that fits. `prefix` is the path of the layer's module or a parent; with `layer` both must fit."""
    if family is not None and family not in FAMILY_NAMES:
        raise LayerError(f"the family {quoted(family)} is unknown; known families are {', '.join(FAMILY_NAMES)}")
    shapes = {key: entry.shape for key, entry in source.entries.items()}
    found = find_candidates(shapes, family)
    if not found:
        if others := {candidate.family.name for candidate in find_candidates(shapes)}:
            raise LayerError(
                f"no layer of the family {family} in its {len(shapes)} keys; it has layers of {listed(sorted(others))}"
            )
        raise LayerError(unknown_family_text(source))
    if prefix is not None:
        found = _below(found, prefix)
    if layer is not None:
        found = _numbered(found, layer, source.config or {})
    if len(found) > 1:
        raise LayerError(_several_text(found))
    return found[0]


def _several_text(found: list[Candidate]) -> str:
    modules, numbers = [candidate.module for candidate in found], {candidate.number for candidate in found}
    if len(numbers) > 1:
        return f"it has {len(found)} attention layers; choose one with --layer N or --prefix P: {listed(modules)}"
    owner = "it" if numbers == {None} else f"layer {numbers.pop()}"
    count = "two" if len(found) == 2 else len(found)  # noqa: PLR2004 (a decoder's)
    choices = " or ".join(f"--prefix {quoted(name, MAX_COPIED)}" for name in modules)
    return f"{owner} has {count} attentions: {choices}"


def _below(found: list[Candidate], prefix: str) -> list[Candidate]:
    path = prefix.rstrip(".")
    exact = [candidate for candidate in found if candidate.module == path]
    matching = exact or [candidate for candidate in found if not path or candidate.module.startswith(f"{path}.")]
    if not matching:
        modules = listed(candidate.module for candidate in found)
        raise LayerError(f"no attention layer has the prefix {quoted(prefix)}; the layers are {modules}")
    return matching


def _numbered(found: list[Candidate], layer: int, config: Config) -> list[Candidate]:
    first = found[0]
    if len(found) == 1 and (first.family.is_shared_by_depths or first.number is None):
        depth = config.get("num_hidden_layers") if first.family.is_shared_by_depths else 1
        numbers = list(range(depth if isinstance(depth, int) and 1 <= depth <= MAX_DEPTH else 1))
        matching = found
    else:
        numbers = sorted({candidate.number for candidate in found if candidate.number is not None})
        matching = [candidate for candidate in found if candidate.number == layer]
    if layer not in numbers:
        span = "no attention layer with a number in its name"
        if numbers:
            span = f"attention layers numbered {numbers[0]} to {numbers[-1]} ({len(numbers)} in all)"
        raise LayerError(f"layer {bounded(str(layer), 20)} is out of range; the checkpoint has {span}")
    return matching


def present_parts(chosen: Candidate, source: Source, ignore: Collection[str] = ()) -> Parts:
    """Return the family's parts that this layer has.

    Raises LayerError for names of unsupported models, missing and unknown keys, half a group, and a wrong `ignore`.
    """
    family, prefix = chosen.family, chosen.prefix
    keys = {key.removeprefix(prefix) for key in source.entries if key.startswith(prefix)}
    present = {key: names for key, names in family.parts.items() if key in keys}
    used = [prefix + key for key in present]
    ignored = _ignored(source, used, ignore)
    check_names(f"{prefix}{family.scope}", used, source.entries.keys(), ignored=ignored)
    absent = {key for group in family.optional if keys.isdisjoint(group) for key in group}
    if missing := sorted(prefix + key for key in family.parts.keys() - absent - keys):
        raise LayerError(f"keys of the {family.name} layer are missing: {listed(missing)}")
    in_module = {key for key in keys - family.parts.keys() if key.startswith(family.scope)}
    extra = {prefix + key for key in in_module if not f"{key}.".startswith(family.ignored)} - ignored
    if extra:
        found = listed(sorted(extra), MAX_COPIED)
        raise LayerError(f"the module has keys that the {family.name} layer does not use ({IGNORE}): {found}")
    return present


def _ignored(source: Source, used: Collection[str], ignore: Collection[str]) -> set[str]:
    """Return the keys that `ignore` names; raise LayerError if one is not in the source or is used."""
    ignored = {existing_key(key, "--ignore", source) for key in ignore}
    if needed := sorted(ignored.intersection(used)):
        raise LayerError(f"--ignore names keys that the layer needs: {listed(needed)}")
    return ignored


def canonical_shapes(chosen: Candidate, present: Parts, source: Source) -> Shapes:
    """Return the shape of each canonical tensor, from the present parts; raise LayerError if a part's shape is wrong."""
    shapes: Shapes = {}
    for key, names in present.items():
        shape = source.entries[chosen.prefix + key].shape
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


def derive_spec(
    chosen: Candidate, shapes: Shapes, config: Config, *, heads: int | None, scale: float | None, add_zero_attn: bool
) -> LayerSpec:
    """Return the spec that the query's weight, the family, the config and the caller imply; `check_fit` checks all shapes."""
    family = chosen.family
    if add_zero_attn and not family.takes_zero_attn:
        raise LayerError(f"add_zero_attn is for the family torch-mha; this layer has the family {family.name}")
    num = num_heads(chosen, config, heads)
    sizes = {f"{name}_width": shapes[f"{name}.weight"][1] for name in PROJECTIONS[:3]}
    sizes |= {f"{name}_rows": shapes[f"{name}.weight"][0] for name in ("query", "value")}
    sizes["out_width"] = shapes.get("output.weight", (sizes["value_rows"],))[0]
    sizes |= dict.fromkeys(family.equal, sizes["query_width"])
    for name in ("query", "value"):
        if sizes[f"{name}_rows"] % num:
            raise LayerError(f"{num} heads do not divide the {sizes[f'{name}_rows']} out features of {name}")
    head_width = sizes["query_rows"] // num
    check_head_width(chosen, config, heads=num, rows=sizes["query_rows"], query_width=sizes["query_width"])
    return LayerSpec(
        query_width=sizes["query_width"],
        key_width=sizes["key_width"],
        value_width=sizes["value_width"],
        out_width=sizes["out_width"],
        num_heads=num,
        num_kv_heads=num,
        head_width=head_width,
        value_head_width=sizes["value_rows"] // num,
        scale=_scale(chosen, config, head_width) if scale is None else float(scale),
        biases=tuple(name for name in PROJECTIONS if f"{name}.bias" in shapes),
        has_output="output.weight" in shapes,
        has_bias_kv="bias_k" in shapes,
        add_zero_attn=add_zero_attn,
    )


def check_fit(spec: LayerSpec, chosen: Candidate, present: Parts, shapes: Shapes) -> None:
    """Raise LayerError if a tensor does not have the shape that the spec expects."""
    keys = {name: chosen.prefix + key for key, names in present.items() for name in names}
    for name, expected in spec.tensor_shapes().items():
        if shapes[name] != expected:
            transposed = ", transposed" if chosen.family.transposed else ""
            found = f"{name} (from {quoted(keys[name])}{transposed}) has the shape {shape_text(shapes[name])}"
            raise LayerError(f"{found}, expected {shape_text(expected)}")


def _scale(chosen: Candidate, config: Config, head_width: int) -> float:
    """Return 1/sqrt(head width), changed as the `scale_attn_…` options of GPT-2's config.json say."""
    scale = 1.0 if config.get("scale_attn_weights") is False else 1.0 / math.sqrt(head_width)
    if not config.get("scale_attn_by_inverse_layer_idx"):
        return scale
    if chosen.number is None:
        raise LayerError("scale_attn_by_inverse_layer_idx needs the layer's number, which its keys lack; give --scale")
    return scale / (chosen.number + 1)


def _read(chosen: Candidate, present: Parts, source: Source) -> dict[str, torch.Tensor]:
    """Return the canonical tensors, in the narrowest dtype that holds each of them exactly."""
    tensors: dict[str, torch.Tensor] = {}
    for key, names in present.items():
        whole = source.entries[chosen.prefix + key].read()
        if names[0].startswith("bias_"):
            whole = whole.flatten()
        if chosen.family.transposed and names[0].endswith(".weight"):
            whole = whole.T
        # copies, so that no tensor shares memory with a mapped file or with another tensor
        parts = [part.clone(memory_format=torch.contiguous_format) for part in whole.chunk(len(names))]
        tensors |= dict(zip(names, parts, strict=True))
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
