"""The client's distribution without the service, alone and with its command line: `make install-test` makes both environments."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

BARE = Path(__file__).parents[2] / ".venv-bare"
EXTRA = BARE / "cli"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not EXTRA.exists(), reason="the bare client is not installed: make install-test"),
]

PROGRAM = """
import importlib.util, json, sys
names = ("torch", "fastapi", "pydantic", "service", "typer", "rich")
absent = [name for name in names if importlib.util.find_spec(name) is None]
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


def run(environment: Path, command: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [environment / "bin" / command, *map(str, words)], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_client_works_without_the_service_package_and_without_its_extra(url):
    done = run(BARE, "python", "-I", "-c", PROGRAM, url)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["absent"] == ["torch", "fastapi", "pydantic", "service", "typer", "rich"]
    assert found["status"] == 404
    assert np.shape(found["output"]) == (3, 16)
    np.testing.assert_allclose(np.array(found["weights"]), np.tri(3) / np.arange(1, 4)[:, None], rtol=1e-6)


def test_without_the_extra_the_command_says_in_one_line_what_to_install():
    done = run(BARE, "attention", "--help")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.endswith("pip install 'attention-service-client[cli]'\n")


def test_with_the_extra_a_heat_map_needs_no_torch(url, tmp_path):
    np.save(tmp_path / "q.npy", np.full((3, 16), 0.5, np.float32))
    words = ("show", "small", "--query", tmp_path / "q.npy", "--causal", "top_left", "--tokens", "the cat sat")
    done = run(EXTRA, "attention", *words, "--url", url)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:5]]
    assert [row[:2] for row in rows] == [["the", "100"], ["cat", "50"], ["sat", "33"]]
    found = run(EXTRA, "python", "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)")
    assert found.returncode == 0
