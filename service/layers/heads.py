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
HEADS = (
    *("num_attention_heads", "n_heads", "n_head", "num_heads", "nhead", "attention_heads"),
    *(
        "encoder_attention_heads",
        "decoder_attention_heads",
        "encoder_num_attention_heads",
        "decoder_num_attention_heads",
    ),
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_heads_kv", "n_kv_heads", "n_head_kv", "num_query_groups")
HEAD_WIDTH = ("head_dim", "attention_head_size", "d_kv", "kv_channels", "size_per_head", "d_head", "dim_head")
WIDTH = ("hidden_size", "n_embd", "d_model", "dim")


def num_heads(chosen: Candidate, config: Config, given: int | None) -> int:
    """Return the layer's number of heads; raise LayerError if nothing says it, if numbers disagree, or if heads are grouped."""
    numbers = _configured(chosen, config, given)
    for key in KV_HEADS:
        groups, heads = config.get(key), next(iter(numbers.values()), given)
        if heads is not None and groups is not None and not _fits(groups, heads):
            why = "grouped key and value heads are not supported"
            raise LayerError(f"config.json has {key} {_shown(groups)} for {heads} heads: {why}")
    if numbers and (pruned := _num_pruned(chosen, config, min(numbers.values()))):
        numbers = {f"{origin} less pruned_heads": number - pruned for origin, number in numbers.items()}
    if chosen.family.is_single_head:
        numbers[f"the family {chosen.family.name}"] = 1
    if given is not None:
        numbers["the caller"] = _checked("the caller", given)
    if not numbers:
        raise LayerError("this checkpoint does not record its number of heads; give it with --heads H")
    if len(set(numbers.values())) > 1:
        raise _contradictory(numbers)
    return next(iter(numbers.values()))


def check_head_width(config: Config, *, heads: int, rows: int, query_width: int) -> None:
    """Raise LayerError if `rows` of the query are not `heads` heads as wide as the config says."""
    found = f"the {rows} rows of query make {heads} heads of {rows // heads}"
    widths = {key: config[key] for key in HEAD_WIDTH if config.get(key) is not None}
    for key, width in widths.items():
        if not _fits(width, rows // heads):
            raise LayerError(f"config.json has {key} {_shown(width)}, but {found}")
    whole = next((config[key] for key in HEADS if type(config.get(key)) is int), None)
    model_width = next((config[key] for key in WIDTH if type(config.get(key)) is int), None)
    if config.get("pruned_heads") and model_width is None:
        model_width = query_width
    if widths or not isinstance(whole, int) or model_width != query_width or query_width % whole:
        return
    if rows != heads * (query_width // whole):
        expected = f"{query_width} wide with {whole} heads, so heads of {query_width // whole}"
        raise LayerError(f"by its config.json the model is {expected}, but {found}; head_dim in it gives another width")


def _configured(chosen: Candidate, config: Config, given: int | None) -> dict[str, int]:
    """Return the numbers of heads in the config by their names: those of the layer's own side, encoder or decoder, if any."""
    keys = [key for key in HEADS if config.get(key) is not None]
    sides = {"encoder", "decoder"} & set(chosen.prefix.split("."))
    if len(sides) == 1:
        own = tuple(sides)
        keys = [key for key in keys if key.startswith(own)] or [key for key in keys if "coder" not in key]
    numbers: dict[str, int] = {}
    for key in keys:
        number = config[key]
        if isinstance(number, list):
            if given is None:
                form = "a list, one number for each stage"
                raise LayerError(f"{key} in config.json is {form}: {_shown(number)}; give this layer's with --heads H")
            if not _fits(number, given):
                raise _contradictory({key: _shown(number), "the caller": given})
        else:
            numbers[key] = _checked(key, number)
    return numbers


def _num_pruned(chosen: Candidate, config: Config, heads: int) -> int:
    """Return how many heads the config says were removed from this layer."""
    pruned = config.get("pruned_heads") or {}
    form = f'pruned_heads in config.json must map numbers of layers to heads from 0 to {heads - 1}, as {{"0": [2, 5]}}'
    if not isinstance(pruned, Mapping):
        raise LayerError(form)
    for number, removed in pruned.items():
        is_list = isinstance(removed, list) and all(type(head) is int and 0 <= head < heads for head in removed)
        if not str(number).isdecimal() or not is_list or len(set(removed)) != len(removed):
            raise LayerError(form)
    if any(pruned.values()) and chosen.number is None:
        raise LayerError("pruned_heads in config.json goes by the layer's number, which the names of its keys lack")
    removed = next((removed for number, removed in pruned.items() if int(str(number)[:18]) == chosen.number), [])
    if len(removed) == heads:
        raise LayerError("pruned_heads in config.json leaves this layer no head")
    return len(removed)


def _checked(origin: str, number: object) -> int:
    if type(number) is not int or not 1 <= number <= MAX_HEADS:
        raise LayerError(f"the number of heads given by {origin} must be a whole number from 1 to {MAX_HEADS}")
    return number


def _contradictory(numbers: Mapping[str, object]) -> LayerError:
    words = ", ".join(f"{number} by {origin}" for origin, number in numbers.items())
    return LayerError(f"the number of heads is contradictory: {words}")


def _fits(found: object, number: int) -> bool:
    """Return whether a number, or a list with one for each stage, has this one."""
    return number in found if isinstance(found, list) else type(found) is int and found == number


def _shown(value: object) -> str:
    return bounded(ascii(value), MAX_NAME)
