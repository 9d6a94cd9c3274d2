"""The file of results holds samples; a part gets more rounds of the same, or is replaced as a whole."""

import io
import sys

import pytest

from benchmarks.__main__ import Group, run
from benchmarks.bench import Bench
from benchmarks.results import difference, load, pooled, save
from benchmarks.subjects import SubjectFailed
from tests.unit.benchmarks.doubles import MACHINE, part, sample


class EmptyBench(Bench):
    """A bench without a layer."""

    def _import_layer(self):
        pass


def group(*parts, failing_round=None):
    """One round measures each part once; in the failing round it then fails."""

    def measure(bench, name):
        yield sample(bench.round, "service", 10 * (bench.round + 1))
        if bench.round == failing_round:
            raise SubjectFailed("no answer")

    return Group(parts, measure)


def run_rounds(path, directory, measured, rounds=1, **fields):
    new = {name: part(name, [], **fields) for name in measured.parts}
    run(EmptyBench(directory, seconds=1), measured, new, rounds, path)


def test_a_written_file_is_read_back(tmp_path):
    parts = {name: part(name, [sample(0, "service", 10)]) for name in ("w1", "w2")}
    save(tmp_path / "r.json", parts)
    assert load(tmp_path / "r.json") == parts


def test_a_part_that_is_measured_again_replaces_only_itself(tmp_path):
    path = tmp_path / "r.json"
    run_rounds(path, tmp_path, group("w1", "w2"))
    before = load(path)["w2"]
    run_rounds(path, tmp_path, group("w1"), rounds=2, commit="new")
    found = load(path)
    assert found["w2"] == before
    assert (found["w1"].commit, [x["tok_s"] for x in found["w1"].samples]) == ("new", [10, 20])


def test_more_rounds_of_the_same_code_on_the_same_machine_are_added(tmp_path):
    path = tmp_path / "r.json"
    run_rounds(path, tmp_path, group("w1"), rounds=2)
    run_rounds(path, tmp_path, group("w1"), measured_at="2026-11-22 10:00 UTC", machine={**MACHINE, "load_before": 0.9})
    found = load(path)["w1"]
    assert [(x["round"], x["tok_s"]) for x in found.samples] == [(0, 10), (1, 20), (2, 10)]
    assert (found.rounds, found.machine["load_before"]) == (3, 0.9)
    assert found.measured_at == "2026-11-22 10:00 UTC, 2026-11-21 10:00 UTC"


@pytest.mark.parametrize(
    "other",
    [
        {"commit": "def5678"},
        {"machine": {**MACHINE, "cpu": "Abacus 10"}},
        {"settings": {"seconds": 2.0, "warm_s": 1}},
        {"subjects": {}},
    ],
)
def test_rounds_of_anything_else_replace_the_part(other):
    new = part("w1", [sample(0, "service", 20)], **other)
    assert pooled(part("w1", [sample(0, "service", 10)]), new) == new


def test_rounds_of_changed_files_are_not_added():
    """The + says that the files are not those of the commit, so two such runs may differ."""
    new = part("w1", [sample(0, "service", 20)], commit="abc1234+")
    assert pooled(part("w1", [sample(0, "service", 10)], commit="abc1234+"), new) == new


@pytest.mark.parametrize(
    ("of_the_older", "expected"),
    [
        ({}, ""),
        ({"commit": "0123456"}, "older code"),
        ({"machine": {**MACHINE, "cpu": "Slide rule"}}, "another processor"),
        ({"machine": {**MACHINE, "cores": 64}, "commit": "0123456"}, "older code, another processor"),
    ],
)
def test_a_part_of_older_code_or_another_processor_than_the_newest_is_found(of_the_older, expected):
    parts = {"w1": part("w1", [], measured_at="2026-11-22 10:00 UTC"), "batch": part("batch", [], **of_the_older)}
    assert difference(parts["batch"], parts) == expected
    assert difference(parts["w1"], parts) == ""


def test_an_unexpected_failure_ends_its_round_and_not_the_run(tmp_path):
    path = tmp_path / "r.json"
    run_rounds(path, tmp_path, group("w1", failing_round=0), rounds=2)
    found = load(path)["w1"].samples
    assert [x.get("failed", x.get("tok_s")) for x in found] == [10, "SubjectFailed('no answer')", 20]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_shows_which_round_is_measured(tmp_path, monkeypatch, is_terminal):
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    run_rounds(tmp_path / "r.json", tmp_path, group("w1"), rounds=2)
    assert ("\x1b[Kw1: round 2 of 2 …\r" in shown.getvalue()) == is_terminal
    assert ("\x1b" in shown.getvalue()) == is_terminal
