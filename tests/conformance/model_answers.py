"""Hidden states and tokens of transformers, computed in their own environment: python model_answers.py DIRECTORY.

DIRECTORY has `cases.json`: a list of models, each with its `path`, its `texts` (pairs of a text and None or another), and
`config`, a class and its options, if the model is to be made there first. `answers.npz` has an entry for each model and text,
`0/3/states` [N + 1, L, D]; `tokens.json` has their ids and offsets. This program imports nothing of the service.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers


def make(path: str, name: str, options: dict[str, Any]) -> None:
    """Save a random model with the head of its masked language modelling, whose tensors an import leaves out."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options, initializer_range=0.5)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    with torch.no_grad():
        for key, tensor in model.named_parameters():  # norms are ones and zeros, biases zeros
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) / 4)
            assert key
    model.save_pretrained(path)


def answers(path: str, texts: list[list[str | None]]) -> list[tuple[np.ndarray, dict[str, Any]]]:
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    if (Path(path) / "tokenizer_config.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    else:
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{path}/tokenizer.json")
    found = []
    for text, pair in texts:
        given = tokenizer(
            text, pair, return_offsets_mapping=True, return_token_type_ids=True, padding=False, truncation=False
        )
        inputs = {"input_ids": torch.tensor([given["input_ids"]])}
        if model.config.model_type in {"bert", "electra"}:
            inputs["token_type_ids"] = torch.tensor([given["token_type_ids"]])
        with torch.inference_mode():
            states = model(**inputs, output_hidden_states=True).hidden_states
        tokens = {"ids": given["input_ids"], "offsets": given["offset_mapping"], "sequences": given.sequence_ids()}
        found.append((torch.cat(states).numpy(), tokens))
    return found


def main() -> None:
    directory = Path(sys.argv[1])
    states, tokens = {}, {}
    for place, case in enumerate(json.loads((directory / "cases.json").read_text(encoding="utf-8"))):
        if case["config"]:
            make(case["path"], *case["config"])
        for number, (found, own) in enumerate(answers(case["path"], case["texts"])):
            states[f"{place}/{number}"], tokens[f"{place}/{number}"] = found, own
    np.savez(directory / "answers.npz", allow_pickle=False, **states)
    (directory / "tokens.json").write_text(json.dumps(tokens), encoding="utf-8")


if __name__ == "__main__":
    main()
