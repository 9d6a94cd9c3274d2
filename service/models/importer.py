"""Importer: reads an encoder of a checkpoint directory as a StoredModel and the StoredLayers that it names.

Invariants: config.json says which model it is and its options; names and shapes of tensors must agree with it. Every key of the
embeddings and of the layers is used, else the model is refused. What was read is one version of the source's files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from service.errors import LayerError
from service.layers.directory import check_name
from service.layers.importer import MAX_DEPTH, import_layer
from service.layers.source import MAX_JSON_BYTES, Source, open_source
from service.layers.store import MAX_SOURCE, StoredLayer
from service.layers.unsupported import check_config
from service.layers.wording import about, bounded, listed, quoted
from service.models.families import ACTIVATION_NAMES, BUFFERS, BY_MODEL, WORD, EncoderFamily
from service.models.stored_model import LayerRef, ModelOptions, StoredModel
from service.models.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
DEFAULT_EPS = 1e-12
NO_TOKENIZER = (
    f"the directory has no {TOKENIZER_FILE}; write it with transformers: "
    "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
)


def import_model(
    directory: Path, *, name: str, step: Callable[[str], None] = lambda _: None
) -> tuple[StoredModel, list[StoredLayer]]:
    """Import the encoder of a directory with config.json and tokenizer.json; its layers are named `<name>-l0` and so on.

    Raises LayerError with what was expected and what was found.
    """
    check_name(name)
    source = open_source(directory)
    here = f"source {quoted(source.label)}"
    with source.files.unchanged():
        with about(here):
            family = _family(source)
            depth, prefix = _number(source, family.depth, least=1), _prefix(source)
            is_projected = family.is_projected and f"{prefix}embeddings_project.weight" in source.entries
            keys = {ours: prefix + key for ours, key in family.keys(depth, is_projected=is_projected).items()}
            found = _renamed(source)
            _check_keys(found, set(keys.values()), family, depth, prefix)
            raw = _tokenizer(source, directory)
            options = _options(source, family, {ours: found.entries[key].shape for ours, key in keys.items()})
            Tokenizer(raw, options.vocabulary)
        layers = []
        for n in range(depth):
            step(f"reading layer {n} of {depth}")
            module = f"{prefix}{family.layer.format(n=n)}attention"
            layers.append(import_layer(source, name=f"{name}-l{n}", prefix=module, family=family.attention))
        step("reading embeddings and feed-forward blocks")
        with about(here):
            tensors = {ours: found.entries[key].read() for ours, key in keys.items()}
            origin = "".join(char if char.isprintable() else "?" for char in f"{source.label} ({family.name})")
            refs = tuple(LayerRef(layer.name, layer.digest) for layer in layers)
            said = dict(name=name, family=family.name, source=bounded(origin, MAX_SOURCE))
            return StoredModel(**said, options=options, layers=refs, tensors=tensors, tokenizer=raw), layers


def _family(source: Source) -> EncoderFamily:
    """Return the row of the config's model; raise LayerError for every other model, and for decoders."""
    config = source.config
    if config is None:
        raise LayerError("it has no config.json, which says what the model computes")
    check_config(config)
    model = config.get("model_type")
    family = BY_MODEL.get(model) if isinstance(model, str) else None
    if family is None:
        named = f"its model_type is {quoted(model)}" if isinstance(model, str) else "its config.json has no model_type"
        raise LayerError(f"{named}; models that are served are encoders: {', '.join(BY_MODEL)}")
    for option in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        if config.get(option):
            raise LayerError(f"config.json has {option}: the model is a decoder, which sees only what came before")
    return family


def _prefix(source: Source) -> str:
    """Return what stands in front of the model's keys, as `bert.`."""
    found = [key.removesuffix(WORD) for key in source.entries if key.endswith(WORD)]
    if len(found) != 1 or not (found[0] == "" or found[0].endswith(".")):
        raise LayerError(f"{len(found)} keys end in {WORD}, expected one")
    return found[0]


def _renamed(source: Source) -> Source:
    """Return the source with the names of norms that checkpoints of TensorFlow have, gamma and beta, as torch names them."""
    entries = {re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", key)): x for key, x in source.entries.items()}
    return dataclasses.replace(source, entries=entries)


def _check_keys(source: Source, used: set[str], family: EncoderFamily, depth: int, prefix: str) -> None:
    if missing := sorted(used - source.entries.keys()):
        raise LayerError(f"keys of the {family.name} model are missing: {listed(missing)}")
    parts = (f"{prefix}embeddings", prefix + family.layer.partition(".")[0] + ".")
    attentions = tuple(
        f"{prefix}{family.layer.format(n=n)}attention." for n in range(depth)
    )  # `import_layer` checks them
    buffers = {prefix + name for name in BUFFERS}
    unknown = {key for key in source.entries if key.startswith(parts) and not key.startswith(attentions)}
    if extra := sorted(unknown - used - buffers):
        raise LayerError(f"the model has keys that a {family.name} of {depth} layers does not use: {listed(extra)}")


def _options(source: Source, family: EncoderFamily, shapes: dict[str, tuple[int, ...]]) -> ModelOptions:
    """Return the options that the config and the shapes give; `StoredModel` checks all shapes."""
    config = source.config or {}
    word, inner = shapes["embeddings.word"], shapes["0.inner.weight"]
    if len(word) != 2 or len(inner) != 2:  # noqa: PLR2004 (matrices)
        raise LayerError("the embeddings and the feed-forward blocks must be matrices")
    activation = config.get(family.activation, "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATION_NAMES:
        shown = quoted(activation) if isinstance(activation, str) else "no name"
        raise LayerError(f"{family.activation} is {shown}; expected one of {', '.join(ACTIVATION_NAMES)}")
    eps, rows = config.get("layer_norm_eps", DEFAULT_EPS), {name: (*shape, 0)[0] for name, shape in shapes.items()}
    return ModelOptions(
        width=inner[1],
        embedding_width=word[1] if "embeddings.project.weight" in shapes else inner[1],
        inner_width=inner[0],
        vocabulary=word[0],
        positions=rows["embeddings.position"],
        position_offset=_number(source, "pad_token_id", default=1) + 1 if family.has_offset else 0,
        types=rows["embeddings.type"] if family.has_types else 0,
        eps=eps if isinstance(eps, float) else 0.0,
        activation=ACTIVATION_NAMES[activation],
    )


def _number(source: Source, option: str, *, least: int = 0, default: int | None = None) -> int:
    found = (source.config or {}).get(option, default)
    if type(found) is not int or not least <= found <= MAX_DEPTH:
        raise LayerError(f"{option} in config.json must be a whole number from {least} to {MAX_DEPTH}")
    return found


def _tokenizer(source: Source, directory: Path) -> bytes:
    path = directory / TOKENIZER_FILE
    if not path.exists():
        raise LayerError(NO_TOKENIZER)
    with about(TOKENIZER_FILE), source.files.open(path) as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise LayerError(f"{TOKENIZER_FILE} has more than {MAX_JSON_BYTES} bytes")
    return raw
