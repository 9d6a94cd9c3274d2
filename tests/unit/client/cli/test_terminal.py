"""Terminal: foreign text never controls it, and only a long command shows its progress there."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.arrays import Raw, write
from attention_client.cli import app as cli
from attention_client.cli.terminal import Screen, printable, progress
from tests.doubles import ManualClock
from tests.unit.commands.answering import answering

EVIL = "\x1b]0;owned\x07\x1b[2J\r\nattention: all is well\x9b31m\u202egnp.\u2028\u2069\x7f"
ONE = {"dtype": "float32", "shape": [1, 2], "data": "AACAPwAAgD8="}
FORBIDDEN = {*map(chr, (*range(10), *range(11, 32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A)))}


@given(st.text())
def test_printable_text_has_no_control_character_and_json_reads_it_as_the_same_text(text):
    shown = printable(text)
    assert not {*shown} & FORBIDDEN
    assert "\n" not in shown
    assert json.loads(printable(json.dumps(text, ensure_ascii=False))) == text
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]


@pytest.mark.parametrize("text", ["", "plain [red]", "é ß 猫 नमस्ते עברית", "👩\u200d👩\u200d👧", "a\\u001b", "\u00a0"])
def test_printable_text_stays_as_it_is(text):
    assert printable(text) == text


@pytest.fixture
def printed(tmp_path, monkeypatch, capfd):
    """Run a command beside files with evil names and metadata; return what it printed."""
    monkeypatch.chdir(tmp_path)
    array = np.ones((1, 2), np.float32)
    for name in ("q.npy", f"{EVIL.replace('/', '')}.npy"):
        np.save(name, array)
    tensors = dict.fromkeys(("query", "key", "value", "output"), Raw("float32", array))
    (tmp_path / "case").write_bytes(write(tensors, {"request": json.dumps({EVIL: 1})}))
    (tmp_path / f"good{EVIL}").write_bytes(write(tensors, {}))
    (tmp_path / "body.json").write_text(json.dumps({"query": [[1]], "layout": EVIL}), encoding="utf-8")

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["attention", *words])
        with pytest.raises(SystemExit):
            cli.main()
        return "".join(capfd.readouterr())

    return run


def check(text: str, *, owns_lines: bool = False) -> None:
    assert text
    assert not {*text} & FORBIDDEN
    assert "\nattention: all is well" not in text
    assert owns_lines or text.count("\n") == 1


PROBLEM = {"code": "invalid", "detail": EVIL, "title": EVIL}
FACTS = {"layer": {"name": EVIL}, EVIL: [EVIL], "masked_rows": 0}
COMMANDS = [
    "attend small --query q.npy", "attend small --query q.npy --json", "sdpa --query q.npy", "sdpa --query q.npy --json",
    "show small --query q.npy", "compare case", "golden --out x",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("status", [200, 422, 503])
def test_the_text_of_a_server_does_not_control_the_terminal(printed, command, status):
    answer = {**FACTS, "output": ONE, "weights": None} if status == 200 else PROBLEM
    with answering(status, json.dumps(answer, ensure_ascii=False).encode()) as (url, _):
        text = printed(*command.split(), "--url", url)
    check(text, owns_lines=True)
    if status == 200 and "--json" in command:
        assert json.loads(text)["layer"] == FACTS["layer"]


@pytest.mark.parametrize(
    "words",
    [("attend", "small", "--query", EVIL), ("attend", "small", "--query", "q.npy", "--key", f"{EVIL}.npy"),
     ("attend", EVIL, "--query", "q.npy"),
     ("attend", "small", "--query", "q.npy", "--mask", EVIL), ("attend", "small", "--query", "q.npy", "--out", EVIL),
     ("compare", EVIL),
     ("show", "--weights", EVIL), ("compare", "case"), ("golden", "--out", "q.npy/" + EVIL), (EVIL,), ("show", "--" + EVIL),
     ("show", "--head", EVIL), ("attend", "small", "--query", "q.npy", "--url", EVIL), ("sdpa", "--request", EVIL)],
)  # fmt: skip
def test_the_name_and_the_metadata_of_a_file_do_not_control_the_terminal(printed, words):
    check(printed(*words))


def test_the_names_and_words_of_a_drawing_do_not_control_the_terminal(printed):
    file = f"{EVIL.replace('/', '')}.npy"
    check(printed("show", "--weights", file, "--tokens", "\x1b[31m", "--key-tokens", "\x9b a\u202e"), owns_lines=True)
    check(printed("show", "--weights", file, "--svg", "w.svg"))
    with answering(200, json.dumps({"output": ONE, "weights": None}).encode()) as (url, _):
        check(printed("attend", "small", "--query", "q.npy", "--out", f"out{file}", "--url", url), owns_lines=True)
        check(printed("compare", f"good{EVIL}", "--url", url), owns_lines=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_by(stdout: io.StringIO, stderr: io.StringIO, seconds: float) -> tuple[str, str]:
    """Return what three steps of this length show on the two streams."""
    clock = ManualClock()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        screen = Screen(force_terminal=stdout.isatty())
        with progress("of 3 vectors", screen, clock.now) as counted:
            for _ in counted(range(3)):
                screen.print("a line")
                clock.advance(seconds)
    return stdout.getvalue(), stderr.getvalue()


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "CI"])
@pytest.mark.parametrize("seconds", [0.1, 9.0])
def test_nothing_but_the_lines_goes_to_a_pipe(monkeypatch, variable, seconds):
    monkeypatch.setenv(variable, "1")
    assert shown_by(io.StringIO(), io.StringIO(), seconds) == ("a line\n" * 3, "")


def test_a_person_who_waits_longer_than_two_seconds_sees_how_far_it_is(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stdout, stderr in ((Terminal(), Terminal()), (Terminal(), io.StringIO())):
        out, err = shown_by(stdout, stderr, 9.0)
        assert "3 of 3 vectors, 27 s" in out
        assert err == ""
    out, err = shown_by(io.StringIO(), Terminal(), 9.0)
    assert (out, "3 of 3 vectors, 27 s" in err) == ("a line\n" * 3, True)
    out, _ = shown_by(Terminal(), io.StringIO(), 0.1)
    assert "vectors" not in out
