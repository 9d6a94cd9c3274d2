"""Importer: chooses one attention layer of a checkpoint, reads its tensors, and returns it as a StoredLayer.

Invariants: Exactly one layer fits the caller's family, prefix and number, or a LayerError says how to choose. A number means
the number in the checkpoint's own names. Names and shapes decide which layer it is and whether its parts fit. After that the
tensors of that layer are read, and no others. Every key of its module is used, or its family or the caller says that it does not
change attention. Heads and add_zero_attn, which no tensor shows, come from the config or the caller and are never guessed. Every
error names the keys, what was expected and what was found. Tensors keep the source's dtype and bits; if its dtypes differ, all
get the narrowest dtype that holds every value exactly. What was read is one version of the source's files. The recorded source
contains no directory.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Collection, Mapping

import torch

from service.attention.spec import LayerSpec
from service.errors import LayerError
from service.layers.derivation import derive, flat, shares
from service.layers.directory import check_name
from service.layers.families import FAMILY_NAMES, find_candidates
from service.layers.family import Candidate, Family, Parts
from service.layers.key_map import existing_key, mapped, unknown_family_text
from service.layers.options import Config, governing, models
from service.layers.source import Source, open_source
from service.layers.store import MAX_SOURCE, StoredLayer
from service.layers.unsupported import IGNORE, check_config, check_names
from service.layers.wording import MAX_COPIED, about, bounded, listed, quoted

MAX_DEPTH = 10_000
MAX_FAMILIES = 12  # in a message


def import_layer(
    source_path: str | os.PathLike[str] | Source,
    *,
    name: str,
    layer: int | None = None,
    prefix: str | None = None,
    family: str | None = None,
    heads: int | None = None,
    add_zero_attn: bool = False,
    causal: bool = False,
    scale: float | None = None,
    key_map: Mapping[str, str] | None = None,
    ignore: Collection[str] = (),
) -> StoredLayer:
    """Import one layer. `layer` is the number in the layer's prefix, `prefix` the path of its module or of a parent.

    `key_map` gives the layer's keys by role instead of `layer`, `prefix` and `family`. `ignore` has the keys of its module that
    do not change attention. `causal` makes a layer causal whose family does not say so.
    `scale` defaults to 1/sqrt(head width), or to the config's. Raises LayerError with what was expected and what was found.
    """
    check_name(name)
    if key_map is not None and (layer, prefix, family) != (None, None, None):
        raise LayerError("--map names whole keys, so it goes without --layer, --prefix and --family")
    source = source_path if isinstance(source_path, Source) else open_source(source_path)
    with about(f"source {quoted(source.label)}"), source.files.unchanged():
        config = source.config or {}
        if key_map:
            check_config(config)
            chosen = mapped(key_map, source)
        else:
            chosen = choose(source, family=family, prefix=prefix, layer=layer)
        chosen = _made_causal(chosen) if causal else chosen
        present = present_parts(chosen, source, ignore)
        made = derive(chosen, present, source, heads=heads, scale=scale, add_zero_attn=add_zero_attn)
        words = (source.label, chosen.module, f"({chosen.family.name})")
        origin = "".join(char if char.isprintable() else "?" for char in " ".join(filter(None, words)))
        tensors = _read(chosen.family, made, present, source)
        return StoredLayer(name, made, tensors, bounded(origin, MAX_SOURCE), chosen.family.name)


def _made_causal(chosen: Candidate) -> Candidate:
    if chosen.family.models:
        raise LayerError(f"--causal is for layers of torch and of one's own; the family {chosen.family.name} knows it")
    return dataclasses.replace(chosen, family=dataclasses.replace(chosen.family, causal=True))


def choose(source: Source, *, family: str | None, prefix: str | None, layer: int | None) -> Candidate:
    """Return the one layer that fits. `prefix` is the path of the layer's module or a parent; with `layer` both must fit."""
    if family is not None and family not in FAMILY_NAMES:
        raise LayerError(f"the family {quoted(family)} is unknown; known families are {', '.join(FAMILY_NAMES)}")
    shapes, config = {key: entry.shape for key, entry in source.entries.items()}, source.config or {}
    found = find_candidates(shapes, family, models(config))
    if not found:
        check_config(config)
        if others := {candidate.family.name for candidate in find_candidates(shapes)}:
            raise LayerError(
                f"no layer of the family {family} in its {len(shapes)} keys; it has layers of {listed(sorted(others))}"
            )
        if likely := [name for name in FAMILY_NAMES if find_candidates(shapes, name)]:
            few = ", ".join(likely[:MAX_FAMILIES]) + " …" * (len(likely) > MAX_FAMILIES)
            how = "its config.json must name a model of one, or, without a model_type, --family does"
            raise LayerError(f"its names are those of several families ({few}); {how}")
        raise LayerError(unknown_family_text(source))
    if prefix is not None:
        found = _below(found, prefix)
    if layer is not None:
        found = _numbered(found, layer, config)
    if len(found) > 1:
        raise LayerError(_several_text(found))
    check_config(governing(found[0].family, found[0].prefix, config) or config, found[0].family)
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
    matching = [candidate for candidate in found if candidate.number == layer]
    numbers = sorted({candidate.number for candidate in found if candidate.number is not None})
    if len(found) == 1 and (first.family.is_shared_by_depths or first.number is None):
        depth = config.get("num_hidden_layers") if first.family.is_shared_by_depths else 1
        matching, numbers = found, list(range(depth if isinstance(depth, int) and 1 <= depth <= MAX_DEPTH else 1))
    if layer not in numbers:
        span = "no attention layer with a number in its name"
        if numbers:
            span = f"attention layers numbered {numbers[0]} to {numbers[-1]} ({len(numbers)} in all)"
        raise LayerError(f"layer {bounded(str(layer), 20)} is out of range; the checkpoint has {span}")
    return matching


def present_parts(chosen: Candidate, source: Source, ignore: Collection[str] = ()) -> Parts:
    """Return the family's parts that this layer has, by their keys in the source.

    Raises LayerError for names of unsupported models, missing and unknown keys, half a group, and a wrong `ignore`.
    """
    family, prefix = chosen.family, chosen.prefix
    parts = {prefix + key: names for key, names in family.parts.items()}
    if chosen.table:
        parts[chosen.table] = ("relative_bias",)
    present = {key: names for key, names in parts.items() if key in source.entries}
    ignored = {existing_key(key, "--ignore", source) for key in ignore}
    if needed := sorted(ignored & present.keys()):
        raise LayerError(f"--ignore names keys that the layer needs: {listed(needed)}")
    passed = tuple(f"{prefix}{name}" for name in family.ignored)
    counted = {key for key in source.entries if not f"{key}.".startswith(passed)} if passed else source.entries.keys()
    check_names(family, f"{prefix}{family.scope}", present.keys(), counted, ignored=ignored)
    groups = [{prefix + key for key in group} for group in family.optional]
    absent = set().union(*(group for group in groups if source.entries.keys().isdisjoint(group)))
    if missing := sorted(parts.keys() - absent - present.keys()):
        raise LayerError(f"keys of the {family.name} layer are missing: {listed(missing)}")
    in_module = {key for key in counted if key.startswith(prefix + family.scope)}
    if extra := in_module - present.keys() - ignored:
        found = listed(sorted(extra), MAX_COPIED)
        raise LayerError(f"the module has keys that the {family.name} layer does not use ({IGNORE}): {found}")
    return present


def _read(family: Family, spec: LayerSpec, present: Parts, source: Source) -> dict[str, torch.Tensor]:
    """Return the canonical tensors, in the narrowest dtype that holds each of them exactly."""
    counts = {"query": spec.num_heads, "key": spec.num_kv_heads, "value": spec.num_kv_heads}
    shapes = spec.tensor_shapes()
    tensors: dict[str, torch.Tensor] = {}
    for key, names in present.items():
        whole = source.entries[key].read()
        is_weight = names[0].endswith(".weight")
        if names[0].startswith("bias_"):
            whole = whole.flatten()
        elif family.has_kernels and not names[0].endswith("_norm.weight"):
            whole = whole.reshape(flat(tuple(whole.shape), names[0]))
        if is_weight and whole.ndim == 2 and (family.transposed or family.has_kernels):  # noqa: PLR2004 (a matrix)
            whole = whole.T
        if family.is_by_head and len(names) > 1:
            whole = whole.unflatten(0, (spec.num_heads, len(names), -1)).transpose(0, 1).flatten(0, 2)
        units = shares(names, counts)
        sizes = [len(whole) // sum(units) * unit for unit in units]
        # copies, so that no tensor shares memory with a mapped file or with another tensor
        parts = [part.clone(memory_format=torch.contiguous_format) for part in whole.split(sizes)]
        tensors |= {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
