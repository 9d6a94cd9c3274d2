"""`asking`: an answer with status 200 that is not the service's is one sentence with its URL, for every command."""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given, settings

from attention_client import Client
from attention_client.arrays import Raw, write
from attention_client.cli import app as cli
from attention_client.cli import asking
from attention_client.errors import ClientError
from tests.unit.client.answering import Answering
from tests.unit.client.test_damaged_answers import damaged, text_of
from tests.unit.commands.answering import answering

FACTS = {"layer": {"name": "small"}, "masked_rows": 0}
ONE = {"dtype": "float32", "shape": [1], "data": "AACAPw=="}  # 1.0
FLAT = {**FACTS, "output": ONE, "weights": ONE, "lse": ONE}
NOT_JSON = [b"", b"<html></html>", b"\xff", b"{", b"[" * 100_000]
NOT_OBJECTS: list[Any] = [[], [1], 5, "text", None, True]
OUTPUTS: list[Any] = [
    None, 5, "x", {}, [1.0], [[1], [1, 2]], ["x"], [{}], {"dtype": "float32"}, {**ONE, "data": "?"}, {**ONE, "data": "AAAA"},
    {**ONE, "data": [1]}, {**ONE, "data": [{}]}, {**ONE, "dtype": "object"}, {**ONE, "dtype": 7}, {**ONE, "dtype": "U1"},
    {**ONE, "dtype": "(,)f4"}, {**ONE, "shape": "x"}, {**ONE, "shape": ["x"]}, {**ONE, "shape": [2**70]}, {**ONE, "shape": [2]},
]  # fmt: skip
OBJECTS: list[dict[str, Any]] = [
    {}, {"error": "x"}, {"output": [1.0]}, {"weights": None}, {**FLAT, "weights": 5}, {**FLAT, "weights": {"values": [1]}},
    {**FLAT, "lse": "x"}, {**FLAT, "more": float("nan")}, {**FLAT, "more": "\ud800"}, *({**FLAT, "output": it} for it in OUTPUTS),
]  # fmt: skip
ANSWERS = [*NOT_JSON, *(json.dumps(it).encode() for it in NOT_OBJECTS + OBJECTS)]
EMPTY = {"dtype": "float32", "shape": [1, 1, 0], "data": ""}
UNEXPECTED = [{**FLAT, "weights": None, "lse": None}, {**FLAT, "output": EMPTY, "weights": EMPTY, "lse": EMPTY}, FLAT]


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Check that a command prints one sentence with the server's URL, and exits with code 1."""
    monkeypatch.chdir(tmp_path)
    np.save("q.npy", np.ones((2, 4), np.float32))
    tensors = dict.fromkeys(("query", "key", "value", "output"), Raw("float32", np.ones((2, 4), np.float32)))
    (tmp_path / "case.safetensors").write_bytes(write(tensors, {}))

    def check(command: str, body: bytes) -> None:
        with answering(200, body) as (url, _):
            monkeypatch.setattr(sys, "argv", ["attention", *command.split(), "--url", url])
            with pytest.raises(SystemExit) as ended:
                cli.main()
        err = capfd.readouterr().err
        assert ended.value.code == 1
        assert err.startswith(f"attention: {url} does not answer as the service does: ")
        assert err.count("\n") == 1

    return check


@pytest.mark.parametrize("body", ANSWERS, ids=lambda body: repr(body[:60]))
def test_an_answer_that_is_not_the_services_is_one_sentence(refused, body):
    refused("attend small --query q.npy --json", body)


@pytest.mark.parametrize(
    "command", ["sdpa --query q.npy", "show small --query q.npy", "compare case.safetensors", "golden --out x"]
)
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", json.dumps(OBJECTS[-1]).encode()])
def test_every_command_that_asks_says_so(refused, command, body):
    refused(command, body)


@pytest.mark.parametrize("command", ["show small --query q.npy", "compare case.safetensors", "golden --out x"])
@pytest.mark.parametrize("found", UNEXPECTED)
def test_an_answer_without_the_requested_arrays_is_not_the_services(refused, command, found):
    refused(command, json.dumps(found).encode())


@pytest.mark.parametrize("depth", [100, 300, 450, 900, 2000])
@pytest.mark.parametrize("options", ["--json", "", "--out x.npz"])
def test_an_answer_of_any_depth_is_printed_or_one_sentence(tmp_path, monkeypatch, capfd, depth, options):
    monkeypatch.chdir(tmp_path)
    np.save("q.npy", np.ones((2, 4), np.float32))
    more = json.dumps({**FLAT, "weights": None, "lse": None, "more": "here"}).replace(
        '"here"', "[" * depth + "]" * depth
    )
    with answering(200, more.encode()) as (url, _):
        monkeypatch.setattr(
            sys, "argv", ["attention", "attend", "small", "--query", "q.npy", *options.split(), "--url", url]
        )
        with pytest.raises(SystemExit) as ended:
            cli.main()
    out, err = capfd.readouterr()
    assert (ended.value.code, err) == (None, "") or (ended.value.code == 1 and err.count("\n") == 1 and not out)


@settings(max_examples=200, deadline=None)
@given(damaged({**FLAT, "weights": {"values": ONE, "indices": ONE, "rest": ONE}, "masked_rows": 0}))
def test_a_damaged_answer_is_one_typed_error_or_one_that_can_be_printed(document):
    reply = httpx2.Response(200, content=text_of(document).encode("utf-8", "surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "Client", lambda url, **given: Client(url, transport=Answering(reply).transport, **given))
        try:
            with asking.asking(None) as ask:
                found = ask("small", {})
        except ClientError:
            return
        for as_json in (True, False):
            found.report(None, as_json=as_json)


def test_a_fault_of_the_command_itself_is_no_foreign_answer(tmp_path, monkeypatch):
    def faulty(*_):
        raise AttributeError("fault")

    monkeypatch.setattr(asking, "Reply", faulty)
    body = json.dumps({**FLAT, "weights": None, "lse": None}).encode()
    with answering(200, body) as (url, _), asking.asking(url) as ask, pytest.raises(AttributeError, match="fault"):
        ask("small", {})


@pytest.mark.parametrize("password", ["secret", "1/secret"])
def test_a_password_in_the_url_is_not_printed(tmp_path, monkeypatch, capfd, password):
    """One with a slash makes the URL that of another host, which does not answer."""
    np.save(tmp_path / "q.npy", np.ones((2, 4), np.float32))
    with answering(200, b"{}") as (url, _):
        secret = url.replace("//", f"//me:{password}@")
        arguments = ["attend", "small", "--query", str(tmp_path / "q.npy"), "--url", secret]
        monkeypatch.setattr(sys, "argv", ["attention", *arguments])
        with pytest.raises(SystemExit):
            cli.main()
    err = capfd.readouterr().err
    assert url in err
    assert "secret" not in err
