"""Checkpoint families: a table of the names, layouts and rules by which each family's models compute attention.

Invariants: No family has code of its own; a new family is a new row, in the words of `family.py`. Keys are written below the
layer's prefix. A weight is [out, in] unless the family is `transposed`. Several canonical names for one key share its rows in
their order. The importer refuses an unknown key inside the attention module, because a layer without that tensor would compute
something else. The numbers in `defaults` are those of the model's class in transformers 5.24, which a config may leave out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace as like

from service.attention.spec import NORMS
from service.layers.family import (
    EVERYTHING,
    FULL,
    QKV_BIAS,
    QKV_WEIGHT,
    SLIDING,
    Candidate,
    Family,
    NormRule,
    Parts,
    RotaryRule,
    TableRule,
    WindowRule,
    biases,
    fused,
    has_stacked_columns,
    linears,
)

# What may stand in front of a decoder's layers. Any other word is another tower.
_STEM = (
    r"^(?:(?:module|model|base_model|transformer|language_model|text_model|gpt_neox|nomic_bert|gte|0|auto_model)\.)*"
)


def _below(path: str, stem: str = "") -> re.Pattern[str]:
    """Return the pattern of a prefix: `#` in the path is a layer's number, and a path behind a stem may be cut."""
    parts = path.replace(".", r"\.").replace("#", r"\d+")
    return re.compile(
        stem + "".join(rf"(?:{part})?" for part in parts.split("|")) + "$" if stem else rf"(?:^|\.){parts}$"
    )


def _class(heads: int, kv_heads: int | None = None, rope_theta: float = 10000.0, **more: object) -> dict[str, object]:
    """Return the defaults of a decoder's class."""
    return dict(num_attention_heads=heads, num_key_value_heads=kv_heads, rope_theta=rope_theta, **more)


# A row is read as a whole, so it is not written one word a line.
# fmt: off
_MHA_ENDS: Parts = {
    "in_proj_bias": QKV_BIAS, "out_proj.weight": ("output.weight",), "out_proj.bias": ("output.bias",),
    "bias_k": ("bias_k",), "bias_v": ("bias_v",),
}
_MHA = Family(
    name="torch-mha", parts={"in_proj_weight": QKV_WEIGHT, **_MHA_ENDS}, equal=EVERYTHING, takes_zero_attn=True,
    about="`torch.nn.MultiheadAttention`, torch's encoder and decoder layers. `--add-zero-attn` and `--causal` if it was made so",
    optional=(("in_proj_bias", "out_proj.bias"), ("bias_k", "bias_v")),
)
_BERT = Family(
    name="bert", models=("bert", "roberta", "xlm-roberta", "electra", "camembert"), about="BERT, MiniLM, RoBERTa, ELECTRA, XLM-R",
    parts=linears("attention.self.query attention.self.key attention.self.value attention.output.dense"), scope="attention.",
    ignored=("attention.output.LayerNorm.", "attention.self_attn_layer_norm."), causal="is_decoder",
)
_VIT = Family(
    name="vit", models=("vit", "deit", "dinov2"), about="ViT, DeiT, DINOv2", scope="attention.",
    parts=linears("attention.attention.query attention.attention.key attention.attention.value attention.output.dense"),
    optional=(tuple(f"attention.attention.{name}.bias" for name in ("query", "key", "value")),),
)
_VIT_NEW = linears("attention.q_proj attention.k_proj attention.v_proj attention.o_proj")
_TIMM_NORMS = linears("q_norm k_norm", " ".join(NORMS), roles=NORMS)
_CLIP = Family(
    name="clip", models=("clip_vision_model",), parts=linears("q_proj k_proj v_proj out_proj"), is_open=False, equal=EVERYTHING,
    about="CLIP: vision, and text, which is causal; also by the names of OpenAI and open_clip",
    below=re.compile(r"(?<!text_model\.)encoder\.layers\.\d+\.self_attn\.$"), defaults={"num_attention_heads": 12},
)
_BART = Family(
    name="bart", models=("bart", "mbart"), about="BART, mBART: encoder, decoder and cross-attention", is_open=False,
    parts=_CLIP.parts, below=_below("(?:encoder.layers.#.self_attn|decoder.layers.#.encoder_attn)."), equal=EVERYTHING,
    defaults={"encoder_attention_heads": 16, "decoder_attention_heads": 16},
)
_WHISPER = like(
    _BART, name="whisper", models=("whisper",), about="Whisper, whose key has no bias; also by OpenAI's names",
    parts=linears("q_proj k_proj v_proj out_proj", "query value output"),
    defaults={"encoder_attention_heads": 6, "decoder_attention_heads": 6},
)
_OPENAI = like(
    _WHISPER, is_open=True, parts=linears("query key value out", "query value output"),
    below=_below("(?:encoder.blocks.#.attn|decoder.blocks.#.cross_attn)."),
)
_T5_STACK = r"^(?P<stack>(?:.*\.)?%s\.)block\.(?P<n>\d+)\.layer\.0\.SelfAttention\.$"
_T5_KEY = "{stack}block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_T5_TABLE = TableRule(key=_T5_KEY, max_distance="relative_attention_max_distance")
_T5 = Family(
    name="t5", models=("t5", "mt5"), about="T5, mT5: self-attention with the table of block 0, and cross-attention",
    is_open=False, parts=linears("q k v o", ""), ignored=("relative_attention_bias.",), scale=1.0,
    below=re.compile(r"block\.(?P<n>\d+)\.layer\.1\.EncDecAttention\.$"),
    defaults={"d_kv": 64, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
)
_T5_ROWS = (
    like(_T5, below=re.compile(_T5_STACK % "encoder"), table=_T5_TABLE),
    like(_T5, below=re.compile(_T5_STACK % "decoder"), table=like(_T5_TABLE, is_bidirectional=False), causal=True),
    _T5,
)
_UMT5 = "{prefix}relative_attention_bias.weight"
_SELF_ATTN = linears("q_proj k_proj v_proj o_proj")
_RMS_NORMS = linears("q_norm k_norm", "", roles=NORMS)
_NORMED = _SELF_ATTN | _RMS_NORMS
_LLAMA = Family(
    name="llama", models=("llama",), about="Llama 2 and 3, SmolLM 2", is_open=False, parts=_SELF_ATTN,
    below=_below("layers.#.|self_attn.", _STEM), ignored=("rotary_emb.",), optional=(biases(_SELF_ATTN),), is_grouped=True,
    causal=True, rotary=RotaryRule(), flags={"attention_bias": "q_proj.bias"}, defaults=_class(32, attention_bias=False),
)
_UNBIASED = like(_LLAMA, parts=linears("q_proj k_proj v_proj o_proj", ""), optional=(), flags={})
_QWEN_WINDOW = WindowRule(switch="use_sliding_window", first="max_window_layers")
_QWEN = _class(32, 32, use_sliding_window=False, sliding_window=4096, max_window_layers=28, rms_norm_eps=1e-6)
_PERIODIC = WindowRule(period="sliding_window_pattern")
_GEMMA = _class(8, 4, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256, rms_norm_eps=1e-6, attention_bias=False)
_WQKV = fused("Wqkv", "Wo")
_NOMIC = Family(
    name="nomic-bert", models=("nomic_bert",), about="NomicBERT, by the names of its own code and of transformers",
    is_open=False, parts=fused("Wqkv", "out_proj"), below=_below("encoder.layers.#.attn."), ignored=("rotary_emb.",),
    optional=(("Wqkv.bias", "out_proj.bias"),), causal="causal", flags={"qkv_proj_bias": "Wqkv.bias"},
    rotary=RotaryRule(theta="rotary_emb_base", partial="rotary_emb_fraction", is_whole=True),
    off=("num_heads_kv", "rotary_emb_scale_base", "rotary_head_dim", "rotary_emb_interleaved", "rotary_scaling_factor"),
    defaults={"num_attention_heads": 12, "rotary_emb_base": 1000.0, "rotary_emb_fraction": 1.0},
)
_GTE = like(
    _UNBIASED, name="gte", models=("gte",), about="GTE as transformers 5 stores it", parts=_SELF_ATTN, is_grouped=False,
    causal=False, defaults={"num_attention_heads": 12, "rope_theta": 160000.0},
)
_OSS_YARN = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096,
)
_GPT = fused("c_attn", "c_proj")
_GPT2 = Family(  # Conv1D, whose weight is [in, out]; the ignored keys are buffers with the causal mask
    name="gpt2", models=("gpt2",), parts=_GPT, ignored=("bias.", "masked_bias."), equal=EVERYTHING,
    about="GPT-2, also its cross-attention; its two options of scale are read from `config.json`",
    below=re.compile(r"(?<!crossattention\.)$"), transposed=True, stacks_columns=True, causal=True,
)
_GPT_CROSS = linears("q_attn c_proj", roles=("query", "output")) | {"c_attn.weight": QKV_WEIGHT[1:], "c_attn.bias": QKV_BIAS[1:]}
_KERAS = linears("query key value attention_output", weight="kernel")
_FLAX, _FLAX_NORMS = linears("query key value out", weight="kernel"), linears("query_ln key_ln", "", weight="scale", roles=NORMS)
_KERNELS = Family(
    name="keras", about="Keras' `MultiHeadAttention` and `GroupedQueryAttention`, by their paths", parts=_KERAS,
    needs=("attention_output.kernel",), optional=(biases(_KERAS),), equal=(), is_grouped=True, has_kernels=True,
)
_ANNOTATED, _D2L = linears("linears.0 linears.1 linears.2 linears.3"), linears("W_q W_k W_v W_o")
_CAPITALS = linears("W_Q W_K W_V fc")
_BARE: Parts = {"W_q": QKV_WEIGHT[:1], "W_k": QKV_WEIGHT[1:2], "W_v": QKV_WEIGHT[2:]}
_NUMPY = Family(
    name="numpy", about="NumPy tutorials; their weights are `[in, out]`", parts={**_BARE, "W_o": ("output.weight",)},
    needs=("W_o",), equal=EVERYTHING, transposed=True,
)

FAMILIES = (
    # OpenAI's CLIP before the module that it is made of.
    like(_MHA, name="clip", about="", below=_below("visual.transformer.resblocks.#.attn.")),
    like(_MHA, name="clip", about="", below=re.compile(r"^(?:text\.)?transformer\.resblocks\.\d+\.attn\.$"), causal=True),
    _MHA,
    like(  # kdim or vdim given
        _MHA, parts={f"{role[0]}_proj_weight": (role,) for role in QKV_WEIGHT} | _MHA_ENDS,
        equal=("out_width", "query_rows", "value_rows"),
    ),
    like(  # before bert, whose names it has
        _BERT, name="esm", models=("esm",), about="ESM-2", is_open=False,
        ignored=("attention.LayerNorm.", "attention.self.rotary_embeddings."),
        rotary=RotaryRule(scalings=("default",), switch="position_embedding_type"),
        defaults={"num_attention_heads": 12, "rope_theta": 10000.0, "position_embedding_type": "absolute"},
    ),
    _BERT,
    like(
        _BERT, scope="crossattention.", ignored=("crossattention.output.LayerNorm.",), causal=False,
        parts={f"cross{key}": names for key, names in _BERT.parts.items()},
    ),
    Family(
        name="distilbert", models=("distilbert",), about="DistilBERT", scope="attention.",
        parts=linears("attention.q_lin attention.k_lin attention.v_lin attention.out_lin"),
    ),
    Family(
        name="albert", models=("albert",), about="ALBERT; one layer serves every depth", below=_below("albert_layers.#."),
        parts=linears("attention.query attention.key attention.value attention.dense"),
        scope="attention.", ignored=("attention.LayerNorm.",), is_shared_by_depths=True,
    ),
    Family(
        name="mpnet", models=("mpnet",), about="MPNet, with the table that its layers share", parts=linears("q k v o"),
        below=re.compile(r"^(?P<stack>(?:.*\.)?)layer\.(?P<n>\d+)\.attention\.attn\.$"),
        table=TableRule(key="{stack}relative_attention_bias.weight", max_distance=128, buckets=32),
    ),
    _VIT,
    like(_VIT, is_open=False, parts=_VIT_NEW, below=_below("layers?.#."), optional=(biases(_VIT_NEW)[:3],)),
    Family(
        name="timm", about="timm's ViT and the original DINOv2", parts=fused("qkv", "proj") | _TIMM_NORMS, needs=("proj.weight",),
        below=_below("attn.", r"(?:^|\.)"), optional=(("qkv.bias",), tuple(_TIMM_NORMS)), norm=NormRule(kind="layer", eps=1e-6),
    ),
    like(
        _CLIP, models=("clip_text_model",), causal=True, defaults={"num_attention_heads": 8},
        below=re.compile(r"(?<!vision_model\.)encoder\.layers\.\d+\.self_attn\.$"),
    ),
    _CLIP,
    _BART,
    like(_BART, below=_below("decoder.layers.#.self_attn."), causal=True),
    _WHISPER,
    like(_WHISPER, below=_below("decoder.layers.#.self_attn."), causal=True),
    _OPENAI,
    like(_OPENAI, below=_below("decoder.blocks.#.attn."), causal=True),
    *_T5_ROWS,
    *(like(row, name="umt5", models=("umt5",), about="UMT5", table=row.table and like(row.table, key=_UMT5)) for row in _T5_ROWS),
    Family(
        name="modernbert", models=("modernbert",), about="ModernBERT, with local and global layers", is_open=False, parts=_WQKV,
        below=_below("layers.#.|attn.", _STEM), ignored=("rotary_emb.",), optional=(biases(_WQKV),), equal=EVERYTHING,
        rotary=RotaryRule(theta="global_rope_theta", sliding_theta="local_rope_theta"),
        window=WindowRule(size="local_attention", period="global_attn_every_n_layers", offset=0, is_centred=True),
        flags={"attention_bias": "Wqkv.bias"}, defaults=dict(
            num_attention_heads=12, global_rope_theta=160000.0, local_rope_theta=10000.0, local_attention=128,
            global_attn_every_n_layers=3, attention_bias=False,
        ),
    ),
    _NOMIC,
    like(_NOMIC, parts=_UNBIASED.parts, below=_LLAMA.below, optional=(), flags={}),
    _GTE,
    like(_GTE, parts=fused("qkv_proj", "o_proj"), below=_below("encoder.layer.#.attention.")),
    _LLAMA,
    like(
        _UNBIASED, name="mistral", models=("mistral",), about="Mistral", window=WindowRule(),
        defaults=_class(32, 8, sliding_window=4096),
    ),
    like(
        _UNBIASED, name="qwen2", models=("qwen2",), about="Qwen2, Qwen2.5", window=_QWEN_WINDOW, defaults=_QWEN,
        parts=linears("q_proj k_proj v_proj o_proj", "query key value"),
    ),
    like(
        _LLAMA, name="qwen3", models=("qwen3",), about="Qwen3, with norms of query and key", parts=_NORMED, window=_QWEN_WINDOW,
        norm=NormRule(), defaults={**_QWEN, "head_dim": 128, "attention_bias": False},
    ),
    like(
        _LLAMA, name="gemma2", models=("gemma2",), about="Gemma 2, with its softcap", window=WindowRule(period=2),
        scale="query_pre_attn_scalar", softcap="attn_logit_softcapping", off=("use_bidirectional_attention",),
        defaults={**_GEMMA, "attn_logit_softcapping": 50.0},
    ),
    like(
        _LLAMA, name="gemma3", models=("gemma3_text",), about="Gemma 3, EmbeddingGemma; two bases of rotary positions",
        parts=_NORMED, rotary=RotaryRule(sliding_theta="rope_local_base_freq", scaled=(FULL,)),
        window=_PERIODIC, bidirectional="use_bidirectional_attention", norm=NormRule(plus_one=True),
        scale="query_pre_attn_scalar", off=("attn_logit_softcapping",),
        defaults={**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
    ),
    like(
        _LLAMA, name="olmo2", models=("olmo2",), about="OLMo 2, with norms over the whole width", parts=_NORMED,
        norm=NormRule(over="width"), defaults={**_LLAMA.defaults, "rms_norm_eps": 1e-5},
    ),
    like(
        _UNBIASED, name="phi3", models=("phi3",), about="Phi-3 of short contexts (no longrope)", window=WindowRule(),
        parts=fused("qkv_proj", "o_proj", "weight"), rotary=RotaryRule(partial="partial_rotary_factor", scalings=("default",)),
        defaults=_class(32, partial_rotary_factor=1.0, sliding_window=None),
    ),
    like(
        _LLAMA, name="cohere", models=("cohere",), parts=_NORMED, optional=(biases(_SELF_ATTN), tuple(_RMS_NORMS)),
        about="Cohere, whose pairs are interleaved; without `rope_theta` in its config it is refused",
        rotary=RotaryRule(layout="interleaved"), norm=NormRule(kind="layer", eps="layer_norm_eps", has_head_weights=True),
        flags={"attention_bias": "q_proj.bias", "use_qk_norm": "q_norm.weight"}, defaults=dict(
            num_attention_heads=64, num_key_value_heads=None, attention_bias=False, layer_norm_eps=1e-5, use_qk_norm=False,
        ),
    ),
    like(
        _LLAMA, name="cohere2", models=("cohere2",), about="Cohere 2; only its sliding layers rotate", window=_PERIODIC,
        rotary=RotaryRule(layout="interleaved", kinds=(SLIDING,)),
        defaults=_class(64, attention_bias=False, sliding_window=4096, sliding_window_pattern=4),
    ),
    like(
        _LLAMA, name="gpt-oss", models=("gpt_oss",), about="gpt-oss, with sinks", parts=_SELF_ATTN | {"sinks": ("sinks",)},
        window=WindowRule(period=2),
        defaults=_class(64, 8, 150000.0, head_dim=64, sliding_window=128, attention_bias=True, rope_parameters=_OSS_YARN),
    ),
    Family(
        name="gpt-neox", models=("gpt_neox",), about="GPT-NeoX, Pythia", is_open=False, parts=fused("query_key_value", "dense"),
        below=_below("layers.#.|attention.", _STEM), ignored=("bias.", "masked_bias.", "rotary_emb."),
        optional=(("query_key_value.bias", "dense.bias"),), equal=EVERYTHING, is_by_head=True, causal=True,
        rotary=RotaryRule(theta="rotary_emb_base", partial="rotary_pct"), flags={"attention_bias": "query_key_value.bias"},
        defaults={"num_attention_heads": 64, "rotary_emb_base": 10000.0, "rotary_pct": 0.25, "attention_bias": True},
    ),
    _GPT2,
    like(  # after gpt2: Linear under the same names
        _GPT2, name="nanogpt", models=(), about="nanoGPT, its `ckpt.pt` too", optional=(biases(_GPT),), transposed=False,
        stacks_columns=False,
    ),
    like(_GPT2, parts=_GPT_CROSS, below=_below("crossattention."), stacks_columns=False, causal=False),
    _KERNELS,
    like(
        _KERNELS, name="flax", about="Flax' `MultiHeadDotProductAttention`, of linen and nnx", parts=_FLAX | _FLAX_NORMS,
        needs=("out.kernel",), optional=(biases(_FLAX), tuple(_FLAX_NORMS)), norm=NormRule(kind="layer", eps=1e-6),
    ),
    Family(
        name="annotated", about="The Annotated Transformer", parts=_ANNOTATED, optional=(biases(_ANNOTATED),), equal=EVERYTHING
    ),
    Family(name="wq-wk-wv-fc", about="articles with these names", parts=_CAPITALS, optional=(biases(_CAPITALS),)),
    Family(name="d2l", about="Dive into Deep Learning", parts=_D2L, optional=(biases(_D2L),), equal=()),
    _NUMPY,
    # After numpy: these names without W_o.
    like(
        _NUMPY, name="single-head", about="the same without an output, with one head", parts=_BARE, needs=(), is_single_head=True
    ),
)
# fmt: on
FAMILY_NAMES = tuple(dict.fromkeys(family.name for family in FAMILIES))


def plain(model: str) -> str:
    """Return a `model_type` as it is compared: in lower case, without hyphens and underscores."""
    return re.sub("[-_]", "", model.lower())


def find_candidates(
    shapes: Mapping[str, tuple[int, ...]], name: str | None = None, models: Collection[str] = ()
) -> list[Candidate]:
    """Return every layer of the named family, or of any; if several rows fit one module, the first row of the table wins.

    A row that is not open needs one of the config's `models`, or its name from the caller if the config has none.
    """
    found: dict[str, Candidate] = {}
    for family in FAMILIES:
        is_known = family.is_open or (name and not models) or not {*map(plain, family.models)}.isdisjoint(models)
        if name not in {None, family.name} or not is_known:
            continue
        anchored = {key.removesuffix(anchor) for anchor in family.anchors for key in shapes if key.endswith(anchor)}
        for prefix in sorted(prefix for prefix in anchored if not prefix or prefix.endswith(".")):
            has_keys = shapes.keys() >= {prefix + key for key in family.needs}
            has_shape = not family.stacks_columns or has_stacked_columns(shapes[prefix + family.anchors[0]])
            if has_keys and has_shape and family.below.search(prefix):
                found.setdefault(prefix + family.scope, Candidate(family, prefix))
    return sorted(
        found.values(), key=lambda candidate: (candidate.number is not None, candidate.number, candidate.prefix)
    )
