"""The roll: what each phase serves and holds, the way back, and what the book makes of damaged files and two authors."""

import json
import multiprocessing
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.worker.desired_state import Phase, Roll, RollBook

OLD, NEW = {"a": "sha256:1", "b": "sha256:2"}, {"a": "sha256:3", "b": "sha256:2"}


@pytest.fixture
def book(tmp_path):
    return RollBook(tmp_path)


def test_a_change_serves_the_old_layers_until_all_are_ready_and_holds_both_until_all_serve():
    before = Roll(4, Phase.SETTLED, OLD)
    prepare = before.prepare("a", "sha256:3")
    serve = prepare.serve()
    after = serve.settle()
    assert [roll.version for roll in (before, prepare, serve, after)] == [4, 5, 6, 7]
    assert [roll.served for roll in (before, prepare, serve, after)] == [OLD, OLD, NEW, NEW]
    both = {*OLD.items(), *NEW.items()}
    assert [roll.held for roll in (before, prepare, serve, after)] == [{*OLD.items()}, both, both, {*NEW.items()}]


@pytest.mark.parametrize(
    ("name", "digest", "layers"),
    [("a", None, {"b": "sha256:2"}), ("c", "sha256:9", {**OLD, "c": "sha256:9"}), ("a", "sha256:1", OLD)],
    ids=["drop", "add", "same"],
)
def test_a_change_is_of_one_layer(name, digest, layers):
    roll = Roll(4, Phase.SETTLED, OLD).prepare(name, digest)
    assert (roll.layers, roll.before, roll.about) == (layers, OLD, name)
    assert roll.serve().about == name
    assert roll.serve().settle() == Roll(7, Phase.SETTLED, layers)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_way_back_leads_to_the_old_layers_from_either_phase(steps):
    roll = Roll(4, Phase.SETTLED, OLD).prepare("a", "sha256:3")
    roll = roll.serve() if steps == 2 else roll
    assert roll.take_back() == Roll(roll.version + 1, Phase.SETTLED, OLD)


def test_what_is_written_is_read(book):
    assert book.read() is None
    for roll in (Roll(1, Phase.SETTLED, OLD), Roll(2, Phase.PREPARE, NEW, OLD, "a"), Roll(9, Phase.SERVE, {}, NEW)):
        book.write(roll)
        assert book.read() == roll


def test_the_first_roll_is_that_of_the_quickest_process(book, tmp_path):
    assert book.begin(OLD) == Roll(1, Phase.SETTLED, OLD)
    assert book.begin(NEW) == Roll(1, Phase.SETTLED, OLD)
    assert [path.name for path in tmp_path.iterdir()] == ["roll"]


GOOD: dict[str, object] = {"version": 3, "phase": "settled", "layers": {"a": "x"}, "before": {}, "about": ""}
CHANGES: list[dict[str, object]] = [
    {"version": True},
    {"version": "3"},
    {"phase": "done"},
    {"layers": []},
    {"layers": {"a": 1}},
    {"before": None},
    {"about": None},
]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        *(json.dumps({**GOOD, **change}).encode() for change in CHANGES),
        json.dumps(GOOD).encode()[:-1],
    ],
)
def test_what_is_not_a_roll_is_none(book, tmp_path, text):
    (tmp_path / "roll").write_bytes(text)
    assert book.read() is None


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_raise(text):
    assert Roll.parse(text) is None


def test_only_one_holds_the_lock_and_it_is_free_afterwards(book, tmp_path):
    with book.locked() as first, RollBook(tmp_path).locked() as second:
        assert (first, second) == (True, False)
    with book.locked() as again:
        assert again


def test_a_lock_that_was_removed_gives_no_right_to_write_and_is_not_had_twice(book, tmp_path):
    book.begin(OLD)
    with book.locked():
        book.write(Roll(2, Phase.SETTLED, NEW))
        (tmp_path / "roll.lock").unlink()
        with pytest.raises(OSError, match="No such file"):
            book.write(Roll(3, Phase.SETTLED, OLD))
        with book.locked() as again:
            assert not again
        with RollBook(tmp_path).locked() as other:
            assert other
            with pytest.raises(OSError, match="another process may hold"):
                book.write(Roll(3, Phase.SETTLED, OLD))
    with book.locked() as later:
        assert later
        book.write(Roll(3, Phase.SETTLED, OLD))


def test_the_lock_goes_with_its_holders_life(book, tmp_path):
    context = multiprocessing.get_context("spawn")
    holder = context.Process(target=_die_with_the_lock, args=(tmp_path,))
    holder.start()
    holder.join(30)
    assert holder.exitcode == 7
    with book.locked() as is_ours:
        assert is_ours


def _die_with_the_lock(directory):
    with RollBook(directory).locked() as is_ours:
        os._exit(7 if is_ours else 1)


def test_without_a_directory_nothing_is_read_or_locked_and_writing_says_so(tmp_path):
    book = RollBook(tmp_path / "gone")
    assert book.read() is None
    with book.locked() as is_ours:
        assert not is_ours
    for write in (lambda: book.write(Roll(1, Phase.SETTLED, OLD)), lambda: book.begin(OLD)):
        with pytest.raises(OSError, match="No such file"):
            write()
