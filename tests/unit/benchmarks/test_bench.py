"""Servers that stay up alternate: one runs, the others are idle; a failure is a sample and not the end of the run."""

import contextlib
import dataclasses

import pytest

from benchmarks.bench import Bench
from benchmarks.subjects import Subject, SubjectFailed

ONE, TWO = (Subject(name, ("true",), "/", {}) for name in ("one", "two"))


@dataclasses.dataclass
class RecordedServer:
    name: str
    calls: list[str]
    fails_at_end: bool = False

    def __post_init__(self):
        self.calls.append(f"start {self.name}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def await_idle(self):
        self.calls.append(f"await {self.name}")

    def close(self):
        self.calls.append(f"close {self.name}")
        if self.fails_at_end:
            raise OSError("it does not end")


class RecordedBench(Bench):
    """A bench without a layer, whose servers record what is done to them."""

    def __init__(self, directory, *, fails_at_end=False):
        self.calls = []
        self._fails_at_end = fails_at_end
        super().__init__(directory, seconds=1)

    def _import_layer(self):
        pass

    def start(self, subject, form="binary"):
        return RecordedServer(f"{subject.name} {form}", self.calls, self._fails_at_end)

    def use(self, subject, form="binary"):
        with self.running(subject, form):
            pass


@pytest.fixture
def bench(tmp_path):
    return RecordedBench(tmp_path)


def test_each_server_starts_once_and_is_idle_before_another_runs(bench):
    for subject in (ONE, TWO, ONE):
        bench.use(subject)
    assert bench.calls == [
        "start one binary",
        "await one binary",
        "start two binary",
        "await two binary",
        "await one binary",
    ]


def test_a_server_that_polls_while_idle_is_ended_after_each_use(bench):
    for _ in range(2):
        bench.use(dataclasses.replace(ONE, polls=True))
    assert bench.calls == ["start one binary", "close one binary"] * 2


def test_forms_share_a_server_unless_it_serves_one_form(bench):
    own = dataclasses.replace(TWO, one_form=True)
    for subject in (ONE, own):
        for form in ("binary", "weights", "weights"):
            bench.use(subject, form)
    assert [call for call in bench.calls if call.startswith("start")] == [
        "start one binary",
        "start two binary",
        "start two weights",
    ]


def test_a_failed_server_is_ended_and_started_again(bench):
    with pytest.raises(OSError, match="cut"), bench.running(ONE, "binary"):
        raise OSError("cut")
    bench.use(ONE)
    assert bench.calls == ["start one binary", "close one binary", "start one binary", "await one binary"]


def test_every_fifth_round_begins_with_fresh_starts(bench):
    for number in range(6):
        bench.begin_round(number)
        bench.use(ONE)
    assert bench.calls.count("start one binary") == 2


def test_closing_ends_all_servers_even_if_one_fails(tmp_path):
    bench = RecordedBench(tmp_path, fails_at_end=True)
    bench.use(ONE)
    bench.use(TWO)
    with contextlib.suppress(OSError):
        bench.close()
    bench.close()
    assert sorted(call for call in bench.calls if call.startswith("close")) == ["close one binary", "close two binary"]


def test_a_failure_is_a_sample_that_says_so(bench):
    def figures():
        raise SubjectFailed("no answer")

    sample = bench.sample("mosec", "w1", figures, point=4)
    assert sample == {
        "round": 0,
        "subject": "mosec",
        "workload": "w1",
        "point": 4,
        "failed": "SubjectFailed: no answer",
    }


def test_figures_are_a_sample_with_what_they_are_of(bench):
    bench.round = 3
    assert bench.sample("mosec", "w1", lambda: {"rps": 2.0}) == {
        "round": 3,
        "subject": "mosec",
        "workload": "w1",
        "rps": 2.0,
    }
