"""Importer: chooses one attention layer of a checkpoint, reads it and returns it as a StoredLayer.

Invariants: Exactly one layer fits the caller's family, prefix and number, or a LayerError says how to choose. No layer is taken
because it comes first. A number means the number in the checkpoint's own names. Names and shapes decide which layer it is and
whether its parts fit. Only then are tensors read, and only those of that layer. Tensors keep the source's dtype and bits. The
recorded source contains no directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from service.errors import LayerError
from service.layers.families import FAMILY_NAMES, REFUSED_MODELS, RELATIVE, Candidate, Parts, find_candidates
from service.layers.layout import Options, canonical_shapes, check_fit, derive_spec, present_parts
from service.layers.source import Source, open_source
from service.layers.stored_layer import MAX_SOURCE, StoredLayer, check_name
from service.layers.wording import MAX_LISTED, about, bounded, listed, quoted

MAX_DEPTH = 10_000


def choose(source: Source, *, family: str | None, prefix: str | None, layer: int | None) -> Candidate:
    """Return the one layer that fits. `prefix` is the path of the layer's module or a parent; with `layer` both must fit."""
    if family is not None and family not in FAMILY_NAMES:
        raise LayerError(f"the family {quoted(family)} is unknown; known families are {', '.join(FAMILY_NAMES)}")
    keys = source.keys()
    found = find_candidates(keys, family)
    if not found:
        wanted = f"no layer of the family {family}" if family else "no known family of attention layers"
        sample = keys[:: max(1, len(keys) // MAX_LISTED)][:MAX_LISTED]  # spread, because sorted neighbours are similar
        raise LayerError(f"{wanted} in its {len(keys)} keys; found keys like {listed(sample)}")
    if prefix is not None:
        found = _below(found, prefix)
    if layer is not None:
        found = _numbered(found, layer, source.config)
    if len(found) > 1:
        raise LayerError(
            f"it has {len(found)} attention layers; choose one with --layer N or --prefix P: {listed(_modules(found))}"
        )
    return found[0]


def _modules(found: list[Candidate]) -> list[str]:
    return [candidate.module.rstrip(".") for candidate in found]


def _below(found: list[Candidate], prefix: str) -> list[Candidate]:
    path = prefix.rstrip(".")
    if exact := [candidate for candidate in found if candidate.module.rstrip(".") == path]:
        return exact
    matching = [candidate for candidate in found if not path or candidate.module.startswith(f"{path}.")]
    if not matching:
        raise LayerError(
            f"no attention layer has the prefix {quoted(prefix)}; the layers are {listed(_modules(found))}"
        )
    return matching


def _numbered(found: list[Candidate], layer: int, config: Mapping[str, object] | None) -> list[Candidate]:
    first = found[0]
    if len(found) == 1 and (first.family.is_shared_by_depths or first.number is None):
        numbers = list(range(_depth(config) if first.family.is_shared_by_depths else 1))
        matching = found
    else:
        numbers = sorted({candidate.number for candidate in found if candidate.number is not None})
        matching = [candidate for candidate in found if candidate.number == layer]
    if layer not in numbers:
        span = (
            f"attention layers numbered {numbers[0]} to {numbers[-1]} ({len(numbers)} in all)"
            if numbers
            else "no attention layer with a number in its name"
        )
        raise LayerError(f"layer {bounded(str(layer), 20)} is out of range; the checkpoint has {span}")
    return matching


def _depth(config: Mapping[str, object] | None) -> int:
    depth = (config or {}).get("num_hidden_layers")
    return depth if isinstance(depth, int) and 1 <= depth <= MAX_DEPTH else 1


def import_layer(
    source_path: str | os.PathLike[str],
    *,
    name: str,
    layer: int | None = None,
    prefix: str | None = None,
    family: str | None = None,
    heads: int | None = None,
    add_zero_attn: bool = False,
    scale: float | None = None,
) -> StoredLayer:
    """Import one layer. `layer` is the number in the layer's prefix, `prefix` the path of its module or of a parent.

    `scale` defaults to 1/sqrt(head width). Raises LayerError with what was expected and what was found.
    """
    check_name(name)
    source = open_source(source_path)
    with about(f"source {quoted(source.label)}"):
        chosen = choose(source, family=family, prefix=prefix, layer=layer)
        _check_model(source.config)
        present = present_parts(chosen, source)
        shapes = canonical_shapes(chosen, present, source)
        spec = derive_spec(chosen, shapes, source.config, Options(heads, scale, add_zero_attn))
        check_fit(spec, chosen, present, shapes)
        return StoredLayer(name, spec, _read(chosen, present, source), _source_text(source, chosen), chosen.family.name)


def _check_model(config: Mapping[str, object] | None) -> None:
    """Raise LayerError if the config names a model whose attention differs in a way that no tensor of the module shows."""
    if config is None:
        return
    model = config.get("model_type")
    if isinstance(model, str) and model in REFUSED_MODELS:
        raise LayerError(f"model_type {model}: {REFUSED_MODELS[model]}")
    if config.get("position_embedding_type") not in (None, "absolute"):
        raise LayerError(f"position_embedding_type in config.json is not absolute: {RELATIVE}")


def _read(chosen: Candidate, present: Parts, source: Source) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for key, names in present.items():
        whole = source.tensor(chosen.prefix + key)
        if names[0].startswith("bias_"):
            whole = whole.flatten()
        if chosen.family.transposed:
            whole = whole.T
        # copies, so that no tensor shares memory with a mapped file or with another tensor
        parts = [part.clone(memory_format=torch.contiguous_format) for part in whole.chunk(len(names))]
        tensors |= dict(zip(names, parts, strict=True))
    return tensors


def _source_text(source: Source, chosen: Candidate) -> str:
    """Return the text that identifies the layer in its source: no directory, only printable characters."""
    words = (source.label, chosen.module.rstrip("."), f"({chosen.family.name})")
    text = " ".join(word for word in words if word)
    return bounded("".join(char if char.isprintable() else "?" for char in text), MAX_SOURCE)
