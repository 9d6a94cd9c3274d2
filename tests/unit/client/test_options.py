"""Client options: a value that is not valid, of any type, is refused before anything is sent."""

import math
from fractions import Fraction
from typing import Any

import httpx2
import numpy as np
import pytest

from attention_client.errors import InvalidInput
from attention_client.options import ClientOptions, check_count, checked_request_id, checked_timeout

QUICK: dict[str, Any] = {
    "url": "http://service:8000", "timeout_s": 30.0, "max_connections": 4, "attempts": 4, "api_key": None,
}  # fmt: skip
NO_COUNTS = [0, -1, 1.5, 2.0, math.nan, math.inf, "8", None, [1]]


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "ftp://x", "http://", "http://x:y", "http://x/?q=1", "http://x/#f", "unix:///x", None, 5, b"http://x", httpx2.URL("http://x"),
     "http://127.0.0.1:1/\x00"],
    ids=repr,
)  # fmt: skip
def test_an_invalid_address_is_refused(url):
    with pytest.raises(InvalidInput, match="url"):
        ClientOptions(**{**QUICK, "url": url})


@pytest.mark.parametrize(
    ("url", "shown"),
    [("ftp://x", "'ftp://x'"), ("http://x/\n#f", r"'http://x/\n#f'"), (5, "'5'"), ("http://me:pa/ss@x/?q=1", "'http://x/?q=1'"),
     ("me:pa/ss@x", "'x'")],
)  # fmt: skip
def test_the_error_shows_the_address_without_a_password(url, shown):
    with pytest.raises(InvalidInput) as raised:
        ClientOptions(url)
    assert raised.value.message == f"url must be like http://127.0.0.1:8000, without a query, not {shown}"


@pytest.mark.parametrize(
    ("url", "path", "address"),
    [("http://x:8000/v1", "/v1", "http://x:8000"), ("http://x/v1/", "/v1", "http://x"), ("http://x//v2//", "/v2", "http://x"),
     ("https://x/attention/v1", "/v1", "https://x/attention"), ("http://me:pa@x/docs", "/docs", "http://x"),
     ("http://x/V1", "/V1", "http://x"),
     ("http://x/v1/layers/small/attend", "/v1/layers/small/attend", "http://x"), ("http://x/healthz", "/healthz", "http://x"),
     ("http://x/openapi.json", "/openapi.json", "http://x"), ("http://x/v2/models/small/infer", "/v2/models/small/infer", "http://x")],
)  # fmt: skip
def test_an_address_with_a_route_is_answered_with_the_address_without_it(url, path, address):
    with pytest.raises(InvalidInput) as raised:
        ClientOptions(url)
    assert raised.value.message == f"url: give the address without {path}, like {address}"


@pytest.mark.parametrize(
    "url", ["http://x", "http://x/", "http://x//", "https://x:1", "http://[::1]:65535/attention/", "http://me:pass@x:80", "http://x/v1x",
            "http://v1/", "http://x/v1/tenant"],
)  # fmt: skip
def test_a_valid_address_is_accepted(url):
    assert ClientOptions(**{**QUICK, "url": url}).url == url


@pytest.mark.parametrize("count", NO_COUNTS, ids=repr)
@pytest.mark.parametrize("name", ["max_connections", "attempts", "max_answer_bytes"])
def test_a_count_is_a_whole_number_from_one_on(name, count):
    with pytest.raises(InvalidInput, match=name):
        ClientOptions(**{**QUICK, name: count})


def test_a_count_may_be_a_numpy_integer():
    check_count(np.int64(8), "window")


@pytest.mark.parametrize("key", ["two\nlines", "", "é", 5, b"key", ["key"]], ids=repr)
def test_a_key_is_printable_text(key):
    with pytest.raises(InvalidInput, match="api_key"):
        ClientOptions(**{**QUICK, "api_key": key})


def test_a_key_and_a_user_name_exclude_each_other():
    """Both are sent as Authorization, and the user name would replace the key."""
    with pytest.raises(InvalidInput, match="api_key and a user name in url"):
        ClientOptions(**{**QUICK, "url": "http://me:pass@x", "api_key": "key"})


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, 5, b"x"], ids=repr)
def test_a_request_id_is_short_plain_text(request_id):
    with pytest.raises(InvalidInput, match="request_id"):
        checked_request_id(request_id)


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, -math.inf, "3", [1], 1j, np.ones(2)], ids=repr)
def test_an_invalid_timeout_is_refused(timeout_s):
    with pytest.raises(InvalidInput, match="timeout_s"):
        checked_timeout(timeout_s)


@pytest.mark.parametrize("timeout_s", [3, 3.0, np.float32(3), np.int8(3), Fraction(3)], ids=repr)
def test_a_timeout_may_be_of_any_numeric_type(timeout_s):
    assert checked_timeout(timeout_s) == 3.0


@pytest.mark.parametrize("timeout_s", [10**400, 2e9, math.inf, None], ids=["10**400", "2e9", "inf", "None"])
def test_a_timeout_of_decades_is_none(timeout_s):
    assert checked_timeout(timeout_s) is None
