"""Importer: reads one attention layer out of a checkpoint and returns it as a StoredLayer.

Invariants: Names and shapes decide which layer it is and whether its parts fit. Only then are tensors read, and only those of
that layer. Tensors keep the source's dtype and bits. The recorded source contains no directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from service.errors import LayerError
from service.layers.choice import choose
from service.layers.families import REFUSED_MODELS, RELATIVE, Candidate, Parts
from service.layers.layout import Options, canonical_shapes, check_fit, derive_spec, present_parts
from service.layers.source import Source, open_source
from service.layers.stored_layer import MAX_SOURCE, StoredLayer, check_name
from service.layers.wording import about, bounded, quoted


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
        return StoredLayer(name, spec, _read(chosen, present, source), _told(source, chosen), chosen.family.name)


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


def _told(source: Source, chosen: Candidate) -> str:
    """Return the text that identifies the layer in its source: no directory, only printable characters."""
    words = (source.label, chosen.module.rstrip("."), f"({chosen.family.name})")
    text = " ".join(word for word in words if word)
    return bounded("".join(char if char.isprintable() else "?" for char in text), MAX_SOURCE)
