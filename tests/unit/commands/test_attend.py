"""`attention` and `show`: attention on one's own arrays in this process, and weights from a file."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from service.cli import app
from service.errors import ServiceError
from tests import reference


def run(*arguments: object) -> str:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture
def files(tmp_path):
    """Query [2, 4, 3, 8], key and value [2, 2, 5, 8] on disk."""
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 4, 3, 8), "key": (2, 2, 5, 8), "value": (2, 2, 5, 8)}
    for name, shape in shapes.items():
        np.save(tmp_path / f"{name}.npy", rng.standard_normal(shape).astype(np.float32))
    return tmp_path


def options(directory) -> list[object]:
    return [part for name in ("query", "key", "value") for part in (f"--{name}", directory / f"{name}.npy")]


def test_attention_writes_the_output_and_everything_that_was_asked_for(files):
    out = files / "out.npz"
    asked = (
        "--scale",
        0.5,
        "--softcap",
        2,
        "--causal",
        "top_left",
        "--weights",
        "heads",
        "--scores",
        "masked",
        "--lse",
    )
    text = run("attention", *options(files), *asked, "--local", "--out", out)
    query, key, value = (np.load(files / f"{name}.npy") for name in ("query", "key", "value"))
    expected = reference.scaled_dot_product((query, key, value), [reference.Causal(0)], scale=0.5, softcap=2.0)
    with np.load(out) as arrays:
        found = dict(arrays)
    assert np.allclose(found["output"], expected.output, atol=1e-5)
    assert np.allclose(found["weights"], expected.weights, atol=1e-5)
    assert np.allclose(found["lse"], expected.lse, atol=1e-5)
    assert np.array_equal(np.isneginf(found["scores"]), np.isneginf(expected.masked))
    assert '"sdpa"' in text


def test_attention_refuses_what_the_service_refuses(files):
    with pytest.raises(ServiceError, match="layout"):
        run("attention", *options(files), "--layout", "hld", "--local")


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 4, 4), (4, 4)])
def test_show_draws_weights_from_a_file(tmp_path, shape):
    weights = np.zeros(shape, np.float32)
    weights[..., 0] = 1.0
    np.savez(tmp_path / "w.npz", weights=weights)
    assert "w.npz, head 0" in run("show", "--weights", tmp_path / "w.npz", "--legend", "--tokens", "a b c d")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show",), "either a layer or --weights"),
        (("show", "layer", "--weights", "w.npz"), "either a layer or --weights"),
        (("show", "--weights", "missing.npz"), "missing.npz"),
        (("show", "--weights", "w.npz", "--sequence", 2), "--sequence must be below 2"),
        (("show", "--weights", "w.npz", "--head", 3), "--head must be below 3"),
        (("show", "--weights", "flat.npy"), "must hold weights"),
    ],
)
def test_show_says_what_is_wrong_with_the_file_or_the_choice(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    np.savez("w.npz", weights=np.ones((2, 3, 4, 4), np.float32))
    np.save("flat.npy", np.ones(4, np.float32))
    with pytest.raises(ServiceError, match=words):
        run(*arguments)
