"""docs/operations.md is true: its table of series is the code's."""

import re
from pathlib import Path

from tests.doubles import lone_metrics

OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def series_table() -> str:
    """What the page must say about series, made from the code."""
    rows = ["| series | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for series in lone_metrics()._registry._collector_to_names:
        family = series.describe()[0]  # type: ignore[attr-defined]
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in series._labelnames)  # type: ignore[attr-defined]
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |".replace("|  |", "| |"))
    return "\n".join(rows)


def test_the_table_of_metrics_matches_the_code():
    found = re.search(r"<!-- series -->\n(.*?)\n<!-- /series -->", OPERATIONS, re.DOTALL)
    assert found
    assert found[1] == series_table()
