"""Writes what goes into one attention layer of a model of transformers as a saved request, for that layer served here.

    python examples/capture_layer.py MODEL_DIRECTORY --layer 1 --text "the cat sat" --out capture.safetensors

It needs torch, transformers and safetensors, in an environment of your own; nothing of this service is imported. The model is
loaded from a local directory, in float32, and runs once. The file has `query` (the rows that the attention gets, behind the norm
in front of it if the model has one), `key` for cross-attention, `positions` if they are not 0, 1, …, and the tokens as labels.
"""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

# The last words of the paths of attention modules; the layer's number is the first number of a path.
NAMES = ("self_attn", "self_attention", "selfattention", "attn", "attention", "self")
CROSS_NAMES = ("encoder_attn", "encdecattention", "crossattention.self", "crossattention")
KEYS = ("key_value_states", "encoder_hidden_states")


def attention_of(model: torch.nn.Module, layer: int, *, is_cross: bool) -> str:
    """Return the path of the layer's attention module: the innermost where a wrapper adds a norm or a residual."""
    names = CROSS_NAMES if is_cross else NAMES
    paths = [
        path
        for path, _ in model.named_modules()
        if next((word for word in path.split(".") if word.isdigit()), None) == str(layer)
        and path.lower().endswith(tuple(f".{name}" for name in names))
        and (is_cross or "cross" not in path.lower())
    ]
    found = [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
    if len(found) != 1:
        raise SystemExit(f"name the attention module with --module; there are {', '.join(found) or 'none'}")
    return found[0]


def tokens_of(directory: Path, text: str | None, ids: str | None) -> tuple[list[int], list[str]]:
    """Return the token ids and a readable label for each; without a text these are the ids themselves."""
    if text is None:
        given = [int(word) for word in (ids or "").split(",") if word]
        return given, [str(number) for number in given]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    found = tokenizer(text)["input_ids"]
    words = zip(tokenizer.convert_ids_to_tokens(found), (tokenizer.decode([number]) for number in found), strict=True)
    return found, [shown.strip() if shown.strip() and "\ufffd" not in shown else token for token, shown in words]


def capture(model: torch.nn.Module, path: str, ids: list[int], first: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Run the model once; return what the module gets, without the axis of the batch, and the first of what it returns."""
    seen: dict[str, torch.Tensor] = {}

    def hook(module: torch.nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        seen["query"] = given["hidden_states"]
        for name in KEYS:
            if given.get(name) is not None:
                seen["key"] = given[name]
        if given.get("position_ids") is not None:
            seen["positions"] = given["position_ids"].expand(1, -1)
        seen["output"] = output[0] if isinstance(output, tuple) else output

    inputs = {"input_ids": torch.tensor([ids])}
    if first:
        inputs["position_ids"] = torch.arange(first, first + len(ids))[None]
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    handle = model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
    with torch.inference_mode():
        model(**inputs)
    handle.remove()
    if "query" not in seen:
        raise SystemExit(f"{path} did not run on this input")
    arrays = {name: tensor[0].numpy() for name, tensor in seen.items()}
    output = arrays.pop("output")
    # Positions are sent only where they differ from the default: a layer that uses none refuses them.
    if "positions" in arrays and np.array_equal(arrays["positions"], np.arange(len(ids))):
        del arrays["positions"]
    return arrays, output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="local directory of the model")
    parser.add_argument("--layer", type=int, required=True, help="0 is the first")
    parser.add_argument("--text", help="text to run, with the tokenizer of the directory")
    parser.add_argument("--ids", help="token ids instead, as 5,1,7")
    parser.add_argument("--first-position", type=int, default=0, help="position of the first token; default: 0")
    parser.add_argument("--cross", action="store_true", help="the cross-attention of a decoder's layer")
    parser.add_argument("--module", help="path of the attention module, if the layer has several")
    parser.add_argument("--out", type=Path, required=True, help="the saved request, .safetensors")
    parser.add_argument("--output", type=Path, help="write what the module itself returned to this .npy, to compare")
    given = parser.parse_args()
    ids, labels = tokens_of(given.model, given.text, given.ids)
    if not ids:
        raise SystemExit("give a text with --text, or token ids with --ids")
    model = transformers.AutoModel.from_pretrained(given.model, dtype=torch.float32).eval()
    path = given.module or attention_of(model, given.layer, is_cross=given.cross)
    arrays, output = capture(model, path, ids, given.first_position)
    save_file(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()},
        given.out,
        {
            "request": "{}",
            "labels": json.dumps(labels),
            **({"key_labels": json.dumps(labels)} if "key" in arrays else {}),
        },
    )
    if given.output is not None:
        np.save(given.output, output)
    print(f"{given.out}: the input of {path}, {', '.join(f'{name} {list(x.shape)}' for name, x in arrays.items())}")


if __name__ == "__main__":
    main()
