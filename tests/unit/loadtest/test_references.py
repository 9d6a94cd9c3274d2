"""References: taken from the target alone, in all forms, and one bit is enough to differ."""

import numpy as np
import pytest

from attention_load.question import FORMS, layer_questions
from attention_load.references import references_digest, take_references
from attention_load.target import TargetFailed
from tests.unit.loadtest.answering import AnsweringTarget, answered, body_of, facts, flip_last_bit, spec, tensors

LAYER = spec()
TENSORS = tensors(LAYER)
QUESTIONS = layer_questions(facts(LAYER), seed=1, long_tokens=40)


@pytest.fixture
def target():
    return AnsweringTarget(LAYER, TENSORS, QUESTIONS)


def test_every_question_is_asked_once_in_every_form(target):
    found = take_references(target, QUESTIONS)
    assert [reference.question for reference in found] == QUESTIONS
    assert target.asked == list(FORMS) * len(QUESTIONS)


@pytest.mark.parametrize("form", ["base64", "safetensors"])
def test_forms_that_disagree_in_one_bit_are_no_reference(target, form):
    def damage(question, asked, arrays):
        if asked == form and question.kind == "long":
            flip_last_bit(arrays["output"])

    target.damage = damage
    with pytest.raises(TargetFailed, match=f"long to odd as {form} is not as lists: 1 of 320 values of output"):
        take_references(target, QUESTIONS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["short", "weights"])
def test_an_answer_with_the_same_bits_has_no_difference_and_one_flipped_bit_is_told(target, form, kind):
    for reference in take_references(target, [question for question in QUESTIONS if question.kind == kind]):
        arrays = answered(LAYER, TENSORS, reference.question)
        assert reference.difference(body_of(arrays, form), FORMS[form]) == ""
        for name in arrays:
            damaged = {other: array.copy() for other, array in arrays.items()}
            flip_last_bit(damaged[name])
            told = reference.difference(body_of(damaged, form), FORMS[form])
            assert told == f"1 of {arrays[name].size} values of {name} have other bits"


def test_zero_and_minus_zero_are_other_bits(target):
    reference = take_references(target, QUESTIONS[:1])[0]
    arrays = {name: np.zeros_like(array) for name, array in reference.arrays.items()}
    zeros = type(reference)(reference.question, {name: array.copy() for name, array in arrays.items()})
    arrays["output"][0, 0] = -0.0
    assert zeros.difference(body_of(arrays, "lists"), FORMS["lists"]).startswith("1 of")


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"output": [[1], [2, 3]], "weights": null}', b"\xff" * 40])
@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_read_is_told_as_a_difference(target, body, form):
    reference = take_references(target, QUESTIONS[:1])[0]
    assert "cannot be read" in reference.difference(body, FORMS[form])


def test_a_shape_that_is_not_the_references_is_told(target):
    reference = take_references(target, QUESTIONS[:1])[0]
    shorter = {"output": reference.arrays["output"][:3]}
    assert reference.difference(body_of(shorter, "base64"), FORMS["base64"]) == (
        "output is float32[3, 8] instead of float32[16, 8]"
    )


def test_the_digest_tells_one_bit(target):
    found = take_references(target, QUESTIONS)
    before = references_digest(found)
    assert references_digest(take_references(target, QUESTIONS)) == before
    output = found[3].arrays["output"].copy()
    flip_last_bit(output)
    found[3] = type(found[3])(found[3].question, {**found[3].arrays, "output": output})
    assert references_digest(found) != before
