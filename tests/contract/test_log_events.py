"""The table of events in docs/operations.md lists every event of the log, with its levels and fields, as the code has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from service.api.outer_middleware import RequestRecord
from service.observability.telemetry import request_fields

ROOT = Path(__file__).parents[2]
LEVELS = {"debug", "info", "warning", "error", "critical"}
SUPERVISOR = {"_log", "log", "write_log_line", "log_line"}


def words(node: ast.expr) -> list[str]:
    """The texts that a constant, or either branch of a condition, may be."""
    if isinstance(node, ast.IfExp):
        return words(node.body) + words(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def calls() -> Iterator[tuple[str, str, set[str]]]:
    """Level, event and fields of each call that logs."""
    for path in sorted((ROOT / "service").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        levels = {
            target.id: words(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            fields = {"exception" if word.arg == "exc_info" else word.arg for word in node.keywords if word.arg}
            if name in LEVELS and isinstance(node.func, ast.Attribute) and node.args and words(node.args[0]):
                yield name, words(node.args[0])[0], fields
            elif name in SUPERVISOR and len(node.args) == 2 and words(node.args[1]):
                level = node.args[0]
                for found in words(level) or levels.get(getattr(level, "id", ""), []):
                    yield found, words(node.args[1])[0], fields


def in_code() -> dict[str, tuple[set[str], set[str]]]:
    """For each event its levels and the fields that a call names."""
    events: dict[str, tuple[set[str], set[str]]] = {
        "request": ({"info"}, set(request_fields(RequestRecord("id", "GET", "/", 0.0), 0.0))),
        "library": (LEVELS, {"logger", "message", "exception"}),
    }
    for level, event, fields in calls():
        levels, names = events.setdefault(event, (set(), set()))
        levels.add(level)
        names |= fields
    return events


def in_table() -> dict[str, tuple[set[str], set[str]]]:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- events -->\n(.*?)\n<!-- /events -->", text, re.DOTALL)
    assert found
    rows = [row.strip("|").split("|") for row in found[1].splitlines()[2:]]
    listed = [
        (row[0].strip().strip("`"), set(row[1].replace(",", " ").split()), set(re.findall(r"`(\w+)`", row[2])))
        for row in rows
    ]
    assert len({name for name, _, _ in listed}) == len(listed), "an event has one row"
    return {name: (LEVELS if levels == {"any"} else levels, fields) for name, levels, fields in listed}


def test_the_table_has_every_event_and_no_other():
    assert in_table().keys() == in_code().keys()


def test_the_table_has_the_levels_of_each_event():
    table = in_table()
    assert {name: levels for name, (levels, _) in in_code().items()} == {name: table[name][0] for name in in_code()}


def test_the_table_has_every_field_of_each_event():
    table = in_table()
    missing = {name: fields - table[name][1] for name, (_, fields) in in_code().items() if fields - table[name][1]}
    assert not missing
