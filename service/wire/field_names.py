"""Field names: what came beside what fits, the nearest name, and the names that other libraries have for ours.

Invariants: everything here runs after a request has failed, in a time that does not grow with it. A name of the caller's is shown
only if `ECHOED` matches it; of any other value only its kind is.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterable

from service.wire.number_list import NumberList

# An answer repeats a name that the caller sent only if it has this form.
ECHOED = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_MAX_COMPARED = 64
_KINDS: dict[type, str] = {
    type(None): "null",
    **dict.fromkeys((int, float), "a number"),
    **dict.fromkeys((list, NumberList), "a list"),
    dict: "an object",
}


def kind_of(value: object) -> str:
    """Return the kind of a value of JSON for an error message: `a list`, `true`."""
    return str(value).lower() if isinstance(value, bool) else _KINDS.get(type(value), "a string")


def instead(value: object, known: Iterable[str]) -> str:
    """Return the end of an error message about a name that is not known: what came, and the nearest known name."""
    came = f'"{value}"' if isinstance(value, str) and ECHOED.fullmatch(value) else kind_of(value)
    return f", got {came}{nearest(value, known)}"


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the words that suggest the known name which is nearest to `name`; none if none is near."""
    names = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name[:_MAX_COMPARED].lower(), names, n=1) if isinstance(name, str) else []
    return f'; did you mean "{names[near[0]]}"?' if near else ""


def pointer(path: tuple[str | int, ...]) -> str | None:
    """Return the path as a JSON pointer; None if it has a name that may not be echoed."""
    if any(isinstance(name, str) and not ECHOED.fullmatch(name) for name in path):
        return None
    return "".join(f"/{name}" for name in path)


def words_of(param: str) -> str:
    """Return a JSON pointer in readable form: `/masks/0/values` becomes masks[0].values."""
    first, *rest = param.strip("/").split("/")
    return first + "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in rest)


def translated(name: str, known: Container[str]) -> str:
    """Return the words that say what the field `name` of another library is in a request with the `known` fields, or none."""
    words = _TRANSLATIONS.get(_squeezed(name[:_MAX_COMPARED]), {})
    return next((f"; {words[field]}" for field in words if field in known), "")


def _squeezed(name: str) -> str:
    return name.replace("_", "").lower()


def _here(field: str, more: str = "") -> dict[str, str]:
    return {field: f'here it is "{field}"{more}'}


def _mask(kind: str, words: str, inputs: str) -> dict[str, str]:
    """Return the words for a mask: in the list of masks, as a tensor of safetensors, and as an input of Open Inference."""
    tensor = f'here it is the tensor "masks.0.values", and {{"kind": "{kind}"}} is in masks of __metadata__.request'
    found = {"masks": f"here it is {words}", "masks.<i>.values": tensor, "values": 'here it is "values"'}
    return found | {inputs.split('"')[1]: f"here it is {inputs}", "attend_mask_axes": f"it is an input: {inputs}"}


_LISTED = '"masks": [{"kind": '
_ALONE = "only attention without a layer takes it (POST /v1/attention; on /v2 the model sdpa)"
_NO_PAST = 'a layer keeps no past: send the rows of all positions as "key" and "value"'
_ANY_MASK = '"masks" with the kind "attend" (true: may attend), "ignore" (true: must not) or "bias" (added)'
_ANY_INPUT = '"attend_mask" (true: may attend), "ignore_mask" (true: must not) or "bias" (added)'
_PADDING = f'{_LISTED}"ignore", "axes": "bs", "values": [[...]]}}], without a batch "axes": "s"'
_PADDING_INPUT = '"ignore_mask" with the parameter "ignore_mask_axes": "bs"'
_HEADS = {"num_heads": 'heads are an axis of the tensors, or "num_heads" and "num_kv_heads" with layout "packed"'}
# Other libraries' names, and what to write, by a field of ours: the first that the request knows gives the words. All requests,
# and the parameters of Open Inference, have "masked_rows".
# fmt: off
_ROWS: tuple[tuple[str, dict[str, str]], ...] = (
    ("q queries query_states input inputs inputs_embeds hidden_state hidden_states x tokens", _here("query")),
    ("k keys key_states memory encoder_hidden_states", _here("key")),
    ("v values value_states", _here("value")),
    ("attn_mask attention_mask mask src_mask padding_mask query_mask value_mask", _mask("attend", _ANY_MASK, _ANY_INPUT)),
    ("key_padding_mask src_key_padding_mask", _mask("ignore", _PADDING, _PADDING_INPUT)),
    ("head_mask", _mask("attend", f'{_LISTED}"attend", "axes": "hls", "values": [[[...]]]}}]', '"attend_mask"')),
    ("attn_bias bias position_bias alibi_slopes", _mask("bias", f'{_LISTED}"bias", "values": [[...]]}}]', '"bias"')),
    ("valid_len valid_lens lens lengths seq_lens sequence_lengths key_value_seq_lengths nonpad_kv_seqlen cache_seqlens",
     _mask("lengths", f'{_LISTED}"lengths", "values": [...]}}]', '"lengths"')),
    ("is_causal causal use_causal_mask causal_mask",
     {"masks": f'here it is {_LISTED}"causal"}}]', **_here("causal", ': "top_left"')}),
    ("window window_size sliding_window", {"masks": f'here it is {_LISTED}"window", "left": ..., "right": ...}}]'}),
    ("need_weights average_attn_weights return_weights return_attention_scores output_attentions attn_weights attention_scores",
     {"weights": 'here it is "weights": "mean" or "weights": "heads"'}),
    ("dropout dropout_p dropout_rate attn_dropout training",
     dict.fromkeys(("query", "masked_rows"), "there is no dropout: leave it out")),
    ("scale scaling scale_factor softmax_scale temperature",
     _here("scale", ", the factor of query·key") | {"masked_rows": f"a layer has its own scale; {_ALONE}"}),
    ("num_heads heads n_heads nhead num_attention_heads q_num_heads num_kv_heads num_key_value_heads kv_num_heads embed_dim",
     _HEADS | {"masked_rows": "a layer has its own heads; without a layer they are an axis of the tensors"}),
    ("enable_gqa", {"masked_rows": "heads share fewer heads of key and value without a field: leave it out"}),
    ("softcap logits_soft_cap", _here("softcap") | {"masked_rows": _ALONE}),
    ("return_lse", _here("lse") | {"masked_rows": _ALONE}),
    ("layout scores lse sinks past_key past_value present", {"masked_rows": _ALONE}),
    ("past past_key_value past_key_values layer_past kv_cache cache use_cache",
     _here("past_key", ' and "past_value"') | {"query": _NO_PAST, "masked_rows": _NO_PAST}),
    ("position_ids positions cache_position", {"masked_rows": "no positions are applied: apply them, and send the result"}),
    ("batch_first", {"masked_rows": "the batch is the first axis: leave it out"}),
    ("dtype", {"query": 'each tensor has its own, as {"dtype": ..., "shape": ..., "data": ...}'}),
)
# fmt: on
_TRANSLATIONS = {_squeezed(name): words for names, words in _ROWS for name in names.split()}
