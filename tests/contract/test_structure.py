"""structure.md has every file of service/ and client/ with its clause: the first line of the module's docstring."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "service", ROOT / "client" / "attention_client")


def clauses(package: Path) -> list[str]:
    """The lines of the document for one package, room by room."""
    found = []
    for path in sorted(package.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        lines = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
        if path.name != "__init__.py":
            found.append(f"- `{path.relative_to(package.parent)}`: {lines[0]}")
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_file_has_its_clause(package):
    document = (ROOT / "docs" / "internals" / "structure.md").read_text(encoding="utf-8").splitlines()
    missing = [line for line in clauses(package) if line not in document]
    assert not missing, "add to docs/internals/structure.md:\n" + "\n".join(missing)


def test_every_clause_names_an_existing_file():
    document = (ROOT / "docs" / "internals" / "structure.md").read_text(encoding="utf-8").splitlines()
    known = [line for package in PACKAGES for line in clauses(package)]
    assert not [line for line in document if line.startswith("- `") and ".py`: " in line and line not in known]
