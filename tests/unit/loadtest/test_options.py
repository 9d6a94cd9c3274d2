"""Options: names of arguments and environment variables, and which values are refused."""

import argparse

import pytest

from attention_load.options import OPTIONS, add_options, validate


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
