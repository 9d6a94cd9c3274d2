"""The rules for answers, the counts at rest and the page of results report what violates them, and nothing else."""

import json

import pytest

from tests.torture import at_rest, report
from tests.torture.answer_rules import MARK, violation
from tests.torture.raw_connection import Reply

PROBLEM = {
    "type": "urn:x",
    "title": "Bad Request",
    "status": 400,
    "detail": "expected a number",
    "code": "bad_json",
    "param": None,
    "request_id": "a1",
}
HEADERS = {"content-type": "application/problem+json", "x-request-id": "a1"}


def problem(status=400, headers=HEADERS, **changes) -> Reply:
    return Reply(status, headers, json.dumps({**PROBLEM, "status": status, **changes}).encode())


@pytest.mark.parametrize(
    "reply",
    [
        problem(),
        Reply(200, {"content-type": "application/json"}, b'{"output":[1.5]}'),
        problem(429, {**HEADERS, "retry-after": "1"}, code="queue_full"),
        Reply(307, {"location": "docs"}, b""),
    ],
)
def test_an_answer_within_the_contract_passes(reply):
    assert violation(reply) is None


@pytest.mark.parametrize(
    "reply",
    [
        problem(500, code="engine_failed"),
        problem(418),
        problem(code="something"),
        problem(code="bad_shape"),
        problem(detail=f"found {MARK}"),
        problem(detail='File "/app/service/edge.py"'),
        problem(detail="x" * 5000),
        problem(extra=1),
        problem(request_id="other"),
        problem(429, code="queue_full"),
        Reply(400, HEADERS, b"{"),
        Reply(200, {"content-type": "application/json"}, b'{"output":[NaN]}'),
    ],
)
def test_an_answer_outside_the_contract_is_reported(reply):
    assert violation(reply) is not None


def test_an_error_of_the_open_inference_protocol_has_a_form_of_its_own():
    answer = Reply(400, {"content-type": "application/json"}, b'{"error":"expected a number (bad_dtype)"}')
    assert violation(answer, is_inference=True) is None
    assert violation(answer) is not None


def test_unbalanced_counts_are_reported():
    samples = {
        "attention_received_total": 3.0,
        'attention_requests_total{route="/a",status="200"}': 1.0,
        'attention_requests_total{route="/a",status="422"}': 1.0,
        'attention_cancelled_total{stage="queued"}': 1.0,
        'attention_rejected_total{reason="invalid"}': 1.0,
    }
    assert at_rest.unbalanced(samples) == []
    assert at_rest.unbalanced({**samples, "attention_received_total": 4.0}) != []
    assert at_rest.unbalanced({**samples, 'attention_rejected_total{reason="invalid"}': 2.0}) != []
    assert at_rest.unbalanced({**samples, "attention_queued_requests": 1.0}) != []


def test_a_page_keeps_the_rows_of_skipped_figures(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        f"before\n{report.BEGIN}\n| 2 | old | | 1 | yes | then |\n| 3 | gone | | 1 | yes | then |\n{report.END}\nafter\n"
    )
    report.write_page(page, [report.at_most(3, "new", 2, 1, " s"), report.none_of(10, "last", [])], "now", "a machine")
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    rows = [line for line in text.splitlines() if line[2:3].isdigit()]
    assert [row.split("|")[2].strip() for row in rows] == ["old", "new", "last"]
    assert "| **NO** | now |" in rows[1]
    assert "Each row has the date of its own run." in text
