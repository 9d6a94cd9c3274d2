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
_KINDS: dict[type, str] = {type(None): "null", dict: "an object", list: "a list", NumberList: "a list"}


def kind_of(value: object) -> str:
    """Return the kind of a value of JSON for an error message: `a list`, `true`."""
    if isinstance(value, int | float):
        return str(value).lower() if isinstance(value, bool) else "a number"
    return _KINDS.get(type(value), "a string")


def instead(value: object, known: Iterable[str]) -> str:
    """Return the end of an error message about a name that is not known: what came, and the nearest known name."""
    came = f'"{value}"' if isinstance(value, str) and ECHOED.fullmatch(value) else kind_of(value)
    return f", got {came}{nearest(value, known)}"


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the words that suggest the known name which is nearest to `name`; none if none is near or several begin with it."""
    plain, names = name[:_MAX_COMPARED].lower() if isinstance(name, str) else "", {one.lower(): one for one in known}
    near = [] if sum(one.startswith(plain) for one in names) > 1 else difflib.get_close_matches(plain, names, n=1)
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
    plain, fields = re.sub("[^a-z0-9]", "", name[:_MAX_COMPARED].lower()), list(known)
    rows = (words for pattern, words in _TRANSLATIONS.items() if re.search(pattern, plain))
    found = next((words[field] for words in rows for field in words if field in fields), "")
    start = "; here it is " if found.startswith('"') else "; "
    return start + found if found else nearest(name, fields)


_ANY_MASK = '"masks" with the kind "attend" (true: may attend), "ignore" (true: must not) or "bias" (added)'
_ANY_INPUT = '"attend_mask" (true: may attend), "ignore_mask" (true: must not) or "bias" (added)'
_PADDING = '"masks": [{"kind": "ignore", "axes": "bs", "values": [[...]]}], without a batch "axes": "s"'
_PADDING_INPUT = '"ignore_mask" with the parameter "ignore_mask_axes": "bs"'
_ALONE = "only attention without a layer takes it (POST /v1/attention; on /v2 the model sdpa)"
_OWN_SCALE = f"a layer has its own scale; {_ALONE}"
_PAST = '"past_key" and "past_value"; "present": true returns the next ones'
# Patterns of other libraries' names, in lower case without marks, and what to write, by a field of ours: the first row that
# matches and its first field that the request knows give the words. `masked_rows` is a field or parameter of every request.
_TRANSLATIONS: dict[str, dict[str, str]] = {
    "^(q|quer(y|ies)(states?)?|inputs?(embeds)?|hiddenstates?|x)$": {"query": '"query"'},
    "^(k|keys?(states?)?|memory|encoderhiddenstates?)$": {"key": '"key"'},
    "^(v|values?(states?)?)$": {"value": '"value"'},
    "keypaddingmask": {"masks": _PADDING, "ignore_mask": _PADDING_INPUT},
    "causal": {"masks": '"masks": [{"kind": "causal"}]', "causal": '"causal": "top_left"'},
    "window": {"masks": '"masks": [{"kind": "window", "left": ..., "right": ...}]'},
    "bias$|alibi": {"masks": '"masks": [{"kind": "bias", "values": [[...]]}]', "bias": '"bias"'},
    "mask(?!edrow)": {"masks": _ANY_MASK, "attend_mask": _ANY_INPUT},
    "len(gth)?s?[kq]?$": {"masks": '"masks": [{"kind": "lengths", "values": [...]}]', "lengths": '"lengths"'},
    "weight|(return|output)att|att(entio)?n(score|prob)": {"weights": '"weights": "mean" or "weights": "heads"'},
    "dropout": dict.fromkeys(("query", "masked_rows"), "there is no dropout: leave it out"),
    "scal(e|ing)|temperature": {"scale": '"scale", the factor of query·key', "masked_rows": _OWN_SCALE},
    "position": {
        "positions": '"positions", and for the keys "key_positions"',
        "layer_masks": "positions are two inputs, positions and key_positions",
        "masked_rows": "no positions are applied: apply them, and send the result",
    },
    "past|cache": {"past_key": _PAST, "present": "a past is two inputs, past_key and past_value"},
    "heads?$|gqa": {"masked_rows": "the layer, or without one the shape of the tensors, says the heads: leave it out"},
    "^(layout|softcap|sinks)$": {"masked_rows": _ALONE},
}
