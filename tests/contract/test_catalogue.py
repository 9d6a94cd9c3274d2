"""The catalogue of hostile cases is proven: each of its ids is named by a test, or here with the reason why not yet.

A test names an id in its own name (`test_q4_…`, `…_H2`), in a docstring, in the id of a parameter or as the key of a table.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
LEGEND = (TESTS / "README.md").read_text(encoding="utf-8")
CATALOGUE = re.findall(r"^\| ([A-Z]\d+) \| .+ \|$", LEGEND, re.MULTILINE)
# A case that goes is a commit of its own, with its reason.
NUM_CASES = 132
# Must shrink: an id that is proven may not stand here.
NOT_YET: dict[str, str] = {}


def words(path: Path) -> Iterator[str]:
    """Names of tests, docstrings, what decorators say, and the keys of tables whose rows are tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in CATALOGUE:
            yield node.value
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name.upper() if node.name.startswith("test_") else node.name
            for decorator in node.decorator_list:
                yield from (
                    part.value
                    for part in ast.walk(decorator)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )


@functools.cache
def named() -> frozenset[str]:
    text = " ".join(word for path in TESTS.rglob("test_*.py") if path != Path(__file__) for word in words(path))
    return frozenset(re.findall(r"(?<![A-Za-z0-9])[HJTMBFQLXDAR]\d+(?![A-Za-z0-9])", text)).intersection(CATALOGUE)


def test_every_case_of_the_catalogue_is_named_by_a_test():
    missing = [case for case in CATALOGUE if case not in named() and case not in NOT_YET]
    assert missing == []


def test_no_test_names_a_case_listed_as_missing():
    assert sorted(NOT_YET.keys() & named()) == []
    assert NOT_YET.keys() <= set(CATALOGUE)


def test_the_legend_lists_every_case_once():
    assert len(set(CATALOGUE)) == len(CATALOGUE) == NUM_CASES
