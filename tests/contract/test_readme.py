"""The README, the page of settings and all links are true; the README's commands are run by `tests/e2e/test_readme.py`."""

import ast
import inspect
import itertools
import re
from pathlib import Path

import pytest

from service.layers.families import FAMILIES
from service.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parents[2]
SETTINGS = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
CHECKPOINTS = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
FOLDERS = ("docs", "docs/internals", "client", "examples", "loadtest", "tests")
PAGES = sorted(page for folder in (".", *FOLDERS) for page in (ROOT / folder).glob("*.md"))


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


def test_the_page_of_checkpoints_has_a_row_for_every_family():
    for family in FAMILIES:
        assert f"\n| `{family.name}` |" in CHECKPOINTS


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_are_found_and_their_headings_too():
    assert len(PAGES) > 15
    assert anchors(ROOT / "README.md") >= {"two-commands", "a-layer-of-your-own"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    for link in re.findall(r"(?:\]\(|<img src=\")([^)\"\s]+)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{page.name}: {link}"


def test_readme_and_the_next_release_stay_short():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(changes.partition("## [Unreleased]")[2].partition("\n## ")[0].splitlines()) <= 60
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 154
