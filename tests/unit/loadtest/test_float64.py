"""The load test's own float64 reference: that it agrees with the suite's, and that it finds wrong references."""

import json

import numpy as np
import pytest
import safetensors.numpy

from attention_load.float64 import attention, check_references
from attention_load.question import layer_questions
from attention_load.references import Reference
from tests import reference
from tests.unit.loadtest.answering import answered, facts, spec, tensors

SPECS = {
    "appended": spec(),
    "plain": spec(key_width=8, value_width=8, has_bias_kv=False, add_zero_attn=False, num_kv_heads=4, biases=()),
    "no-output": spec(has_output=False, out_width=12, biases=("key",), has_bias_kv=False),
}


def stored(directory, layer, parameters, *, digest="sha256:1"):
    told = json.dumps({**layer.to_json(), "digest": digest})
    safetensors.numpy.save_file(parameters, directory / "odd.safetensors", {"spec": told})


def references(layer, parameters):
    questions = layer_questions(facts(layer), seed=1, long_tokens=40)
    return [Reference(question, answered(layer, parameters, question)) for question in questions]


@pytest.mark.parametrize("layer", SPECS.values(), ids=SPECS)
def test_it_agrees_with_the_reference_of_the_suite(layer):
    parameters = tensors(layer)
    for question in layer_questions(facts(layer), seed=1, long_tokens=40):
        query = question.tensors["query"]
        key = question.tensors.get("key", query)
        masks = [reference.Causal(0)] if question.is_causal else []
        inputs = (query[None], key[None], question.tensors.get("value", key)[None])
        wanted = reference.multi_head_attention(layer, parameters, inputs, masks)
        wide = {name: array.astype(np.float64) for name, array in parameters.items()}
        for ours, theirs in zip(attention(layer.to_json(), wide, question), wanted, strict=True):
            np.testing.assert_allclose(ours, theirs[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer", SPECS.values(), ids=SPECS)
def test_right_references_pass(tmp_path, layer):
    parameters = tensors(layer)
    stored(tmp_path, layer, parameters)
    found = references(layer, parameters)
    check = check_references([facts(layer)], found, tmp_path)
    assert (check.checked, check.wrong, check.not_checked) == (len(found), [], [])
    assert 0 < check.worst < 0.1


@pytest.mark.parametrize("name", ["output", "weights", "weights.values", "weights.indices", "weights.rest"])
def test_a_value_that_is_off_in_any_tensor_is_found(tmp_path, name):
    layer = spec()
    parameters = tensors(layer)
    stored(tmp_path, layer, parameters)
    for found in references(layer, parameters):
        if name in found.arrays:
            array = found.arrays[name]
            array[0] = array[0] + 1 if name == "weights.indices" else array[0] + 0.01
            assert len(check_references([facts(layer)], [found], tmp_path).wrong) == 1


def test_a_layer_with_swapped_projections_is_found(tmp_path):
    layer = SPECS["plain"]
    parameters = tensors(layer)
    swapped = {**parameters, "query.weight": parameters["key.weight"], "key.weight": parameters["query.weight"].copy()}
    stored(tmp_path, layer, swapped)
    check = check_references([facts(layer)], references(layer, parameters), tmp_path)
    assert check.wrong


def test_nan_is_not_within_any_tolerance(tmp_path):
    layer = spec()
    parameters = tensors(layer)
    stored(tmp_path, layer, parameters)
    found = references(layer, parameters)[0]
    found.arrays["output"][0, 0] = np.nan
    assert check_references([facts(layer)], [found], tmp_path).wrong


def test_without_a_file_of_this_version_nothing_is_checked_and_that_is_told(tmp_path):
    layer = spec()
    parameters = tensors(layer)
    found = references(layer, parameters)
    missing = check_references([facts(layer)], found, tmp_path)
    assert (missing.checked, len(missing.not_checked)) == (0, 1)
    stored(tmp_path, layer, parameters, digest="sha256:2")
    other = check_references([facts(layer)], found, tmp_path)
    assert (other.checked, other.not_checked) == (0, ["odd: the file has another digest"])
