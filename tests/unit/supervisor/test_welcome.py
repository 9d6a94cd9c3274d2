"""Welcome: the address opens in a browser, and the served layers are named."""

import re

import pytest

from service.supervisor import welcome as module
from service.supervisor.welcome import AUTHORITY, LAYERS, reachable, welcome


@pytest.mark.parametrize(
    ("bound", "opens"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("192.0.2.7", "192.0.2.7"),
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("2001:db8::7", "[2001:db8::7]"),
        ("fe80::1%eth0", "[fe80::1%25eth0]"),
    ],
)
def test_a_bound_address_is_written_as_one_that_opens(bound, opens):
    assert reachable(bound) == opens


def written(monkeypatch, layers) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(module, "write_text", found.append)
    text = f"starts on http://{AUTHORITY}\nserves {LAYERS}attention\nopen http://{AUTHORITY}/docs\n"
    write_others = welcome(text, "::", 8000)
    assert found == ["starts on http://[::1]:8000\n"], "the rest waits until it is true"
    write_others(layers)
    return "".join(found).splitlines()


def test_the_layers_are_named_once_they_are_served(monkeypatch):
    assert written(monkeypatch, {"small": "", "cross": ""})[1:] == [
        "serves cross, small, attention",
        "open http://[::1]:8000/docs",
    ]
    assert written(monkeypatch, {})[1] == "serves attention"


def test_many_layers_are_counted(monkeypatch):
    line = written(monkeypatch, {f"l{number:05d}": "" for number in range(14_000)})[1]
    assert re.fullmatch(r"serves l00000, .*, l00007, 13992 more, attention", line)
