"""Parity: how far a stored layer in float32 is from its source, by the source's model in transformers or a float64 reference.

Invariants: Only this module imports transformers, only for a check, and the service does not depend on it. A check downloads
nothing and runs no code of a checkpoint. It says why it does without transformers.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from service.attention import masks, reference
from service.attention.call import Call, WeightsWanted
from service.attention.layer import Layer
from service.attention.spec import MAX_POSITION, PROJECTIONS, LayerSpec
from service.errors import LayerError
from service.layers.store import StoredLayer
from service.layers.wording import MAX_COPIED, bounded

Arrays = Sequence[np.ndarray]
CHECK_ROWS, CHECK_SEED = 24, 7
MODEL_ROWS = 144  # tokens of a model: more than the windows of ModernBERT and gpt-oss
# Over a few hundred products, errors of float32 against float64 are near 1e-6 of the largest value.
TOLERANCE = 1e-4
MODEL_TOLERANCE = 1e-5  # of transformers, times the largest value if that is above 1
# TOLERANCE is for scores so far apart. Scores ten times as far apart round ten times as much, and so do their weights.
USUAL_SCORES = 16.0


def with_float64(stored: StoredLayer, origin: StoredLayer) -> tuple[bool, str]:
    """Compare `stored` with the reference on the tensors of `origin`, on seeded random rows; return the errors in words too."""
    spec, generator = stored.spec, np.random.default_rng(CHECK_SEED)
    widths = (spec.query_width, spec.key_width, spec.value_width)
    query, key, value = rows = [generator.standard_normal((CHECK_ROWS, n)).astype(np.float32) for n in widths]
    tensors = {name: tensor.to(torch.float64).numpy() for name, tensor in origin.tensors.items()}
    at = _positions(spec) if spec.uses_positions else None
    expected = reference.attend(spec, tensors, query, key, value, positions=at, key_positions=at)
    # A weight of e^-s beside a large one shows scores s apart.
    apart = -math.log(expected[1].min(where=expected[1] > 0, initial=1.0))
    return _compared(stored, rows, expected, TOLERANCE * max(1.0, apart / USUAL_SCORES), positions=at)


def _positions(spec: LayerSpec) -> np.ndarray:
    """Return positions at the start, at the edge of the window of those, and the largest."""
    reach = max(spec.window.left or 0, spec.window.right or 0) if spec.window else 0
    run = np.arange(CHECK_ROWS // 3)
    return np.concatenate([run, run + max(reach - len(run) // 2, len(run)), run + MAX_POSITION - len(run)])


def _compared(
    stored: StoredLayer,
    rows: Arrays,
    expected: Arrays,
    tolerance: float,
    least: float = math.ulp(1.0),
    positions: np.ndarray | None = None,
) -> tuple[bool, str]:
    """Return whether the layer's output and weights are as expected, and their errors in words.

    The tolerance of the output is times its largest value, or `least`.
    """
    query, key, value = (torch.from_numpy(x)[None] for x in rows)
    at = None if positions is None else torch.from_numpy(positions)[None]
    call = Call(query, key, value, weights=WeightsWanted("heads"), positions=at, key_positions=at)
    if stored.spec.window is not None:
        sizes = masks.Sizes(1, stored.spec.num_heads, query.shape[1], key.shape[1])
        call = call._replace(mask=masks.CombinedMask(sizes, (masks.of_positions(stored.spec.window, *call.places),)))
    with torch.inference_mode():
        served = Layer(stored.spec, stored.tensors, dtype=torch.float32, device=torch.device("cpu")).forward([call])[0]
    assert isinstance(served.weights, torch.Tensor), "form heads gives one tensor. This is a bug."
    found = served.output[0].numpy(), served.weights[0].numpy()
    errors = [float(np.abs(ours - theirs).max()) for ours, theirs in zip(found, expected, strict=True)]
    size = max(float(np.abs(expected[0]).max()), math.ulp(1.0))
    words = f"max abs error output {errors[0]:.3g} (largest value {size:.3g}), weights {errors[1]:.3g}"
    return errors[0] <= tolerance * max(size, least) and errors[1] <= tolerance, words


def with_source(stored: StoredLayer, origin: StoredLayer, source: Path) -> tuple[bool, str, str]:
    """Compare with the model in the directory `source` if transformers runs it, else with float64; return with which too."""
    if not (source / "config.json").is_file():
        why = "the source is no directory with a config.json"
    elif importlib.util.find_spec("transformers") is None:
        why = "transformers is not installed"
    else:
        try:
            version, *rows, output, weights = _run(origin, source)
            return *_compared(stored, rows, (output, weights), MODEL_TOLERANCE, least=1.0), f"transformers {version}"
        except Exception as error:  # noqa: BLE001 (a library that runs any model raises anything)
            why = f"not with transformers: {bounded(' '.join(ascii(str(error))[1:-1].split()), MAX_COPIED)}"
    return *with_float64(stored, origin), f"float64 ({why})"


def _run(origin: StoredLayer, source: Path) -> tuple[Any, ...]:
    """Run the source's model once; return transformers' version, the layer's query, key and value, its output and weights."""
    import huggingface_hub
    import transformers

    huggingface_hub.constants.HF_HUB_OFFLINE = True  # else it looks for a safetensors form of a pytorch_model.bin
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options: Any = dict(local_files_only=True, trust_remote_code=False, attn_implementation="eager")
    model = transformers.AutoModel.from_pretrained(source, dtype=torch.float32, **options).eval()
    owners = {name: _owner(model, origin.tensors[f"{name}.weight"].float()) for name in PROJECTIONS}
    seen: dict[str, np.ndarray] = {}

    def keep(module: object, given: Any, made: Any) -> None:
        # The output of the last projection lies before dropout, residual and norm, which some modules include.
        found = [(name, made if name == "output" else given[0]) for name, owner in owners.items() if owner is module]
        if isinstance(made, tuple) and "query" in seen:
            shape = (1, origin.spec.num_heads, len(seen["query"]), len(seen["key"]))
            # T5's relative bias has this shape too, and comes before the weights.
            found += [("weights", x) for x in made[::-1] if isinstance(x, torch.Tensor) and x.shape == shape]
        for name, x in found:
            seen.setdefault(name, x[0].numpy().copy())

    model.apply(lambda part: part.register_forward_hook(keep) and None)
    with torch.inference_mode():
        model(**_inputs(model))
    if missing := {*PROJECTIONS, "weights"} - seen.keys():
        raise LayerError(f"its model does not show {', '.join(sorted(missing))} of the layer")
    return transformers.__version__, *(seen[name] for name in (*PROJECTIONS, "weights"))


def _owner(model: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    """Return the module whose weight, or its transpose, has the rows of `weight`: transformers renames what it loads."""

    def has(row: torch.Tensor, own: object) -> bool:
        wholes = (own, own.T) if isinstance(own, torch.Tensor) and own.dim() == weight.dim() else ()
        return any(any(map(row.equal, x[x[:, 0] == row[0]])) for x in wholes if x.shape[1] == len(row))

    modules = [(module, getattr(module, "weight", None)) for module in model.modules()]
    found = [module for module, own in modules if has(weight[0], own) and has(weight[-1], own)]
    if len(found) != 1:
        raise LayerError(f"{len(found) or 'no'} modules of {type(model).__name__} have the layer's tensors")
    return found[0]


def _inputs(model: Any) -> dict[str, Any]:
    """Return random inputs by the names that the model takes; some models give weights only if asked."""
    torch.manual_seed(CHECK_SEED)
    config, taken = model.config, inspect.signature(model.forward).parameters
    text, image = config.get_text_config(), getattr(config, "vision_config", config)
    longest = (getattr(text, f"max_{kind}", MODEL_ROWS) for kind in ("position_embeddings", "target_positions"))
    rows = min(MODEL_ROWS, *longest) - 2  # RoBERTa's positions begin at 2
    special = [value for key, value in text.to_dict().items() if key.endswith("_token_id")]
    words = torch.tensor([word for word in range(getattr(text, "vocab_size", 0)) if word not in special])
    lengths = {"input_ids": rows, "decoder_input_ids": rows - rows // 4}
    made: dict[str, Any] = {
        name: words[torch.randint(len(words), (1, lengths[name]))] for name in lengths if name in taken
    }
    if "pixel_values" in taken:
        made["pixel_values"] = torch.randn(1, image.num_channels, image.image_size, image.image_size)
    if "input_features" in taken:
        made["input_features"] = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions)
    return made | ({"output_attentions": True} if "output_attentions" in taken else {})
