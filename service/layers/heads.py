"""Heads: the numbers of heads of one layer, as its config, the caller and shapes give them, and their width.

Invariants: Nothing is guessed: without a number there is an error that names --heads. Numbers that disagree with one another, or
with the rows of the query, are refused. A pruned layer has fewer heads than its config says, as wide as before.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.attention.spec import MAX_HEADS
from service.errors import LayerError
from service.layers.family import QKV_WEIGHT, Candidate
from service.layers.options import Options, agreed, shown
from service.layers.wording import quoted, shape_text

Shapes = Mapping[str, tuple[int, ...]]
# Names in a config.json, in nanoGPT's `model_args` and in configs of one's own.
HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads", "nhead")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
SIDE_HEADS = ("encoder_attention_heads", "decoder_attention_heads", "decoder_num_attention_heads")
HEAD_WIDTH = ("head_dim", "attention_head_size", "d_kv", "kv_channels", "size_per_head", "d_head", "dim_head")


def num_heads(chosen: Candidate, options: Options, given: int | None, raw: Shapes) -> int:
    """Return the layer's number of heads; raise LayerError if nothing says it or if numbers disagree.

    `raw` has the shapes in the source of the parts that the layer has, by canonical name.
    """
    numbers: dict[str, int] = {}
    if chosen.family.has_kernels:
        numbers["the shape of query"] = _kernel_heads(raw, "query")
    for key, number in _configured(chosen, options).items():
        if isinstance(number, int):
            pruned = _num_pruned(chosen, options, number)
            origin = key + " less pruned_heads" * bool(pruned)
            numbers[origin] = _checked(origin, number - pruned)
        elif given not in number:
            form = f"a list, one number for each stage: {shown(number)}"
            raise LayerError(f"{key} in config.json is {form}; give this layer's with --heads H")
    if chosen.family.is_single_head:
        numbers = {f"the family {chosen.family.name}": 1}
    if given is not None:
        numbers["the caller"] = _checked("the caller", given)
    if not numbers:
        raise LayerError("this checkpoint does not record its number of heads; give it with --heads H")
    if len(set(numbers.values())) > 1:
        words = ", ".join(f"{number} by {origin}" for origin, number in numbers.items())
        raise LayerError(f"the number of heads is contradictory: {words}")
    return next(iter(numbers.values()))


def num_kv_heads(chosen: Candidate, options: Options, heads: int, raw: Shapes) -> int:
    """Return the layer's number of key/value heads: by the rows of its key, which the config must not contradict."""
    if not chosen.family.is_grouped:
        return heads
    places = [{key: values[key] for key in KV_HEADS if key in values} for values in (options.said, options.defaults)]
    said, configured = agreed(places[0] or places[1]), None
    if any(places):
        configured = heads if said is None else _checked("num_key_value_heads", said)
    query, key = raw["query.weight"], raw["key.weight"]
    if chosen.family.has_kernels:
        found = _kernel_heads(raw, "key")
    elif QKV_WEIGHT in chosen.family.parts.values():  # its rows do not show it
        if configured is None:
            raise LayerError("nothing says num_key_value_heads, which decides how its fused rows are split")
        return configured
    else:
        found, rest = divmod(key[0] * heads, query[0]) if query and key and query[0] else (heads, 0)
        if rest or not found or heads % found:
            rows = f"key has the shape {shape_text(key)} and query {shape_text(query)}"
            raise LayerError(f"{rows}, which do not make heads for {heads} heads of query")
    if configured not in (None, found):
        raise LayerError(f"config.json gives {configured} key/value heads, but the rows of key make {found}")
    return found


def _kernel_heads(raw: Shapes, name: str) -> int:
    shape = raw[f"{name}.weight"]
    if len(shape) != 3 or 0 in shape:  # noqa: PLR2004 (width, heads, width of a head)
        raise LayerError(f"{name} has the shape {shape_text(shape)}, expected [width, heads, width of a head]")
    return _checked(f"the shape of {quoted(name)}", shape[1])


def check_head_width(chosen: Candidate, options: Options, heads: int, head_width: int, query_width: int) -> None:
    """Raise LayerError if the heads are not as wide as the config says, by name or before pruning."""
    widths = {key: options.get(key) for key in HEAD_WIDTH if options.get(key) is not None}
    if options.get("pruned_heads") and not widths:
        for key, number in _configured(chosen, options).items():
            if isinstance(number, int):
                widths[f"pruned_heads and {key} {number}, so heads of"] = query_width // number
    for key, width in widths.items():
        if width != head_width:
            found = f"the {heads * head_width} rows of query make {heads} heads of {head_width}"
            raise LayerError(f"config.json has {key} {shown(width)}, but {found}")


def _configured(chosen: Candidate, options: Options) -> dict[str, int | list[object]]:
    """Return the numbers of heads in the config by their names: those of the layer's own side, encoder or decoder, if any."""
    own = [key for key in SIDE_HEADS if key.partition("_")[0] in chosen.prefix.split(".")]
    places = [
        {key: values[key] for key in keys if values.get(key) is not None}
        for values in (options.said, options.defaults)
        for keys in (own, HEADS)
    ]
    found = next(filter(None, places), {})
    return {key: number if isinstance(number, list) else _checked(key, number) for key, number in found.items()}


def _num_pruned(chosen: Candidate, options: Options, heads: int) -> int:
    """Return how many heads the config says were removed from this layer."""
    pruned = options.get("pruned_heads") or {}
    removed = pruned.get(str(chosen.number), []) if isinstance(pruned, Mapping) else None
    if not isinstance(removed, list) or not all(type(head) is int and 0 <= head < heads for head in removed):
        form = f'must map numbers of layers to heads from 0 to {heads - 1}, as {{"0": [2, 5]}}'
        raise LayerError(f"pruned_heads in config.json {form}")
    return len(set(removed))


def _checked(origin: str, number: object) -> int:
    if type(number) is not int or not 1 <= number <= MAX_HEADS:
        raise LayerError(f"the number of heads given by {origin} must be a whole number from 1 to {MAX_HEADS}")
    return number
