"""docs/client.md and docs/conventions.md as a reader tries them: every block, one after the other, against a real service."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def run_blocks(page: str, url: str) -> int:
    """Run the blocks of a page in one namespace and return their number."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        code = compile(block.replace("http://127.0.0.1:8000", url), f"{page}, block {number}", "exec")
        exec(code, names)
    return len(blocks)


def test_every_block_runs(url, capsys):
    assert run_blocks("client.md", url) >= 6
    out, _ = capsys.readouterr()
    assert 'query has 100 features, layer "minilm-l3" takes 384' in out


def test_the_figures_of_the_conventions_are_those_of_the_service(url):
    assert run_blocks("conventions.md", url) == 1
