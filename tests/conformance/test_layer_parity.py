"""Layers of tiny random models, imported by the command and asked over HTTP, beside transformers: each family, mask and position."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from service import cli
from tests.conformance.layer_cases import CASES, FEATURES, STATES, Call, Kind, LayerCase
from tests.conformance.parity_environment import has_package, run_program
from tests.e2e.started import Started

pytestmark = [
    pytest.mark.skipif(not has_package("transformers"), reason="transformers is not installed: make install-parity"),
    pytest.mark.timeout(300),
    pytest.mark.long,
]
HEADERS = {"content-type": "application/vnd.safetensors"}
# Times the largest value, if that is above 1.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
LAYERS = [(case, name, *case.imports[name]) for case in CASES for name in case.imports]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """The checkpoints that transformers has saved, and what its layers answered."""
    directory: Path = tmp_path_factory.mktemp("transformers")
    (directory / "cases.json").write_text(json.dumps([case.as_json() for case in CASES]), encoding="utf-8")
    run_program("layer_answers.py", directory)
    return directory


@pytest.fixture(scope="module")
def theirs(models) -> dict[str, Tensors]:
    return {case.name: safetensors.torch.load_file(models / f"{case.name}.safetensors") for case in CASES}


@pytest.fixture(scope="module")
def failures(models) -> dict[str, str]:
    """What `layers import` said of each layer that it did not import."""
    found = {}
    for case, name, number, kind in LAYERS:
        said = imported(models / case.name, name, number, kind, models / "layers")
        if said:
            found[name] = said
    return found


@pytest.fixture(scope="module")
def services(models, failures) -> Iterator[dict[str, httpx2.Client]]:
    """A service for each dtype, all over the same layers."""
    assert len(failures) < len(LAYERS)
    with ExitStack() as stack:
        started = {dtype: Started(models / "layers", dtype=dtype) for dtype in TOLERANCES}
        for service in started.values():
            stack.callback(service.end)
        clients = {}
        for dtype, service in started.items():
            service.wait_ready()
            clients[dtype] = stack.enter_context(httpx2.Client(base_url=service.url, timeout=30))
        yield clients


def imported(source: Path, name: str, number: int, kind: Kind, directory: Path) -> str:
    """Import a layer by the command; return what it says if it fails."""
    prefix = ("--prefix", kind.prefix.format(number)) if kind.prefix else ()
    words = ("layers", "import", source, "--name", name, "--layer", number, *prefix, *kind.options)
    ran = CliRunner().invoke(cli.app, [*map(str, words), "--layers-dir", str(directory)])
    return "" if ran.exit_code == 0 else f"{ran.output}{ran.exception}"


def asked(client: httpx2.Client, name: str, tensors: Tensors, **fields: Any) -> Tensors:
    content = safetensors.torch.save(
        tensors, {"request": json.dumps(fields | {"weights": {"form": "heads"}})}
    )
    reply = client.post(f"/v1/layers/{name}/attend", content=content, headers=HEADERS)
    assert reply.status_code == 200, reply.text
    return safetensors.torch.load(reply.content)


def request(case: LayerCase, kind: Kind, call: Call, given: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and fields that ask for what the family's module answered: its pads are masked keys."""
    tensors = {name: given[name] for name in ("query", "key") if name in given}
    fields: dict[str, Any] = {}
    if case.has_positions:
        fields["positions"] = call.positions
    pads = key_pads(case, kind, call)
    if pads is not None and pads.any():
        tensors["masks.0.values"] = pads
        fields["masks"] = [{"kind": "ignore", "axes": "bs"}]
    return tensors, fields


def key_pads(case: LayerCase, kind: Kind, call: Call) -> torch.Tensor | None:
    """Which keys are padding; None where the family masks none."""
    if kind.entry == STATES or case.given == STATES or (kind.is_cross and case.given == FEATURES):
        return None
    return torch.tensor(call.pads(call.sources if kind.is_cross or is_source(case, kind) else call.lengths))


def is_source(case: LayerCase, kind: Kind) -> bool:
    """Whether it is the attention of an encoder of two."""
    return case.given == "pairs" and kind.module.partition("encoder")[1] != "" and not kind.is_cross


def check(answer: Tensors, expected: Tensors, rows: torch.Tensor, tolerance: float) -> None:
    """Output and weights of the real rows."""
    for part in ("output", "weights"):
        found, wanted = answer[part].float(), expected[part]
        assert found.shape == wanted.shape
        if part == "weights":
            found, wanted = found.transpose(1, 2), wanted.transpose(1, 2)
        error = (found - wanted)[rows].abs().max()
        assert error <= tolerance * max(1.0, float(wanted[rows].abs().max())), part


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("case", "name", "number", "kind"), LAYERS, ids=[name for _, name, *_ in LAYERS])
def test_an_imported_layer_answers_as_its_family(theirs, failures, services, case, name, number, kind, dtype):
    assert name not in failures, failures[name]
    for call in case.calls:
        expected = part_of(theirs, case, name, call)
        tensors, fields = request(case, kind, call, expected)
        answer = asked(services[dtype], name, tensors, **fields)
        check(answer, expected, real_rows(case, kind, call), TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("case", "name", "number", "kind"), [one for one in LAYERS if one[-1].is_relative], ids=lambda one: str(one)[:20]
)
def test_a_layer_with_relative_positions_answers_the_same_far_from_the_start(
    theirs, failures, services, case, name, number, kind
):
    assert name not in failures, failures[name]
    expected = part_of(theirs, case, name, case.calls[2])
    rows = expected["query"].shape[1]
    answer = asked(services["float32"], name, {"query": expected["query"]}, positions=list(range(4000, 4000 + rows)))
    check(answer, expected, torch.ones(1, rows, dtype=torch.bool), TOLERANCES["float32"])


def part_of(theirs: dict[str, Tensors], case: LayerCase, name: str, call: Call) -> Tensors:
    parts = ("query", "key", "output", "weights")
    found = {part: theirs[case.name].get(f"{name}/{call.name}/{part}") for part in parts}
    return {part: tensor for part, tensor in found.items() if tensor is not None}


def real_rows(case: LayerCase, kind: Kind, call: Call) -> torch.Tensor:
    if kind.entry == STATES or case.given == STATES:
        return torch.ones(len(call.lengths), max(call.lengths), dtype=torch.bool)
    return ~torch.tensor(call.pads(call.sources if is_source(case, kind) else call.lengths))
