"""Questions: every kind, the same for every process, never longer than the layer takes."""

import json

import numpy as np
import safetensors.numpy

from attention_load.question import KINDS, layer_questions
from tests.unit.loadtest.answering import facts, spec


def questions(layer=None, *, seed=1, long_tokens=300, **limits):
    return layer_questions(facts(layer or spec(), **limits), seed=seed, long_tokens=long_tokens)


def test_a_layer_is_asked_every_kind():
    assert {question.kind for question in questions()} == set(KINDS)


def test_the_same_seed_asks_the_same_and_another_does_not():
    one, same, other = (b"".join(q.bodies["lists"] for q in questions(seed=seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_lengths_are_what_the_kinds_say():
    found = questions()
    assert {question.rows for question in found if question.kind == "short"} == {16}
    assert {question.rows for question in found if question.kind == "long"} == {300}
    mixed = {question.rows for question in found if question.kind == "mixed"}
    assert len(mixed) > 1
    assert min(mixed) >= 8
    assert max(mixed) <= 256


def test_some_are_causal_and_all_forms_of_weights_are_asked_for():
    found = questions()
    assert {question.is_causal for question in found} == {True, False}
    assert {question.weights["form"] for question in found if question.kind == "weights"} == {"heads", "mean", "top_k"}


def test_a_question_brings_what_a_layer_of_other_widths_needs():
    found = questions()[0]
    assert {name: array.shape for name, array in found.tensors.items()} == {
        "query": (16, 8),
        "key": (16, 6),
        "value": (16, 10),
    }


def test_a_layer_of_one_width_is_asked_with_its_query_alone():
    layer = spec(query_width=8, key_width=8, value_width=8)
    assert set(questions(layer)[0].tensors) == {"query"}


def test_the_three_bodies_of_a_question_are_one_question():
    found = next(q for q in questions() if q.kind == "weights" and q.weights["form"] == "top_k")
    lists, packed = json.loads(found.bodies["lists"]), json.loads(found.bodies["base64"])
    assert np.array_equal(np.array(lists["query"], np.float32), found.tensors["query"])
    assert packed["query"]["shape"] == [128, 8]
    loaded = safetensors.numpy.load(found.bodies["safetensors"])
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        name: array.tobytes() for name, array in found.tensors.items()
    }
    assert lists["weights"] == packed["weights"] == {"form": "top_k", "k": 4}


def test_no_question_is_longer_than_the_target_permits():
    for limits in ({"max_body_bytes": 4000}, {"max_tokens": 30}, {"max_cells": 4 * 12 * 12}):
        found = questions(**limits)
        for question in found:
            assert all(len(body) <= limits.get("max_body_bytes", 1 << 30) for body in question.bodies.values())
            assert 2 * question.rows <= limits.get("max_tokens", 1 << 30)
            assert 4 * question.rows**2 <= limits.get("max_cells", 1 << 30)


def test_the_k_of_a_short_question_is_no_more_than_its_keys():
    found = next(q for q in questions(max_tokens=4) if q.weights and q.weights["form"] == "top_k")
    assert (found.rows, found.weights["k"]) == (2, 2)
