"""`golden`: test vectors are true, the same for a seed, and find a kernel that reads blocked keys."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from attention_client.cli import asking, commands
from attention_client.cli.app import app
from attention_client.cli.golden_vectors import VECTORS
from attention_client.errors import ServiceError
from tests import oracle

pytestmark = pytest.mark.usefixtures("service")

NAMES = [vector.name for vector in VECTORS]
# Where every key is seen by some row.
UNPOISONED = {"no_mask", "causal_bottom_right"}
TABLES: dict[str, Callable[[np.ndarray], oracle.Mask]] = {
    "attend": oracle.Attend,
    "ignore": oracle.Ignore,
    "bias": oracle.Bias,
}


def run(*arguments: object) -> str:
    found = CliRunner().invoke(app, ["golden", *map(str, arguments)], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture(scope="module")
def directory(tmp_path_factory, service):
    out = tmp_path_factory.mktemp("golden") / "new"
    assert f"{len(VECTORS)} vectors in" in run("--out", out)
    return out


def read(path) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors and the one key of metadata, by the library alone."""
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == ["golden"]
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["golden"])  # noqa: SIM118


def in_heads(tensor: torch.Tensor, request: dict, name: str) -> np.ndarray:
    """[B, H, L, d] in float64."""
    array, layout = tensor.double().numpy(), request["layout"]
    if layout == "packed":
        heads = request["num_heads" if name in ("query", "output") else "num_kv_heads"]
        layout, array = "blhd", array.reshape(*array.shape[:2], heads, -1)
    array = array.transpose([layout.index(axis) for axis in "bhld" if axis in layout])
    return np.expand_dims(array, [place for place, axis in enumerate("bhld") if axis not in layout])


def masks_of(tensors: dict[str, torch.Tensor], request: dict, offset: int) -> list[oracle.Mask]:
    """The request's masks as the oracle's masks; `offset` is S - L."""
    found: list[oracle.Mask] = []
    for place, mask in enumerate(request["masks"]):
        values = tensors[f"masks.{place}.values"].numpy() if f"masks.{place}.values" in tensors else np.empty(0)
        match mask["kind"]:
            case "causal":
                found.append(oracle.Causal(offset if mask["align"] == "bottom_right" else 0))
            case "window":
                found.append(oracle.Window(offset, mask["left"], mask["right"]))
            case "lengths":
                found.append(oracle.Lengths(values))
            case kind:
                found.append(TABLES[kind](values))
    return found


def computed(path, *, blocks: bool = True) -> tuple[oracle.Attention, np.ndarray, np.ndarray, dict]:
    """The oracle's answer, the file's output and lse, and its metadata; without `blocks` no mask counts."""
    tensors, about = read(path)
    request = about["request"]
    query, key, value = (in_heads(tensors[name], request, name) for name in ("query", "key", "value"))
    if "past_key" in tensors:
        pasts = (tensors[name].double().numpy() for name in ("past_key", "past_value"))
        key, value = (np.concatenate(pair, axis=2) for pair in zip(pasts, (key, value), strict=True))
    masks = masks_of(tensors, request, key.shape[2] - query.shape[2]) if blocks else []
    sinks = tensors["sinks"].double().numpy() if "sinks" in tensors else None
    options = {"scale": request.get("scale"), "softcap": request.get("softcap"), "sinks": sinks}
    answer = oracle.scaled_dot_product((query, key, value), masks, **options)
    return answer, in_heads(tensors["output"], request, "output"), tensors["lse"].numpy(), about


@pytest.mark.parametrize("name", NAMES)
def test_another_reference_computes_the_same_output_and_lse(directory, name):
    answer, output, lse, _ = computed(directory / f"{name}.safetensors")
    np.testing.assert_allclose(answer.output, output, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(answer.lse.reshape(lse.shape), lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_that_reads_poisoned_keys_is_wrong_in_every_row(directory, name):
    answer, output, _, about = computed(directory / f"{name}.safetensors", blocks=False)
    assert (name in UNPOISONED) == ("; 0 of" in about["description"])
    if name not in UNPOISONED:
        assert (np.abs(answer.output - output).max(axis=-1) > 100).all()


def test_a_seed_gives_the_same_bytes_and_another_seed_other_inputs(directory, tmp_path):
    run("--out", tmp_path / "same")
    run("--out", tmp_path / "other", "--seed", 1)
    for name in NAMES:
        first, same, other = (x / f"{name}.safetensors" for x in (directory, tmp_path / "same", tmp_path / "other"))
        assert first.read_bytes() == same.read_bytes()
        assert read(first)[1]["sha256"] != read(other)[1]["sha256"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_names_the_hash_of_its_inputs(directory, name):
    tensors, about = read(directory / f"{name}.safetensors")
    inputs = sorted(tensors.keys() - {"output", "lse"})
    data = b"".join(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name in inputs)
    assert about["sha256"] == hashlib.sha256(data).hexdigest()
    assert (about["name"], about["seed"]) == (name, 0)
    assert {"attention-service-client", "numpy"} == about["made_by"].keys()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layout_packed", "packed, repeat, causal top_left"),
        ("float16", "ignore ls, causal bottom_right"),
        ("bias", "bias hls"),
    ],
)
def test_compare_reads_a_file(directory, name, words):
    found = CliRunner().invoke(app, ["compare", str(directory / f"{name}.safetensors")])
    assert found.exit_code == 0
    assert words in " ".join(found.stdout.split())


def wrong(change):
    """`asking` with an answer that `change` has changed."""
    honest = asking.asking

    @contextlib.contextmanager
    def wrongly(where, api_key=None):
        with honest(where, api_key) as ask:
            yield lambda layer, body: change(ask(layer, body))

    return wrongly


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("output", lambda output: output + np.where(output == output.max(), 1e-3, 0)),
        ("output", lambda output: np.where(output == 0, np.nan, output)),
        ("lse", lambda lse: lse * (1 + 1e-3)),
    ],
)
def test_a_wrong_answer_ends_with_exit_code_1_and_names_the_vector(tmp_path, monkeypatch, name, change):
    def changed(reply):
        return asking.Reply(reply.arrays | {name: change(reply.arrays[name])}, {})

    monkeypatch.setattr(commands, "asking", wrong(changed))
    with pytest.raises(ServiceError, match=rf"the service's {name} of \w+ is off by .* times the tolerance"):
        run("--out", tmp_path)


def test_the_files_are_written_though_no_service_answers(tmp_path):
    with pytest.raises(ServiceError):
        run("--out", tmp_path, "--url", "http://127.0.0.1:9")
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(NAMES)


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ServiceError, match="cannot be written: Not a directory"):
        run("--out", tmp_path / "file" / "new")


@pytest.mark.parametrize("name", ["x[v2]", "[red]x[", ":key:"])
def test_the_directory_is_printed_as_it_is(tmp_path, name):
    """What rich calls markup is text in a name."""
    assert f" vectors in {tmp_path / name}; the largest error " in run("--out", tmp_path / name)


def test_a_seed_that_json_cannot_hold_is_refused(tmp_path):
    found = CliRunner().invoke(app, ["golden", "--out", str(tmp_path), "--seed", str(2**64)])
    assert found.exit_code == 2
