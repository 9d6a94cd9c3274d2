"""Unsupported models: a table of models whose attention a served layer does not compute, and how each is recognised.

Invariants: No row has code of its own; a model that becomes supported leaves the table. A config counts wherever its key stands,
also in the config of another tower, because nothing says which tower a layer is of. An option that is off (null, false, 0, a
negative number, empty, "absolute" or "none") does not count. Names of tensors count with a config and without.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from service.errors import LayerError
from service.layers.families import FAMILIES, plain
from service.layers.family import Family
from service.layers.options import sections
from service.layers.wording import MAX_COPIED, MAX_NAME, bounded, listed, quoted

RELATIVE = "it uses relative positions, which a served layer does not support"
ROTARY = "its rotary positions are of no family that the importer knows"
TRANSFORMED = "it changes queries or keys before the product, or scores after it, which a served layer does not support"
LATENT = "it computes keys and values of a latent vector (MLA), which a served layer does not support"
GATED = "it gates the output of its heads, which a served layer does not support"
CHUNKED = "it attends inside of chunks, which a served layer does not support"
APPROXIMATE = "it computes sparse or approximate attention, which a served layer does not support"
ALIBI = "it uses ALiBi; import its projections with --map and send `bias` with each request"
UNTOLD = "its code alone says which keys a row sees"
BY_HEAD = "its fused projection is ordered by heads, which the importer does not read"
UNSCALED = "its scores are not scaled by 1/sqrt(head width)"
OTHER_NAMES = "its layers have parts beside projections, which are read only under the names of the model's own code"
IGNORE = "--ignore KEY, once for each, leaves out what does not change attention"
# Values of an option that is off, beside false ones.
OFF = re.compile("-.*|0|none|null|false|no|off|absolute|learned|sinusoidal", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """One reason and what shows it; a regular expression that is empty shows nothing."""

    why: str
    models: str = (
        ""  # patterns of a model_type, or of timm's architecture, in lower case, without hyphens and underscores
    )
    options: str = ""  # in the name of an option that is on, or in the text of one that says how positions enter
    names: str = ""  # in the name of a tensor that the layer uses, from its beginning or a dot on
    traces: str = ""  # in a name that stands below the layer's module or a parent of it, from its beginning or a dot on


# fmt: off
TABLE = (
    Unsupported(
        why=LATENT, models="deepseek* kimi* longcat* minicpm3", options="kv_lora_rank", names=r"(q_a|kv_a|kv_b)_proj"
    ),
    Unsupported(why=GATED, models="qwen3next* qwen35*", options="^attn_output_gate$"),
    Unsupported(
        why=CHUNKED,
        models="llama4* sam2hiera* hiera* twins* nest* davit*",
        options="attention_chunk_size",
        names="(initial|final)_char_encoder",  # CANINE
    ),
    Unsupported(why=UNTOLD, models="git blip bliptextmodel tipsv2*"),
    Unsupported(
        why=TRANSFORMED, models="roformer", options="clip_qkv|qk_?(norm|ln|layer_?norm)|att.*soft_?cap|softermax",
        names=r"(roformer|esm)\.",
    ),
    Unsupported(
        why=f"{UNSCALED}, and {RELATIVE}", models="longt5 switchtransformers pix2struct* pop2piano udop",
        names=r"(Self|EncDec|LocalSelf|TransientGlobalSelf)Attention\.[qkvo]\.",
    ),
    Unsupported(
        why="it adds scores of relative positions, which a served layer does not support", models="deberta*",
        options="^pos_att_type$", names=r"deberta\.|attention\.self\.(query_proj|key_proj|value_proj|in_proj)\.",
        traces=r"rel_embeddings\.",
    ),
    Unsupported(why=BY_HEAD, models="bloom* gptbigcode refinedweb*", names=r"h\.\d+\.self_attention\.query_key_value\."),
    Unsupported(
        why=ALIBI, models="mpt jais", options="alibi", names=r"blocks\.\d+\.attn\.Wqkv\.", traces="(?i:[^.]*alibi)"
    ),
    Unsupported(
        why=APPROXIMATE, models="bigbird* longformer led mra nystromformer reformer yoso",
        names=r"(longformer|nystromformer|yoso)\.",
    ),
    Unsupported(why=UNSCALED, models="gptneo", names=r"attn\.attention\.[qkv]_proj\."),
    Unsupported(
        why=ROTARY,
        models=(
            "baichuan* chatglm* codegen* ernie45* eurobert exaone* falcon* gemma gemma3n* gemma4* glm* gptj gptneoxjapanese "
            "granite* hunyuan* internlm* minicpm* ministral* mixtral* mllama* modernbertdecoder neobert nemotron* new olmo olmoe "
            "olmo3* olmohybrid persimmon phi phimoe* phi4* pixtral qwen qwen2moe* qwen2vl* qwen25* qwen2audio* qwen3moe* "
            "qwen3vl* qwen3omni* smollm3 stablelm* starcoder2 t5gemma* yi jais2* "
            "*rope* *dinov3* eva02* *pecore* *pelang* *pespatial*"  # architectures of timm
        ),
        options="(?<![du])rope(?!r)|rotary",  # but not in dropedge, europe or property
        names=(
            r"layers\.\d+\.self_attn\.(o_proj|qkv_proj|dense|query_key_value)\."  # Llama and its many kin; Phi
            r"|W_pack\.|Wqkv\.|blk\.\d+\.attn_"  # Baichuan; ModernBERT, NomicBERT; GGUF
            r"|layers\.\d+\.attention\.w(q|k|v|qkv)\."  # Meta's Llama, InternLM
            r"|gpt_neox\.|attention\.query_key_value\.|layers\.\d+\.self_attention\.query_key_value\."  # and ChatGLM
            r"|encoder\.layer\.\d+\.attention\.qkv_proj\.|h\.\d+\.attn\.(q|k|v|qkv)_proj\."  # GTE; GPT-J, CodeGen
        ),
        traces="(?i:[^.]*((?<![du])rope(?!r)|rotary|inv_freq))",
    ),
    Unsupported(
        why=RELATIVE, models="bros donutswin funnel layoutlmv2 layoutlmv3 nezha speecht5 swin* transfoxl wavlm xlnet",
        options="relative_?(att|pos|key|bias)|^relative$|rel_?(pos|att)|position_buckets",
        names=r"attention\.attn\.[qkvo]\.|(bros|nezha|layoutlmv[23]|rel_attn)\.",
        traces=r"[^.]*(relative_?(att|pos|key|bias)|distance_embedding)|rel_?(pos|att|emb|bias)|emb_rel_",
    ),
)
# fmt: on
# Models whose layers compute more than projections: under other names the importer would leave that out.
NEEDS_NAMES = {plain(model) for family in FAMILIES if not family.is_plain for model in family.models}


def check_config(config: Mapping[str, object], family: Family | None = None) -> None:
    """Raise LayerError if the config names a model, or has an option, that a served layer does not support.

    With a `family`, its models and the options that it reads are left out.
    """
    known, own = (family.options, family.models) if family else (frozenset(), ())
    for path, options in sections(config, known):
        key = "architecture" if "model_type" not in options and "architecture" in options else "model_type"
        model = str(options.get(key))
        named = f"{quoted(f'{path}{key}') if path else key} {bounded(ascii(model)[1:-1], MAX_NAME)}"
        for row in TABLE:
            is_dense = row.why == APPROXIMATE and options.get("attention_type") == "original_full"  # a Big Bird
            if any(fnmatchcase(plain(model), pattern) for pattern in row.models.split()) and not is_dense:
                raise LayerError(f"{named}: {row.why}")
            unread = [(str(key), value) for key, value in options.items() if key not in known]
            if found := sorted(path + key for key, value in unread if _has_option(row, key, value)):
                raise LayerError(f"config.json has {listed(found)}: {row.why}")
        if plain(model) in NEEDS_NAMES and plain(model) not in map(plain, own):
            raise LayerError(f"{named}: {OTHER_NAMES}")
        if _is_on(options.get("position_embedding_type")) and "position_embedding_type" not in known:
            raise LayerError(f"{quoted(f'{path}position_embedding_type')} in config.json is not absolute: {RELATIVE}")
    if family and (on := [name for name in family.off if _is_on(config.get(name))]):
        raise LayerError(f"config.json has {listed(on)}; with it {family.name} computes what a served layer does not")


def check_names(
    family: Family, module: str, used: Collection[str], keys: Collection[str], *, ignored: Collection[str]
) -> None:
    """Raise LayerError if a name that the layer uses, or one below its module or a parent, is of an unsupported model.

    Keys in `ignored` do not count, except rotary ones; of a family with positions of its own, only other traces count.
    """
    for row in TABLE:
        if row.why == ROTARY and family.rotary:
            continue
        if family.is_plain and (found := sorted(key for key in used if _mark(row.names, key))):
            raise LayerError(f"{quoted(found[0])} is a name of an unsupported model: {row.why}")
        dropped, remedy = ((), "") if row.why == ROTARY else (ignored, f"; {IGNORE}")
        parents = {
            key: key[: mark.start()]
            for key in keys
            if (mark := _mark(row.traces, key)) and key not in dropped and key not in used
        }
        near = [key for key, parent in parents.items() if module.startswith(parent) or parent.startswith(module)]
        if near:
            raise LayerError(f"{listed(near, MAX_COPIED)}: {row.why}{remedy}")


def reason_of_names(keys: Collection[str]) -> str | None:
    """Return why a model with these names is not supported, or None if they show no reason."""
    return next((row.why for row in TABLE for key in keys if _mark(row.names, key) or _mark(row.traces, key)), None)


def _has_option(row: Unsupported, key: str, value: object) -> bool:
    """Return whether an option is on and its name, or the text of one as `position_embedding_type`, is of the row."""
    if not row.options or not _is_on(value):
        return False
    text = f"{key}\n{value}" if isinstance(value, str) and re.search("pos|att|emb|^pe", key) else key
    return re.search(row.options, text, re.IGNORECASE | re.MULTILINE) is not None


def _is_on(value: object) -> bool:
    return bool(value) and not (isinstance(value, str | int | float) and OFF.fullmatch(str(value)))


def _mark(pattern: str, key: str) -> re.Match[str] | None:
    """Return where the pattern first matches the key from its beginning or a dot on."""
    return re.search(rf"(?<![^.])({pattern})", key) if pattern else None
