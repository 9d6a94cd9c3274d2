"""Whether the caller takes JSON."""

import pytest

from service.api.accept import check_accepts_json
from service.errors import NotAcceptable


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"*/*",
        b"application/json",
        b"APPLICATION/JSON",
        b"text/html, application/*;q=0.1",
        b"text/html;q=0.9, */*;q=0.01",
        b"application/json;q=0.5, */*;q=0",
    ],
)
def test_json_may_be_answered(value):
    check_accepts_json({"headers": [] if value is None else [(b"accept", value)]})


@pytest.mark.parametrize(
    "value",
    [
        b"text/html",
        b"*/*;q=0",
        b"application/json;q=0, */*",
        b"application/json;q=nope",
        b"x" * 10_000,
        b"application/json;q=nan",
        b"image/*",
    ],
)
def test_json_may_not_be_answered(value):
    with pytest.raises(NotAcceptable):
        check_accepts_json({"headers": [(b"accept", value)]})
