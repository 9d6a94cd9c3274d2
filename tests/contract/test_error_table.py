"""Every failure has a code of its own, a status of the contract, a short valid body, and a row with its cause and remedy."""

import json
import re
from pathlib import Path

import pytest

from service import errors
from service.api.problems import error_rows, render, status_of
from tests.torture.answer_rules import CODES

# What an answer may be, and the one code that only a fault of the service has.
CONTRACT = {code: status for status, codes in CODES.items() for code in codes} | {"engine_failed": 500}


def leaves(kind: type[errors.ServiceError]) -> list[type[errors.ServiceError]]:
    below = kind.__subclasses__()
    own = [kind] if not below or kind is errors.InvalidInput else []
    return own + [leaf for child in below for leaf in leaves(child)]


def made(kind: type) -> errors.ServiceError:
    return kind("words", allow="GET") if kind is errors.MethodNotAllowed else kind("words")


ANSWERED = [leaf for branch in (errors.Rejected, errors.Refused, errors.Failed) for leaf in leaves(branch)]


@pytest.mark.parametrize(
    "kind", [k for k in ANSWERED if k.__module__ == "service.errors"], ids=lambda kind: kind.__name__
)
def test_every_failure_has_the_status_that_the_contract_lists_for_its_code(kind):
    assert status_of(type(made(kind))) == CONTRACT[kind.code]


def test_every_code_of_the_contract_belongs_to_an_error():
    assert {kind.code for kind in ANSWERED if kind.__module__ == "service.errors"} == set(CONTRACT)


@pytest.mark.parametrize("character", ["x", "é", "字", "😀", '"', "\x01"], ids=ascii)
@pytest.mark.parametrize("as_inference", [False, True], ids=["/v1", "/v2"])
def test_a_problem_body_has_at_most_4_kib_of_bytes_for_any_message(character, as_inference):
    """The longest request id, and a pointer as long as the longest name at every level of a body."""
    error = errors.BadShape(character * 100_000, param=32 * f"/{'n' * 32}")
    body = render(error, "i" * 128, as_inference=as_inference).body
    assert len(body) <= 4096
    found = json.loads(body)
    detail = found["error"].removesuffix(" (bad_shape)") if as_inference else found["detail"]
    assert len(detail) >= 200
    assert set(detail) == {character}


def test_a_message_of_2000_bytes_is_whole():
    assert json.loads(render(errors.BadShape("é" * 1000), "id").body)["detail"] == "é" * 1000


def test_a_problem_body_has_the_fields_of_problem_details():
    problem = render(errors.BadShape("x" * 100_000, param="/query"), "id-1")
    found = json.loads(problem.body)
    assert set(found) == {"type", "title", "status", "detail", "code", "param", "request_id"}
    assert (found["status"], found["code"], found["param"], found["request_id"]) == (422, "bad_shape", "/query", "id-1")


def test_a_refusal_has_a_retry_after():
    problem = render(errors.QueueFull("full", retry_after_s=7), "id")
    assert (b"retry-after", b"7") in problem.headers


def test_every_code_has_a_row_with_its_cause_and_its_remedy():
    rows = error_rows()
    assert [row.code for row in rows if row.status != CONTRACT[row.code]] == []
    assert {row.code for row in rows} == set(CONTRACT)
    for row in rows:
        assert row.cause[0].isupper(), row.code
        assert row.remedy, row.code
        assert row.remedy.endswith("."), row.code


def test_the_page_of_errors_in_the_documentation_matches_the_code():
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- errors -->\n(.*?)\n<!-- /errors -->", text, re.DOTALL)
    lines = ["| code | status | under `/v2` | cause | remedy |", "| --- | --- | --- | --- | --- |"]
    for row in error_rows():
        cells = (f'<a id="{row.code}"></a>`{row.code}`', row.status, row.inference_status, row.cause, row.remedy)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    assert found
    assert found[1] == "\n".join(lines)
