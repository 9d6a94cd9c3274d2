"""Field names: what came beside what fits, the nearest name, and the names that other libraries have for ours.

Invariants: everything here runs after a request has failed, in a time that does not grow with it. A name of the caller's is shown
only if `ECHOED` matches it; of any other value only its kind is.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

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


def hint(name: str, known: Iterable[str]) -> str:
    """Return the words that say what to write instead of the field `name`, where the request takes the `known` fields."""
    squeezed, fields = _squeezed(name[:_MAX_COMPARED]), list(known)
    rows = (words for pattern, words in _TRANSLATIONS if pattern.search(squeezed))
    found = (f"; {words[field]}" for words in rows for field in words if field in fields)
    return next(found, "") or nearest(name, fields)


def _squeezed(name: str) -> str:
    """Return the name without case, marks between words and a plural's s."""
    return re.sub("[^a-z0-9]", "", name.lower()).rstrip("s")


def _here(field: str, more: str = "") -> dict[str, str]:
    return {field: f'here it is "{field}"{more}'}


def _mask(kind: str, words: str, inputs: str) -> dict[str, str]:
    """Return the words for a mask: in the list of masks, as a tensor of safetensors, and as an input of Open Inference."""
    tensor = f'here it is the tensor "masks.0.values", and {{"kind": "{kind}"}} is in masks of __metadata__.request'
    found = {"masks": f"here it is {words}", "masks.<i>.values": tensor, "values": 'here it is "values"'}
    return found | {inputs.split('"')[1]: f"here it is {inputs}", "attend_mask_axes": f"it is an input: {inputs}"}


_LISTED = '"masks": [{"kind": '
_ALONE = "only attention without a layer takes it (POST /v1/attention; on /v2 the model sdpa)"
_ALONE_FIELDS = ("layout", "softcap", "scores", "lse", "sinks", "past_key", "past_value", "present")
_NO_PAST = 'a layer keeps no past: send the rows of all positions as "key" and "value"'
_ANY_MASK = '"masks" with the kind "attend" (true: may attend), "ignore" (true: must not) or "bias" (added)'
_ANY_INPUT = '"attend_mask" (true: may attend), "ignore_mask" (true: must not) or "bias" (added)'
_PADDING = f'{_LISTED}"ignore", "axes": "bs", "values": [[...]]}}], without a batch "axes": "s"'
# Patterns of other libraries' names, squeezed, and what to write, by a field of ours: the first row that matches and its first
# field that the request knows give the words. All requests, and the parameters of Open Inference, have "masked_rows".
# fmt: off
_ROWS: tuple[tuple[str, dict[str, str]], ...] = (
    ("^(q|quer(y|ie)(state)?|inputs?(embed)?|embedding|hiddenstate|x)$", _here("query")),
    ("^(k|key(value)?(state)?|memory|encoderhiddenstate)$", _here("key")),
    ("^(v|val(ue)?(state)?)$", _here("value")),
    ("^(inputid|token|text|sentence)", {"query": 'tokens are no rows: send their embeddings as "query"'}),
    ("keypaddingmask", _mask("ignore", _PADDING, '"ignore_mask" with the parameter "ignore_mask_axes": "bs"')),
    ("headmask", _mask("attend", f'{_LISTED}"attend", "axes": "hls", "values": [[[...]]]}}]', '"attend_mask"')),
    ("causal|unidirectional", {"masks": f'here it is {_LISTED}"causal"}}]', **_here("causal", ': "top_left"')}),
    ("window", {"masks": f'here it is {_LISTED}"window", "left": ..., "right": ...}}]'}),
    ("bia$|alibi", _mask("bias", f'{_LISTED}"bias", "values": [[...]]}}]', '"bias"')),
    ("mask(?!edrow)", _mask("attend", _ANY_MASK, _ANY_INPUT)),
    ("len(gth)?[kq]?$|nonpad", _mask("lengths", f'{_LISTED}"lengths", "values": [...]}}]', '"lengths"')),
    ("weight|(return|output)att|att(entio)?n(score|prob)", {"weights": 'here it is "weights": "mean" or "weights": "heads"'}),
    ("dropout|training|deterministic", dict.fromkeys(("query", "masked_rows"), "there is no dropout: leave it out")),
    ("scal(e|ing)|temperature",
     _here("scale", ", the factor of query·key") | {"masked_rows": f"a layer has its own scale; {_ALONE}"}),
    ("gqa", {"masked_rows": "heads share fewer heads of key and value without a field: leave it out"}),
    ("head(?!er)|embeddim|dmodel", {
        "num_heads": 'heads are an axis of the tensors, or "num_heads" and "num_kv_heads" with layout "packed"',
        "masked_rows": "a layer has its own heads; without a layer they are an axis of the tensors"}),
    ("position", {"masked_rows": "no positions are applied: apply them, and send the result"}),
    ("pastkeyvalue|past$|cache", _here("past_key", ' and "past_value"') | {"query": _NO_PAST, "masked_rows": _NO_PAST}),
    *[(f"^(return|softmax|attention|attn|logits?)*{_squeezed(field)}(ping)?$", _here(field) | {"masked_rows": _ALONE})
      for field in _ALONE_FIELDS],
    ("batchfirst", {"masked_rows": "the batch is the first axis: leave it out"}),
    ("^dtype$", {"query": 'each tensor has its own, as {"dtype": ..., "shape": ..., "data": ...}'}),
)
# fmt: on
_TRANSLATIONS = tuple((re.compile(pattern), words) for pattern, words in _ROWS)
