"""Clients that generators write from /openapi.json: openapi-python-client and openapi-typescript, as their users call them."""

import os
import shutil
import subprocess
from pathlib import Path

import httpx2
import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "clients"
ENVIRONMENT = ROOT / ".venv-clients" / "bin"
MODULES = ROOT / ".npm-browser" / "node_modules"
# The binary form of a body, by a type that openapi-python-client does not know: bytes.
BINARY = "content_type_overrides:\n  application/vnd.safetensors: application/octet-stream\n"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
needs_python_generator = pytest.mark.skipif(
    not (ENVIRONMENT / "openapi-python-client").exists(), reason="no generator: make install-clients"
)
needs_typescript_generator = pytest.mark.skipif(
    shutil.which("node") is None or not (MODULES / "openapi-typescript").exists(),
    reason="no generator: apt-get install nodejs npm, make install-browser",
)


@pytest.fixture
def document(url, tmp_path):
    """The document of a running service, in a file."""
    path = tmp_path / "openapi.json"
    path.write_bytes(httpx2.get(f"{url}/openapi.json").content)
    return path


def ran(*command: object, **environment: str) -> str:
    """What the command printed; it must succeed."""
    done = subprocess.run(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def generated(document: Path, *options: object) -> str:
    package = document.parent / "attention_service_client"
    generator = ENVIRONMENT / "openapi-python-client"
    return ran(generator, "generate", "--path", document, "--meta=none", "--output-path", package, *options)


@pytest.mark.long
@needs_python_generator
def test_openapi_python_client_writes_a_client_whose_every_call_is_answered(url, document):
    generated(document)
    program = PROGRAMS / "generated_python.py"
    address = url.removeprefix("http://")
    assert ran(ENVIRONMENT / "python", program, address, PYTHONPATH=str(document.parent)).startswith("ok ")


@pytest.mark.long
@needs_python_generator
def test_openapi_python_client_leaves_nothing_out_if_it_may_send_bytes(document):
    config = document.with_name("config.yaml")
    config.write_text(f"{BINARY}post_hooks: []\n", encoding="ascii")
    generated(document, "--config", config, "--fail-on-warning")


@pytest.mark.long
@needs_python_generator
def test_no_class_of_the_python_client_has_a_name_that_the_generator_had_to_make_up(document):
    generated(document)
    models = {path.stem for path in (document.parent / "attention_service_client" / "models").glob("*.py")}
    assert [name for name in models if "type_" in name or "_item" in name] == []
    assert {"tensor_object", "answer", "attend_mask", "problem", "weights"} <= models


@pytest.mark.long
@needs_typescript_generator
def test_openapi_typescript_writes_types_that_a_strict_compiler_holds_a_program_to(url, document):
    directory = document.parent
    (directory / "node_modules").symlink_to(MODULES)
    (directory / "package.json").write_text('{"type": "module"}', encoding="ascii")
    program = shutil.copy(PROGRAMS / "generated_typescript.ts", directory)
    ran(MODULES / ".bin" / "openapi-typescript", document, "--output", directory / "schema.d.ts")
    strict = ("--strict", "--noUncheckedIndexedAccess", "--target", "es2022", "--lib", "es2022,dom")
    ran(MODULES / ".bin" / "tsc", *strict, "--module", "nodenext", "--outDir", directory / "out", program)
    assert ran("node", directory / "out" / "generated_typescript.js", url) == "ok\n"
