"""Rotary positions of an imported layer: the frequencies that its config implies, with the bits of transformers 5.24.

Invariants: Frequencies are computed in float32 in the order of operations of transformers' `modeling_rope_utils.py`. A key of
`rope_parameters` or `rope_scaling` that is unknown here is refused, as is a scaling that depends on the length of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from service.attention.spec import Rotary
from service.errors import LayerError
from service.layers.family import FULL, SCALINGS, SLIDING, RotaryRule
from service.layers.options import Options, agreed, positive, shown
from service.layers.wording import listed

KNOWN = {
    "rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
    "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "finetuned",
}  # fmt: skip
DEPENDS = "its frequencies depend on the length of a sequence, which a served layer does not support"
REASONS = dict.fromkeys(SCALINGS, "this family's models do not compute it") | dict.fromkeys(
    ("dynamic", "longrope", "su"), DEPENDS
)


def rotary(rule: RotaryRule | None, options: Options, kind: str, head_width: int) -> Rotary | None:
    """Return the rotary positions of a layer of this kind, or None if it has none."""
    if rule is None:
        return None
    switch = options.get(rule.switch) if rule.switch else "rotary"
    if switch not in ("rotary", "absolute"):
        raise LayerError(f"{rule.switch} {shown(switch)} is neither rotary nor absolute")
    if switch == "absolute" or kind not in rule.kinds:
        return None
    parameters = _parameters(rule, options, kind)
    scaling = agreed({key: parameters[key] for key in ("rope_type", "type") if key in parameters}) or "default"
    if scaling not in rule.scalings:
        why = REASONS.get(str(scaling), "the importer does not know it")
        raise LayerError(f"the rotary positions have the scaling {shown(scaling)}: {why}")
    if unknown := sorted(str(key) for key, value in parameters.items() if key not in KNOWN and value is not None):
        raise LayerError(f"the rotary positions have options that the importer does not know: {listed(unknown)}")
    if rule.sliding_theta and not parameters.get("truncate", True):
        raise LayerError("truncate of the rotary scaling is off, which transformers 5 does not read in this family")
    theta, width = _theta(rule, options, kind, parameters), _width(rule, options, parameters, head_width)
    powers = theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    frequencies, factor = 1.0 / powers, 1.0
    if scaling == "linear":
        frequencies = frequencies / _of(parameters, "factor")
    elif scaling == "llama3":
        frequencies = _llama3(frequencies, parameters, _original(options, parameters))
    elif scaling == "yarn":
        frequencies, factor = _yarn(powers, theta, options, parameters)
    return Rotary(rule.layout, tuple(frequencies.tolist()), factor)


def _parameters(rule: RotaryRule, options: Options, kind: str) -> Mapping[str, object]:
    """Return the options of the scaling: those of `rope_scaling`, else of `rope_parameters`, of the layer's kind if nested."""
    given = {key: options.said[key] for key in ("rope_scaling", "rope_parameters") if options.said.get(key)}
    merged: dict[str, object] = {}
    for name, value in given.items():
        if not isinstance(value, Mapping):
            raise LayerError("rope_parameters and rope_scaling in config.json must be objects")
        is_nested = not {FULL, SLIDING}.isdisjoint(value)
        if name == "rope_parameters" and rule.sliding_theta and not is_nested:
            raise LayerError(f"{name} in config.json must have {FULL} and {SLIDING}, as this family's bases differ")
        if name == "rope_scaling" and kind not in rule.scaled and not is_nested:
            continue
        inner = value.get(kind) if is_nested else value
        if rule.sliding_theta and inner is None:
            inner = {}  # each kind has defaults
        if not isinstance(inner, Mapping):
            raise LayerError(f"{name} in config.json has no object for {kind}")
        if rule.sliding_theta and not is_nested and "type" in inner and "rope_type" not in inner:
            raise LayerError(
                f"{name} in config.json has type without rope_type, which transformers 5 does not read here"
            )
        for key, number in inner.items():
            merged[key] = agreed({f"{name}.{key}": number} | ({key: merged[key]} if key in merged else {}))
    return merged if given else options.defaults.get("rope_parameters", {})  # type: ignore[return-value]


def _said(options: Options, names: set[str], parameters: Mapping[str, object], own: str) -> object:
    """Return the value that the options of these names and the scaling's `own` give; raise LayerError if they differ."""
    found = {name: options.said[name] for name in sorted(names) if options.said.get(name) is not None}
    return agreed(found | ({f"rope_parameters.{own}": parameters[own]} if parameters.get(own) is not None else {}))


def _theta(rule: RotaryRule, options: Options, kind: str, parameters: Mapping[str, object]) -> float:
    name = rule.sliding_theta if kind == SLIDING and rule.sliding_theta else rule.theta
    theta = _said(options, {name} if rule.sliding_theta else {name, "rope_theta"}, parameters, "rope_theta")
    base = options.number(name) if theta is None else positive(name, theta)
    if base <= 1:
        raise LayerError(f"{name} is {shown(base)}; a base of rotary positions is above 1")
    return base


def _width(rule: RotaryRule, options: Options, parameters: Mapping[str, object], head_width: int) -> int:
    part = _said(options, {"partial_rotary_factor", rule.partial} - {""}, parameters, "partial_rotary_factor")
    if part is None:
        part = options.number(rule.partial) if rule.partial else 1.0
    if (rule.is_whole or not rule.partial) and part != 1:
        raise LayerError(f"partial_rotary_factor is {shown(part)}, but this family's models rotate whole heads")
    width = int(head_width * positive("the rotated share of a head", part))
    if width % 2 or not 0 < width <= head_width:
        raise LayerError(f"{width} features of heads of {head_width} are rotated; expected an even number, at most all")
    return width


def _of(parameters: Mapping[str, object], name: str, default: float | None = None) -> float:
    return positive(f"{name} of the rotary scaling", parameters.get(name) or default)


def _original(options: Options, parameters: Mapping[str, object]) -> float:
    """Return the length of the sequences before the scaling."""
    name = "original_max_position_embeddings"
    length = _said(options, {name}, parameters, name)
    return options.number("max_position_embeddings") if length is None else positive(name, length)


def _llama3(plain: torch.Tensor, parameters: Mapping[str, object], original: float) -> torch.Tensor:
    """Return the frequencies of Llama 3.1: long waves are stretched, short ones kept, those between interpolated."""
    factor, low, high = (_of(parameters, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise LayerError("low_freq_factor of the rotary scaling must be below high_freq_factor")
    waves = 2 * math.pi / plain
    stretched = torch.where(waves > original / low, plain / factor, plain)
    smooth = (original / waves - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    is_between = ~(waves < original / high) & ~(waves > original / low)
    return torch.where(is_between, between, stretched)


def _yarn(
    powers: torch.Tensor, theta: float, options: Options, parameters: Mapping[str, object]
) -> tuple[torch.Tensor, float]:
    """Return the frequencies of YaRN (Peng et al. 2023), and the factor of cosine and sine."""
    original, width = _original(options, parameters), 2 * len(powers)
    given = parameters.get("factor")
    factor = options.number("max_position_embeddings") / original if given is None else _of(parameters, "factor")

    def magnitude(scale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention = magnitude()
    if parameters.get("attention_factor") is not None:
        attention = _of(parameters, "attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        attention = magnitude(_of(parameters, "mscale")) / magnitude(_of(parameters, "mscale_all_dim"))

    def feature(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = feature(_of(parameters, "beta_fast", 32)), feature(_of(parameters, "beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low + 0.001 * (low == high))).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(attention)
