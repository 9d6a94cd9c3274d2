"""The notebook of examples/ as its reader runs it, with a port of its own."""

import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from tests import processes

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture
def notebook():
    return nbformat.read(EXAMPLES / "attention.ipynb", as_version=4)


def test_the_notebook_is_stored_without_outputs(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code), "clear its outputs"


@pytest.mark.long
def test_the_notebook_imports_asks_draws_and_agrees_with_torch(notebook, monkeypatch):
    for name in processes.environment(workers=1).items():
        monkeypatch.setenv(*name)
    for cell in notebook.cells:
        cell.source = cell.source.replace("PORT = 8001", f"PORT = {processes.free_port()}")
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(EXAMPLES)}}).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "family torch-mha, 32 wide, 4 heads of 8" in printed
    difference = re.search(r"largest difference: (\S+) (\S+)", printed)
    assert difference
    assert max(map(float, difference.groups())) < 1e-5

    pictures = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert [text.count("<svg") for text in pictures] == [4, 4, 1]
    pictures.append((EXAMPLES.parent / "docs" / "plots" / "animal-attention.svg").read_text(encoding="utf-8"))
    squares = [[float(x) for x in re.findall(r'fill-opacity="(.*?)"', text)] for text in pictures]
    assert [len(drawn) for drawn in squares] == [4 * 6 * 6] * 2 + [14 * 14] * 2
    assert np.allclose(squares[2], squares[3], atol=2e-3), "the sentence is drawn as on top of the README"
    assert sum(x == 0 for x in squares[1]) >= 4 * (15 + 5), "causal and the hidden word leave their squares empty"
    assert sum(x == 0 for x in squares[0]) < 4 * 6
