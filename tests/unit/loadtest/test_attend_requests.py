"""Attend requests: every kind, the same in every process, never larger than the layer accepts."""

import json

import numpy as np
import safetensors.numpy

from attention_load.attend_requests import KINDS, attention_requests, layer_requests
from tests.unit.loadtest.answering import listed


def requests(*, seed=1, long_tokens=300, limits=None, **changes):
    return layer_requests(listed(limits=limits, **changes), seed=seed, long_tokens=long_tokens)


def test_a_layer_gets_every_kind_and_each_request_its_own_id():
    found = requests() + attention_requests(1)
    assert {request.kind for request in found} == set(KINDS)
    assert len({request.id for request in found}) == len(found)


def test_the_same_seed_makes_the_same_bodies_and_another_does_not():
    one, same, other = (b"".join(x.bodies["lists"] for x in requests(seed=seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_a_request_without_a_layer_goes_to_its_route_and_says_its_layout():
    found = attention_requests(1)[0]
    assert found.path == "/v1/attention"
    assert json.loads(found.bodies["lists"])["layout"] == "packed"
    assert requests()[0].path != found.path


def test_the_kinds_have_their_lengths():
    lengths = {kind: {len(x.tensors["query"]) for x in requests() if x.kind == kind} for kind in KINDS}
    assert lengths["short"] == {16}
    assert lengths["long"] == {300}
    assert len(lengths["mixed"]) > 1
    assert all(8 <= rows <= 256 for rows in lengths["mixed"])


def test_some_are_causal_and_all_forms_of_weights_are_requested():
    found = requests()
    assert {request.is_causal for request in found} == {True, False}
    assert {request.weights["form"] for request in found if request.kind == "weights"} == {"heads", "mean", "top_k"}
    assert b"causal" in next(request for request in found if request.is_causal).bodies["lists"]


def test_a_layer_of_several_widths_gets_key_and_value():
    assert {name: array.shape for name, array in requests()[0].tensors.items()} == {
        "query": (16, 8),
        "key": (16, 6),
        "value": (16, 10),
    }


def test_a_layer_of_one_width_gets_the_query_alone():
    assert set(requests(key_width=8, value_width=8)[0].tensors) == {"query"}


def test_a_value_as_wide_as_the_query_is_sent_where_the_key_is_not():
    assert set(requests(key_width=6, value_width=8)[0].tensors) == {"query", "key", "value"}


def test_the_three_bodies_are_one_request():
    found = next(x for x in requests() if x.kind == "weights" and x.weights["form"] == "top_k")
    lists, packed = json.loads(found.bodies["lists"]), json.loads(found.bodies["base64"])
    assert np.array_equal(np.array(lists["query"], np.float32), found.tensors["query"])
    assert packed["query"]["shape"] == [128, 8]
    loaded = safetensors.numpy.load(found.bodies["safetensors"])
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        name: array.tobytes() for name, array in found.tensors.items()
    }
    assert lists["weights"] == packed["weights"] == {"form": "top_k", "k": 4}


def test_no_request_is_larger_than_the_service_accepts():
    for limits in ({"body_bytes": 4000}, {"tokens": 30}, {"cells": 4 * 12 * 12}):
        for request in requests(limits=limits):
            rows = len(request.tensors["query"])
            assert all(len(body) <= limits.get("body_bytes", 1 << 30) for body in request.bodies.values())
            assert 2 * rows <= limits.get("tokens", 1 << 30)
            assert 4 * rows**2 <= limits.get("cells", 1 << 30)


def test_the_k_of_a_short_request_is_no_more_than_its_keys():
    found = next(x for x in requests(limits={"tokens": 4}) if x.weights and x.weights["form"] == "top_k")
    assert (len(found.tensors["query"]), found.weights["k"]) == (2, 2)
