"""Text: both clients send it to a model as JSON, and read tokens, attention and hidden states from bytes."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client import Answer, BadAnswer, Client, States, TextAnswer, Token, Weights, errors, masks
from tests.unit.client.answering import FACTS, Answering, answer_of, file_of, problem_of
from tests.unit.client.test_damaged_answers import body, damaged, text_of

TOKENS: list[dict[str, Any]] = [
    {"text": "[CLS]", "id": 101, "offsets": None, "sequence": None},
    {"text": "it", "id": 2009, "offsets": [0, 2], "sequence": 0},
    {"text": "is", "id": 2003, "offsets": None, "sequence": 1},
]
SHARED: dict[str, Any] = {"tokens": TOKENS, "model": {"name": "tiny", "digest": "sha256:11"}}
TEXT_FACTS = FACTS | SHARED
STATES_FACTS = {name: FACTS[name] for name in ("batch", "timing_ms")} | SHARED | {"layers": [0, 2]}
TENSORS = {"output": torch.rand(3, 4), "weights": torch.rand(1, 3, 3)}
STATES = {"states": torch.rand(2, 3, 4)}


def test_a_text_is_sent_as_json_with_the_values_of_masks_in_base64(face):
    service = Answering(answer_of(TENSORS, TEXT_FACTS))
    bias = np.array([[0, -np.inf, 1e-30]], np.float32)
    wanted = [masks.causal(), masks.bias(bias), masks.ignore([True, False, True]), masks.lengths(2)]
    face(service).attend_text(
        "tiny", "it", "is 🐕 שלום", layer=np.int64(3), masks=wanted, weights=Weights(heads=np.arange(1)),
        masked_rows="error", request_id="job-7",
    )  # fmt: skip
    [request] = service.seen
    assert (request.method, request.url.path) == ("POST", "/v1/models/tiny/attend")
    names = ("content-type", "accept", "x-request-id")
    assert [request.headers[name] for name in names] == ["application/json", "application/vnd.safetensors", "job-7"]

    fields = json.loads(request.content)
    values = [mask.pop("values", None) for mask in fields["masks"]]
    assert fields == {
        "text": "it", "text_pair": "is 🐕 שלום", "layer": 3, "masked_rows": "error",
        "weights": {"form": "heads", "heads": [0]},
        "masks": [{"kind": kind} for kind in ("causal", "bias", "ignore", "lengths")],
    }  # fmt: skip
    assert base64.b64decode(values[1].pop("data")) == bias.tobytes()
    assert [value and (value["dtype"], value["shape"]) for value in values] == [
        None, ("float32", [1, 3]), ("bool", [3]), ("int64", []),
    ]  # fmt: skip


def test_a_plain_text_has_no_other_field(face):
    service = Answering(answer_of(TENSORS, TEXT_FACTS), answer_of(STATES, STATES_FACTS))
    client = face(service)
    client.attend_text("tiny", tokens=["[CLS]", "it"], layer=0)
    client.states("tiny", "it", layers=range(2))
    assert [json.loads(request.content) for request in service.seen] == [
        {"tokens": ["[CLS]", "it"], "layer": 0}, {"text": "it", "layers": [0, 1]},
    ]  # fmt: skip


def test_an_answer_on_text_is_an_answer_with_tokens(face):
    answer = face(Answering(answer_of(TENSORS, TEXT_FACTS))).attend_text("tiny", "it", layer=3, weights="heads")
    assert issubclass(TextAnswer, Answer)
    assert isinstance(answer, TextAnswer)
    for found, sent in ((answer.output, TENSORS["output"]), (answer.weights, TENSORS["weights"])):
        assert np.asarray(found).tobytes() == sent.numpy().tobytes()
    assert answer.tokens == [
        Token("[CLS]", 101, None, None), Token("it", 2009, (0, 2), 0), Token("is", 2003, None, 1),
    ]  # fmt: skip
    assert (answer.layer, answer.digest) == ("small", "sha256:00")
    assert (answer.model, answer.model_digest, answer.request_id) == ("tiny", "sha256:11", "theirs")
    assert "CLS" not in repr(answer)


def test_states_are_the_rows_of_the_tokens_in_front_of_each_layer(face):
    found = face(Answering(answer_of(STATES, STATES_FACTS))).states("tiny", "it", layers=[0, 2])
    assert isinstance(found, States)
    assert found.states.tobytes() == STATES["states"].numpy().tobytes()
    assert (found.layers, [token.text for token in found.tokens]) == ([0, 2], ["[CLS]", "it", "is"])
    assert (found.model, found.batch.tokens, found.timing_ms.total) == ("tiny", 4, 4.25)


def test_models_are_the_objects_of_the_service(face):
    model = {"name": "tiny", "heads": [4, 4], "fault": None}
    assert face(Answering(httpx2.Response(200, json={"models": [model]}))).models() == [model]


@pytest.mark.parametrize(
    "found", [b"", b"[]", b"{}", b'{"models": 3}', b'{"models": [7]}', b'{"models": [{"name": 7}]}']
)
def test_a_malformed_list_of_models_is_one_typed_error(face, found):
    with pytest.raises(BadAnswer):
        face(Answering(httpx2.Response(200, content=found))).models()


@pytest.mark.parametrize("name", ["", "..", "a/b", "UP", "x" * 65, "a\n", None, 5, b"tiny"])
def test_an_illegal_model_name_reaches_no_other_route(face, name):
    service = Answering()
    client = face(service)
    for ask in (
        lambda: client.attend_text(name, "it", layer=0),
        lambda: client.states(name, "it", layers=[0]),
        lambda: client.attend_text_json(name, {}),
    ):
        with pytest.raises(errors.ModelNotFound):
            ask()
    assert not service.seen


def test_a_refused_text_is_sent_again_and_a_wrong_one_is_the_services_error(face):
    refused, wrong = problem_of(503, "not_ready"), problem_of(404, "model_not_found")
    service = Answering(refused, answer_of(TENSORS, TEXT_FACTS), wrong, httpx2.Response(200, json={"tokens": []}))
    client = face(service)
    assert client.attend_text("tiny", "it", layer=0).output.shape == (3, 4)
    with pytest.raises(errors.ModelNotFound):
        client.states("tiny", "it", layers=[0])
    assert client.attend_text_json("tiny", {"text": "it", "layer": 0}) == {"tokens": []}
    assert len(service.seen) == 4


@pytest.mark.parametrize("options", [{"layer": float("nan")}, {"layer": 0, "masks": [np.ones(2)]}, {"layer": {1}}])
def test_an_impossible_text_request_is_refused_before_it_is_sent(face, options):
    service = Answering()
    with pytest.raises((errors.InvalidInput, errors.MaskKindRequired)):
        face(service).attend_text("tiny", "it", **options)
    assert not service.seen


def test_another_number_of_rows_than_tokens_is_one_typed_error(face):
    for tensors, facts in ((TENSORS, TEXT_FACTS), (STATES, STATES_FACTS)):
        client = face(Answering(answer_of(tensors, {**facts, "tokens": TOKENS[:2]})))
        with pytest.raises(BadAnswer, match="another number of rows"):
            client.attend_text("tiny", "it", layer=0) if tensors is TENSORS else client.states("tiny", "it", layers=[0])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([TEXT_FACTS, STATES_FACTS]).flatmap(lambda facts: st.tuples(st.just(facts), damaged(facts))))
def test_damaged_facts_are_one_typed_error_or_the_right_answer(both):
    facts, changed = both
    is_attend = facts is TEXT_FACTS
    reply = body(file_of(TENSORS if is_attend else STATES, text_of(changed)))
    with Client(transport=Answering(reply).transport) as client:
        try:
            found = client.attend_text("tiny", "it", layer=0) if is_attend else client.states("tiny", "it", layers=[0])
        except BadAnswer:
            return
    assert {(type(token.text), type(token.id)) for token in found.tokens} == {(str, int)}
    assert all(token.offsets is None or [*map(type, token.offsets)] == [int, int] for token in found.tokens)
    assert (type(found.model), type(found.model_digest)) == (str, str)


@pytest.mark.parametrize(
    "token", [{"offsets": [1]}, {"offsets": [1, 2, 3]}, {"offsets": "ab"}, {"id": True}, {"sequence": "0"}]
)
def test_a_damaged_token_is_one_typed_error(face, token):
    facts = {**TEXT_FACTS, "tokens": [*TOKENS[:2], TOKENS[2] | token]}
    with pytest.raises(BadAnswer):
        face(Answering(answer_of(TENSORS, facts))).attend_text("tiny", "it", layer=0)
