"""What commands print: one line a message whatever it quotes, and progress only where a person sees it."""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import cli
from service.commands.terminal import say
from service.errors import printable
from tests import processes
from tests.unit.layers.checkpoints import linears, save_safetensors

SERVICE = Path(cli.__file__).parent


@given(st.text(st.characters(exclude_categories=[]), max_size=40))
def test_a_printed_text_has_no_character_that_controls_a_terminal(text):
    shown = printable(text)
    assert not {unicodedata.category(char) for char in shown.replace("\u200c", "").replace("\u200d", "")} & {
        "Cc", "Cf", "Cs", "Zl", "Zp"
    }  # fmt: skip
    assert shown.splitlines() in ([], [shown])
    assert text.isprintable() <= (shown == text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jx", r"\x1b[2Jx"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\nattention-service: all is well", r"a\nattention-service: all is well"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("\x9b31m\x85\u2028\u2029\r\t\0", r"\x9b31m\x85\u2028\u2029\r\t\x00"),
        ("b\udcffd", r"b\udcffd"),
        ("Zoë 字 🙂 👩\u200d🔬 می\u200cخواهم a\u00a0b", "Zoë 字 🙂 👩\u200d🔬 می\u200cخواهم a\u00a0b"),
    ],
)
def test_a_text_is_shown_with_its_controls_as_escapes_and_otherwise_as_it_is(capsys, text, shown):
    say(text)
    say(text, err=True)
    assert capsys.readouterr() == (f"{shown}\n", f"{shown}\n")


@pytest.mark.parametrize(
    "words",
    [
        ["layers", "list", "--layers-dir", "no\x1b[2J\nattention-service: fine"],
        ["layers", "remove", "x", "--layers-dir", "no\x1b[2J\nattention-service: fine"],
        ["layers", "remove", "x\x1b]0;t\x07", "more\n"],
        ["health", "--url", "no\u202e\n\x1b"],
        ["serve", "--layers-dir", "no\n\x1b"],
        ["serve", "--dtype", "no\n\x1b"],
        ["serve", "--port", "no\n\x1b"],
        ["ser\x1bve\n"],
        ["--no\n\x1b"],
    ],
    ids=ascii,
)
def test_a_mistake_is_one_line_whatever_was_typed(monkeypatch, capfd, words):
    monkeypatch.setattr(sys, "argv", ["attention-service", *words])
    with pytest.raises(SystemExit):
        cli.main()
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err[:-1].isprintable()


def test_commands_print_through_one_function():
    """Only the terminal's own module calls what prints; help and completion are typer's."""
    for path in [SERVICE / "cli.py", *(SERVICE / "commands").glob("*.py")]:
        calls = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Call)
        }
        found = calls & {"print", "typer.echo", "typer.secho", "sys.stdout.write", "sys.stderr.write"}
        assert found == ({"typer.echo"} if path.name == "terminal.py" else set()), path


def test_progress_is_shown_on_a_terminal_and_nowhere_else(tmp_path):
    """Not even where colours are forced. Results go to stdout in any case."""
    source = save_safetensors(tmp_path / "x.safetensors", linears("m.", "0", "1", "2", "3"))
    pairs = [f"{role}=m.{number}.weight" for number, role in enumerate(("query", "key", "value", "output"))]
    options = ["--name", "mine", "--heads", "2", "--map", *pairs]
    words = [sys.executable, "-m", "service", "layers", "import", str(source), *options]
    where = {**processes.environment(layers_dir=tmp_path), "FORCE_COLOR": "1", "TERM": "xterm"}
    mine, other = processes.openpty()
    shown = b""
    with subprocess.Popen(words, env=where, stdout=subprocess.PIPE, stderr=other, text=True) as drawn:
        os.close(other)
        with contextlib.suppress(OSError):  # EIO: everything has been read, and the other end is closed
            while block := os.read(mine, 65536):
                shown += block
        os.close(mine)
        assert drawn.stdout is not None
        result = drawn.stdout.read()
    for step in ("loading torch", "writing mine"):  # the first one, which takes seconds, and the last
        assert step in shown.decode()
    piped = subprocess.run(words, env=where, capture_output=True, text=True, check=True)
    assert piped.stderr == ""
    assert result.splitlines()[:2] == piped.stdout.splitlines()[:2]
    assert "\x1b" not in result + piped.stdout
