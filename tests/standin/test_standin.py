"""Suites of the computation on the stand-in GPU, in processes of their own, because a device is registered for a whole process.

What tests the CPU's own rules (packed products, row counts, the inline policy) is not among them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[2]
UNIT = ("engine", "layer", "masks", "attention_weights", "scaled_dot_product", "gpu")
# Those whose tensors are computed. `wire/` alone tells the axes of masks, and `batching/` what a full queue refuses.
INTEGRATION = (
    "attend",
    "attention",
    "binary_bodies",
    "conventions",
    "layer_admin",
    "lifecycle",
    "mask_cases",
    "one_truth",
)
SUITES = {
    "device": ["tests/standin/on_device.py"],
    "attention": [f"tests/unit/attention/test_{name}.py" for name in UNIT],
    "blocked positions": ["tests/unit/attention/test_blocked_positions.py"],
    "conformance": ["tests/conformance"],
    "integration": [f"tests/integration/test_{name}.py" for name in INTEGRATION],
}


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices written in Python",
)
@pytest.mark.timeout(900)
# Each of the others takes up to a minute on one core.
@pytest.mark.parametrize("name", [n if n == "device" else pytest.param(n, marks=pytest.mark.long) for n in SUITES])
def test_the_suite_passes_on_a_stand_in_for_a_gpu(name):
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "tests.standin.plugin", *SUITES[name]]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-8000:]
