"""Part of figure 1: schemathesis against our own OpenAPI page, with data that fits it and data that does not.

Invariants: it runs in an environment of its own (`make install-fuzz`); without it the row says so. What the page promises is
checked: statuses, media types, headers and schemas of answers, methods, and that what does not fit is refused. That what fits
is accepted cannot be: shapes that must agree with one another are beyond JSON Schema.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from tests.torture.figure import Form
from tests.torture.report import Row, none_of, not_yet
from tests.torture.subject import Subject

EXAMPLES = 1000
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance",
)  # fmt: skip
MEANT = ("503", "504")
# Any request may carry headers that the page does not name.
HARMLESS = "in header - object with unexpected properties"
WHAT = "schemathesis, positive and negative data: failures"


def rows(subject: Subject, form: Form) -> Iterator[Row]:
    if form.schema_tool is None:
        yield not_yet(1, WHAT, "schemathesis is not installed (make install-fuzz)")
        return
    yield none_of(1, f"{WHAT} ({form.count(EXAMPLES, 10)} examples a route)", failures(subject, form))


def failures(subject: Subject, form: Form) -> list[str]:
    assert form.schema_tool is not None
    report = subject.directory / "schemathesis.txt"
    with report.open("wb") as file:
        done = subprocess.run(
            [
                form.schema_tool, "run", f"http://127.0.0.1:{subject.port}/openapi.json", "--mode=all",
                f"--checks={','.join(CHECKS)}",
                f"--max-examples={form.count(EXAMPLES, 10)}", f"--seed={form.seed}", "--continue-on-failure", "--no-color",
                "--request-timeout=5", "--no-shrink", "--suppress-health-check=all", "--phases=examples,coverage,fuzzing",
            ],
            stdout=file, stderr=subprocess.STDOUT, cwd=subject.directory, check=False,
        )  # fmt: skip
    text = report.read_text(encoding="utf-8", errors="replace")
    if done.returncode not in (0, 1):
        return [f"exit code {done.returncode}: {text[-200:]}"]
    # What a check found, then the status in brackets; a 503 or 504 has a meaning, and is found only by the first check.
    found = re.findall(r"^- (.+?)$(.*?)^\[(\d{3})\].*?^ +curl -X \S+", text, re.MULTILINE | re.DOTALL)
    return [
        f"{what} [{status}]"
        for what, why, status in found
        if HARMLESS not in why and not ("Server error" in what and status in MEANT)
    ]
