"""Budgets of size, and one value a name: how long a function may be. Lines are told, not limited: `make size`."""

import ast
import re
from collections.abc import Iterator
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


def constants(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and value of the public module constants. A TypeVar has one letter."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            found = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            found = [(node.target, node.value)]
        else:
            continue
        for target, value in found:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                found += zip(target.elts, value.elts, strict=True)
            elif isinstance(target, ast.Name) and re.fullmatch(r"[A-Z][A-Z0-9_]+", target.id):
                yield target.id, ast.unparse(value)


def test_a_constant_has_one_value_a_name():
    values: dict[str, dict[str, list[str]]] = {}
    for path in paths("service"):
        for name, value in constants(path):
            values.setdefault(name, {}).setdefault(value, []).append(str(path.relative_to(ROOT)))
    assert "ANSWER_S" in values, "constants of one line count too"
    assert not {name: found for name, found in values.items() if len(found) > 1}
