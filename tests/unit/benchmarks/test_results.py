"""The file of results: parts are replaced one by one, by whole rounds."""

import json

import pytest

from benchmarks.results import Results, as_text, load
from tests.unit.benchmarks.made_up import part, sample


def measured(path, *names) -> Results:
    """A file with one round of these parts."""
    results = Results(path)
    for name in names:
        results.begin(part(name, []))
        results.add(name, sample(0, "service", 10))
    results.end_round()
    results.end()
    return results


def test_a_written_file_is_read_back(tmp_path):
    written = measured(tmp_path / "r.json", "w1", "w2")
    assert load(tmp_path / "r.json") == written.parts


def test_a_part_that_is_measured_again_replaces_only_itself(tmp_path):
    before = measured(tmp_path / "r.json", "w1", "w2").parts["w2"]
    results = Results(tmp_path / "r.json")
    assert results.begin(part("w1", [], commit="new")) == 0
    results.add("w1", sample(0, "service", 99))
    results.end_round()
    found = load(tmp_path / "r.json")
    assert found["w2"] == before
    assert (found["w1"].commit, [x["tok_s"] for x in found["w1"].samples]) == ("new", [99])


def test_a_run_that_is_cut_in_its_first_round_leaves_the_old_part(tmp_path):
    before = measured(tmp_path / "r.json", "w1").parts
    results = Results(tmp_path / "r.json")
    results.begin(part("w1", [], commit="new"))
    results.add("w1", sample(0, "service", 99))
    assert load(tmp_path / "r.json") == before


def test_an_unfinished_run_goes_on_at_its_next_round(tmp_path):
    measured(tmp_path / "r.json", "w1")
    results = Results(tmp_path / "r.json")
    assert results.begin(part("w1", []), resume=True) == 1
    results.add("w1", sample(1, "service", 30))
    results.end_round()
    assert [x["tok_s"] for x in load(tmp_path / "r.json")["w1"].samples] == [10, 30]


@pytest.mark.parametrize("changed", [{"commit": "new"}, {"settings": {"seconds": 1}}, {"subjects": {}}])
def test_a_run_of_something_else_begins_anew(tmp_path, changed):
    measured(tmp_path / "r.json", "w1")
    assert Results(tmp_path / "r.json").begin(part("w1", [], **changed), resume=True) == 0


def test_the_file_sums_up_what_it_holds(tmp_path):
    samples = [sample(0, "service", 80), sample(0, "bound", 100)]
    found = json.loads(as_text({"w1": part("w1", samples)}))
    assert [row["tok_s"] for row in found["summary"]["w1"]] == [[100, 100, 100], [80, 80, 80]]
    assert found["ratios"][0] == {"part": "w1", "figure": "tok_s", "of": "service", "over": "bound", "ratio": [0.8] * 3}
    assert found["targets"][0]["is_met"] is False
    assert found["parts"]["w1"]["samples"] == samples


def test_a_file_of_another_version_is_refused(tmp_path):
    (tmp_path / "r.json").write_text('{"version": 0}', encoding="utf-8")
    with pytest.raises(SystemExit, match="another version"):
        load(tmp_path / "r.json")
