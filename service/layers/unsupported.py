"""Unsupported models: a table of models whose attention a served layer does not compute, and how each is recognised.

Invariants: No row has code of its own; a model that becomes supported leaves the table. A config counts wherever its key stands,
also in the config of another tower, because nothing says which tower a layer is of. An option that is off (null, false, 0, a
negative number, empty, "absolute" or "none") does not count. Names of tensors count with a config and without.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping

from service.errors import LayerError
from service.layers.wording import MAX_COPIED, MAX_NAME, bounded, listed, quoted

RELATIVE = "it uses relative positions, which a served layer does not support"
ROTARY = "rotary layers are not served yet"
TRANSFORMED = "it changes queries or keys between projection and product, which a served layer does not support"
APPROXIMATE = "it computes sparse or approximate attention, which a served layer does not support"
ALIBI = "it uses ALiBi, biases by distance, which a served layer does not have"
BY_HEAD = "its fused projection is ordered by heads, which the importer does not read"
UNSCALED = "its scores are not scaled by 1/sqrt(head width); give --scale 1"
UNSCALED_RELATIVE = f"its scores are not scaled by 1/sqrt(head width), and {RELATIVE}"
IGNORE = "--ignore KEY, once for each, leaves out what does not change attention"
OFF = {
    "",
    "absolute",
    "learned",
    "learnable",
    "sinusoidal",
    "sine",
    "sincos",
    "none",
    "nope",
    "null",
    "no",
    "off",
    "false",
}
# Options whose names are those of classes, which may be any words.
LABELS = {"label2id", "id2label"}
DENSE = "original_full"  # the attention_type of a Big Bird that attends to everything
# Options whose text says how positions enter attention, as `position_embedding_type`.
_SAYING = re.compile("pos|att|emb|^pe_|^pe$", re.IGNORECASE)
_NUMBER = re.compile(r"\.\d+\.")
_CLASS = re.compile(r"(\w+?)(?:LMHead|Encoder|Decoder|PreTrained|Double|With|For|Model|$)")


def _words(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives), re.IGNORECASE | re.ASCII)


def _types(text: str) -> re.Pattern[str]:
    """Return the pattern of whole model types without hyphens and underscores; a word may end in `*` for any ending."""
    return _words(*text.replace("*", "[a-z0-9.]*").split())


def _keys(*alternatives: str) -> re.Pattern[str]:
    """Return the pattern of names in a list with one name a line, sorted; each begins after a dot or at the beginning."""
    return re.compile("|".join(rf"(?:^|\.){key}" for key in alternatives), re.MULTILINE)


NEVER = re.compile("(?!)")
_ROPE = "(?<!eu)(?<!d)rope(?!r)"  # but not in europe, dropedge or property


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    why: str
    models: re.Pattern[str] = NEVER  # a model_type
    options: re.Pattern[str] = NEVER  # in the name of an option that is on, or in the text of one that says how
    names: re.Pattern[str] = NEVER  # in the names of the layer's tensors
    traces: re.Pattern[str] = NEVER  # in a part of a name that stands below the layer's module or a parent of it
    is_cured_by_scale: bool = False
    can_be_ignored: bool = True  # --ignore drops a trace


TABLE = (
    Unsupported(
        why=TRANSFORMED,
        models=_types("roformer esm"),
        options=_words("clip_qkv", "qk_?(?:norm|ln|layer_?norm)"),
        names=_keys(r"(?:roformer|esm)\."),
    ),
    Unsupported(
        why="it caps its scores or replaces the softmax, which a served layer does not do",
        options=_words("att.*soft_?cap", "softermax"),
    ),
    Unsupported(
        why=UNSCALED_RELATIVE,
        models=_types("t5 mt5 umt5 byt5 longt5 switchtransformers pix2struct* pop2piano udop"),
        names=_keys(r"(?:Self|EncDec|LocalSelf|TransientGlobalSelf)Attention\.[qkvo]\."),
    ),
    Unsupported(
        why="it adds scores of relative positions, which a served layer does not support",
        models=_types("deberta*"),
        options=_words("^pos_att_type$"),
        names=_keys(r"deberta\.", r"attention\.self\.(?:query_proj|key_proj|value_proj|in_proj)\."),
        traces=_words("^rel_embeddings$"),
    ),
    Unsupported(
        why=f"{BY_HEAD}, and its positions are ALiBi or rotary",
        models=_types("bloom* refinedweb*"),
        names=_keys(r"h\.\d+\.self_attention\.query_key_value\."),
    ),
    Unsupported(why=BY_HEAD, models=_types("gptbigcode")),
    Unsupported(
        why=ALIBI,
        models=_types("mpt jais*"),
        options=_words("alibi"),
        names=_keys(r"blocks\.\d+\.attn\.Wqkv\."),
        traces=_words("alibi"),
    ),
    Unsupported(
        why=APPROXIMATE,
        models=_types("bigbird* longformer led mra nystromformer reformer yoso"),
        names=_keys(r"(?:longformer|nystromformer|yoso)\."),
    ),
    Unsupported(
        why=UNSCALED, models=_types("gptneo"), names=_keys(r"attn\.attention\.[qkv]_proj\."), is_cured_by_scale=True
    ),
    Unsupported(
        why=ROTARY,
        models=_types(
            "apertus* aquila* arcee* baichuan* bamba bitnet chatglm* codegen* cogvlm* cohere* csm cwm dbrx decilm deepseek* dia "
            "diffllama dinov3* doge* dots1 emu3* ernie45* eurobert exaone* falcon* flexolmo fuyu gemma* glm* gptj gptneox* "
            "gptoss granite* gte helium* hunyuan* idefics internlm* jetmoe kimi* lfm2* lightglue llama* longcat* mimi mimo* "
            "minicpm* minimax* ministral* mistral* mixtral* mlcd* mllama* modernbert* moonshine* moshi* nanochat nemotron* "
            "neobert new nomicbert* olmo* openelm orion persimmon phi* pixtral qwen* recurrentgemma seedoss skywork* smollm3 "
            "solar stablelm* starcoder2 t5gemma* telechat* vaultgemma vjepa2* voxtral* xverse yi zamba2"
        ),
        options=_words(_ROPE, "rotary"),
        names=_keys(
            r"layers\.\d+\.self_attn\.(?:o_proj|qkv_proj|dense|query_key_value)\.",  # Llama and its many kin; Phi
            r"W_pack\.",  # Baichuan
            r"layers\.\d+\.attn\.Wqkv\.",  # ModernBERT, NomicBERT
            r"attn\.Wo\.\w+\n(?:.*\n)?(?:.*\.)?attn\.Wqkv\.",
            r"layers\.\d+\.attention\.w(?:q|k|v|qkv)\.",  # Meta's Llama, InternLM
            r"(?:gpt_neox|attention\.query_key_value|layers\.\d+\.self_attention\.query_key_value)\.",  # and ChatGLM
            r"encoder\.layer\.\d+\.attention\.qkv_proj\.",  # GTE
            r"h\.\d+\.attn\.(?:q|k|v|qkv)_proj\.",  # GPT-J, CodeGen
            r"kv_a_proj_with_mqa\.",  # DeepSeek
            r"blk\.\d+\.attn_",  # GGUF
        ),
        traces=_words(_ROPE, "rotary", "inv_freq"),
        can_be_ignored=False,
    ),
    Unsupported(
        why=RELATIVE,
        models=_types(
            "bros clapaudio* cpmant donutswin fastspeech2* funnel layoutlmv2 layoutlmv3 maskformerswin mpnet nezha prophetnet "
            "sam samhq* samvision* speecht5 swin* transfoxl vits wavlm xlnet xlmprophetnet"
        ),
        options=_words("relative_?(?:att|pos|key|bias)", "^relative$", "rel_?(?:pos|att)", "position_buckets"),
        names=_keys(r"attention\.attn\.[qkvo]\.", r"(?:bros|nezha|mpnet|layoutlmv[23]|rel_attn)\."),
        traces=_words(
            "relative_?(?:att|pos|key|bias)", "^rel_?(?:pos|att|emb|bias)", "^emb_rel_", "distance_embedding"
        ),
    ),
)


def check_config(config: Mapping[str, object], *, has_scale: bool) -> None:
    """Raise LayerError if the config names a model, or has an option, that a served layer does not support."""
    for path, options in _sections(config):
        model = _model_type(options)
        plain = model.replace("-", "").replace("_", "")
        for row in TABLE:
            is_dense = row.why == APPROXIMATE and options.get("attention_type") == DENSE
            if row.models.fullmatch(plain) and not is_dense and not (row.is_cured_by_scale and has_scale):
                named = quoted(f"{path}model_type") if path else "model_type"
                raise LayerError(f"{named} {bounded(model, MAX_NAME)}: {row.why}")
            if found := sorted(path + str(key) for key, value in options.items() if _has_option(row, str(key), value)):
                raise LayerError(f"config.json has {listed(found)}: {row.why}")
        if _is_on(options.get("position_embedding_type")):
            raise LayerError(f"{quoted(f'{path}position_embedding_type')} in config.json is not absolute: {RELATIVE}")


def check_names(
    module: str, used: Collection[str], keys: Collection[str], *, ignored: Collection[str], has_scale: bool
) -> None:
    """Raise LayerError if a name that the layer uses, or one below its module or a parent, is of an unsupported model."""
    names, parts = sorted(used), _parts(keys)
    for row in TABLE:
        if (found := row.names.search("\n".join(names))) and not (row.is_cured_by_scale and has_scale):
            name = names[found.string[: found.start()].count("\n")]
            raise LayerError(f"{quoted(name)} is a name of an unsupported model: {row.why}")
        dropped = ignored if row.can_be_ignored else ()
        marks = set(filter(row.traces.search, parts))
        if marks and (traces := [key for key in keys if key not in dropped and _is_near(key, marks, module)]):
            remedy = f"; {IGNORE}" if row.can_be_ignored else ""
            raise LayerError(f"{listed(traces, MAX_COPIED)}: {row.why}{remedy}")


def reason_of_names(keys: Collection[str]) -> str | None:
    """Return why a model with these names is not supported, or None if they show no reason."""
    names, parts = "\n".join(sorted({_NUMBER.sub(".0.", key) for key in keys})), _parts(keys)
    return next((row.why for row in TABLE if row.names.search(names) or any(map(row.traces.search, parts))), None)


def _sections(config: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the config and each mapping inside it, with the beginning of the names of its options."""
    waiting: list[tuple[str, object]] = [("", config)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Mapping):
            yield path, value
            waiting += [(f"{path}{key}.", inner) for key, inner in value.items() if key not in LABELS]
        elif isinstance(value, list | tuple):
            waiting += [(path, inner) for inner in value]


def _model_type(options: Mapping[str, object]) -> str:
    """Return the model type that the options name, or that the class in `architectures` has by its name."""
    model, classes = options.get("model_type"), options.get("architectures")
    if isinstance(model, str):
        return model
    name = classes[0] if isinstance(classes, list) and classes else ""
    return found[1] if isinstance(name, str) and (found := _CLASS.match(name)) else ""


def _has_option(row: Unsupported, key: str, value: object) -> bool:
    says = isinstance(value, str) and _SAYING.search(key) and row.options.search(value)
    return _is_on(value) and bool(says or row.options.search(key))


def _is_on(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() not in OFF
    if isinstance(value, int | float):
        return not value <= 0  # NaN is on
    return bool(value)


def _parts(keys: Collection[str]) -> set[str]:
    """Return the parts of the names, each once, because the layers of a model repeat them."""
    return {part for key in keys for part in key.split(".")}


def _is_near(key: str, marks: Collection[str], module: str) -> bool:
    """Return whether the first mark in the key stands below `module` or below a parent of it."""
    parts = key.split(".")
    index = next((index for index, part in enumerate(parts) if part in marks), None)
    parent = "".join(f"{part}." for part in parts[:index])
    return index is not None and (module.startswith(parent) or parent.startswith(module))
