from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from service.layers.importer import import_layer

SCRIPT = Path(__file__).parents[3] / "examples" / "make_demo_layer.py"


def test_the_demo_layer_is_the_same_on_every_machine(tmp_path):
    """512 wide, 8 heads, imported by the ordinary command; golden digest."""
    path = tmp_path / "demo.safetensors"
    subprocess.run([sys.executable, "-W", "error", SCRIPT, path], check=True, timeout=60)
    layer = import_layer(path, name="demo", heads=8)
    assert (layer.spec.query_width, layer.spec.num_heads, layer.family) == (512, 8, "torch-mha")
    assert layer.digest == "sha256:0514562694f32b2caa2fa8e283de689abfbfc1003cf14d668a60ec76d32b5c1a"
