"""Imported layers of each family, asked over HTTP, beside its own code: masks, padding, windows, positions, packaged weights."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
import safetensors.torch
from typer.testing import CliRunner

from service import cli
from tests import processes
from tests.conformance.layer_cases import CASES, TOLERANCES
from tests.conformance.layer_questions import FRAMEWORK_ANSWERS, Imported, Question, Tensors, imported_layers
from tests.conformance.packaged_models import SMOLLM2, packaged_cases, write_smollm2
from tests.conformance.parity_environment import package, run_program
from tests.e2e.started import Started

HOW_TO_INSTALL = "transformers, Keras and Flax are not installed: make install-parity"
pytestmark = [
    pytest.mark.skipif(package("transformers") is None, reason=HOW_TO_INSTALL),
    pytest.mark.timeout(300),
    pytest.mark.long,
]
HEADERS = {"content-type": "application/vnd.safetensors"}
LAYERS = imported_layers()
GRID = [(layer, dtype) for layer in LAYERS for dtype in layer.tolerances]
PACKAGED = packaged_cases()


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The checkpoints, and what the layers of transformers and of the frameworks answer."""
    found: Path = tmp_path_factory.mktemp("families")
    if any(case.name == SMOLLM2 for case in PACKAGED):
        write_smollm2(found)
    cases = [case.as_json() for case in (*CASES, *PACKAGED)]
    (found / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    run_program("layer_answers.py", found)
    run_program("framework_layers.py", found)
    return found


@pytest.fixture(scope="module")
def theirs(directory) -> dict[str, Tensors]:
    names = [*(case.name for case in (*CASES, *PACKAGED)), FRAMEWORK_ANSWERS]
    return {name: safetensors.torch.load_file(directory / f"{name}.safetensors") for name in names}


@pytest.fixture(scope="module")
def failures(directory) -> dict[str, str]:
    """What `layers import` said of each layer that it did not import."""
    said = {layer.name: failure_of_import(layer, directory) for layer in LAYERS}
    return {name: words for name, words in said.items() if words}


def failure_of_import(layer: Imported, directory: Path) -> str:
    words = ("layers", "import", str(directory / layer.source), "--name", layer.name, *layer.words)
    ran = CliRunner().invoke(cli.app, [*words, "--layers-dir", str(directory / "layers")])
    return "" if ran.exit_code == 0 else f"{ran.output} {ran.exception}"


@pytest.fixture(scope="module")
def services(directory, failures) -> Iterator[dict[str, httpx2.Client]]:
    """A service for each dtype, all over the same layers."""
    assert len(failures) < len(LAYERS)
    with ExitStack() as stack:
        started = {dtype: Started(directory / "layers", dtype=dtype, workers=1) for dtype in TOLERANCES}
        for service in started.values():
            stack.callback(service.end)
        clients = {}
        for dtype, service in started.items():
            url = service.url
            processes.eventually(functools.partial(processes.is_ready, url), "the service is ready", within_s=200)
            clients[dtype] = stack.enter_context(httpx2.Client(base_url=url, timeout=30))
        yield clients


def asked(client: httpx2.Client, layer: str, question: Question, reference: Tensors) -> Tensors:
    tensors, fields = question.request(reference)
    content = safetensors.torch.save(tensors, {"request": json.dumps(fields)})
    reply = client.post(f"/v1/layers/{layer}/attend", content=content, headers=HEADERS)
    assert reply.status_code == 200, reply.text
    return safetensors.torch.load(reply.content)


def error(question: Question, answer: Tensors, reference: Tensors, part: str) -> float:
    """The largest error of the rows that are no padding, in parts of the largest value, if that is above 1."""
    found, wanted = answer[part].float(), reference[part]
    assert found.shape == wanted.shape
    if question.row_pads is not None:
        axis = found.dim() - 2  # the rows
        found, wanted = (x.movedim(axis, 1)[~question.row_pads] for x in (found, wanted))
    return float((found - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(("layer", "dtype"), GRID, ids=[f"{layer.name}-{dtype}" for layer, dtype in GRID])
def test_an_imported_layer_answers_as_its_own_code_does(theirs, failures, services, layer, dtype):
    assert layer.name not in failures, failures[layer.name]
    errors = {}
    for question in layer.questions:
        reference = question.reference(theirs)
        answer = asked(services[dtype], layer.name, question, reference)
        for part in ("output", "weights"):
            if part in reference:
                errors[question.name, part] = error(question, answer, reference, part)
    assert {where: value for where, value in errors.items() if not value <= layer.tolerances[dtype]} == {}


@pytest.mark.parametrize("name", ["minilm", "rxnmapper", "anarcii", SMOLLM2])
def test_the_weights_of_a_package_are_among_them(name):
    if name not in {case.name for case in PACKAGED}:
        pytest.skip(f"the weights of {name} are not installed: make install-parity")
    assert any(layer.name.startswith(name) for layer in LAYERS)
