"""Status: a report is read back as it was sent, and a malformed one is none."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.supervisor.desired_state import DesiredState, Phase
from service.supervisor.status import MAX_REASON_CHARS, Change, Outcome, ServiceStatus, State, WorkerStatus

CHANGE = Change(3, "a", "sha256:1", None, 30.0)
GOOD = dataclasses.asdict(WorkerStatus(State.READY, "é\ud800\n", 7, "no memory", True, {"a": "sha256:1"}, CHANGE))
BEGUN = DesiredState(4, Phase.SETTLED, {"a": "sha256:1"}).prepare("b", "sha256:2")


def sent(message):
    return json.loads(json.dumps(dataclasses.asdict(message)))


@pytest.mark.parametrize("change", [None, CHANGE, Change(1, "a", None, None, 0.2)])
@pytest.mark.parametrize("state", State)
def test_the_report_of_a_worker_is_read_back(state, change):
    status = WorkerStatus(state, "é\ud800\n", 7, "no memory", is_file_changed=True, found={"a": "x"}, change=change)
    assert WorkerStatus.parse(sent(status)) == status


@pytest.mark.parametrize("outcome", [None, Outcome(1, is_new=True), Outcome(2, code="not_ready", retry_after_s=5)])
@pytest.mark.parametrize("desired", [DesiredState(), BEGUN, BEGUN.serve()])
def test_the_report_of_the_supervisor_is_read_back(desired, outcome):
    status = ServiceStatus(desired, "1 of 2 processes is starting", [12, 11], outcome)
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
        {**GOOD, "change": {**GOOD["change"], "name": ["a"]}},
        {**GOOD, "change": {**GOOD["change"], "digest": []}},
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
