"""docs/security.md as an operator follows it: keys made and used, a digest, a certificate."""

import hashlib
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from service.settings import ENV_PREFIX, Settings
from tests.e2e.started import Started
from tests.integration.running import prepare, small_layer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
COMMANDS = [
    re.sub(r"\s+# .*", "", line).strip()
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").strip().splitlines()
]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def run(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = command.replace("attention-service", f"{sys.executable} -m service")
    command = command.replace("attention show", f"{sys.executable} -m attention_client.cli show")
    named = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environment}
    ran = subprocess.run(
        command, shell=True, cwd=folder, env=named, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran


@pytest.mark.long
def test_a_generated_key_grants_access(tmp_path):
    widths = dict.fromkeys(("query_width", "key_width", "value_width", "out_width"), 384)
    prepare(tmp_path, [small_layer("minilm-l3", **widths, num_heads=12, num_kv_heads=12)])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    made = [run(command, tmp_path).stderr.strip() for command in COMMANDS if " keys new " in command]
    assert len(made) == 2
    assert all(re.fullmatch(r"[\w-]{43}", key) for key in made)
    kept = (tmp_path / "keys.txt").read_text()
    assert [line.split()[1:] for line in kept.splitlines()] == [["infer", "#", "team", "a"], ["admin", "#", "ops"]]
    assert not any(key in kept for key in made)
    service = Started(tmp_path / "layers", workers=1, api_keys_file=tmp_path / "keys.txt")
    try:
        service.wait_ready()
        asking = [command for command in COMMANDS if "/v1/layers" in command]
        asking += [f"{command} --url http://127.0.0.1:8000" for command in COMMANDS if " show " in command]
        assert len(asking) == 3
        for key in made:
            for command in asking:
                told = run(command.replace("http://127.0.0.1:8000", service.url), tmp_path, KEY=key).stdout
                assert "minilm-l3" in told
    finally:
        service.end()


def test_the_digest_of_a_key_matches_the_page(tmp_path):
    (command,) = (command for command in COMMANDS if "sha256sum" in command)
    assert run(command, tmp_path, KEY="mine").stdout.split()[0] == hashlib.sha256(b"mine").hexdigest()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed: apt-get install openssl")
def test_the_example_certificate_is_valid(tmp_path):
    (command,) = (command for command in COMMANDS if command.startswith("openssl"))
    run(command, tmp_path)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")


def test_every_variable_on_the_page_is_a_setting():
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields} | {
        "ATTENTION_CLIENT_KEY",
        "ATTENTION_URL",
    }
    assert set(re.findall(r"ATTENTION_[A-Z_]+", PAGE)) <= known
