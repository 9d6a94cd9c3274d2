"""The command line: its version, its completion, and the examples at the end of each command's help."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from service import __version__, cli

LINES = [f"{name} {example}".strip() for name, examples in cli.EXAMPLES.items() for example in examples]


def test_the_version_is_printed():
    found = CliRunner().invoke(cli.app, ["--version"])
    assert (found.exit_code, found.stdout) == (0, f"attention-service {__version__}\n")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("h", ["health"]), ("layers ", ["check", "import", "list", "publish", "remove"])],
)
def test_the_shell_completes_commands(typed, offered):
    words = f"attention-service {typed}"
    asked = {"_ATTENTION_SERVICE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "import sys; sys.argv = ['attention-service']; from service.cli import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    assert sorted(found.stdout.split()) == offered


def commands() -> dict[str, Any]:
    """Every command that a user sees, by its words."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        if not command.hidden:
            below = getattr(command, "commands", None)
            found |= {name: command} if below is None else {f"{name} {inner}": one for inner, one in below.items()}
    return found


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_help_of_every_command_ends_with_its_examples(name):
    found = CliRunner().invoke(cli.app, [*name.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    _, examples, text = found.stdout.partition("Examples:")
    assert examples
    shown = [line.strip().removeprefix("attention-service ") for line in text.splitlines() if line.strip()]
    assert shown == [f"{name} {example}".strip() for example in cli.EXAMPLES[name]]


@pytest.mark.parametrize("line", LINES)
def test_an_example_is_understood(line):
    words = shlex.split(line.partition(" >> ")[0])
    name = " ".join(words[: 2 if words[0] in ("layers", "models", "keys") else 1])
    commands()[name].make_context(
        name, words[len(name.split()) :]
    )  # raises a usage error for an option that it has not


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("bad allocation")])
def test_a_lack_of_memory_is_one_sentence(monkeypatch, capfd, error):
    def app(**_):
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, *capfd.readouterr()) == (1, "", "attention-service: the memory does not suffice\n")


def test_the_directory_of_layers_has_the_same_variable_in_every_command():
    """`serve` reads the variable with its settings."""
    found = {
        name: parameter.envvar
        for name, command in commands().items()
        for parameter in command.params
        if "--layers-dir" in parameter.opts and name != "serve"
    }
    assert len(found) > 2
    assert set(found.values()) == {"ATTENTION_LAYERS_DIR"}


@pytest.mark.parametrize("command", ["--version", "--help", "keys new", "layers list --layers-dir ."])
def test_a_stdout_that_cannot_be_written_is_one_sentence(tmp_path, command):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        words = [sys.executable, "-m", "service", *command.split()]
        where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        found = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path, env=where
        )
    line = "attention-service: a write failed: No space left on device"
    assert (found.returncode, found.stderr.splitlines()[-1]) == (1, line)
    assert len(found.stderr.splitlines()) == 1 + (command == "keys new"), "that command prints its secret to stderr"


@pytest.mark.parametrize(
    "command",
    ["--version", "--help", "keys new", "keys new --help", "layers list --layers-dir .", "layers list --help"],
)
@pytest.mark.parametrize("stdout", [">&-", "</dev/null 1<&0"])
def test_a_result_that_a_closed_stdout_loses_is_an_error(tmp_path, command, stdout):
    done = in_shell(tmp_path, f"{command} {stdout}")
    line = "attention-service: a write failed: Bad file descriptor"
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (1, "", line)
    assert len(done.stderr.splitlines()) == 1 + (command == "keys new"), "that command prints its secret to stderr"


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/null", "2>/dev/full"])
def test_a_key_that_cannot_be_printed_is_an_error_and_has_no_line(tmp_path, stderr):
    done = in_shell(tmp_path, f"keys new {stderr}")
    assert (done.returncode, done.stdout) == (1, "")


def in_shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = ["bash", "-c", f"exec {sys.executable} -m service {command}"]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder, env=where)


def test_a_file_that_may_not_grow_is_one_sentence_too(tmp_path):
    command = f"ulimit -f 0; exec {sys.executable} -m service --version > out"
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path, env=where
    )
    assert (found.returncode, found.stderr) == (1, "attention-service: a write failed: File too large\n")


def test_the_line_of_a_key_is_utf_8_whatever_the_locale():
    words = [sys.executable, "-m", "service", "keys", "new", "--name", "Zoë"]
    found = subprocess.run(words, stdout=subprocess.PIPE, check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert found.stdout.decode().endswith(" infer  # Zoë\n")
