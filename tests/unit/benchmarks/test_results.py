"""The file of results holds samples, and each part is replaced as a whole."""

from benchmarks.__main__ import Group, run
from benchmarks.bench import Bench
from benchmarks.results import load, save
from benchmarks.subjects import SubjectFailed
from tests.unit.benchmarks.doubles import part, sample


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


def test_an_unexpected_failure_ends_its_round_and_not_the_run(tmp_path):
    path = tmp_path / "r.json"
    run_rounds(path, tmp_path, group("w1", failing_round=0), rounds=2)
    found = load(path)["w1"].samples
    assert [x.get("failed", x.get("tok_s")) for x in found] == [10, "SubjectFailed('no answer')", 20]
