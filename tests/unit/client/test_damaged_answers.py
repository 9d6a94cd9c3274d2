"""Damaged answers: whatever is wrong with one, the call raises BadAnswer, or returns what was asked for with its types."""

import builtins
import json
import math
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client import AttentionAnswer, BadAnswer, Client, TopK, Weights
from attention_client.answer import Batch, Timing
from tests.unit.client.answering import FACTS, LAYER, MEDIA_TYPE, Answering, answer_of, file_of

X = np.arange(6, dtype=np.float32).reshape(3, 2)
HEADS = {"output": torch.tensor(X), "weights": torch.ones(4, 3, 3)}
TOP = {
    "output": torch.tensor(X),
    "weights.values": torch.ones(4, 3, 2),
    "weights.indices": torch.ones(4, 3, 2, dtype=torch.int32),
    "weights.rest": torch.ones(4, 3),
}
ODD = st.one_of(
    st.none(), st.booleans(), st.sampled_from([10**400, -(10**400), 10**5000, math.nan, math.inf, -1, "\ud800", "\x1b[2J"]),
    st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.none(), max_size=2),
)  # fmt: skip


@st.composite
def damaged(draw: Any, document: Any) -> Any:
    """The document with one value, at any depth, replaced, removed or renamed."""
    if not isinstance(document, dict) or not document or draw(st.integers(0, 3)) == 0:
        return draw(ODD)
    name = draw(st.sampled_from(sorted(document)))
    changed = {key: value for key, value in document.items() if key != name}
    if draw(st.integers(0, 4)):
        changed[draw(st.sampled_from([name, name, name, "x"]))] = draw(damaged(document[name]))
    return changed


def ask(response: httpx2.Response, **options: Any) -> Any:
    with Client(transport=Answering(response).transport) as client:
        return client.attend("small", X, **options)


def body(content: bytes) -> httpx2.Response:
    return httpx2.Response(200, content=content, headers={"content-type": MEDIA_TYPE})


def text_of(document: Any) -> str:
    """JSON with every number that Python's parser may meet, also one of more digits than Python writes."""
    return json.dumps(document, default=str) if not _is_huge(document) else '{"masked_rows": 1' + "0" * 5000 + "}"


def _is_huge(document: Any) -> bool:
    if isinstance(document, dict):
        return any(map(_is_huge, document.values()))
    return isinstance(document, int) and abs(document) >= 10**4000


def check_right(answer: Any, form: str) -> None:
    assert (answer.output.dtype, answer.output.shape[:-1]) == (np.float32, (3,))
    found = [answer.weights]
    if form == "top_k":
        assert isinstance(answer.weights, TopK)
        found = [answer.weights.values, answer.weights.rest]
        assert answer.weights.indices.dtype == np.int32
    assert all(array.dtype in (np.float16, np.float32, np.float64) for array in found)
    assert type(answer.masked_rows) is int
    assert (type(answer.layer), type(answer.digest)) == (str, str)
    assert isinstance(answer.batch, Batch)
    assert {type(count) for count in answer.batch} == {int}
    assert isinstance(answer.timing_ms, Timing)
    assert all(type(ms) is float and math.isfinite(ms) for ms in answer.timing_ms)
    assert repr(answer).isprintable()


@settings(max_examples=150, deadline=None)
@given(damaged(FACTS), st.sampled_from(["heads", "top_k"]))
def test_damaged_facts_are_one_typed_error_or_the_right_answer(facts, form):
    tensors, weights = (HEADS, "heads") if form == "heads" else (TOP, Weights("top_k", k=2))
    try:
        answer = ask(body(file_of(tensors, text_of(facts))), weights=weights)
    except BadAnswer:
        return
    check_right(answer, form)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_file_is_one_typed_error_or_the_right_answer(data):
    """Bytes are replaced, cut out and put in, in the header and at its border; damage among the numbers cannot be seen."""
    content = bytearray(file_of(HEADS))
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, end))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        answer = ask(body(bytes(content)), weights="heads")
    except BadAnswer:
        return
    check_right(answer, "heads")


@settings(max_examples=100, deadline=None)
@given(damaged(LAYER))
def test_a_damaged_layer_is_one_typed_error_or_the_right_layer(facts):
    response = httpx2.Response(200, content=text_of(facts).encode("utf-8", "surrogatepass"))
    try:
        with Client(transport=Answering(response).transport) as client:
            layer = client.layer("small")
    except BadAnswer:
        return
    assert (type(layer.name), type(layer.digest), type(layer.limits), type(layer.facts)) == (str, str, dict, dict)
    widths = (layer.query_width, layer.key_width, layer.value_width, layer.out_width, layer.num_heads)
    assert {type(width) for width in widths} == {int}


@pytest.mark.parametrize("name", ["decode", "queue", "compute", "total"])
@pytest.mark.parametrize(
    "value", ["1" + "0" * 400, "1" + "0" * 5000, "1e999", "NaN", "-Infinity", "true", "null", '"5"', "[1]"]
)
def test_a_time_that_is_no_finite_number_is_one_typed_error(name, value):
    facts = json.dumps({**FACTS, "timing_ms": {**FACTS["timing_ms"], name: "here"}}).replace('"here"', value)
    with pytest.raises(BadAnswer, match="damaged"):
        ask(answer_of(HEADS, facts), weights="heads")


@pytest.mark.parametrize(
    "damage", [{"weights": torch.ones(4, 3, 3).int()}, {"weights": torch.ones(4, 3, 3).bfloat16()}]
)
def test_weights_of_another_dtype_are_one_typed_error(damage):
    with pytest.raises(BadAnswer, match="it lacks weights in the requested dtype"):
        ask(answer_of(HEADS | damage), weights="heads")


def test_an_answer_without_the_requested_tensors_is_one_typed_error():
    with pytest.raises(BadAnswer, match="it lacks weights"):
        ask(answer_of({"output": torch.tensor(X)}), weights="heads")
    with (
        Client(transport=Answering(answer_of({"output": torch.tensor(X)})).transport) as client,
        pytest.raises(BadAnswer, match="it lacks scores in the requested dtype"),
    ):
        client.attention(X, X, X, lse=True, scores="masked", present=True)


@pytest.mark.parametrize(
    ("tensors", "weights"),
    [(TOP, "heads"), (HEADS, Weights("top_k", k=2)), (HEADS, {"form": "top_k", "k": 2}),
     ({name: TOP[name] for name in ("output", "weights.values", "weights.indices")}, Weights("top_k", k=2)),
     (TOP | {"weights.indices": torch.ones(4, 3, 2)}, Weights("top_k", k=2))],
)  # fmt: skip
def test_weights_in_another_form_than_was_requested_are_one_typed_error(tensors, weights):
    with pytest.raises(BadAnswer, match=r"it lacks weights[a-z.]* in the requested dtype"):
        ask(answer_of(tensors), weights=weights)


@pytest.fixture
def without_ml_dtypes(monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name == "ml_dtypes":
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)


@pytest.mark.usefixtures("without_ml_dtypes")
@pytest.mark.parametrize("name", ["more", "weights", "lse", "weights.values", "present_key"])
def test_a_bfloat16_tensor_that_nobody_requested_is_ignored_without_its_package(name):
    answer = ask(answer_of({"output": torch.tensor(X), name: torch.ones(2).bfloat16()}))
    assert (answer.output == X).all()
    assert answer.weights is None


@pytest.mark.usefixtures("without_ml_dtypes")
def test_a_bfloat16_tensor_that_was_requested_is_not_blamed_on_the_answer():
    """The present of a bfloat16 key of torch, beside a NumPy query."""
    key: Any = torch.ones(3, 2).bfloat16()
    answer = answer_of({"output": torch.tensor(X), "present_key": key, "present_value": key.clone()})
    with (
        Client(transport=Answering(answer).transport) as client,
        pytest.raises(ModuleNotFoundError, match="ml_dtypes"),
    ):
        client.attention(X, key, key, present=True)


def test_a_lack_of_memory_is_not_blamed_on_the_answer(monkeypatch):
    def full(*_: object) -> Any:
        raise MemoryError

    monkeypatch.setattr("attention_client.answer.made_like", full)
    with pytest.raises(MemoryError):
        ask(answer_of(HEADS))


def test_requested_extras_are_returned():
    tensors = {"output": torch.tensor(X), "lse": torch.ones(3), "scores": torch.ones(3, 3)}
    with Client(transport=Answering(answer_of(tensors)).transport) as client:
        found = client.attention(X, X, X, lse=True, scores="scaled")
    assert isinstance(found, AttentionAnswer)
    assert found.lse is not None
    assert found.lse.shape == (3,)
    assert found.scores is not None
