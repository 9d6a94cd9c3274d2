"""The README and the page of settings are true; the README's commands are run by `tests/e2e/test_readme.py`."""

import ast
import inspect
import itertools
import re
from pathlib import Path

from service.layers.families import FAMILIES
from service.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def meanings() -> dict[str, str]:
    """The text under each field of the settings, on one line."""
    (made,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(made, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(made.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def settings_table() -> str:
    """The table of docs/settings.md, made from the code."""
    meaning = meanings()
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = (
            ""
            if field.default is None
            else str(field.default).lower()
            if isinstance(field.default, bool)
            else field.default
        )
        rows.append(f"| `{ENV_PREFIX}{name.upper()}` | `{default}` | {meaning[name]} |".replace("| `` |", "| |"))
    return "\n".join(rows)


def test_the_settings_table_matches_the_code():
    found = re.search(r"<!-- settings -->\n(.*?)\n<!-- /settings -->", SETTINGS, re.DOTALL)
    assert found
    assert found[1] == settings_table()


def test_the_code_reads_every_setting():
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "service").rglob("*.py") if path.name != "settings.py"
    )
    unread = [name for name in Settings.model_fields if f"settings.{name}" not in source]
    assert not unread


def test_the_readme_names_every_checkpoint_family():
    for family in FAMILIES:
        assert f"`{family.name}`" in README


def test_every_linked_page_exists():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).is_file(), link
