"""The field's own clients against the running service, each in an environment of its own (`make install-clients`)."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "clients"
ENVIRONMENT = ROOT / ".venv-clients"
PYTHON = ENVIRONMENT / "bin" / "python"
PERF_ANALYZER = ENVIRONMENT / "perf_analyzer" / "bin" / "perf_analyzer"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (ENVIRONMENT / ".installed").exists(), reason="the clients are not installed: make install-clients"
    ),
]


@pytest.fixture
def address(url):
    return url.removeprefix("http://")


@pytest.mark.long
@pytest.mark.parametrize("program", ["triton_sync", "triton_aio", "kserve_rest", "published_schema"])
def test_every_check_of_a_real_client_passes(address, program):
    ran = subprocess.run(
        [PYTHON, PROGRAMS / f"{program}.py", address], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("ok ")


def analyze(address: str, *options: str) -> str:
    """perf_analyzer against one layer, with an end that does not depend on how quiet the machine is."""
    libraries = ENVIRONMENT / "perf_analyzer" / "nvidia" / "cuda_runtime" / "lib"
    ran = subprocess.run(
        [
            *(PERF_ANALYZER, "-m", "small", "-u", address, "-i", "http"),
            *("--measurement-mode", "count_windows", "--measurement-request-count", "50", "-s", "100000", *options),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def can_start_perf_analyzer() -> bool:
    """The last wheels that carry it are x86-64 and want a library of Debian's (`libb64-0d`)."""
    libraries = ENVIRONMENT / "perf_analyzer" / "nvidia" / "cuda_runtime" / "lib"
    try:
        ran = subprocess.run(
            [PERF_ANALYZER, "--version"],
            env={"LD_LIBRARY_PATH": str(libraries)},
            capture_output=True,
            check=False,
        )
    except OSError:
        return False
    return ran.returncode == 0


needs_perf_analyzer = pytest.mark.skipif(
    not can_start_perf_analyzer(),
    reason="perf_analyzer does not start here: apt-get install libb64-0d, then make install-clients",
)


@pytest.mark.long
@needs_perf_analyzer
def test_perf_analyzer_completes_a_run_with_zeros_and_reads_the_statistics(address):
    told = analyze(address, "--shape", "query:8,16", "--input-data", "zero", "--concurrency-range", "1:4:3")
    assert "Inferences/Second vs. Client" in told
    assert "Successful request count:" in told
    assert "compute infer" in told


@pytest.mark.long
@needs_perf_analyzer
@pytest.mark.parametrize("form", ["json", "binary"])
def test_perf_analyzer_completes_a_run_with_batches_of_real_numbers(address, tmp_path, form):
    numbers = random.Random(1)
    content = [numbers.gauss(0, 1) for _ in range(8 * 16)]
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": [{"query": {"content": content, "shape": [8, 16]}}]}))
    told = analyze(
        address,
        *("--input-data", str(data), "-b", "3", "--concurrency-range", "2"),
        *("--input-tensor-format", form, "--output-tensor-format", form),
    )
    assert "Throughput:" in told
    assert "Failed" not in told
