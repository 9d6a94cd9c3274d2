"""Status: a report is read back as it was sent, a malformed one is none; what each phase of a change serves and holds."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.supervisor.status import (
    MAX_REASON_CHARS,
    Change,
    DesiredState,
    Phase,
    RolloutOutcome,
    ServiceStatus,
    SourceStatus,
    State,
    WorkerStatus,
)

CHANGE = Change(3, {"a": "sha256:1", "b": None}, {"a": "sha256:0"}, 30.0, "sha256:5")
SOURCE = SourceStatus("away", 1.5, 2.5)
GOOD = dataclasses.asdict(WorkerStatus(State.READY, "é\ud800\n", 7, "no memory", True, {"a": "sha256:1"}, CHANGE))
BEGUN = DesiredState(4, Phase.SETTLED, {"a": "sha256:1"}).prepare({"b": "sha256:2"})


def sent(message):
    return json.loads(json.dumps(dataclasses.asdict(message)))


@pytest.mark.parametrize("change", [None, CHANGE, Change(1, {"a": None}, {}, 0.2)])
@pytest.mark.parametrize("state", State)
def test_the_report_of_a_worker_is_read_back(state, change):
    status = WorkerStatus(
        state, "é\ud800\n", 7, "no memory", is_file_changed=True, found={"a": "x"}, change=change, source=SOURCE
    )
    assert WorkerStatus.parse(sent(status)) == status


@pytest.mark.parametrize(
    "outcome", [None, RolloutOutcome(1, is_new=True), RolloutOutcome(2, code="not_ready", retry_after_s=5)]
)
@pytest.mark.parametrize("desired", [DesiredState(), BEGUN, BEGUN.serve()])
def test_the_report_of_the_supervisor_is_read_back(desired, outcome):
    status = ServiceStatus(desired, "1 of 2 processes is starting", [12, 11], outcome, SOURCE)
    assert ServiceStatus.parse(sent(status)) == status


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        "ready",
        {},
        {**GOOD, "state": "asleep"},
        {**GOOD, "state": None},
        {**GOOD, "unknown": 1},
        {**GOOD, "found": ["a"]},
        {**GOOD, "found": {"a": 1}},
        {**GOOD, "change": {"number": 1}},
        {**GOOD, "change": {**GOOD["change"], "layers": ["a"]}},
        {**GOOD, "change": {**GOOD["change"], "layers": {"a": 1}}},
        {**GOOD, "change": {**GOOD["change"], "seen": {"a": []}}},
        {**GOOD, "change": {**GOOD["change"], "layer_set": None}},
        {**GOOD, "source": {"fault": "away"} | {"since": "today"}},
        {**GOOD, "change": {**GOOD["change"], "timeout_s": "long"}},
        {**GOOD, "change": {**GOOD["change"], "timeout_s": float("nan")}},
        {**GOOD, "change": {**GOOD["change"], "timeout_s": float("inf")}},
        {**GOOD, "change": {**GOOD["change"], "number": [[]]}},
        *({**GOOD, name: 0.5} for name in GOOD),
        *({**GOOD, name: [[[]]]} for name in GOOD),
        {**GOOD, "found": 0},
        {**GOOD, "found": ""},
        {**GOOD, "found": False},
    ],
)
def test_a_malformed_report_is_none(fields):
    assert WorkerStatus.parse(GOOD) is not None
    assert WorkerStatus.parse(fields) is None


def test_long_texts_are_cut():
    status = WorkerStatus.parse({**GOOD, "reason": "x" * 1000, "refusal": "y" * 1000})
    assert status is not None
    assert (len(status.reason), len(status.refusal)) == (MAX_REASON_CHARS, MAX_REASON_CHARS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.fixed_dictionaries({name: st.just(value) | JSON for name, value in GOOD.items()}) | JSON)
def test_no_report_raises(fields):
    WorkerStatus.parse(fields)


OLD, NEW = {"a": "sha256:1", "b": "sha256:2"}, {"a": "sha256:3", "b": "sha256:2"}


def test_a_rollout_serves_the_old_layers_until_all_are_ready_and_holds_both_until_all_serve():
    before = DesiredState(4, Phase.SETTLED, OLD)
    prepare = before.prepare({"a": "sha256:3"})
    serve = prepare.serve()
    after = serve.settle()
    assert [desired.version for desired in (before, prepare, serve, after)] == [4, 5, 6, 7]
    assert [desired.served for desired in (before, prepare, serve, after)] == [OLD, OLD, NEW, NEW]
    both = {*OLD.items(), *NEW.items()}
    assert [desired.loaded for desired in (before, prepare, serve, after)] == [
        {*OLD.items()},
        both,
        both,
        {*NEW.items()},
    ]


@pytest.mark.parametrize(
    ("name", "digest", "layers"),
    [("a", None, {"b": "sha256:2"}), ("c", "sha256:9", {**OLD, "c": "sha256:9"}), ("a", "sha256:1", OLD)],
    ids=["drop", "add", "same"],
)
def test_a_rollout_changes_one_layer(name, digest, layers):
    desired = DesiredState(4, Phase.SETTLED, OLD).prepare({name: digest})
    assert (desired.layers, desired.previous, desired.changed) == (layers, OLD, (name,))
    assert desired.serve().changed == (name,)
    assert desired.serve().settle() == DesiredState(7, Phase.SETTLED, layers)


@pytest.mark.parametrize("steps", [1, 2])
def test_an_abort_restores_the_old_layers_from_either_phase(steps):
    desired = DesiredState(4, Phase.SETTLED, OLD).prepare({"a": "sha256:3"})
    desired = desired.serve() if steps == 2 else desired
    assert desired.abort() == desired.abort().abort() == DesiredState(desired.version + 1, Phase.SETTLED, OLD)
