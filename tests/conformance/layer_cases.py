"""Tiny random models whose attention layers `layer_answers.py` computes with transformers and the service after an import.

A case has a class of transformers and its config. Each of its kinds of attention has the path of its module, in which `{}` is the
layer's number, and the arguments of `layers import` besides the number. Widths, windows and frequencies are small, so that 33
tokens reach beyond every window and every bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Config = dict[str, Any]
# By the service's dtype, times the largest value, if that is above 1.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
# What a model is given: tokens; a decoder's tokens and the encoder's, or its states; or states, for the attention module itself.
TOKENS, PAIRS, FEATURES, STATES = "tokens", "pairs", "features", "states"
TINY_VOCABULARY = 60


class Kind(NamedTuple):
    """One attention of each numbered layer. `output` is the module that projects, where the attention module does not."""

    module: str
    output: str = ""
    prefix: str = ""
    options: tuple[str, ...] = ()
    entry: str = ""  # the part of the model that is called, where it is not the whole
    is_cross: bool = False
    is_source: bool = False  # the attention of the encoder of two
    is_causal_by_mask: bool = False  # the checkpoint does not say so, and the request does
    tolerances: Mapping[str, float] = TOLERANCES
    is_relative: bool = False  # positions matter, but only their differences


class Call(NamedTuple):
    """The lengths of its sequences and of their sources; they are padded on the left. `positions` are the real tokens'."""

    name: str
    lengths: tuple[int, ...]
    sources: tuple[int, ...]
    start: int = 0

    @staticmethod
    def pads(lengths: tuple[int, ...]) -> list[list[bool]]:
        longest = max(lengths)
        return [[place < longest - length for place in range(longest)] for length in lengths]

    @property
    def positions(self) -> list[list[int]]:
        """From `start` at the first real token; a pad has the same."""
        longest = max(self.lengths)
        return [[self.start + max(0, place - longest + length) for place in range(longest)] for length in self.lengths]


CALLS = (Call("1", (1,), (33,)), Call("7", (7,), (1,)), Call("33", (33,), (7,)), Call("padded", (7, 4), (5, 7)))
FAR = Call("far", (33,), (7,), start=4000)


class LayerCase(NamedTuple):
    """A model: `has_positions` = its forward takes `position_ids` and a layer depends on them."""

    name: str
    model: str
    config: Config
    kinds: dict[str, Kind]
    layers: tuple[int, ...] = (0, 1)
    given: str = TOKENS
    has_positions: bool = False
    saved: Mapping[str, Any] = MappingProxyType({})  # options of save_pretrained
    path: str = ""  # of a checkpoint that is there, absolute or below the directory of all
    vocabulary: int = TINY_VOCABULARY

    @property
    def calls(self) -> tuple[Call, ...]:
        if self.given == STATES or self.is_anarcii:
            return CALLS[:3]  # without padding
        return (*CALLS, FAR) if self.has_positions else CALLS

    @property
    def is_anarcii(self) -> bool:
        return self.model == "anarcii"

    def as_json(self) -> dict[str, Any]:
        """What `layer_answers.py` is told."""
        layers = {
            name: dict(module=kind.module.format(layer), output=kind.output.format(layer), entry=kind.entry)
            for name, (layer, kind) in self.imports.items()
        }
        calls = [call._asdict() | dict(positions=call.positions if self.has_positions else None) for call in self.calls]
        plain = {
            name: getattr(self, name) for name in ("name", "model", "config", "saved", "given", "path", "vocabulary")
        }
        plain["saved"] = dict(self.saved)
        return plain | dict(layers=layers, calls=calls)

    @property
    def imports(self) -> dict[str, tuple[int, Kind]]:
        """Each layer's name in the service, with its number and kind."""
        several = len(self.kinds) > 1
        return {
            f"{self.name}-{kind}-{layer}" if several else f"{self.name}-{layer}": (layer, found)
            for kind, found in self.kinds.items()
            for layer in self.layers
        }


def _bert(prefix: str) -> dict[str, Kind]:
    at = f"{prefix}encoder.layer.{{}}.attention"
    return {"self": Kind(f"{at}.self", f"{at}.output.dense")}


def _only(module: str, **options: Any) -> dict[str, Kind]:
    return {"self": Kind(module, **options)}


DECODER = _only("model.layers.{}.self_attn")
VOCABULARY = dict(vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2)
ENCODER = dict(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=1,
)
# Eight thousand positions, and a head width that is not hidden_size / num_attention_heads where the family has the key.
LLAMA = VOCABULARY | dict(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=8192,
)
HEAD = dict(head_dim=12)
ROPE = dict(rope_type="default", rope_theta=10000.0)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=16.0, original_max_position_embeddings=512)
VISION = dict(
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4
)
BART = VOCABULARY | dict(
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=2,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    max_position_embeddings=64,
    decoder_start_token_id=2,
)


def _bart_kinds(**encoder: Any) -> dict[str, Kind]:
    found = {
        name: f"model.{side}.layers.{{}}.{module}"
        for name, side, module in (
            ("encoder", "encoder", "self_attn"),
            ("decoder", "decoder", "self_attn"),
            ("cross", "decoder", "encoder_attn"),
        )
    }
    return {
        name: Kind(
            module,
            prefix=module,
            is_cross=name == "cross",
            is_source=name == "encoder",
            **(encoder if name == "encoder" else {}),
        )
        for name, module in found.items()
    }


T5_KINDS = {
    "encoder": "encoder.block.{}.layer.0.SelfAttention",
    "decoder": "decoder.block.{}.layer.0.SelfAttention",
    "cross": "decoder.block.{}.layer.1.EncDecAttention",
}
CLIP_TEXT = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4) | dict(
    max_position_embeddings=64, vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2
)
CLIP_KINDS = {
    name: Kind(f"{name}_model.encoder.layers.{{}}.self_attn", prefix=f"{name}_model.encoder", entry=entry)
    for name, entry in (("text", "text_model"), ("vision", STATES))
}
NOMIC = ENCODER | dict(pad_token_id=0, rope_parameters=ROPE | dict(rope_theta=1000.0))
GPT2 = VOCABULARY | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
GEMMA = LLAMA | HEAD | dict(sliding_window=8, query_pre_attn_scalar=20)
GEMMA3_ROPE = dict(full_attention=LINEAR | dict(rope_theta=1e6), sliding_attention=ROPE)

CASES = (
    LayerCase("roberta", "RobertaForMaskedLM", ENCODER, _bert("roberta.")),
    LayerCase("xlm-roberta", "XLMRobertaForMaskedLM", ENCODER, _bert("roberta.")),
    LayerCase("electra", "ElectraForMaskedLM", ENCODER | dict(embedding_size=16), _bert("electra.")),
    LayerCase(
        "modernbert",
        "ModernBertForMaskedLM",
        ENCODER | dict(num_hidden_layers=4, local_attention=8, pad_token_id=0),
        _only("model.layers.{}.attn"),
        layers=(0, 1, 2, 3),
        has_positions=True,
    ),
    LayerCase(
        "modernbert-bias",
        "ModernBertForMaskedLM",
        ENCODER | dict(local_attention=8, pad_token_id=0, attention_bias=True),
        _only("model.layers.{}.attn"),
        has_positions=True,
    ),
    LayerCase("nomic", "NomicBertModel", NOMIC, _only("layers.{}.self_attn"), has_positions=True),
    LayerCase(
        "nomic-new",
        "NomicBertModel",
        NOMIC,
        _only("layers.{}.self_attn"),
        has_positions=True,
        saved=dict(save_original_format=False),
    ),
    LayerCase(
        "esm",
        "EsmForMaskedLM",
        ENCODER | dict(position_embedding_type="rotary", mask_token_id=3),
        _bert("esm."),
        has_positions=True,
    ),
    LayerCase("mpnet", "MPNetForMaskedLM", ENCODER, _only("mpnet.encoder.layer.{}.attention.attn", is_relative=True)),
    LayerCase("vit", "ViTModel", VISION, _only("layers.{}.attention"), given=STATES),
    LayerCase(
        "vit-new",
        "ViTModel",
        VISION | dict(qkv_bias=False),
        _only("layers.{}.attention"),
        given=STATES,
        saved=dict(save_original_format=False),
    ),
    LayerCase("clip", "CLIPModel", dict(text_config=CLIP_TEXT, vision_config=VISION), CLIP_KINDS),
    LayerCase("bart", "BartForConditionalGeneration", BART, _bart_kinds(), given=PAIRS),
    LayerCase(
        "whisper",
        "WhisperForConditionalGeneration",
        BART | dict(max_source_positions=64, max_target_positions=64, num_mel_bins=4),
        _bart_kinds(entry=STATES),
        given=FEATURES,
    ),
    LayerCase("gpt2", "GPT2LMHeadModel", GPT2, _only("transformer.h.{}.attn", is_relative=True)),
    LayerCase(
        "gpt2-scaled",
        "GPT2LMHeadModel",
        GPT2 | dict(scale_attn_by_inverse_layer_idx=True),
        _only("transformer.h.{}.attn"),
    ),
    LayerCase(
        "gpt-neox",
        "GPTNeoXForCausalLM",
        VOCABULARY
        | dict(hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3)
        | dict(max_position_embeddings=8192, rope_parameters=ROPE | dict(partial_rotary_factor=0.25)),
        _only("gpt_neox.layers.{}.attention"),
        has_positions=True,
    ),
    LayerCase(
        "t5",
        "T5ForConditionalGeneration",
        VOCABULARY
        | dict(d_model=32, d_kv=6, d_ff=40, num_layers=2, num_heads=4, decoder_start_token_id=0)
        | dict(relative_attention_num_buckets=8, relative_attention_max_distance=20),
        {
            name: Kind(
                module,
                prefix=module,
                is_cross=name == "cross",
                is_source=name == "encoder",
                is_relative=name != "cross",
            )
            for name, module in T5_KINDS.items()
        },
        given=PAIRS,
    ),
    LayerCase("llama", "LlamaForCausalLM", LLAMA, DECODER, has_positions=True),
    LayerCase(
        "llama-bias",
        "LlamaForCausalLM",
        LLAMA | HEAD | dict(attention_bias=True, rope_parameters=ROPE | dict(rope_theta=500.0)),
        DECODER,
        has_positions=True,
    ),
    LayerCase("llama-linear", "LlamaForCausalLM", LLAMA | dict(rope_parameters=LINEAR), DECODER, has_positions=True),
    LayerCase("llama-llama3", "LlamaForCausalLM", LLAMA | dict(rope_parameters=LLAMA3), DECODER, has_positions=True),
    LayerCase("llama-yarn", "LlamaForCausalLM", LLAMA | dict(rope_parameters=YARN), DECODER, has_positions=True),
    LayerCase("qwen2", "Qwen2ForCausalLM", LLAMA, DECODER, has_positions=True),
    LayerCase(
        "qwen2-window",
        "Qwen2ForCausalLM",
        LLAMA | dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
        DECODER,
        has_positions=True,
    ),
    LayerCase("mistral", "MistralForCausalLM", LLAMA | HEAD | dict(sliding_window=8), DECODER, has_positions=True),
    LayerCase("qwen3", "Qwen3ForCausalLM", LLAMA | HEAD, DECODER, has_positions=True),
    LayerCase("gemma2", "Gemma2ForCausalLM", GEMMA | dict(attn_logit_softcapping=3.0), DECODER, has_positions=True),
    LayerCase(
        "gemma3",
        "Gemma3ForCausalLM",
        GEMMA | dict(rope_parameters=GEMMA3_ROPE, layer_types=["sliding_attention", "full_attention"]),
        DECODER,
        has_positions=True,
    ),
    LayerCase(
        "gemma3-six",
        "Gemma3ForCausalLM",
        GEMMA | dict(num_hidden_layers=6),
        DECODER,
        layers=(4, 5),
        has_positions=True,
    ),
    LayerCase("olmo2", "Olmo2ForCausalLM", LLAMA, DECODER, has_positions=True),
    LayerCase(
        "phi3",
        "Phi3ForCausalLM",
        LLAMA | dict(sliding_window=8, rope_parameters=ROPE | dict(partial_rotary_factor=0.5)),
        DECODER,
        has_positions=True,
    ),
    LayerCase("cohere", "CohereForCausalLM", LLAMA | dict(rope_parameters=ROPE), DECODER, has_positions=True),
    LayerCase(
        "cohere-norm",
        "CohereForCausalLM",
        LLAMA | dict(rope_parameters=ROPE, use_qk_norm=True),
        DECODER,
        has_positions=True,
    ),
    LayerCase(
        "cohere2",
        "Cohere2ForCausalLM",
        LLAMA | dict(num_hidden_layers=4, sliding_window=8, rope_parameters=ROPE),
        DECODER,
        layers=(2, 3),
        has_positions=True,
    ),
    LayerCase(
        "gpt-oss",
        "GptOssForCausalLM",
        LLAMA | HEAD | dict(sliding_window=8, num_local_experts=2, num_experts_per_tok=1),
        DECODER,
        has_positions=True,
    ),
)
