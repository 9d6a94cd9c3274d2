"""Servers that stay up take turns: one runs, the others rest."""

import contextlib
import dataclasses

import pytest

from benchmarks.kept import Kept
from benchmarks.subjects import Subject

ONE, TWO = (Subject(name, ("true",), "/", {}) for name in ("one", "two"))


@dataclasses.dataclass
class House:
    """Starts servers that tell what is done to them."""

    told: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def start(self, subject, form):
        name = f"{subject.name} {form}"
        self.told.append(f"start {name}")
        yield Server(name, self.told)
        self.told.append(f"end {name}")


@dataclasses.dataclass
class Server:
    name: str
    told: list[str]

    def rest(self):
        self.told.append(f"rest {self.name}")

    def wake(self):
        self.told.append(f"wake {self.name}")


@pytest.fixture
def house():
    return House()


@pytest.fixture
def kept(house):
    return Kept(house.start)


def use(kept, subject, form="binary"):
    with kept.awake(subject, form):
        pass


def test_each_subject_starts_once_and_rests_while_the_other_runs(house, kept):
    for subject in (ONE, TWO, ONE):
        use(kept, subject)
    assert house.told == [
        "start one binary",
        "rest one binary",
        "start two binary",
        "rest two binary",
        "wake one binary",
        "rest one binary",
    ]


def test_a_form_shares_a_start_unless_it_needs_its_own(house, kept):
    own = dataclasses.replace(ONE, by_form={"lists": {"ROUTE": "/lists"}})
    for form in ("binary", "weights", "lists", "lists"):
        use(kept, own, form)
    assert [line for line in house.told if line.startswith("start")] == ["start one binary", "start one lists"]


def test_a_failed_subject_is_ended_and_started_again(house, kept):
    with pytest.raises(OSError, match="cut"), kept.awake(ONE, "binary"):
        raise OSError("cut")
    use(kept, ONE)
    assert house.told == ["start one binary", "end one binary", "start one binary", "rest one binary"]


def test_a_subject_that_does_not_start_is_tried_again():
    asked = []

    def fails(subject, form):
        asked.append(subject.name)
        raise OSError("no port")

    broken = Kept(fails)
    for _ in range(2):
        with pytest.raises(OSError, match="no port"):
            use(broken, ONE)
    broken.end()
    assert asked == ["one", "one"]


def test_closing_ends_all_subjects(house, kept):
    use(kept, ONE)
    use(kept, TWO)
    kept.end()
    assert [line for line in house.told if line.startswith("end")] == ["end one binary", "end two binary"]
    kept.end()
    assert len(house.told) == 6


def test_a_subject_that_fails_at_its_end_leaves_no_other_running():
    ended = []

    @contextlib.contextmanager
    def start(subject, form):
        yield Server(subject.name, [])
        ended.append(subject.name)
        raise OSError("it would not go")

    kept = Kept(start)
    use(kept, ONE)
    use(kept, TWO)
    with pytest.raises(OSError, match="would not go"):
        kept.end()
    assert ended == ["one", "two"]
