"""References: fetched one request at a time in all forms, and one other bit is a difference."""

import numpy as np
import pytest

from attention_load.attend_requests import FORMS, layer_requests
from attention_load.references import bits_digest, difference, fetch_digests, fetch_layers, read_answer
from tests.unit.loadtest.answering import (
    AnsweringService,
    answered,
    body_of,
    flip_last_bit,
    listed,
    spec,
    tensors,
)

LAYER = spec()
TENSORS = tensors(LAYER)
REQUESTS = layer_requests(listed(), seed=1, long_tokens=40)


@pytest.fixture
def service():
    return AnsweringService(LAYER, TENSORS, REQUESTS)


def test_every_request_is_sent_once_in_every_form(service):
    assert list(fetch_digests(service, REQUESTS)) == [request.id for request in REQUESTS]
    assert service.forms == list(FORMS) * len(REQUESTS)


@pytest.mark.parametrize("form", ["base64", "safetensors"])
def test_forms_that_differ_in_one_bit_give_no_reference(service, form):
    def damage(request, sent, arrays):
        if sent == form and request.kind == "long":
            flip_last_bit(arrays["output"])

    service.damage = damage
    with pytest.raises(ValueError, match=f"long request to odd, alone: {form} and lists differ in bits"):
        fetch_digests(service, REQUESTS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["short", "weights"])
def test_the_same_bits_are_no_difference_and_one_flipped_bit_is(service, form, kind):
    for request in [request for request in REQUESTS if request.kind == kind]:
        digest = fetch_digests(service, [request])[request.id]
        arrays = answered(LAYER, TENSORS, request)
        assert difference(digest, body_of(arrays, form), FORMS[form]) == ""
        for name in arrays:
            damaged = {other: array.copy() for other, array in arrays.items()}
            flip_last_bit(damaged[name])
            assert difference(digest, body_of(damaged, form), FORMS[form]) == "bits differ from the reference"


def test_a_reference_is_the_same_from_every_form():
    for request in REQUESTS:
        arrays = answered(LAYER, TENSORS, request)
        digests = {bits_digest(read_answer(body_of(arrays, form), kind)) for form, kind in FORMS.items()}
        assert digests == {bits_digest(arrays)}


def test_zero_and_minus_zero_have_other_bits():
    zeros = {"output": np.zeros((2, 2), np.float32)}
    digest = bits_digest(zeros)
    zeros["output"][0, 0] = -0.0
    assert difference(digest, body_of(zeros, "lists"), FORMS["lists"])


@pytest.mark.parametrize("other", [np.zeros((4, 1), np.float32), np.zeros((2, 2), np.int32)])
def test_the_same_bytes_in_another_shape_or_dtype_are_a_difference(other):
    assert bits_digest({"output": np.zeros((2, 2), np.float32)}) != bits_digest({"output": other})


def test_a_tensor_that_is_missing_or_named_otherwise_is_a_difference():
    ones = np.ones((2, 2), np.float32)
    digests = {bits_digest(x) for x in ({"output": ones}, {"weights": ones}, {"output": ones, "weights": ones})}
    assert len(digests) == 3


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"output": [[1], [2, 3]], "weights": null}', b"\xff" * 40])
@pytest.mark.parametrize("form", FORMS)
def test_an_unreadable_answer_is_a_difference(body, form):
    assert "cannot read" in difference("", body, FORMS[form])


def test_layers_are_all_that_are_listed_or_those_named(service):
    assert [layer["name"] for layer in fetch_layers(service, "")] == ["odd", "even"]
    assert [layer["name"] for layer in fetch_layers(service, "even, odd")] == ["even", "odd"]
    with pytest.raises(ValueError, match="has no layer other"):
        fetch_layers(service, "odd,other")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"layers": []}', b'{"layers": [1]}'])
def test_an_answer_without_a_list_of_layers_is_an_error(body):
    with pytest.raises((ValueError, TypeError)):
        fetch_layers(lambda path: body, "")
