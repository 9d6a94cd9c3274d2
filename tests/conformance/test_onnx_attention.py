"""Every case that the package onnx has for its Attention operator, over POST /v1/attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.conformance.onnx_cases import HOW_TO_INSTALL, onnx_cases, question_of, rtol_of

CASES = onnx_cases()
ANSWERS = {"Y": "output", "present_key": "present_key", "present_value": "present_value"}
pytestmark = pytest.mark.skipif(not CASES, reason=HOW_TO_INSTALL)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_answer_is_the_one_that_onnx_expects(attention, case):
    question = question_of(case)
    found = attention(question.tensors, question.masks, **question.fields)
    for name, expected in case.outputs.items():
        answer = found[ANSWERS.get(name, "weights" if "weights" in found else "scores")]
        np.testing.assert_allclose(
            answer.double().numpy(), expected.astype(np.float64), rtol=rtol_of(case), atol=case.atol, err_msg=name
        )


@pytest.mark.parametrize("name", ["present_key", "present_value"])
def test_the_present_has_the_bits_of_past_and_new_rows(attention, name):
    cases = [case for case in CASES if name in case.outputs]
    assert cases
    for case in cases:
        question = question_of(case)
        found = attention(question.tensors, question.masks, **question.fields)[name]
        assert torch.equal(found, torch.from_numpy(case.outputs[name])), case.name


def test_the_package_has_93_cases():
    assert len(CASES) == 93
    assert {case.opset for case in CASES} == {23, 24, 25}
