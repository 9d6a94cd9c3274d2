"""Windows of an imported layer: of which kind the layer is, and which keys its queries see.

Invariants: `layer_types` of a config decides where a family has kinds of layers, and must agree where it has none.
"""

from __future__ import annotations

from service.attention.spec import Window
from service.errors import LayerError
from service.layers.family import FULL, SLIDING, Candidate, Family
from service.layers.options import Options, shown


def kind_of(chosen: Candidate, options: Options) -> str:
    """Return FULL or SLIDING; raise LayerError for another kind, and if the layer's number is needed and missing."""
    family, rule, types = chosen.family, chosen.family.window, options.get("layer_types")
    has_kinds = rule is not None and bool(rule.period or rule.first)
    if types is None or (rule is None and family.rotary is None):
        return _kind_by_rule(chosen, options)
    number = _number(chosen)
    if not isinstance(types, list) or number >= len(types):
        raise LayerError(f"layer_types in config.json has no entry for layer {number}")
    kind = FULL if types[number] == "attention" else types[number]
    if kind not in (FULL, SLIDING):
        raise LayerError(f"layer_types in config.json has {shown(kind)}, which a served layer does not support")
    if not has_kinds and kind != _kind_by_rule(chosen, options):
        raise LayerError(f"layer_types in config.json has {shown(kind)}, which contradicts the family {family.name}")
    return str(kind)


def _kind_by_rule(chosen: Candidate, options: Options) -> str:
    rule = chosen.family.window
    if rule is None or (rule.switch and not options.get(rule.switch)):
        return FULL
    if rule.period:
        return SLIDING if (_number(chosen) + rule.offset) % options.count(rule.period) else FULL
    if rule.size not in options.said and rule.size not in options.defaults:
        options.number(rule.size)  # raises
    if options.get(rule.size) is None:
        return FULL
    return FULL if rule.first and options.get(rule.first) and _number(chosen) < options.count(rule.first) else SLIDING


def _number(chosen: Candidate) -> int:
    if chosen.number is None:
        raise LayerError("the layer's number decides which keys it sees, and its keys lack it")
    return chosen.number


def window(family: Family, options: Options, kind: str) -> Window | None:
    """Return the layer's own mask, or None if every query sees every key."""
    causal = options.get(family.causal) if isinstance(family.causal, str) else family.causal
    is_centred = bool(family.bidirectional and options.get(family.bidirectional))
    is_causal = bool(causal) and options.get("is_causal") is not False and not is_centred
    if kind == FULL or family.window is None:
        return Window(None, 0) if is_causal else None
    size, is_switched = options.count(family.window.size), not family.window.switch or options.get(family.window.switch)
    if not is_switched:
        raise LayerError(f"layer_types in config.json has {SLIDING}, but {family.window.switch} is off")
    if is_causal:
        return Window(size - 1, 0)
    if is_centred and size % 2:
        raise LayerError(
            f"{family.window.size} is {size}; with {family.bidirectional} it is halved, so it must be even"
        )
    edge = size // 2 if is_centred or family.window.is_centred else size
    return Window(edge, edge)
