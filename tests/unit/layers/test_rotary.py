"""Rotary positions: frequencies equal those of transformers 5.24, which are written here."""

from __future__ import annotations

import pytest

from service.errors import LayerError
from service.layers.family import FULL, SLIDING, RotaryRule
from service.layers.options import Options
from service.layers.rotary import rotary

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0}
EXACT = {**YARN, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = {
    "linear": (
        {"type": "linear", "factor": 3.0},
        (0.3333333432674408, 0.10540925711393356, 0.03333333507180214, 0.010540925897657871), 1.0,
    ),
    "llama3": (
        {**LLAMA3, "original_max_position_embeddings": 32},
        (1.0, 0.0958399772644043, 0.012500000186264515, 0.0039528473280370235), 1.0,
    ),
    "yarn": (YARN, (1.0, 0.19764235615730286, 0.02500000037252903, 0.007905694656074047), 1.138629436111989),
    "exact yarn": (EXACT, (1.0, 0.16058915853500366, 0.02500000037252903, 0.007905694656074047), 1.0648216253695715),
}  # fmt: skip


def made(**said: object):
    return rotary(RotaryRule(), Options(said), FULL, 8)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("scaling", "frequencies", "factor"), SCALINGS.values(), ids=SCALINGS)
def test_a_scaling_gives_the_frequencies_of_transformers(place, scaling, frequencies, factor):
    found = made(rope_theta=100.0, **{place: scaling})
    assert found.inverse_frequencies == pytest.approx(frequencies, rel=1e-6)
    assert found.attention_factor == pytest.approx(factor)


def test_the_length_before_the_scaling_may_stand_at_the_top_but_not_twice():
    short = {key: value for key, value in YARN.items() if not key.startswith("original")}
    for name in ("original_max_position_embeddings", "max_position_embeddings"):
        assert made(rope_theta=100.0, rope_scaling=short, **{name: 32}) == made(rope_theta=100.0, rope_scaling=YARN)
    with pytest.raises(LayerError, match="contradicts itself: 'original_max_position_embeddings' 16"):
        made(rope_theta=100.0, rope_scaling=YARN, original_max_position_embeddings=16)


def test_the_parameters_may_be_those_of_a_kind_of_layers():
    nested = {FULL: {"rope_theta": 100.0}, SLIDING: {"rope_theta": 10.0, "rope_type": "default"}}
    assert made(rope_parameters=nested) == made(rope_theta=100.0)
    assert rotary(RotaryRule(), Options({"rope_parameters": nested}), SLIDING, 8) == made(rope_theta=10.0)
    with pytest.raises(LayerError, match="has no object for full_attention"):
        made(rope_parameters={SLIDING: {}})


@pytest.mark.parametrize("theta", [1, 0.5, 0, -2, True, "x", float("inf"), float("nan"), [10]])
def test_a_base_that_is_none_is_refused(theta):
    with pytest.raises(LayerError):
        made(rope_theta=theta)


@pytest.mark.parametrize("part", [0.0, 0.3, 2.0, "1"])
def test_the_rotated_share_is_an_even_number_of_features(part):
    rule = RotaryRule(partial="rotary_pct")
    with pytest.raises(LayerError):
        rotary(rule, Options({"rope_theta": 100.0, "rotary_pct": part}), FULL, 10)
    found = rotary(rule, Options({"rope_theta": 100.0, "rotary_pct": 0.4}), FULL, 10)
    assert found is not None
    assert found.width == 4


def test_a_share_that_codes_of_a_family_disagree_on_is_refused():
    """transformers 5 ignores NomicBERT's share, and its own code does not."""
    rule = RotaryRule(partial="rotary_pct", is_whole=True)
    for said in ({"rotary_pct": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        with pytest.raises(LayerError, match=r"is 0\.5, but this family's models rotate whole heads"):
            rotary(rule, Options({"rope_theta": 100.0, **said}), FULL, 8)
    assert rotary(rule, Options({"rope_theta": 100.0, "rotary_pct": 1.0}), FULL, 8) == made(rope_theta=100.0)


TWO_BASES = RotaryRule(sliding_theta="rope_local_base_freq")


def test_a_family_of_two_bases_takes_the_scalings_of_transformers_5():
    said = {"rope_theta": 100.0, "rope_local_base_freq": 10.0}
    found = rotary(TWO_BASES, Options(said | {"rope_scaling": YARN}), FULL, 8)
    assert found == made(rope_theta=100.0, rope_scaling={**YARN, "finetuned": True})
    for nested in ({FULL: YARN}, {FULL: YARN, SLIDING: None}):  # the other kind has its defaults
        assert rotary(TWO_BASES, Options(said | {"rope_parameters": nested}), SLIDING, 8) == made(rope_theta=10.0)


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 3.0}, {**YARN, "truncate": False}])
def test_a_family_of_two_bases_refuses_what_transformers_4_and_5_read_differently(scaling):
    said = {"rope_theta": 100.0, "rope_local_base_freq": 10.0, "rope_scaling": scaling}
    with pytest.raises(LayerError, match="which transformers 5 does not read"):
        rotary(TWO_BASES, Options(said), FULL, 8)


def test_a_scaling_that_a_family_does_not_compute_is_refused_with_that_reason():
    with pytest.raises(LayerError, match="'yarn': this family's models do not compute it"):
        rotary(RotaryRule(scalings=("default",)), Options({"rope_theta": 100.0, "rope_scaling": YARN}), FULL, 8)
