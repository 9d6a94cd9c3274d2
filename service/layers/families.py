"""Checkpoint families: a table of the names, layouts and rules by which each family's models compute attention.

Invariants: No family has code of its own; a new family is a new row, in the words of `family.py`. Keys are written below the
layer's prefix. A weight is [out, in] unless the family is `transposed`. Several canonical names for one key share its rows in
their order. The importer refuses an unknown key inside the attention module, because a layer without that tensor would compute
something else. The numbers in `defaults` are those of the model's class in transformers 5.24, which a config may leave out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

from service.attention.spec import PROJECTIONS
from service.layers.family import (
    EVERYTHING,
    FULL,
    QKV_BIAS,
    QKV_WEIGHT,
    SCALINGS,
    SLIDING,
    Candidate,
    Family,
    NormRule,
    RotaryRule,
    TableRule,
    WindowRule,
    biases,
    fused,
    has_stacked_columns,
    linears,
    norms,
)

_MHA_COMMON = {
    "in_proj_bias": QKV_BIAS,
    "out_proj.weight": ("output.weight",),
    "out_proj.bias": ("output.bias",),
    "bias_k": ("bias_k",),
    "bias_v": ("bias_v",),
}
_MHA_OPTIONAL = (("in_proj_bias", "out_proj.bias"), ("bias_k", "bias_v"))
_MHA_SEPARATE = {f"{letter}_proj_weight": (name,) for letter, name in zip("qkv", QKV_WEIGHT, strict=True)}
_MHA = Family(
    name="torch-mha",
    about="`torch.nn.MultiheadAttention`, and torch's encoder and decoder layers (`--prefix …self_attn` or `…multihead_attn`)",
    parts={"in_proj_weight": QKV_WEIGHT, **_MHA_COMMON},
    optional=_MHA_OPTIONAL,
    equal=EVERYTHING,
    takes_zero_attn=True,
)
_BERT = Family(
    name="bert",
    models=("bert", "roberta", "xlm-roberta", "electra", "camembert"),
    about="BERT, MiniLM, RoBERTa, ELECTRA, XLM-R",
    parts=linears(*(f"attention.self.{name}" for name in PROJECTIONS[:3]), "attention.output.dense"),
    scope="attention.",
    ignored=("attention.output.LayerNorm.", "attention.self_attn_layer_norm."),
    causal="is_decoder",
)
_DISTILBERT = linears(*(f"attention.{name}_lin" for name in ("q", "k", "v", "out")))
_ANNOTATED = linears(*(f"linears.{index}" for index in range(4)))
_CAPITALS = linears("W_Q", "W_K", "W_V", "fc")
_D2L = linears("W_q", "W_k", "W_v", "W_o")
_C_PROJ = {f"c_proj.{kind}": (f"output.{kind}",) for kind in ("weight", "bias")}
_GPT = {"c_attn.weight": QKV_WEIGHT, "c_attn.bias": QKV_BIAS, **_C_PROJ}
_GPT_CROSS = {f"q_attn.{kind}": (f"query.{kind}",) for kind in ("weight", "bias")} | {
    f"c_attn.{kind}": (f"key.{kind}", f"value.{kind}") for kind in ("weight", "bias")
}
_BARE = {f"W_{letter}": (name,) for letter, name in zip("qkv", QKV_WEIGHT, strict=True)}
_GPT2 = Family(  # Conv1D, whose weight is [in, out]
    name="gpt2",
    models=("gpt2",),
    about="GPT-2; its two options of scale are read from `config.json`",
    parts=_GPT,
    below=re.compile(r"(?<!crossattention\.)$"),
    ignored=("bias.", "masked_bias."),  # buffers with the causal mask
    equal=EVERYTHING,
    transposed=True,
    stacks_columns=True,
    causal=True,
)
_VIT_NEW = linears(*(f"attention.{letter}_proj" for letter in "qkvo"))
_OUT_PROJ = linears("q_proj", "k_proj", "v_proj", "out_proj")
_TIMM = fused("qkv", "proj") | norms("q_norm", "k_norm", "weight", "bias")
_SIDES = r"(?:encoder\.layers\.\d+\.self_attn|decoder\.layers\.\d+\.encoder_attn)\.$"
_BART = Family(
    name="bart",
    models=("bart", "mbart"),
    about="BART, mBART: encoder, decoder and `encoder_attn`",
    is_open=False,
    parts=_OUT_PROJ,
    below=re.compile(_SIDES),
    equal=EVERYTHING,
    defaults={"encoder_attention_heads": 16, "decoder_attention_heads": 16},
)
_WHISPER = dataclasses.replace(
    _BART,
    name="whisper",
    models=("whisper",),
    about="Whisper, whose key has no bias; also by OpenAI's names",
    parts=linears("q_proj", "k_proj", "v_proj", "out_proj", biases=("query", "value", "output")),
    defaults={"encoder_attention_heads": 6, "decoder_attention_heads": 6},
)
_WHISPER_OPENAI = dataclasses.replace(
    _WHISPER,
    is_open=True,
    parts=linears("query", "key", "value", "out", biases=("query", "value", "output")),
    below=re.compile(r"(?:encoder\.blocks\.\d+\.attn|decoder\.blocks\.\d+\.cross_attn)\.$"),
)
_CLIP = Family(
    name="clip",
    models=("clip_vision_model",),
    about="CLIP: vision, and text, which is causal; also by the names of OpenAI and open_clip",
    is_open=False,
    parts=_OUT_PROJ,
    below=re.compile(r"(?<!text_model\.)encoder\.layers\.\d+\.self_attn\.$"),
    equal=EVERYTHING,
    defaults={"num_attention_heads": 12},
)
_T5 = Family(
    name="t5",
    models=("t5", "mt5"),
    about="T5, mT5: `SelfAttention` with the table of block 0, and `EncDecAttention`",
    is_open=False,
    parts=linears("q", "k", "v", "o", biases=()),
    below=re.compile(r"block\.(?P<n>\d+)\.layer\.1\.EncDecAttention\.$"),
    ignored=("relative_attention_bias.",),
    scale=1.0,
    defaults={"d_kv": 64, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
)
_T5_STACK = r"^(?P<stack>(?:.*\.)?%s\.)block\.(?P<n>\d+)\.layer\.0\.SelfAttention\.$"
_T5_TABLE = TableRule(
    key="{stack}block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    max_distance="relative_attention_max_distance",
)
_T5_ENCODER = dataclasses.replace(_T5, below=re.compile(_T5_STACK % "encoder"), table=_T5_TABLE)
_T5_DECODER = dataclasses.replace(
    _T5,
    below=re.compile(_T5_STACK % "decoder"),
    table=dataclasses.replace(_T5_TABLE, is_bidirectional=False),
    causal=True,
)
# What may stand in front of a decoder's layers. Any other word is another tower.
_STEM = (
    r"^(?:(?:module|model|base_model|transformer|language_model|text_model|gpt_neox|nomic_bert|gte|0|auto_model)\.)*"
)
_SELF_ATTN = linears("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = norms("q_norm", "k_norm", "weight")
_LLAMA = Family(
    name="llama",
    models=("llama",),
    about="Llama 2 and 3, SmolLM 2",
    is_open=False,
    parts=_SELF_ATTN,
    below=re.compile(_STEM + r"(?:layers\.\d+\.)?(?:self_attn\.)?$"),
    ignored=("rotary_emb.",),
    optional=(biases(_SELF_ATTN),),
    is_grouped=True,
    causal=True,
    rotary=RotaryRule(),
    flags={"attention_bias": "q_proj.bias"},
    defaults={"num_attention_heads": 32, "num_key_value_heads": None, "rope_theta": 10000.0, "attention_bias": False},
)
_GTE = dataclasses.replace(
    _LLAMA,
    name="gte",
    models=("gte",),
    about="GTE, by the names of transformers",
    optional=(),
    equal=EVERYTHING,
    is_grouped=False,
    causal=False,
    flags={},
    defaults={"num_attention_heads": 12, "rope_theta": 160000.0},
)
_GTE_FUSED = fused("qkv_proj", "o_proj")
_QWEN_WINDOW = WindowRule(size="sliding_window", switch="use_sliding_window", first="max_window_layers")
_QWEN = {
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rope_theta": 10000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
}
_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}
_COHERE = dataclasses.replace(
    _LLAMA,
    name="cohere",
    models=("cohere",),
    about="Cohere, whose pairs are interleaved; without `rope_theta` in its config it is refused",
    parts=_SELF_ATTN | _NORMS,
    optional=(biases(_SELF_ATTN), tuple(_NORMS)),
    rotary=RotaryRule(layout="interleaved"),
    norm=NormRule(kind="layer", eps="layer_norm_eps", has_head_weights=True),
    flags={"attention_bias": "q_proj.bias", "use_qk_norm": "q_norm.weight"},
    defaults={
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "layer_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
    },
)
_WQKV = fused("Wqkv", "Wo")
_NOMIC = fused("Wqkv", "out_proj")
_NOMIC_BERT = Family(
    name="nomic-bert",
    models=("nomic_bert",),
    about="NomicBERT, by the names of its remote code and of transformers",
    is_open=False,
    parts=_NOMIC,
    below=re.compile(r"encoder\.layers\.\d+\.attn\.$"),
    ignored=("rotary_emb.",),
    optional=(("Wqkv.bias", "out_proj.bias"),),
    equal=EVERYTHING,
    causal="causal",
    rotary=RotaryRule(theta="rotary_emb_base", partial="rotary_emb_fraction"),
    flags={"qkv_proj_bias": "Wqkv.bias"},
    off=("num_heads_kv", "rotary_emb_scale_base", "rotary_head_dim", "rotary_emb_interleaved", "rotary_scaling_factor"),
    defaults={"num_attention_heads": 12, "rotary_emb_base": 1000.0, "rotary_emb_fraction": 1.0},
)
_KERAS = {
    **{f"{name}.kernel": (f"{name}.weight",) for name in PROJECTIONS[:3]},
    **{f"{name}.bias": (f"{name}.bias",) for name in PROJECTIONS[:3]},
}
_KERAS_OUT = {
    f"attention_output.{theirs}": (f"output.{ours}",) for theirs, ours in (("kernel", "weight"), ("bias", "bias"))
}
_FLAX_OUT = {f"out.{theirs}": (f"output.{ours}",) for theirs, ours in (("kernel", "weight"), ("bias", "bias"))}
_FLAX_NORMS = norms("query_ln", "key_ln", "scale")
_KERNELS = Family(
    name="keras",
    about="Keras' `MultiHeadAttention` and `GroupedQueryAttention`, in an `.npz` or `.safetensors` of their paths",
    parts=_KERAS | _KERAS_OUT,
    needs=("attention_output.kernel",),
    optional=(biases(_KERAS | _KERAS_OUT),),
    equal=(),
    is_grouped=True,
    has_kernels=True,
)

FAMILIES = (
    # OpenAI's CLIP before the module that it is made of.
    dataclasses.replace(
        _MHA, name="clip", models=(), about="", below=re.compile(r"visual\.transformer\.resblocks\.\d+\.attn\.$")
    ),
    dataclasses.replace(
        _MHA,
        name="clip",
        models=(),
        about="",
        below=re.compile(r"^(?:text\.)?transformer\.resblocks\.\d+\.attn\.$"),
        causal=True,
    ),
    _MHA,
    dataclasses.replace(  # kdim or vdim given
        _MHA, parts={**_MHA_SEPARATE, **_MHA_COMMON}, equal=("out_width", "query_rows", "value_rows")
    ),
    dataclasses.replace(  # before bert, whose names it has
        _BERT,
        name="esm",
        models=("esm",),
        about="ESM-2",
        is_open=False,
        ignored=("attention.LayerNorm.", "attention.self.rotary_embeddings."),
        rotary=RotaryRule(scalings=("default",), switch="position_embedding_type"),
        defaults={"num_attention_heads": 12, "rope_theta": 10000.0, "position_embedding_type": "absolute"},
    ),
    _BERT,
    dataclasses.replace(
        _BERT,
        parts=linears(*(f"crossattention.self.{name}" for name in PROJECTIONS[:3]), "crossattention.output.dense"),
        scope="crossattention.",
        ignored=("crossattention.output.LayerNorm.",),
        causal=False,
    ),
    Family(name="distilbert", models=("distilbert",), about="DistilBERT", parts=_DISTILBERT, scope="attention."),
    Family(
        name="albert",
        models=("albert",),
        about="ALBERT; one layer serves every depth",
        parts=linears(*(f"attention.{name}" for name in (*PROJECTIONS[:3], "dense"))),
        below=re.compile(r"(^|\.)albert_layers\.\d+\.$"),
        scope="attention.",
        ignored=("attention.LayerNorm.",),
        is_shared_by_depths=True,
    ),
    Family(
        name="mpnet",
        models=("mpnet",),
        about="MPNet, with the table that its layers share",
        parts=linears("q", "k", "v", "o"),
        below=re.compile(r"^(?P<stack>(?:.*\.)?)layer\.(?P<n>\d+)\.attention\.attn\.$"),
        table=TableRule(key="{stack}relative_attention_bias.weight", max_distance=128, buckets=32),
    ),
    Family(
        name="vit",
        models=("vit", "deit", "dinov2"),
        about="ViT, DeiT, DINOv2, by the names of transformers before 5 and since",
        parts=linears(*(f"attention.attention.{name}" for name in PROJECTIONS[:3]), "attention.output.dense"),
        scope="attention.",
        optional=(tuple(f"attention.attention.{name}.bias" for name in PROJECTIONS[:3]),),
    ),
    Family(
        name="vit",
        models=("vit", "deit", "dinov2"),
        is_open=False,
        parts=_VIT_NEW,
        below=re.compile(r"layers?\.\d+\.$"),
        scope="attention.",
        optional=(biases(_VIT_NEW)[:3],),
    ),
    Family(
        name="timm",
        about="timm's ViT; `--heads` by the name of its architecture",
        parts=_TIMM,
        needs=("proj.weight",),
        below=re.compile(r"(?:^|\.)(?:attn\.)?$"),
        optional=(("qkv.bias",), tuple(norms("q_norm", "k_norm", "weight", "bias"))),
        norm=NormRule(kind="layer", eps=1e-6),
    ),
    dataclasses.replace(
        _CLIP,
        models=("clip_text_model",),
        below=re.compile(r"(?<!vision_model\.)encoder\.layers\.\d+\.self_attn\.$"),
        causal=True,
        defaults={"num_attention_heads": 8},
    ),
    _CLIP,
    _BART,
    dataclasses.replace(_BART, below=re.compile(r"decoder\.layers\.\d+\.self_attn\.$"), causal=True),
    _WHISPER,
    dataclasses.replace(_WHISPER, below=re.compile(r"decoder\.layers\.\d+\.self_attn\.$"), causal=True),
    _WHISPER_OPENAI,
    dataclasses.replace(_WHISPER_OPENAI, below=re.compile(r"decoder\.blocks\.\d+\.attn\.$"), causal=True),
    _T5_ENCODER,
    _T5_DECODER,
    _T5,
    *(
        dataclasses.replace(
            row,
            name="umt5",
            models=("umt5",),
            about="UMT5; every layer has its own table",
            table=row.table and dataclasses.replace(row.table, key="{prefix}relative_attention_bias.weight"),
        )
        for row in (_T5_ENCODER, _T5_DECODER, _T5)
    ),
    Family(
        name="modernbert",
        models=("modernbert",),
        about="ModernBERT, with local and global layers",
        is_open=False,
        parts=_WQKV,
        below=re.compile(_STEM + r"(?:layers\.\d+\.)?(?:attn\.)?$"),
        ignored=("rotary_emb.",),
        optional=(biases(_WQKV),),
        equal=EVERYTHING,
        rotary=RotaryRule(theta="global_rope_theta", sliding_theta="local_rope_theta", scalings=SCALINGS[:3]),
        window=WindowRule(size="local_attention", period="global_attn_every_n_layers", offset=0, is_centred=True),
        flags={"attention_bias": "Wqkv.bias"},
        defaults={
            "num_attention_heads": 12,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "attention_bias": False,
        },
    ),
    _NOMIC_BERT,
    dataclasses.replace(
        _NOMIC_BERT,
        parts=linears("q_proj", "k_proj", "v_proj", "o_proj", biases=()),
        below=_LLAMA.below,
        optional=(),
        flags={},
    ),
    _GTE,
    dataclasses.replace(
        _GTE,
        parts=_GTE_FUSED,
        below=re.compile(r"encoder\.layer\.\d+\.attention\.$"),
    ),
    _LLAMA,
    dataclasses.replace(
        _LLAMA,
        name="mistral",
        models=("mistral",),
        about="Mistral",
        parts=linears("q_proj", "k_proj", "v_proj", "o_proj", biases=()),
        optional=(),
        window=WindowRule(size="sliding_window"),
        flags={},
        defaults={"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096},
    ),
    dataclasses.replace(
        _LLAMA,
        name="qwen2",
        models=("qwen2",),
        about="Qwen2, Qwen2.5",
        parts=linears("q_proj", "k_proj", "v_proj", "o_proj", biases=PROJECTIONS[:3]),
        optional=(),
        window=_QWEN_WINDOW,
        flags={},
        defaults=_QWEN,
    ),
    dataclasses.replace(
        _LLAMA,
        name="qwen3",
        models=("qwen3",),
        about="Qwen3, with norms of query and key",
        parts=_SELF_ATTN | _NORMS,
        window=_QWEN_WINDOW,
        norm=NormRule(kind="rms"),
        defaults=_QWEN | {"head_dim": 128, "attention_bias": False},
    ),
    dataclasses.replace(
        _LLAMA,
        name="gemma2",
        models=("gemma2",),
        about="Gemma 2, with its softcap",
        window=WindowRule(size="sliding_window", period=2),
        scale="query_pre_attn_scalar",
        softcap="attn_logit_softcapping",
        off=("use_bidirectional_attention",),
        defaults=_GEMMA | {"attn_logit_softcapping": 50.0},
    ),
    dataclasses.replace(
        _LLAMA,
        name="gemma3",
        models=("gemma3_text",),
        about="Gemma 3, EmbeddingGemma; two bases of rotary positions",
        parts=_SELF_ATTN | _NORMS,
        rotary=RotaryRule(sliding_theta="rope_local_base_freq", scalings=SCALINGS[:3], scaled=(FULL,)),
        window=WindowRule(size="sliding_window", period="sliding_window_pattern"),
        bidirectional="use_bidirectional_attention",
        norm=NormRule(kind="rms", plus_one=True),
        scale="query_pre_attn_scalar",
        off=("attn_logit_softcapping",),
        defaults=_GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
    ),
    dataclasses.replace(
        _LLAMA,
        name="olmo2",
        models=("olmo2",),
        about="OLMo 2, with norms over the whole width",
        parts=_SELF_ATTN | _NORMS,
        norm=NormRule(kind="rms", over="width"),
        defaults=_LLAMA.defaults | {"rms_norm_eps": 1e-5},
    ),
    dataclasses.replace(
        _LLAMA,
        name="phi3",
        models=("phi3",),
        about="Phi-3, Phi-4-mini",
        parts={"qkv_proj.weight": QKV_WEIGHT, "o_proj.weight": ("output.weight",)},
        optional=(),
        window=WindowRule(size="sliding_window"),
        rotary=RotaryRule(partial="partial_rotary_factor", scalings=("default",)),
        flags={},
        defaults={
            "num_attention_heads": 32,
            "num_key_value_heads": None,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
    ),
    _COHERE,
    dataclasses.replace(
        _COHERE,
        name="cohere2",
        models=("cohere2",),
        about="Cohere 2; only its sliding layers rotate",
        parts=_SELF_ATTN,
        optional=(biases(_SELF_ATTN),),
        rotary=RotaryRule(layout="interleaved", kinds=(SLIDING,)),
        norm=None,
        window=WindowRule(size="sliding_window", period="sliding_window_pattern"),
        flags={"attention_bias": "q_proj.bias"},
        defaults=_COHERE.defaults | {"rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    dataclasses.replace(
        _LLAMA,
        name="gpt-oss",
        models=("gpt_oss",),
        about="gpt-oss, with sinks",
        parts=_SELF_ATTN | {"sinks": ("sinks",)},
        window=WindowRule(size="sliding_window", period=2),
        defaults={
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "attention_bias": True,
        },
    ),
    Family(
        name="gpt-neox",
        models=("gpt_neox",),
        about="GPT-NeoX, Pythia",
        is_open=False,
        parts=fused("query_key_value", "dense"),
        below=re.compile(_STEM + r"(?:layers\.\d+\.)?(?:attention\.)?$"),
        ignored=("bias.", "masked_bias.", "rotary_emb."),
        optional=(("query_key_value.bias", "dense.bias"),),
        equal=EVERYTHING,
        is_by_head=True,
        causal=True,
        rotary=RotaryRule(theta="rotary_emb_base", partial="rotary_pct"),
        flags={"attention_bias": "query_key_value.bias"},
        defaults={
            "num_attention_heads": 64,
            "rotary_emb_base": 10000.0,
            "rotary_pct": 0.25,
            "attention_bias": True,
        },
    ),
    _GPT2,
    # After gpt2: Linear under the same names.
    dataclasses.replace(
        _GPT2,
        name="nanogpt",
        models=(),
        about="nanoGPT, its `ckpt.pt` too",
        optional=(biases(_GPT),),
        transposed=False,
        stacks_columns=False,
    ),
    dataclasses.replace(
        _GPT2,
        parts=_GPT_CROSS | _C_PROJ,
        below=re.compile(r"crossattention\.$"),
        stacks_columns=False,
        causal=False,
    ),
    _KERNELS,
    dataclasses.replace(
        _KERNELS,
        name="flax",
        about="Flax' `MultiHeadDotProductAttention`, of linen and nnx",
        parts=_KERAS | _FLAX_OUT | _FLAX_NORMS,
        needs=("out.kernel",),
        optional=(biases(_KERAS | _FLAX_OUT), tuple(_FLAX_NORMS)),
        norm=NormRule(kind="layer", eps=1e-6),
    ),
    Family(
        name="annotated",
        about="The Annotated Transformer",
        parts=_ANNOTATED,
        optional=(biases(_ANNOTATED),),
        equal=EVERYTHING,
    ),
    Family(name="wq-wk-wv-fc", about="articles with these names", parts=_CAPITALS, optional=(biases(_CAPITALS),)),
    Family(name="d2l", about="Dive into Deep Learning", parts=_D2L, optional=(biases(_D2L),), equal=()),
    Family(
        name="numpy",
        about="NumPy tutorials, whose weights are `[in, out]`",
        parts={**_BARE, "W_o": ("output.weight",)},
        needs=("W_o",),
        equal=EVERYTHING,
        transposed=True,
    ),
    Family(  # After numpy: these names without W_o.
        name="single-head",
        about="the same without an output, with one head",
        parts=_BARE,
        equal=EVERYTHING,
        transposed=True,
        is_single_head=True,
    ),
)
FAMILY_NAMES = tuple(dict.fromkeys(family.name for family in FAMILIES))


def plain(model: str) -> str:
    """Return a `model_type` as it is compared: in lower case, without hyphens and underscores."""
    return re.sub("[-_]", "", model.lower())


def find_candidates(
    shapes: Mapping[str, tuple[int, ...]], name: str | None = None, models: Collection[str] = ()
) -> list[Candidate]:
    """Return every layer of the named family, or of any; if several rows fit one prefix, the first row of the table wins.

    A row that is not open needs one of the config's `models`, or its name from the caller if the config has none.
    """
    found: dict[str, Candidate] = {}
    for family in FAMILIES:
        is_known = (
            family.is_open
            or (not models and name is not None)
            or any(plain(model) in models for model in family.models)
        )
        if name not in {None, family.name} or not is_known:
            continue
        anchored = {key.removesuffix(anchor) for anchor in family.anchors for key in shapes if key.endswith(anchor)}
        for prefix in sorted(prefix for prefix in anchored if not prefix or prefix.endswith(".")):
            has_keys = shapes.keys() >= {prefix + key for key in family.needs}
            has_shape = not family.stacks_columns or has_stacked_columns(shapes[prefix + family.anchors[0]])
            if has_keys and has_shape and family.below.search(prefix):
                found.setdefault(prefix, Candidate(family, prefix))
    return sorted(
        found.values(), key=lambda candidate: (candidate.number is not None, candidate.number, candidate.prefix)
    )
