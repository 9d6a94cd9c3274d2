"""Budgets of size: how long a function may be. Lines are told, not limited: `make size`."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FUNCTION_LINES = 40


def paths(directory: str) -> list[Path]:
    return sorted((ROOT / directory).rglob("*.py"))


def test_no_function_is_longer_than_40_lines():
    long = [
        f"{path.relative_to(ROOT)}: {node.name} {node.end_lineno - node.lineno + 1}"
        for path in (*paths("service"), *paths("client/attention_client"), *paths("benchmarks"), *paths("loadtest"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not long
