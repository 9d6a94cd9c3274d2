"""docs/client.md as a reader tries it: every block, one after the other, against a real service."""

import re
from pathlib import Path

import pytest

from tests.e2e.started import Started
from tests.integration.running import prepare, small_layer

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture
def url(tmp_path):
    widths = dict.fromkeys(("query_width", "key_width", "value_width", "out_width"), 384)
    heads = dict(num_heads=12, num_kv_heads=12, head_width=32, value_head_width=32)
    prepare(tmp_path, [small_layer("minilm-l3", **widths, **heads)])
    service = Started(tmp_path / "layers", workers=1)
    service.wait_ready()
    yield service.url
    service.process.kill()
    service.process.communicate()


def test_every_block_runs(url, capsys):
    assert len(BLOCKS) >= 6
    names: dict[str, object] = {}
    for number, block in enumerate(BLOCKS):
        code = compile(block.replace("http://127.0.0.1:8000", url), f"{PAGE.name}, block {number}", "exec")
        exec(code, names)
    out, err = capsys.readouterr()
    assert 'query has 100 features, layer "minilm-l3" takes 384' in out
    assert "40/?" in err
