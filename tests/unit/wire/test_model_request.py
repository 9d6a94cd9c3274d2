"""Requests for models: what they cost, and their limits."""

from functools import partial
from typing import Any

import pytest
import torch

from service.attention.cost import flops
from service.attention.engine import LoadedLayer
from service.attention.masks import Sizes
from service.errors import CostLimit, InvalidInput
from service.layers.catalog import ServedLayer
from service.models.encoder import Encoder
from service.models.served_model import ServedModel
from service.models.tokenizer import Tokenizer
from service.wire.attend_request import RequestLimits
from service.wire.model_request import MAX_TEXT, Checked, check_model_attend, check_states
from tests.integration.models import LAYERS, MAX_TOKENS, small_model
from tests.unit.models.encoders import CPU, loaded_layer

LIMITS = RequestLimits(1, 1024, 2**20, 2**20, 2**20)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    stored = small_model()
    layers = [ServedLayer(layer, loaded_layer(layer)) for layer in LAYERS]
    encoder = Encoder(stored, [layer.loaded for layer in layers], device=CPU)
    loaded = LoadedLayer(partial(Encoder, stored), torch.float32, variants={torch.float32: encoder})
    return ServedModel(stored, Tokenizer(stored.tokenizer, stored.options.vocabulary), layers, loaded)


def attend(model: ServedModel, limits: RequestLimits = LIMITS, **body: Any) -> Checked:
    return check_model_attend({"tokens": ["the"] * 5, "layer": 1, **body}, model, limits)


def test_a_request_costs_its_layer_and_all_that_the_model_computes_in_front_of_it(model):
    spec, feed_forward = LAYERS[0].spec, 2 * 2 * 5 * 16 * 32
    layer = flops(spec, Sizes(1, 4, 5, 5), None, None)
    first, second = (attend(model, layer=n)[0].cost for n in (0, 1))
    assert (first.flops, second.flops) == (layer, 2 * layer + feed_forward)
    assert second[:3] == (1, 5, 4 * 5 * 5)
    weights = attend(model, weights="heads")[0].cost
    assert weights.weights_bytes == 4 * 4 * 5 * 5
    assert weights.flops > second.flops
    states = [check_states({"tokens": ["the"] * 5, "layers": [n, 0]}, model, LIMITS)[0].cost for n in (1, 2)]
    assert [cost.flops for cost in states] == [layer + feed_forward, 2 * (layer + feed_forward)]


@pytest.mark.parametrize("check", [check_model_attend, check_states])
def test_a_sequence_has_at_most_as_many_tokens_as_the_model_has_positions(model, check):
    asked = {"layer": 0} if check is check_model_attend else {"layers": [0]}
    for text, tokens in (("the " * (MAX_TOKENS - 2), None), (None, ["the"] * MAX_TOKENS)):
        request = check({"text": text, "tokens": tokens, **asked}, model, LIMITS)
        assert request[0].cost.tokens == len(request[1]["tokens"]) == MAX_TOKENS
    for text, tokens in (("the " * (MAX_TOKENS - 1), None), (None, ["the"] * (MAX_TOKENS + 1))):
        with pytest.raises(InvalidInput, match=f"has {MAX_TOKENS + 1} tokens.* takes at most {MAX_TOKENS}"):
            check({"text": text, "tokens": tokens, **asked}, model, LIMITS)


def test_a_text_has_a_limit_of_characters(model):
    assert len(attend(model, tokens=None, text="the" + " " * (MAX_TEXT - 3))[1]["tokens"]) == 3
    bodies: list[dict[str, Any]] = [{"text": "a" * (MAX_TEXT + 1)}, {"text": "the", "text_pair": " " * (MAX_TEXT + 1)}]
    for body in bodies:
        with pytest.raises(CostLimit, match="131,073 characters, expected at most 131,072"):
            attend(model, tokens=None, **body)


@pytest.mark.parametrize(
    ("limit", "body"),
    [
        ({"max_tokens": 4}, {}),
        ({"max_cells": 99}, {}),
        ({"max_weights_bytes": 399}, {"weights": "heads"}),
        ({"max_table_bytes": 99}, {"masks": [{"kind": "bias", "values": [[0.0] * 5] * 5}]}),
    ],
)
def test_the_limits_are_those_of_attend(model, limit, body):
    attend(model, **body)
    with pytest.raises(CostLimit, match="the request needs"):
        attend(model, RequestLimits(**{**{name: getattr(LIMITS, name) for name in LIMITS.__slots__}, **limit}), **body)
