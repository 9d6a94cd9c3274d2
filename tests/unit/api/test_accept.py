"""How the caller wants the answer: its type and its coding."""

import pytest

from service.api.reply import MIN_COMPRESSED, answer_coding, answer_type
from service.errors import NotAcceptable
from service.http.request_parser import HeaderFields

JSON, BINARY = b"application/json", b"application/vnd.safetensors"


def asked(name: bytes, *values: bytes) -> HeaderFields:
    return HeaderFields((name, value) for value in values)


def type_for(*values: bytes, offered: tuple[bytes, ...] = (JSON, BINARY)) -> bytes:
    return answer_type(asked(b"accept", *values), offered)


@pytest.mark.parametrize(
    "values",
    [
        (),
        (b"",),
        (b"*/*",),
        (b"application/json",),
        (b"APPLICATION/JSON",),
        (b"text/html, application/*;q=0.1",),
        (b"text/html;q=0.9, */*;q=0.01",),
        (b"application/json;q=0.5, */*;q=0",),
        (b"application/json, application/vnd.safetensors",),
        (b"text/html", b"application/json"),
        (b"application/json, text/plain, */*",),
        (b"application/json;q=1, application/vnd.safetensors;q=5",),
        (b"text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2",),  # Java's HttpURLConnection
    ],
)
def test_the_answer_has_the_form_of_the_request_unless_accept_prefers_another(values):
    assert type_for(*values) == JSON
    assert type_for(*values, offered=(JSON,)) == JSON


@pytest.mark.parametrize(
    "value",
    [
        b"application/vnd.safetensors",
        b"application/json;q=0.5, application/vnd.safetensors",
        b"application/json;q=0, */*",
        b"application/json;q=nope, application/*;q=0.1",
    ],
)
def test_the_preferred_type_of_accept_is_chosen(value):
    assert type_for(value) == BINARY


@pytest.mark.parametrize(
    "value",
    [b"text/html", b"*/*;q=0", b"application/json;q=nope", b"x" * 10_000, b"application/json;q=nan", b"image/*"],
)
def test_an_accept_without_an_available_type_is_refused(value):
    """B15."""
    with pytest.raises(NotAcceptable, match=r"application/json or application/vnd\.safetensors"):
        type_for(value)


@pytest.mark.parametrize(
    "value", [b"identity;q=0", b"*;q=0", b"identity;q=0, br", b"gzip;q=0, zstd;q=0, identity;q=0.0", b"identity;q=-1"]
)
def test_an_accept_encoding_without_an_available_coding_is_refused(value):
    with pytest.raises(NotAcceptable, match="identity or zstd or gzip"):
        coding_for(value)


def coding_for(*values: bytes, take_offers: bool = False) -> bytes | None:
    found = answer_coding(asked(b"accept-encoding", *values), (b"zstd", b"gzip"), take_offers=take_offers)
    return None if found is None else found[0]


@pytest.mark.parametrize(
    ("value", "min_bytes"),
    [
        (b"gzip", MIN_COMPRESSED),
        (b"gzip, identity;q=0.5", MIN_COMPRESSED),
        (b"gzip, identity;q=0", 0),
        (b"gzip, *;q=0", 0),
    ],
)
def test_an_answer_that_may_not_be_plain_is_compressed_however_small(value, min_bytes):
    assert answer_coding(asked(b"accept-encoding", value), (b"zstd", b"gzip"), take_offers=False) == (
        b"gzip",
        min_bytes,
    )


@pytest.mark.parametrize(
    ("value", "coding"),
    [(b"gzip", b"gzip"), (b"zstd", b"zstd"), (b"GZIP;q=0.3", b"gzip"), (b"gzip, identity;q=0.5", b"gzip")],
)
def test_naming_one_coding_or_lowering_identity_compresses_the_answer(value, coding):
    assert coding_for(value) == coding


@pytest.mark.parametrize(
    "value",
    [b"", b"identity", b"br", b"gzip;q=0", b"gzip;q=0.5, identity", b"gzip, deflate, br, zstd", b"*", b"gzip;q=0, *"],
)
def test_any_other_accept_encoding_gets_no_compressed_answer(value):
    assert coding_for(value) is None
    assert coding_for() is None


def test_a_setting_compresses_for_a_list_of_several_codings():
    assert coding_for(b"gzip, deflate, br, zstd", take_offers=True) == b"zstd"
    assert coding_for(b"gzip;q=1.0, zstd;q=0.5", take_offers=True) == b"gzip"
    assert coding_for(b"br, deflate", take_offers=True) is None
