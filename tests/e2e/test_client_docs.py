"""docs/client.md as a reader tries it: every block, one after the other, against a real service."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_every_block_runs(url, capsys):
    assert len(BLOCKS) >= 6
    names: dict[str, object] = {}
    for number, block in enumerate(BLOCKS):
        code = compile(block.replace("http://127.0.0.1:8000", url), f"{PAGE.name}, block {number}", "exec")
        exec(code, names)
    out, _ = capsys.readouterr()
    assert 'query has 100 features, layer "minilm-l3" takes 384' in out
