"""What a body says it is."""

import pytest

from service.api.reply import JSON, SAFETENSORS, body_type
from service.errors import UnsupportedMediaType
from service.http.request_parser import HeaderFields


def said(*values: bytes) -> bytes:
    return body_type(HeaderFields((b"content-type", value) for value in values), (JSON, SAFETENSORS))


@pytest.mark.parametrize(
    "value",
    [
        b"application/json",
        b"Application/JSON; charset=UTF-8",
        b'application/json;charset="utf-8"',
        b"application/json;charsetx=1",
        b'application/json; v="a;charset=utf-16"',
        b"application/json;",
        b"application/json ; x",
    ],
)
def test_json_in_utf8_is_accepted(value):
    assert said(value) == JSON


def test_safetensors_is_accepted():
    assert said(b"application/vnd.safetensors") == said(b"Application/vnd.Safetensors") == SAFETENSORS


@pytest.mark.parametrize(
    "values",
    [
        (),
        (b"",),
        (b"text/plain",),
        (b"multipart/form-data",),
        (b"application/x-python-pickle",),
        (b"application/vnd.bentoml+pickle",),
        (b"application/json; charset=utf-16",),
        (b"application/json; charset=utf-7",),
        (b"application/json; charset=",),
        (b'application/json; v="x"; Charset = "UTF-16"',),
        (b"application/jsonx",),
        (b"application/json", b"application/json"),
    ],
)
def test_anything_else_is_an_unsupported_media_type(values):
    """H12, H13."""
    with pytest.raises(UnsupportedMediaType, match=r"application/json or application/vnd\.safetensors"):
        said(*values)
