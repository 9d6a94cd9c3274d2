"""The notebook and the capture of a layer of examples/ as their reader runs them, with ports of their own."""

import re
import subprocess
import sys
from pathlib import Path

import httpx2
import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from tests import processes
from tests.conformance.parity_environment import PYTHON, package

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


MAKE_LLAMA = """
import sys, torch, transformers
torch.manual_seed(0)
sizes = dict(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=64)
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""


@pytest.mark.long
@pytest.mark.skipif(package("transformers") is None, reason="transformers is not installed: make install-parity")
def test_the_captured_input_of_a_decoders_layer_gives_the_output_of_its_module(tmp_path, serve):
    def run(*command: object) -> None:
        done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    run(PYTHON, "-c", MAKE_LLAMA, "model")
    ids = ("--ids", "5,1,7,8,2", "--first-position", 40)
    capture = (PYTHON, EXAMPLES / "capture_layer.py", "model", "--layer", 1)
    run(*capture, *ids, "--out", "capture.safetensors", "--output", "theirs.npy")
    command = (sys.executable, "-m", "service", "layers", "import", tmp_path / "model", "--layer", 1)
    subprocess.run([*map(str, command), "--name", "llama-l1", "--layers-dir", tmp_path / "decoders"], check=True)
    service = serve(tmp_path / "decoders", workers=1)
    service.wait_ready()

    asked = ("attend", "llama-l1", "--request", "capture.safetensors", "--out", "ours.npz", "--weights", "heads")
    run(sys.executable, "-m", "attention_client.cli", *asked, "--url", service.url)
    theirs = np.load(tmp_path / "theirs.npy")
    with np.load(tmp_path / "ours.npz") as ours:
        assert np.abs(ours["output"] - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())
        assert (ours["weights"] > 0).tolist() == [np.tri(5, dtype=bool).tolist()] * 4, "the layer is causal"

    body = (tmp_path / "capture.safetensors").read_bytes()
    headers = {"content-type": "application/vnd.safetensors"}
    answer = httpx2.post(f"{service.url}/v1/layers/llama-l1/attend", content=body, headers=headers)
    assert answer.status_code == 200, "the labels are ignored by the service"
