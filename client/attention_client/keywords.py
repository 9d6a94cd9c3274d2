"""Keywords: answers a keyword argument that a call lacks, most often another library's name, with what to write here.

Invariant: such a keyword is a TypeError, as in any Python call; only its message is more.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

Given = ParamSpec("Given")
Result = TypeVar("Result")

_LEAVE = "leave it out: "
_BY_MEANING = "masks=[masks.attend(values)] where true = may attend, masks.ignore(values) where true = blocked, masks.bias(values) where added"  # fmt: skip  # noqa: E501
_CAUSAL = 'masks=[masks.causal("top_left")] as torch and Keras mean it, masks.causal("bottom_right") as FlashAttention'
# By remedy, which begins with our name: what other libraries call it.
_FOREIGN = {
    _BY_MEANING: "mask attn_mask attention_mask attend_mask encoder_attention_mask query_mask key_mask value_mask",
    "masks=[masks.bias(values)]": "bias attn_bias attention_bias position_bias",
    "masks=[masks.key_padding_mask(values)] where true = blocked": "key_padding_mask padding_mask src_key_padding_mask memory_key_padding_mask",  # noqa: E501
    _CAUSAL: "is_causal causal causal_mask use_causal_mask look_ahead_mask",
    "masks=[masks.lengths(n)], of the first n keys": "lengths valid_lens valid_len seq_lens nonpad_kv_seqlen cache_seqlens",
    "masks=[masks.window(left, right)]": "window window_size sliding_window local_window_size",
    'weights="heads" for a table of each head, or weights="mean"': "need_weights average_attn_weights return_attention_scores return_weights output_attentions",  # noqa: E501
    'weights=Weights("top_k", k=3)': "top_k topk",
    "query=": "q Q x input inputs hidden_states queries",
    "key=": "k K keys memory key_value_states",
    "value=": "v V values",
    "past_key= and past_value=": "past_key_values past_key_value layer_past kv_cache",
    "scale=": "sm_scale softmax_scale scaling",
    "timeout_s=, in seconds": "timeout",
    "url=, the address without /v1": "base_url host",
    _LEAVE + "an answer has no dropout": "dropout dropout_p dropout_rate training deterministic",
    _LEAVE + "an array with 3 axes is [B, L, d]": "batch_first",
    _LEAVE + "key and value may have fewer heads": "enable_gqa",
}  # fmt: skip
_REMEDIES = {name: remedy for remedy, names in _FOREIGN.items() for name in names.split()}
_OF_A_LAYER = dict.fromkeys(("num_heads", "num_kv_heads", "scale", "softcap"), _LEAVE + "a layer has its own")
_OF_A_LAYER["past_key"] = "give the whole key= and value=; a layer keeps no past"


def with_remedies(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return the function; it raises TypeError with a remedy for a keyword argument that it lacks."""
    known = list(inspect.signature(function).parameters)

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if unknown := next((name for name in kwargs if name not in known), None):
            name = function.__name__ if function.__name__ != "__init__" else type(args[0]).__name__
            raise TypeError(f"{name}() has no argument {unknown}: {_remedy(unknown, known)}")

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        check(args, kwargs)
        return function(*args, **kwargs)

    @functools.wraps(function)
    async def awaited(*args: Given.args, **kwargs: Given.kwargs) -> Any:
        check(args, kwargs)
        return await cast("Any", function(*args, **kwargs))

    return cast("Callable[Given, Result]", awaited) if inspect.iscoroutinefunction(function) else call


def _remedy(unknown: str, known: list[str]) -> str:
    remedy = _REMEDIES.get(unknown, f"{unknown}=")
    ours = remedy.partition("=")[0]
    if ours in known or remedy.startswith(_LEAVE):
        return remedy if remedy.startswith(_LEAVE) else f"write {remedy}"
    if "items" in known and ours in ("masks", "weights", "key", "value"):
        return f"make each item a Request(query, …) and write {remedy} there"
    if "layer" in known and ours in _OF_A_LAYER:
        return _OF_A_LAYER[ours]
    near = difflib.get_close_matches(unknown, known, 1)
    return f"did you mean {near[0]}=?" if near else f"it has {', '.join(name for name in known if name != 'self')}"
