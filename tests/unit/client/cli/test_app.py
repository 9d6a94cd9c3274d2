"""The command `attention`: its version, its completion, its examples, and what it prints when something is missing or full."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from typer.testing import CliRunner

from attention_client.cli import app as cli

COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
DOCS = (Path(__file__).parents[4] / "docs" / "client.md").read_text(encoding="utf-8")
LINES = [f"{name} {example}" for name, examples in cli.EXAMPLES.items() for example in examples]
LINES += re.findall(r"(?m)^attention (.*?)  +# ", DOCS)


def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attention_client.cli", *map(str, words)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


def test_the_version_is_that_of_the_distribution():
    found = CliRunner().invoke(cli.app, ["--version"])
    assert (found.exit_code, found.stdout) == (0, f"attention {version('attention-service-client')}\n")


def test_the_shell_completes_commands():
    asked = {"_ATTENTION_COMPLETE": "complete_bash", "COMP_WORDS": "attention s", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['attention']; from attention_client.cli.app import main; main()"
    words = [sys.executable, "-c", code]
    found = subprocess.run(words, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert sorted(found.stdout.split()) == ["sdpa", "show"]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_of_every_command_ends_with_its_examples(name):
    found = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    lines = [line.strip() for line in found.stdout.partition("Examples:")[2].splitlines() if line.strip()]
    assert lines == [f"attention {name} {example}" for example in cli.EXAMPLES[name]] != []


def test_attention_without_a_layer_promises_no_default_of_key_and_value():
    helps = {parameter.name: parameter.help for parameter in COMMANDS["sdpa"].params}
    assert not [name for name in ("query", "key", "value") if "default" in helps[name]]


@pytest.mark.parametrize("line", LINES)
def test_an_example_is_understood(line):
    name, *words = shlex.split(line)
    COMMANDS[name].make_context(name, words)  # raises a usage error for an option that it has not


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_takes_the_address_and_the_key_of_the_environment(name):
    found = {parameter.name: parameter.envvar for parameter in COMMANDS[name].params if parameter.envvar}
    assert found == {"url": "ATTENTION_URL", "api_key": "ATTENTION_CLIENT_KEY"}


def test_a_usage_error_is_one_line_and_exit_code_2():
    found = run("golden", "--seed", "x")
    assert (found.returncode, found.stderr.count("\n"), found.stderr[:11]) == (2, 1, "attention: ")


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("bad allocation")])
def test_a_lack_of_memory_is_one_sentence(monkeypatch, capfd, error):
    def app(**_):
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, *capfd.readouterr()) == (1, "", "attention: the memory does not suffice\n")


@pytest.mark.parametrize("command", ["--version", "--help", "show --weights w.npy"])
def test_a_stdout_that_cannot_be_written_is_one_sentence(tmp_path, command):
    np.save(tmp_path / "w.npy", np.eye(2))
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        found = run(*command.split(), stdout=full, cwd=tmp_path)
    assert (found.returncode, found.stderr) == (1, "attention: a write failed: No space left on device\n")


@pytest.mark.parametrize(("closed", "code"), [("1>&-", 0), ("2>&-", 0), ("1>&- 2>&-", 0), ("<&- >&- 2>&-", 0)])
def test_a_closed_standard_stream_changes_neither_the_exit_code_nor_the_file(tmp_path, closed, code):
    np.save(tmp_path / "w.npy", np.eye(2))
    command = f"exec {sys.executable} -m attention_client.cli show --weights {tmp_path}/w.npy {closed}"
    assert subprocess.run(["sh", "-c", command], capture_output=True, check=False).returncode == code
    command = f"exec {sys.executable} -m attention_client.cli show --weights {tmp_path}/missing {closed}"
    assert subprocess.run(["sh", "-c", command], capture_output=True, check=False).returncode == 1


def test_a_name_that_is_not_utf_8_is_printed_with_backslash_escapes(tmp_path):
    path = tmp_path / os.fsdecode(b"b\xff.npy")
    np.save(path, np.eye(2))
    found = run("show", "--weights", path, stdout=subprocess.PIPE)
    assert r"b\udcff.npy" in found.stdout


@pytest.mark.parametrize("absent", ["rich", "typer"])
def test_without_the_extra_the_command_says_in_one_line_what_to_install(absent):
    code = f"import sys; sys.modules['{absent}'] = None; from attention_client.cli.__main__ import main; main()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    line = f"attention: {absent} is missing: pip install 'attention-service-client[cli]'\n"
    assert (found.returncode, found.stdout, found.stderr) == (1, "", line)


def test_nothing_of_a_service_is_imported():
    code = "import sys, attention_client.cli.app; print({'torch', 'service', 'pydantic'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
