"""`layers import --url`: what a service may answer, and the sentence for each."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from service.commands.layer_admin import serve_at
from service.errors import InvalidInput, LayerError
from tests.unit.commands.answering import answering

DIGEST = "sha256:" + "0" * 64
KEY = "the-admins-own"


def problem(code: str, detail: str) -> bytes:
    return json.dumps({"code": code, "detail": detail}).encode()


def load(url: str, directory: Path = Path(), key: str = KEY) -> None:
    serve_at(url, key, "mine", DIGEST, directory)


def reason(url: str, **given: Any) -> str:
    with pytest.raises(LayerError) as caught:
        load(url, **given)
    assert KEY not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("status", [200, 201])
def test_a_layer_with_our_digest_is_served(status):
    with answering(status, json.dumps({"digest": DIGEST}).encode()) as (url, asked):
        load(f"{url}/below/")
    assert asked == ["/below/v1/layers/mine"]


FOREIGN = "this is no answer of the attention service; check --url"
REFUSED = [
    (401, problem("unauthorized", "needs a key"), "401: needs a key"),
    (403, problem("forbidden", "needs admin"), "403: needs admin"),
    (409, problem("layer_changed", "the file changed"), "409: the file changed"),
    (422, problem("invalid", "the file has 9 bytes, the limit is 8"), "422: the file has 9 bytes, the limit is 8"),
    (307, b"", f"307: {FOREIGN}"),
    (404, b"<html>", f"404: {FOREIGN}"),
    (500, problem("x", "two\nlines \x1b[2J"), f"500: {FOREIGN}"),
    *((200, body, f"200: {FOREIGN}") for body in (b"", b"[]", b"{}", b'{"digest": 5}', b"\xff", b"[" * 60_000)),
]


@pytest.mark.parametrize(("status", "body", "expected"), REFUSED, ids=lambda value: str(value)[:20])
def test_another_answer_is_one_sentence(status, body, expected):
    with answering(status, body) as (url, asked):
        assert reason(url) == expected
    assert len(asked) == 1, "a redirect is not followed"


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, problem("layer_not_found", "no file")), (200, json.dumps({"digest": DIGEST.replace("0", "a", 9)}).encode())],
)
def test_a_service_without_the_file_or_with_another_one_reads_another_directory(tmp_path, status, body):
    with answering(status, body) as (url, _):
        expected = f"{status}: its layer directory is another than {tmp_path}; compare its ATTENTION_LAYERS_DIR"
        assert reason(url, directory=tmp_path) == expected


def test_a_refused_connection_is_one_sentence_without_a_password():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert reason(f"http://me:secret@{where}") == f"no answer from {where} (Connection refused)"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://x:y", ""])
def test_an_address_that_cannot_be_is_refused(url):
    with pytest.raises(InvalidInput) as caught:
        load(url)
    assert caught.value.message == f"--url must be like http://127.0.0.1:8000, not {url}"


@pytest.mark.parametrize("key", ["two\nlines", "é"])
def test_a_key_that_cannot_be_is_refused_and_not_printed(key):
    assert reason("http://127.0.0.1", key=key) == "--api-key must be printable ASCII characters"
