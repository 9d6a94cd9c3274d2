"""Keras, Flax and JAX over POST /v1/attention: each gets the arguments that its convention gets, and answers in float64."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attention_client import AsyncClient
from tests.conformance import parity_cases
from tests.conformance.parity_cases import CASES, DTYPES, MASKED_ROWS
from tests.conformance.parity_environment import OWN, run_program

HOW_TO_INSTALL = "Keras, Flax and JAX are not installed: make install-parity"
IS_INSTALLED = OWN.exists() or all(importlib.util.find_spec(name) for name in ("jax", "flax", "keras"))
pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason=HOW_TO_INSTALL),
    pytest.mark.timeout(300),
    pytest.mark.long,
]
MASKED = 1
GRID = [(case, dtype) for case in CASES for dtype in case.dtypes]


def answers_of(directory: Path, calls: list[tuple[str, dict[str, Any]]]) -> list[np.ndarray]:
    """The answers of the systems, computed in a process of their own: JAX starts threads that would outlive a test."""
    directory.mkdir()
    arrays = {
        f"{place}/{name}": value
        for place, (_, arguments) in enumerate(calls)
        for name, value in arguments.items()
        if isinstance(value, np.ndarray)
    }
    plain = [{name: x for name, x in arguments.items() if not isinstance(x, np.ndarray)} for _, arguments in calls]
    cases = [{"call": call, "arguments": found} for (call, _), found in zip(calls, plain, strict=True)]
    np.savez(directory / "arrays.npz", allow_pickle=False, **arrays)
    (directory / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    # Each call is compiled once, for a few numbers.
    compiling = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    run_program("parity_answers.py", directory, KERAS_BACKEND="jax", **compiling)
    with np.load(directory / "answers.npz") as found:
        return [found[str(place)] for place in range(len(calls))]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[object, np.ndarray]:
    """The answer of each case and dtype, and of each masked row by its place."""
    calls = {(case.name, dtype): (case.call, case.given(dtype)) for case, dtype in GRID} | {
        place: (case.call, case.with_masked_row(MASKED) | options)
        for place, (case, options, _) in enumerate(MASKED_ROWS)
    }
    return dict(zip(calls, answers_of(tmp_path_factory.mktemp("parity") / "calls", list(calls.values())), strict=True))


def asked(attention, arguments):
    async def ask():
        transport = attention.service.transport
        async with AsyncClient("http://service", transport=transport) as client:
            return await client.attention(**arguments)

    return attention.runner.run(ask())


def tolerance(case: parity_cases.ParityCase, dtype: str) -> float:
    """That of float64 is the system's; a dtype of 16 bits may also differ by one unit in the last place."""
    kind = parity_cases.numpy_dtype(dtype)
    if dtype == "float64":
        return case.system.tolerance
    return DTYPES[dtype] + (float(ml_dtypes.finfo(kind).eps) if kind.itemsize == 2 else 0.0)


@pytest.mark.parametrize(
    ("case", "dtype"), GRID, ids=[f"{case.name}, {dtype}".replace(", ", "-") for case, dtype in GRID]
)
def test_the_output_is_the_one_of_the_system_in_float64(attention, answers, case, dtype):
    answer, expected = asked(attention, case.asked(dtype)), answers[case.name, dtype]
    assert answer.output.dtype == parity_cases.numpy_dtype(dtype)
    found = case.output(answer.output)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance(case, dtype) * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(
    "place", range(len(MASKED_ROWS)), ids=[f"{case.call}-{there}" for case, _, there in MASKED_ROWS]
)
def test_a_masked_row_is_zeros_here_and_what_the_page_says_there(attention, answers, place):
    case, _, there = MASKED_ROWS[place]
    arguments, expected = case.asked("float64", case.with_masked_row(MASKED)), answers[place]
    answer = asked(attention, arguments).output
    assert not answer[:, MASKED].any()
    mean = answer.copy()
    mean[:, MASKED] = arguments["value"].mean(axis=1)
    np.testing.assert_allclose(case.output(mean if there == "mean" else answer), expected, atol=1e-5)
