"""The encoder: equal to a float64 reference, the same bits whatever else runs, and the same as its layers' own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from service.attention import reference
from service.attention.call import Call, WeightsWanted
from service.attention.masks import CombinedMask, Sizes, causal
from service.attention.progress import Progress, Stopped
from service.errors import LayerError
from service.models.families import BY_MODEL
from tests.attention_fixtures import full_weights
from tests.unit.layers.checkpoints import stored
from tests.unit.models.encoders import CONFIGS, attend_call, checkpoint, encoder, imported, states_call

IDS, TYPES = [2, 5, 9, 30, 3, 31, 40, 3], [0, 0, 0, 0, 0, 1, 1, 1]


def gelu(x):
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def expected_states(model, layers, ids=IDS, types=TYPES):
    """The hidden states by the definition (Devlin et al. 2019), in float64."""
    t, options = {name: tensor.double().numpy() for name, tensor in model.tensors.items()}, model.options

    def norm(name, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + options.eps)
        return scaled * t[f"{name}.weight"] + t[f"{name}.bias"]

    x = t["embeddings.word"][ids] + t["embeddings.position"][np.arange(len(ids)) + options.position_offset]
    if options.types:
        x = x + t["embeddings.type"][[min(kind, options.types - 1) for kind in types]]
    x = norm("embeddings.norm", x)
    if "embeddings.project.weight" in t:
        x = x @ t["embeddings.project.weight"].T + t["embeddings.project.bias"]
    states = [x]
    for n, layer in enumerate(layers):
        tensors = {name: tensor.numpy() for name, tensor in layer.tensors.items()}
        x = norm(f"{n}.attention_norm", x + reference.attend(layer.spec, tensors, x, x, x)[0])
        inner = ACTIVATIONS[options.activation](x @ t[f"{n}.inner.weight"].T + t[f"{n}.inner.bias"])
        x = norm(f"{n}.norm", x + inner @ t[f"{n}.outer.weight"].T + t[f"{n}.outer.bias"])
        states.append(x)
    return np.stack(states)


@pytest.fixture(scope="module", params=CONFIGS)
def tiny(request, tmp_path_factory):
    return imported(checkpoint(tmp_path_factory.mktemp(request.param), request.param))


def test_the_states_are_those_of_the_definition(tiny):
    answer = encoder(*tiny).forward([states_call(IDS, TYPES, 0, 1, 2)])[0]
    np.testing.assert_allclose(answer.output, expected_states(*tiny), atol=2e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish"])
def test_every_activation_is_the_one_of_its_name(tmp_path, activation):
    made = imported(checkpoint(tmp_path, hidden_act=activation))
    answer = encoder(*made).forward([states_call(IDS, TYPES, 2)])[0]
    np.testing.assert_allclose(answer.output[0], expected_states(*made)[2], atol=2e-5)


def test_states_come_in_the_requested_order_and_have_the_bits_of_one_asked_alone(tiny):
    runner = encoder(*tiny)
    both = runner.forward([states_call(IDS, TYPES, 2, 0)])[0].output
    for place, n in enumerate((2, 0)):
        assert torch.equal(both[place], runner.forward([states_call(IDS, TYPES, n)])[0].output[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_attends_as_it_does_to_the_states_sent_to_it(tiny, dtype, layer):
    model, layers = tiny
    runner, sizes = encoder(model, layers, dtype), Sizes(1, 2, len(IDS), len(IDS))
    parts: dict[str, Any] = {"mask": CombinedMask(sizes, (causal(sizes, 0),)), "weights": WeightsWanted("heads")}
    states = runner.forward([states_call(IDS, [0] * len(IDS), layer)])[0].output
    assert states.dtype == torch.float32
    answer = runner.forward([attend_call(IDS, layer, 8, **parts)])[0]
    own = runner._layers[layer].forward([Call(states, **parts)])[0]
    assert torch.equal(answer.output, own.output)
    assert torch.equal(*(full_weights(found) for found in (answer, own)))


def test_a_call_has_its_bits_alone_and_in_a_batch(tiny):
    runner, calls = encoder(*tiny), [states_call(IDS[:length], TYPES[:length], 1, 2) for length in range(1, 9)]
    alone = [runner.forward([call])[0].output for call in calls]
    for answer, output in zip(runner.forward(calls), alone, strict=True):
        assert torch.equal(answer.output, output)


def test_a_stopped_call_ends_between_two_layers(tiny):
    runner, progress = encoder(*tiny), Progress()
    progress.stop()
    with progress, pytest.raises(Stopped):
        runner.forward([states_call(IDS, TYPES, 2)])


def test_padding_takes_no_position_where_a_family_has_an_offset(tmp_path):
    """As `transformers` counts the positions of RoBERTa."""
    model, layers = imported(checkpoint(tmp_path, "roberta"))
    assert (model.options.position_offset, model.options.max_tokens) == (2, 38)
    states = encoder(model, layers).forward([states_call([5, 1, 6], [0] * 3, 0)])[0].output[0]
    word, position = model.tensors["embeddings.word"], model.tensors["embeddings.position"]
    rows = word[[5, 1, 6]] + position[[2, 1, 3]] + model.tensors["embeddings.type"][0]
    weight, bias = (model.tensors[f"embeddings.norm.{kind}"] for kind in ("weight", "bias"))
    expected = torch.nn.functional.layer_norm(rows, (8,), weight, bias, 1e-5)
    torch.testing.assert_close(states, expected)


def test_a_layer_of_another_width_is_refused(tmp_path):
    model, _ = imported(checkpoint(tmp_path))
    with pytest.raises(LayerError, match="widths 6, 6, 6, 6; the model has 8"):
        encoder(model, [stored(), stored()])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_cost_grows_with_each_layer_and_counts_both_products_of_its_block(tiny, depth):
    runner = encoder(*tiny)
    per_layer = runner.flops(10, 1)
    assert runner.flops(10, depth) == depth * per_layer
    assert per_layer > 2 * 2 * 10 * 8 * 16


def test_every_family_has_a_checkpoint_here():
    assert {BY_MODEL[name].name for name in CONFIGS} == {family.name for family in BY_MODEL.values()}
