"""`attention-service models import`: the output and the files of an import, and the message for each mistake."""

from __future__ import annotations

import sys

import pytest

from service import cli
from service.layers.store import Store
from service.models.stored_model import ModelStore
from tests.unit.models.encoders import checkpoint


@pytest.fixture
def run_command(tmp_path, monkeypatch, capfd):
    """Return a function that imports a model into the directory `layers` of the test: its exit code and output."""

    def run(*arguments: object) -> tuple[int, str, str]:
        words = [
            "attention-service",
            "models",
            "import",
            *map(str, arguments),
            "--layers-dir",
            str(tmp_path / "layers"),
        ]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def stored(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "layers").glob("*"))


SET = ["tiny-l0.safetensors", "tiny-l1.safetensors", "tiny.model"]


def test_an_import_stores_the_layers_and_the_model_that_names_them(run_command, tmp_path):
    code, out, err = run_command(checkpoint(tmp_path / "source"), "--name", "tiny")
    assert (code, err) == (0, "")
    assert stored(tmp_path) == SET
    model = ModelStore(tmp_path / "layers").load("tiny")
    assert [Store(tmp_path / "layers").load(ref.name).digest for ref in model.layers] == [
        ref.digest for ref in model.layers
    ]
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["tiny-l0"] * 3 + ["tiny-l1"] * 3 + ["tiny"] * 3
    assert lines[-3:] == [
        f"tiny: family bert, 2 layers, 8 wide, at most 40 tokens of 80, {model.digest[:19]}…",
        f"tiny: wrote {tmp_path}/layers/tiny.model",
        "tiny: a running service that serves these layers has it now, another one after a restart",
    ]


def test_an_import_keeps_what_is_there_and_adds_what_is_missing(run_command, tmp_path):
    """As layers of an earlier release, which had no models, or of an import that was interrupted."""
    source = checkpoint(tmp_path / "source")
    run_command(source, "--name", "tiny")
    times = {name: (tmp_path / "layers" / name).stat().st_mtime_ns for name in SET}
    for missing in (set(), {"tiny.model"}, {"tiny-l1.safetensors"}, {"tiny-l0.safetensors", "tiny.model"}):
        for name in missing:
            (tmp_path / "layers" / name).unlink()
            del times[name]
        code, out, _ = run_command(source, "--name", "tiny")
        assert (code, out.count("wrote"), out.count("holds it already")) == (0, len(missing), 3 - len(missing))
        assert stored(tmp_path) == SET
        assert all((tmp_path / "layers" / name).stat().st_mtime_ns == time for name, time in times.items())
        times = {name: (tmp_path / "layers" / name).stat().st_mtime_ns for name in SET}


@pytest.mark.parametrize("there", [["tiny.model"], ["tiny-l1.safetensors"], SET])
def test_another_model_is_overwritten_only_with_replace(run_command, tmp_path, there):
    """A refused import writes nothing."""
    run_command(checkpoint(tmp_path / "source"), "--name", "tiny")
    for name in SET:
        if name not in there:
            (tmp_path / "layers" / name).unlink()
    other = checkpoint(tmp_path / "other", "electra")
    code, out, err = run_command(other, "--name", "tiny")
    assert (code, out, stored(tmp_path)) == (1, "", there)
    assert "exists with other tensors or options, from source" in err
    assert run_command(other, "--name", "tiny", "--replace")[0] == 0
    assert ModelStore(tmp_path / "layers").load("tiny").family == "electra"


def test_a_damaged_file_is_overwritten_only_with_replace(run_command, tmp_path):
    source = checkpoint(tmp_path / "source")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "tiny.model").write_bytes(b"damaged")
    code, _, err = run_command(source, "--name", "tiny")
    assert (code, stored(tmp_path)) == (1, ["tiny.model"])
    assert err.endswith("; --replace overwrites the file\n")
    assert run_command(source, "--name", "tiny", "--replace")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nothing", "--name", "tiny"), "source 'nothing': the file does not exist"),
        (("source", "--name", "Tiny"), "--name must be 1 to 64 of a-z"),
        (("source", "--name", "sdpa"), "--name must be 1 to 64 of a-z"),
        (("source/model.safetensors", "--name", "tiny"), "has no tokenizer.json"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_no_file(run_command, tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(checkpoint(tmp_path / "source").parent)
    code, out, err = run_command(*arguments)
    assert (code, out, stored(tmp_path)) == (1, "", [])
    assert reason in err
    assert err.count("\n") == 1
