"""The client's distribution alone, in an environment without the service: `make install-test` makes it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.started import Started
from tests.integration.running import LAYERS, prepare

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-bare" / "bin" / "python"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not PYTHON.exists(), reason="the bare client is not installed: make install-test"),
]

PROGRAM = """
import importlib.util, json, sys
absent = [name for name in ("torch", "fastapi", "pydantic", "service") if importlib.util.find_spec(name) is None]
import numpy as np
from attention_client import Client, masks
from attention_client.errors import LayerNotFound
x = np.full((3, 16), 0.5, np.float32)
with Client(sys.argv[1]) as client:
    answer = client.attend("small", x, masks=[masks.causal()], weights="mean")
    try:
        client.attend("nobody", x)
    except LayerNotFound as error:
        status = error.status
print(json.dumps({"absent": absent, "output": answer.output.tolist(), "weights": answer.weights.tolist(), "status": status}))
"""


@pytest.mark.long
def test_the_client_works_without_the_service_package(tmp_path):
    prepare(tmp_path, LAYERS)
    service = Started(tmp_path / "layers", workers=1)
    try:
        service.wait_ready()
        done = subprocess.run(
            [PYTHON, "-I", "-c", PROGRAM, service.url], capture_output=True, text=True, check=True, timeout=60
        )
    finally:
        service.process.kill()
        service.process.communicate()
    found = json.loads(done.stdout)
    assert found["absent"] == ["torch", "fastapi", "pydantic", "service"]
    assert found["status"] == 404
    assert np.shape(found["output"]) == (3, 16)
    np.testing.assert_allclose(np.array(found["weights"]), np.tri(3) / np.arange(1, 4)[:, None], rtol=1e-6)
