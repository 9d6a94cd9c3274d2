"""`show --text`: the tokens of a text head the rows and columns of the head that is drawn, and every mistake is one sentence."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import numpy as np
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from attention_client import Client, TopK, Weights, masks
from attention_client.cli import asking
from attention_client.cli.app import app
from attention_client.cli.arguments import tensor_field
from attention_client.errors import ServiceError
from tests.unit.client.answering import Answering, problem_of

WORDS = ["[CLS]", "猫", "שלום", "e\u0301", "🐕", "##ing", "\u202egnp", "<b>", "[SEP]"]


@pytest.mark.usefixtures("service")
def test_a_service_draws_the_tokens_of_a_text_and_names_what_is_wrong_by_its_option():
    def run(*words: str) -> str:
        found = CliRunner().invoke(app, ["show", "--text", *words], env={"COLUMNS": "120"}, catch_exceptions=True)
        return str(found.exception or found.stdout)

    title, heads, *rows = run("the animals", "--text-pair", "😀", "--layer", "1", "--causal", "top_left").splitlines()
    assert title == "tiny, layer 1, head 0"
    words = ["[CLS]", "the", "animal", "##s", "[SEP]", "😀", "[SEP]"]
    assert heads.split() == [*words, "strongest"]
    assert [row.split()[0] for row in rows[:-1]] == words
    assert rows[0].endswith("[CLS] 1.000 ")
    wrong = {
        ("",): "--text",
        ("a", "--text-pair", "\udcff"): "--text-pair",
        ("a", "--layer", "2"): "--layer",
        ("it " * 20,): "the",
    }
    for mistaken, place in wrong.items():
        assert run(*mistaken).startswith(f"422 invalid: {place} "), run(*mistaken)


@pytest.mark.parametrize("weights", ["heads", "contributions", Weights("top_k", k=2, heads=[1]), None])
def test_the_answer_on_a_text_is_that_of_its_layer_to_the_states_in_front_of_it(bridge, weights):
    bias = masks.bias(np.array([0, -np.inf, 1], np.float32), axes="s")
    options: Any = {"weights": weights, "scores": "masked", "lse": True, "entropy": True}
    with Client("http://service", transport=bridge) as client:
        answer = client.attend_text(
            "tiny", tokens=["[CLS]", "it", "[SEP]"], layer=1, masks=[masks.causal(), bias], **options
        )
        states = client.states("tiny", "it", layers=[2, 1])
        same = client.attend(answer.layer, states.states[1], masks=[masks.causal(), bias], **options)
        assert [(model["name"], model["fault"]) for model in client.models()] == [("tiny", None)]
    for name in ("output", "weights", "scores", "lse", "entropy"):
        found, expected = getattr(answer, name), getattr(same, name)
        for part in ("values", "indices", "rest") if isinstance(expected, TopK) else [""]:
            one, other = (getattr(array, part) if part else array for array in (found, expected))
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), (name, part)
    assert [token.offsets for token in states.tokens] == [None, (0, 2), None]


def models(*names: str) -> httpx2.Response:
    return httpx2.Response(200, json={"models": [{"name": name, "fault": None} for name in names]})


def drawn(words: Any, size: int | None = None) -> httpx2.Response:
    """The answer to a text of these tokens: each row attends to the token behind it."""
    size = size or len(words)
    weights = np.roll(np.eye(size, dtype=np.float32), 1, axis=1)[None]
    fields = {"output": tensor_field(np.zeros((size, 2), np.float32)), "weights": tensor_field(weights)}
    tokens = [{"text": word, "id": 1, "offsets": None, "sequence": 0} for word in words]
    return httpx2.Response(200, json={**fields, "tokens": tokens, "masked_rows": 0})


@pytest.fixture
def show(monkeypatch):
    """`show(*words)` runs the command against `show.service`, and returns its lines."""

    class Show:
        service = Answering()

        def __call__(self, *words: object, columns: int = 80) -> list[str]:
            words = ("show", *words)
            found = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": str(columns)})
            if found.exception is not None and not isinstance(found.exception, SystemExit):
                raise found.exception
            assert found.exit_code == 0, found.output
            return found.stdout.splitlines()

        def answered(self, *script: Any) -> None:
            self.service = Answering(*script)

        @property
        def sent(self) -> tuple[str, dict[str, Any]]:
            request = self.service.seen[-1]
            return request.url.path, json.loads(request.content)

    made = Show()
    monkeypatch.setattr(
        asking, "Client", lambda url, **options: Client(url, **options, transport=made.service.transport)
    )
    return made


def test_the_only_model_is_asked_for_its_first_layer_and_head_and_the_title_says_so(show):
    show.answered(models("tiny"), drawn(WORDS))
    assert show("--text", "a b")[0] == "tiny, layer 0, head 0"
    weights = {"form": "heads", "heads": [0]}
    assert show.sent == (
        "/v1/models/tiny/attend",
        {"text": "a b", "layer": 0, "weights": weights, "encoding": "base64"},
    )


def test_a_pair_a_model_a_layer_a_head_and_masks_are_sent(show):
    show.answered(drawn(WORDS))
    options = ("--model", "big", "--layer", 3, "--head", 1, "--causal", "top_left", "--mask", "window left=1 right=0")
    assert show("--text", "a", "--text-pair", "b", *options)[0] == "big, layer 3, head 1"
    path, fields = show.sent
    assert path == "/v1/models/big/attend"
    assert (fields["text"], fields["text_pair"], fields["layer"], fields["weights"]["heads"]) == ("a", "b", 3, [1])
    assert fields["masks"] == [{"kind": "window", "left": 1, "right": 0}, {"kind": "causal", "align": "top_left"}]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_columns_stay_aligned_whatever_the_tokens(show, columns):
    show.answered(drawn(WORDS))
    lines = show("--text", "a", "--model", "tiny", columns=columns)
    assert not [mark for line in lines for mark in line if mark in "\u202e\x1b"], "what reorders text is escaped"
    tables, start = [line for line in lines if re.search(r"(strongest|elsewhere|1\.000) *$", line)], 0
    assert max(map(cell_len, tables)) <= columns
    for line in tables:
        before, _, last = line.partition(" strongest")
        start = cell_len(before) if last else start
        split = next(n for n in range(len(line)) if cell_len(line[: n + 1]) > start)
        assert re.match(r" (strongest|elsewhere|\S+( \S+)? 1\.000)", line[split:]), line
    assert sum("1.000" in line for line in tables) == len(WORDS)


def test_the_picture_is_labelled_with_the_tokens(show, tmp_path):
    show.answered(drawn(WORDS))
    [line] = show("--text", "a", "--model", "tiny", "--svg", tmp_path / "x.svg", columns=200)
    assert line.startswith("tiny, layer 0, head 0: 9 queries and 9 keys, written to ")
    text = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert [text.count(f">{word}</text>") for word in ("猫", "שלום", "🐕", "&lt;b&gt;", r"\u202egnp")] == [2] * 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("small", "--text", "a"), "^give either a layer or --weights FILE or --text"),
        (("--text", "a", "--request", "body.json"), "^give either a layer .* request go only with a layer"),
        (("--text", "a", "--query", "x.npy"), "^give either a layer"),
        (("--text", "a", "--weights", "w.npz"), "^give either a layer"),
        (("--weights", "w.npz", "--mask", "causal"), "^give either a layer .*, masks not with --weights$"),
        (("small", "--query", "x.npy", "--layer", "3"), "^--text-pair, --model and --layer go with --text;"),
        (("--weights", "w.npz", "--model", "tiny"), "^--text-pair, --model and --layer go with --text;"),
        (("--layer", "3", "--head", "1"), "^--text-pair, --model and --layer go with --text;"),
        (("--text-pair", "a"), "^--text-pair, --model and --layer go with --text;"),
        (("--text", "a", "--tokens", "a"), "--tokens, --key-tokens, --sequence do not$"),
        (("--text", "a", "--key-tokens", "a"), "--tokens, --key-tokens, --sequence do not$"),
        (("--text", "a", "--sequence", "1"), "--tokens, --key-tokens, --sequence do not$"),
        (("--text", "a", "--model", "../x"), "^a model's name is"),
    ],
)
def test_options_that_exclude_each_other_are_refused_before_anything_is_asked(show, words, message):
    with pytest.raises(ServiceError, match=message):
        show(*words)
    assert not show.service.seen


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([models()], "^the service has no model$"),
        ([models("a", "b")], "^the service has several models, a, b: name one with --model$"),
        ([models("a"), problem_of(422, "invalid", "text has no token")], "^422 invalid: --text has no token$"),
        (
            [models("a"), problem_of(422, "invalid", "layer must be from 0 to 5")],
            "^422 invalid: --layer must be from 0",
        ),
        ([models("a"), problem_of(503, "not_ready", "its layer is gone")], "^503 not_ready: its layer is gone$"),
        ([httpx2.Response(200, json={"models": [{"name": 7}]})], "does not answer as the service does"),
        ([models("a"), drawn(["x"], 2)], "does not answer as the service does"),
        ([models("a"), drawn([7, 7])], "does not answer as the service does: .* lacks the tokens"),
        ([models("a"), httpx2.Response(200, json={"output": tensor_field(np.ones(1))})], "does not answer as"),
    ],
)
def test_what_the_service_refuses_or_lacks_is_one_sentence(show, script, message):
    show.answered(*script)
    with pytest.raises(ServiceError, match=message):
        show("--text", "a")
