"""Heads: the number of heads of one layer, as its config and the caller give it, and their width.

Invariants: Nothing is guessed: without a number there is an error that names --heads. Numbers that disagree with one another, or
with the rows of the query, are refused. A pruned layer has fewer heads than its config says, as wide as before.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.attention.spec import MAX_HEADS
from service.errors import LayerError
from service.layers.families import Candidate
from service.layers.wording import MAX_NAME, bounded

Config = Mapping[str, object]
# Names in a config.json, in nanoGPT's `model_args` and in configs of one's own.
HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads", "nhead")
SIDE_HEADS = ("encoder_attention_heads", "decoder_attention_heads", "decoder_num_attention_heads")
HEAD_WIDTH = ("head_dim", "attention_head_size", "d_kv", "kv_channels", "size_per_head", "d_head", "dim_head")


def num_heads(chosen: Candidate, config: Config, given: int | None) -> int:
    """Return the layer's number of heads; raise LayerError if nothing says it or if numbers disagree."""
    numbers: dict[str, int] = {}
    for key, number in _configured(chosen, config).items():
        if isinstance(number, int):
            pruned = _num_pruned(chosen, config, number)
            origin = f"{key} less pruned_heads" if pruned else key
            numbers[origin] = _checked(origin, number - pruned)
        elif given not in number:
            form = f"a list, one number for each stage: {_shown(number)}"
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


def check_head_width(chosen: Candidate, config: Config, *, heads: int, rows: int, query_width: int) -> None:
    """Raise LayerError if `rows` of the query are not heads as wide as the config says, by name or before pruning."""
    widths = {key: config[key] for key in HEAD_WIDTH if config.get(key) is not None}
    if config.get("pruned_heads") and not widths:
        for key, number in _configured(chosen, config).items():
            if isinstance(number, int):
                widths[f"pruned_heads and {key} {number}, so heads of"] = query_width // number
    for key, width in widths.items():
        if width != rows // heads:
            found = f"the {rows} rows of query make {heads} heads of {rows // heads}"
            raise LayerError(f"config.json has {key} {_shown(width)}, but {found}")


def _configured(chosen: Candidate, config: Config) -> dict[str, int | list[object]]:
    """Return the numbers of heads in the config by their names: those of the layer's own side, encoder or decoder, if any."""
    own = [key for key in SIDE_HEADS if key.partition("_")[0] in chosen.prefix.split(".")]
    keys = [key for key in own if config.get(key) is not None] or [key for key in HEADS if config.get(key) is not None]
    found = {key: config[key] for key in keys}
    return {key: number if isinstance(number, list) else _checked(key, number) for key, number in found.items()}


def _num_pruned(chosen: Candidate, config: Config, heads: int) -> int:
    """Return how many heads the config says were removed from this layer."""
    pruned = config.get("pruned_heads") or {}
    removed = pruned.get(str(chosen.number), []) if isinstance(pruned, Mapping) else None
    if not isinstance(removed, list) or not all(type(head) is int and 0 <= head < heads for head in removed):
        form = f'must map numbers of layers to heads from 0 to {heads - 1}, as {{"0": [2, 5]}}'
        raise LayerError(f"pruned_heads in config.json {form}")
    return len(set(removed))


def _checked(origin: str, number: object) -> int:
    if type(number) is not int or not 1 <= number <= MAX_HEADS:
        raise LayerError(f"the number of heads given by {origin} must be a whole number from 1 to {MAX_HEADS}")
    return number


def _shown(value: object) -> str:
    return bounded(ascii(value), MAX_NAME)
