"""Attention layers computed by transformers, in its own environment: python layer_answers.py DIRECTORY.

DIRECTORY has `cases.json`: the cases of `layer_cases.py` and the calls of each. A case's checkpoint is written to `NAME/`, and
`NAME.safetensors` gets, by `LAYER/CALL/`, the `query` and `key` that the attention module received, the `output` and `weights`
that it returned. This program imports nothing of the service.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def random_model(name: str, config: dict[str, Any]) -> Any:
    """Scores and outputs of the size of 1; norms, biases, sinks and tables of bias are far from what they start as."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config, attn_implementation="eager")).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "relative_attention_bias" in key or "sinks" in key:
                tensor.normal_()
            elif tensor.dim() < 2 or "norm" in key:
                tensor.add_(torch.randn_like(tensor), alpha=0.3)
            elif "embed" in key and "project" not in key:
                tensor.normal_()
            else:
                tensor.normal_(std=1.1 / math.sqrt(max(tensor.shape)))
    return model


def stored_model(name: str, path: Path) -> torch.nn.Module:
    if name == "anarcii":
        return anarcii(path)
    kind = getattr(transformers, name)
    model: torch.nn.Module = kind.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def anarcii(path: Path) -> torch.nn.Module:
    """The model of the package's own code, with the sizes that lie beside its state dict."""
    place = path.parents[2] / "inference" / "model.py"
    spec = importlib.util.spec_from_file_location("anarcii_model", place)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    own = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    state = torch.load(path, weights_only=True, map_location="cpu")
    sizes = (
        own["HID_DIM"],
        own["LAYERS"],
        own["HEADS"],
        len(state["encoder.layers.0.positionwise_feedforward.fc_1.bias"]),
    )
    encoder = module.Encoder(own["INPUT_DIM"], *sizes, 0.0, "cpu")
    decoder = module.Decoder(own["OUTPUT_DIM"], *sizes, 0.0, "cpu")
    model = module.S2S(encoder, decoder, 0, 0, "cpu")
    model.load_state_dict(state)
    found: torch.nn.Module = model.eval()
    return found


class Capture:
    """The inputs and answers of one attention module, from a hook on it and one on the module that projects its output."""

    def __init__(self, model: torch.nn.Module, module: str, output: str) -> None:
        self.module: Any = model.get_submodule(module)
        self.found: Tensors = {}
        self.hooks = [self.module.register_forward_hook(self._attention, with_kwargs=True)]
        if output:
            self.hooks.append(model.get_submodule(output).register_forward_hook(self._output))

    def _attention(self, module: torch.nn.Module, positional: Any, named: Any, answer: Any) -> None:
        given = inspect.signature(module.forward).bind(*positional, **named).arguments
        given |= given.pop("kwargs", {})
        query: torch.Tensor = given["hidden_states"] if "hidden_states" in given else given["query"]
        key = given.get("key_value_states", given.get("encoder_hidden_states", given.get("key")))
        self.found = {"output": answer[0], **self.found, "query": query, "weights": answer[-1]}
        self.found |= {} if key is None or key is query else {"key": key}

    def _output(self, module: torch.nn.Module, given: Any, answer: torch.Tensor) -> None:
        assert module
        assert given
        self.found["output"] = answer

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def tokens(lengths: list[int], vocabulary: int, seed: int) -> Tensors:
    """Random tokens above the special ones, padded on the left to the longest."""
    longest, generator = max(lengths), torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocabulary, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


def states(lengths: list[int], width: int) -> torch.Tensor:
    return torch.randn(len(lengths), max(lengths), width, generator=torch.Generator().manual_seed(3))


def asked(call: dict[str, Any], given: str, vocabulary: int) -> dict[str, Any]:
    """The arguments of a call: as many tokens as `lengths`, and as many of the encoder, or states of it, as `sources`."""
    found: dict[str, Any] = tokens(call["lengths"], vocabulary, 1)
    if given != "tokens":
        found = {f"decoder_{name}": tensor for name, tensor in found.items()}
        found |= (
            tokens(call["sources"], vocabulary, 2)
            if given == "pairs"
            else {"encoder_outputs": (states(call["sources"], 32),)}
        )
    if call["positions"] is not None:
        found["position_ids"] = torch.tensor(call["positions"])
    return found


def answers(model: torch.nn.Module, case: dict[str, Any]) -> Tensors:
    found: Tensors = {}
    for call in case["calls"]:
        for entry in {layer["entry"] for layer in case["layers"].values()}:
            captures = {
                name: Capture(model, layer["module"], layer["output"])
                for name, layer in case["layers"].items()
                if layer["entry"] == entry
            }
            with torch.inference_mode():
                run(model, case, captures, call, entry)
            for name, capture in captures.items():
                capture.remove()
                for part, tensor in capture.found.items():
                    found[f"{name}/{call['name']}/{part}"] = tensor.contiguous().clone()
    return found


def run(
    model: torch.nn.Module, case: dict[str, Any], captures: dict[str, Capture], call: dict[str, Any], entry: str
) -> None:
    if case["model"] == "anarcii":
        given = (tokens(call[part], case["vocabulary"], 1)["input_ids"] for part in ("sources", "lengths"))
        with redirect_stdout(None):  # it prints the shapes of its masks
            model(*given)
        return
    if "states" not in {entry, case["given"]}:
        entered: Any = model.get_submodule(entry)
        entered(**asked(call, case["given"], case["vocabulary"]), output_attentions=True)
        return
    for capture in captures.values():
        linear = next(part for part in capture.module.modules() if isinstance(part, torch.nn.Linear))
        capture.module(hidden_states=states(call["lengths"], linear.in_features), attention_mask=None)


def main() -> None:
    directory = Path(sys.argv[1])
    for case in json.loads((directory / "cases.json").read_text(encoding="utf-8")):
        if case["path"]:
            model: Any = stored_model(case["model"], directory / case["path"])
        else:
            model = random_model(case["model"], case["config"])
            model.save_pretrained(directory / case["name"], **case["saved"])
        save_file(answers(model, case), directory / f"{case['name']}.safetensors")


if __name__ == "__main__":
    main()
