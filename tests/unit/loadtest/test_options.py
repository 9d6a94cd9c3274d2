"""Options: names of arguments and environment variables, and which values are refused."""

import argparse

import pytest

from attention_load.options import OPTIONS, add_options, address, validate


class Parser:
    """Keeps what is added."""

    def __init__(self):
        self.added = {}

    def add_argument(self, name, /, **settings):
        self.added[name] = settings


def options(**changes) -> argparse.Namespace:
    return argparse.Namespace(**{name: default for name, default, _ in OPTIONS} | changes)


def test_every_option_has_an_environment_variable_a_default_and_a_meaning():
    parser = Parser()
    add_options(parser)
    assert len(parser.added) == len(OPTIONS)
    for name, settings in parser.added.items():
        assert settings["env_var"] == "LOADTEST_" + name.removeprefix("--").replace("-", "_").upper()
        assert isinstance(settings["default"], settings["type"])
        assert settings["help"]


def test_the_web_page_shows_neither_key_nor_path():
    parser = Parser()
    add_options(parser)
    hidden = {name for name, settings in parser.added.items() if not settings["include_in_web_ui"]}
    assert hidden == {"--api-key", "--json-report"}


def test_the_defaults_are_valid():
    validate(options())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_users": 0}, "--peak-users must be positive"),
        ({"steps": 0}, "--steps must be positive"),
        ({"hold_s": -1.0}, "--hold-s must not be negative"),
        ({"max_error_share": -0.1}, "--max-error-share must not be negative"),
        ({"api_key": "secret\n"}, "--api-key has characters that a header cannot carry"),
    ],
)
def test_an_invalid_value_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message) as refused:
        validate(options(**changes))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "used"),
    [("http://x:8000", "http://x:8000"), ("http://x:8000/", "http://x:8000"), ("https://x/attention//", "https://x/attention"),
     ("http://[::1]:8000/", "http://[::1]:8000"), ("http://v1/", "http://v1")],
)  # fmt: skip
def test_an_address_may_end_with_a_slash(host, used):
    assert address(host) == used


@pytest.mark.parametrize(
    ("host", "message"),
    [(None, "^--host must be like http://127.0.0.1:8000, .* not None$"),
     ("", "--host must be like"), ("x:8000", "--host must be like"),
     ("ftp://x", "--host must be like"), ("http://x/?a=1", "--host must be like"), ("http:///v1", "--host must be like"),
     ("http://x/v1", "^--host: give the address without /v1$"), ("http://x/v1/layers", "without /v1/layers$"),
     ("http://x//v2//", "without /v2$"), ("http://x/docs/", "without /docs$")],
)  # fmt: skip
def test_another_address_is_refused_by_the_options_name(host, message):
    with pytest.raises(ValueError, match=message):
        address(host)
