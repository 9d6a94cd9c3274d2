"""docs/wire.md as its reader follows it: the file that Python writes, the curls, the JavaScript."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|bash|js)\n(.*?)```", PAGE, re.DOTALL)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_python_and_curl_run_one_after_the_other(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for kind, block in BLOCKS:
        if kind == "python":
            exec(compile(block.replace("http://127.0.0.1:8000", url), "docs/wire.md", "exec"), names)
        elif kind == "bash":
            for line in block.replace("\\\n", " ").strip().splitlines():
                command = line.replace("http://127.0.0.1:8000", url).replace("curl ", "curl --fail-with-body ", 1)
                ran = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
                assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "answer.safetensors").exists()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed: apt-get install nodejs")
def test_javascript_prints_the_output_on_the_page(url, tmp_path):
    (block,) = (block for kind, block in BLOCKS if kind == "js")
    program = tmp_path / "ask.mjs"
    program.write_text(block)
    ran = subprocess.run(
        ["node", program],
        env={**os.environ, "SERVICE_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"prints `{ran.stdout.strip()}`" in PAGE
