"""The tokens of a text: offsets in characters, nothing cut off, and no word of the text in an error."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidInput, LayerError
from service.models.tokenizer import Tokenizer, Tokens
from tests.unit.models.encoders import LETTERS, tokenizer_json

TINY = Tokenizer(tokenizer_json(), 62)


def test_tokens_have_the_strings_of_the_vocabulary_and_offsets_in_characters():
    found = TINY.of_text("é🐈 b", "c")
    assert found == Tokens(
        ids=[2, 30, 61, 5, 3, 6, 3],
        types=[0, 0, 0, 0, 0, 1, 1],
        texts=["[CLS]", "é", "##🐈", "b", "[SEP]", "c", "[SEP]"],
        offsets=[None, (0, 1), (1, 2), (3, 4), None, (0, 1), None],
        sequences=[None, 0, 0, 0, None, 1, None],
    )


def test_the_truncation_and_the_padding_of_the_file_do_not_count():
    assert len(TINY.of_text("a " * 300).ids) == 302
    assert len(TINY.of_text("a").ids) == 3


def test_tokens_are_taken_as_they_are():
    assert TINY.of_tokens(["b", "[SEP]", "##🐈"]) == Tokens(
        [5, 3, 61], [0] * 3, ["b", "[SEP]", "##🐈"], [None] * 3, [None] * 3
    )


@given(st.text(st.sampled_from([*LETTERS, " ", "\u200d", "\u202e", "\0", "\n", "ض", "e\u0301"[1]])), st.booleans())
def test_every_text_gives_tokens_inside_it_or_one_error(text, is_pair):
    with contextlib.suppress(InvalidInput):
        check_tokens(text, is_pair=is_pair)


def check_tokens(text, *, is_pair):
    found = TINY.of_text("a", text) if is_pair else TINY.of_text(text)
    assert TINY.of_tokens(found.texts).ids == found.ids
    for span, sequence in zip(found.offsets, found.sequences, strict=True):
        assert (span is None) == (sequence is None)
        assert span is None or 0 <= span[0] < span[1] <= len(text if sequence == int(is_pair) else "a")


@pytest.mark.parametrize(
    ("ask", "param"),
    [
        (lambda: TINY.of_text(""), "/text"),
        (lambda: TINY.of_text(" \n"), "/text"),
        (lambda: TINY.of_text("a", ""), "/text_pair"),
        (lambda: TINY.of_text("secret \ud800"), "/text"),
        (lambda: TINY.of_text("a", "secret \udfff"), "/text_pair"),
        (lambda: TINY.of_tokens([]), "/tokens"),
        (lambda: TINY.of_tokens(["a", "secret"]), "/tokens/1"),
        (lambda: TINY.of_tokens(["secret \ud800"]), "/tokens/0"),
    ],
)
def test_an_error_points_to_the_field_and_repeats_no_text(ask, param):
    with pytest.raises(InvalidInput) as raised:
        ask()
    assert raised.value.param == param
    assert "secret" not in raised.value.message
    assert raised.value.__context__ is None


def test_a_text_that_the_tokenizer_cannot_take_is_refused_without_repeating_it():
    raw = json.loads(tokenizer_json())
    raw["model"] |= {"type": "WordLevel", "unk_token": "gone"}
    with pytest.raises(InvalidInput) as raised:
        Tokenizer(json.dumps(raw).encode(), 62).of_text("secret")
    assert (raised.value.param, "secret" in raised.value.message) == ("/text", False)
    assert raised.value.__context__ is None


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"\xff", b"null", tokenizer_json()[:-9], b"[" * 99999])
def test_what_is_no_tokenizer_is_refused(raw):
    with pytest.raises(LayerError, match="is not one that the library tokenizers reads"):
        Tokenizer(raw, 62)


def test_an_id_without_an_embedding_is_refused():
    with pytest.raises(LayerError, match="the id 61, but the model has embeddings of 61 ids"):
        Tokenizer(tokenizer_json(), 61)
