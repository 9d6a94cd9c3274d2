"""What is installed and what is called: hashes, the floor of versions, nothing that reads pickles or trusts a Host header."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICE = sorted((ROOT / "service").rglob("*.py"))
# Below these: a Host header in request.url (CVE-2026-48710), a lenient chunk parser (CVE-2025-43859), a way around
# `weights_only` (CVE-2025-32434, and later ones), unbounded recursion (CVE-2024-27454).
FLOOR = {"starlette": (1, 0, 1), "h11": (0, 16, 0), "torch": (2, 10), "orjson": (3, 9, 15)}
# Modules that run what they read, or middleware that hides disconnects.
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "yaml", "cloudpickle"}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__", "BaseHTTPMiddleware"}


def versions(file: str) -> dict[str, str]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return {
        name.lower().replace("_", "-"): version
        for name, version in re.findall(r"^([\w.-]+)==([^ +\n]+)", text, re.MULTILINE)
    }


LOCK, CONSTRAINTS = versions("requirements.lock"), versions("constraints.txt")


def test_r9_every_locked_package_has_a_hash_and_the_version_that_the_tests_ran_with():
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", re.sub(r"(?m)^#.*\n", "", text).strip())
    assert len(entries) == len(LOCK) > 30
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]
    assert {name: CONSTRAINTS.get(name) for name in LOCK} == LOCK


def test_r9_every_direct_dependency_is_locked():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[0]
    direct = re.findall(r'^    "([a-z0-9_-]+)>=', text, re.MULTILINE)
    assert len(direct) > 15
    assert set(direct) <= LOCK.keys()


@pytest.mark.parametrize("name", FLOOR)
def test_r9_versions_are_above_the_floor(name):
    for found in (LOCK, CONSTRAINTS):
        assert tuple(map(int, found[name].split("."))) >= FLOOR[name]


def test_r9_form_parsers_are_not_locked():
    assert not {"python-multipart", "multipart"} & LOCK.keys()


def calls_of(source: str) -> set[str]:
    """What of the forbidden things a program uses, by name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                found |= {name.name.split(".")[0] for name in names} & FORBIDDEN_MODULES
            case ast.ImportFrom(module=str(module), names=names):
                found |= ({module.split(".")[0]} & FORBIDDEN_MODULES) | (
                    {name.name for name in names} & FORBIDDEN_NAMES
                )
            case ast.Name(id=name) if name in FORBIDDEN_NAMES:
                found.add(name)
            case ast.Attribute(value=ast.Name(id="torch" | "_torch"), attr="load"):
                found.add("torch.load")
            case ast.Attribute(attr="load") if "torch" in ast.unparse(node):
                found.add("torch.load")
            case ast.Attribute(value=ast.Name(id="request" | "req"), attr="url" | "base_url"):
                found.add("request.url")
            case _:
                pass
    return found


# The import command converts state dicts, weights only, on the operator's own machine.
ALLOWED = {"service/layers/source.py": {"torch.load"}}


@pytest.mark.parametrize("path", SERVICE, ids=lambda path: str(path.relative_to(ROOT)))
def test_r10_nothing_reads_pickles_evaluates_text_or_trusts_a_host_header(path):
    assert calls_of(path.read_text(encoding="utf-8")) == ALLOWED.get(str(path.relative_to(ROOT)), set())


def test_f7_the_server_never_imports_the_state_dict_reader_and_no_tokenizer_before_a_model():
    """Only the commands for layers and models read state dicts."""
    names = "{'service.layers.source', 'tokenizers'}"
    script = f"import sys, service.app, service.worker.server; print(bool({names} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("from yaml import load", "yaml"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("eval('1')", "eval"),
        ("from starlette.middleware.base import BaseHTTPMiddleware", "BaseHTTPMiddleware"),
        ("def f(request): return request.url.path", "request.url"),
    ],
)
def test_the_scan_detects_every_forbidden_pattern(source, found):
    assert calls_of(source) == {found}
