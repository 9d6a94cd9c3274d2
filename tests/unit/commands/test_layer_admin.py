"""`layers import --url` and `layers remove --url`: what a service may answer, and the sentence for each."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from service.commands.layer_admin import LayerAdmin, admin_of
from service.errors import InvalidInput, LayerError
from tests.unit.commands.answering import answering

DIGEST = "sha256:" + "0" * 64
KEY = "the-admins-own"


def problem(code: str, detail: str) -> bytes:
    return json.dumps({"code": code, "detail": detail}).encode()


def reason(action: str, url: str, *, directory: Path = Path(), key: str | None = KEY) -> str:
    admin = LayerAdmin(url, key, directory)
    with pytest.raises(LayerError) as caught:
        admin.load("mine", DIGEST) if action == "load" else admin.unload("mine")
    assert KEY not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("status", [200, 201])
def test_a_layer_with_our_digest_is_served(status):
    with answering(status, json.dumps({"digest": DIGEST}).encode()) as (url, asked):
        LayerAdmin(f"{url}/below/", KEY, Path()).load("mine", DIGEST)
    assert asked == ["/below/v1/layers/mine"]


FOREIGN = "this is no answer of the attention service; check --url"
REFUSED = [
    (401, problem("unauthorized", "needs a key"), "401: needs a key; ATTENTION_CLIENT_KEY or --api-key gives it"),
    (403, problem("forbidden", "needs admin"), "403: needs admin; without --url, a restart makes the change"),
    (409, problem("layer_changed", "the file changed"), "409: the file changed; repeat the command"),
    (422, problem("invalid", "the file has 9 bytes, the limit is 8"), "422: the file has 9 bytes, the limit is 8"),
    (503, problem("not_ready", "another change"), "503: another change; repeat the command"),
    (307, b"", f"307: {FOREIGN}"),
    (404, b"<html>", f"404: {FOREIGN}"),
    (500, problem("x", "two\nlines \x1b[2J"), f"500: {FOREIGN}"),
]


@pytest.mark.parametrize("action", ["load", "unload"])
@pytest.mark.parametrize(("status", "body", "expected"), REFUSED, ids=lambda value: str(value)[:20])
def test_another_answer_is_one_sentence_with_its_remedy(action, status, body, expected):
    with answering(status, body) as (url, asked):
        assert reason(action, url) == expected
    assert len(asked) == 1, "a redirect is not followed"


def test_a_service_without_the_file_reads_another_directory(tmp_path):
    with answering(404, problem("layer_not_found", "no file")) as (url, _):
        expected = f"404: its layer directory is another than {tmp_path}; compare its ATTENTION_LAYERS_DIR"
        assert reason("load", url, directory=tmp_path) == expected


def test_a_service_with_another_file_of_the_name_reads_another_directory_too(tmp_path):
    other = DIGEST.replace("0", "a", 12)
    with answering(200, json.dumps({"digest": other}).encode()) as (url, _):
        found = reason("load", url, directory=tmp_path)
    assert found.startswith(
        "it serves another layer of that name, sha256:aaaaaaaaaaaa…: its layer directory is another"
    )


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"digest": 5}', b"\xff", b"[" * 60_000], ids=lambda x: repr(x[:20])
)
def test_another_server_that_answers_200_serves_nothing(body):
    with answering(200, body) as (url, _):
        assert reason("load", url) == f"200: {FOREIGN}"


def test_a_layer_that_was_not_served_is_unloaded():
    with answering(404, problem("layer_not_found", "none")) as (url, _):
        assert not LayerAdmin(url, KEY, Path()).unload("mine")
    with answering(204, b"") as (url, _):
        assert LayerAdmin(url, KEY, Path()).unload("mine")


def test_a_refused_connection_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert reason("load", f"http://127.0.0.1:{taken.getsockname()[1]}") == "no answer (Connection refused)"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://x:y", ""])
def test_an_address_that_cannot_be_is_refused_before_anything_is_done(url):
    with pytest.raises(InvalidInput) as caught:
        admin_of(url, None, Path())
    assert caught.value.message == f"--url must be like http://127.0.0.1:8000, not {url}"


@pytest.mark.parametrize("key", ["two\nlines", "a b", "é", "", "x" * 513])
def test_a_key_that_cannot_be_is_refused_and_not_printed(key):
    with pytest.raises(InvalidInput) as caught:
        admin_of("http://127.0.0.1", key, Path())
    assert caught.value.message == "--api-key must be at most 512 printable ASCII characters without blanks"


def test_a_password_in_the_address_is_not_printed():
    assert LayerAdmin("https://me:secret@example.com:1/x", None, Path()).where == "https://example.com:1/x"
