"""Keywords: answers a keyword argument that a call lacks, most often another library's name, with what to write here.

Invariant: such a keyword is a TypeError, as in any Python call; only its message is more.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

Given = ParamSpec("Given")
Result = TypeVar("Result")

_LEAVE = "leave it out: "
# What begins with our name, by what is in the names of torch, Keras, JAX, Hugging Face and others; the first that fits counts.
_FOREIGN = {
    r"padding_mask": "masks=[masks.key_padding_mask(values)] where true = blocked",
    r"causal|look_ahead": 'masks=[masks.causal("top_left")] as torch and Keras mean it, masks.causal("bottom_right") as FlashAttention',  # noqa: E501
    r"mask(?!ed)": "masks=[masks.attend(values)] where true = may attend, masks.ignore(values) where true = blocked, masks.bias(values) where added",  # noqa: E501
    r"bias|alibi": "masks=[masks.bias(values)]",
    r"len(s|gths?)?(_|$)|seqlen": "masks=[masks.lengths(n)], of the first n keys",
    r"window": "masks=[masks.window(left, right)]",
    r"top_?k": 'weights=Weights("top_k", k=3)',
    r"(cos|sin|rope|rotary|freqs?|position_emb\w*)($|_)": "rotary=",
    r"^(cache_|input_)?pos": "positions=",
    r"sink|s_aux": "sinks=",
    r"use_cache": "present=True",
    r"(need|average|return|output|sow)_": 'weights="heads" for a table of each head, or weights="mean"',
    r"past|cache": "past_key= and past_value=",
    r"scal": "scale=",
    r"dropout|^train(ing)?$|deterministic": _LEAVE + "an answer has no dropout",
    r"batch_first": _LEAVE + "an array with 3 axes is [B, L, d]",
    r"gqa": _LEAVE + "key and value may have fewer heads",
    r"^(k|keys?(_states)?|memory|inputs_k|key_value_states|encoder_hidden_states)$": "key=",
    r"^(v|values?(_states)?|inputs_v)$": "value=",
    r"^(q|x|query_states|queries|inputs?(_q)?|hidden_states)$": "query=",
}
_OF_A_LAYER = ("num_heads", "num_kv_heads", "scale", "softcap", "sinks", "rotary")


def with_remedies(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return the function; it raises TypeError with a remedy for a keyword argument that it lacks."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if unknown := next((name for name in kwargs if name not in known), None):
            name = function.__name__ if function.__name__ != "__init__" else type(args[0]).__name__
            raise TypeError(f"{name}() has no argument {unknown}: {_remedy(unknown, known)}")
        return function(*args, **kwargs)

    @functools.wraps(function)
    async def awaited(*args: Given.args, **kwargs: Given.kwargs) -> Any:
        return await cast("Any", call(*args, **kwargs))

    return cast("Callable[Given, Result]", awaited) if inspect.iscoroutinefunction(function) else call


def _remedy(unknown: str, known: list[str]) -> str:
    remedy = next((ours for theirs, ours in _FOREIGN.items() if re.search(theirs, unknown.lower())), f"{unknown}=")
    ours = remedy.partition("=")[0]
    if ours in known or remedy.startswith(_LEAVE):
        return f"write {remedy}" if ours in known else remedy
    if "layer" in known and ours in _OF_A_LAYER:
        return _LEAVE + "a layer has its own"
    near = difflib.get_close_matches(unknown, known, 1)
    return f"did you mean {near[0]}=?" if near else f"it has {', '.join(name for name in known if name != 'self')}"
