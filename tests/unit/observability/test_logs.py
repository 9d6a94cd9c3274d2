"""Logs: every event is one JSON line of bounded length."""

import asyncio
import io
import json
import logging
import subprocess
import sys
import warnings
from datetime import UTC, datetime

import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st

import service
from service.observability.logs import (
    MAX_LINE_BYTES,
    REFUSAL_LINES,
    REFUSAL_WINDOW_S,
    RefusalLimit,
    configure_logs,
    finish_logs,
    get_logger,
    log_request,
)
from tests.doubles import ManualClock

LINE = dict(
    request_id="abc",
    route="/v1/layers/{layer}/attend",
    method="POST",
    status=200,
    code=None,
    layer="minilm-l0",
    batch_requests=3,
    tokens=48,
    decode_ms=0.4,
    queue_ms=0.1,
    compute_ms=1.25,
    total_ms=2.0,
    bytes_in=1000,
    bytes_out=2000,
)


class Captured:
    """Configures logs to write into memory, and restores them at the end."""

    def __init__(self, level="info"):
        self.level = level
        self.stream = io.BytesIO()

    def __enter__(self):
        root = logging.getLogger()
        self.before = structlog.get_config(), root.handlers[:], root.level, logging.getLogger("uvicorn").level
        configure_logs(self.level, self.stream)
        return self

    def __exit__(self, *_):
        config, handlers, level, uvicorn_level = self.before
        structlog.configure(**config)
        logging.getLogger().handlers[:] = handlers
        logging.getLogger().setLevel(level)
        logging.getLogger("uvicorn").setLevel(uvicorn_level)
        logging.captureWarnings(capture=False)

    @property
    def text(self):
        return self.stream.getvalue().decode()

    @property
    def lines(self):
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def captured():
    with Captured() as captured:
        yield captured


def test_a_line_has_time_level_event_and_version(captured):
    get_logger().warning("layer_slow", layer="minilm-l0")
    (line,) = captured.lines
    stamp = datetime.fromisoformat(line.pop("timestamp"))
    assert stamp.utcoffset() is not None
    assert not stamp.utcoffset()
    assert line == {"level": "warning", "event": "layer_slow", "version": service.__version__, "layer": "minilm-l0"}


def test_a_request_is_one_line_with_all_known_fields(captured):
    log_request(LINE)
    (line,) = captured.lines
    assert line["event"] == "request"
    assert {name: line[name] for name in ("request_id", "status", "compute_ms", "bytes_out")} == {
        "request_id": "abc",
        "status": 200,
        "compute_ms": 1.25,
        "bytes_out": 2000,
    }
    assert "code" not in line, "what is not known is left out"


def test_the_line_of_a_request_has_the_time_of_its_end(captured):
    async def end_then_go_on():
        before = datetime.now(UTC)
        log_request(LINE)
        assert not captured.text, "the line waits for the end of the turn"
        return before, datetime.now(UTC)

    before, after = asyncio.run(end_then_go_on())
    (line,) = captured.lines
    assert before <= datetime.fromisoformat(line["timestamp"]) <= after


def test_lines_below_the_level_are_not_written():
    with Captured("error") as captured:
        log_request(LINE)
        get_logger().error("worse")
        assert [line["event"] for line in captured.lines] == ["worse"]


@given(st.text(), st.text(), st.integers() | st.floats() | st.binary() | st.none() | st.lists(st.text()))
@example('\r\n{"event": "forged"}', "\x00\u2028", 2**70)
@example("\ud800", "é" * 5000, float("nan"))
@example("\x01" * 5000, "\x01" * 5000, ["\x01" * 5000])
@example("e" * 5000, "x", b"\xff" * 5000)
def test_no_field_breaks_forges_or_lengthens_a_line(event, text, value):
    with Captured() as captured:
        get_logger().info(event, text=text, value=value)
        assert captured.text.endswith("\n")
        assert captured.text.count("\n") == 1
        assert len(captured.text.encode()) <= MAX_LINE_BYTES
        assert json.loads(captured.text)["level"] == "info"


def test_twenty_hostile_fields_still_fit_into_a_line(captured):
    get_logger().info("e" * 300, **{f"a_field_named_{number}": '\x01\\"' * 200 for number in range(30)})
    (line,) = captured.lines
    assert line["truncated"] is True
    assert len(captured.text.encode()) <= MAX_LINE_BYTES


def test_a_long_line_cuts_its_long_texts_and_a_short_one_keeps_them(captured):
    get_logger().info("short", text=500 * "a", number=1)
    get_logger().info("long", text=2000 * "a", number=1)
    short, long = captured.lines
    assert (short["text"], short["number"]) == (500 * "a", 1)
    assert (long["text"], long["number"]) == (256 * "a" + "…", 1)


def test_an_exception_is_in_its_line_and_keeps_its_end(captured):
    def deep(depth):
        if depth:
            deep(depth - 1)
        raise ValueError("the cause of it")

    try:
        deep(100)
    except ValueError:
        get_logger().exception("fault", request_id="abc")
    (line,) = captured.lines
    assert line["exception"].endswith("ValueError: the cause of it")
    assert len(captured.text.encode()) <= MAX_LINE_BYTES


@pytest.mark.parametrize("letter", ["é", "日", "😀", "\ud800"])
def test_a_line_beyond_ascii_is_as_short_in_bytes(captured, letter):
    get_logger().error("fault", exc_info=ValueError(3000 * letter + "the cause of it"))
    get_logger().info("many", **{f"field_{number}": 256 * letter for number in range(8)})
    exception, fields = captured.text.splitlines()
    assert max(len(exception.encode()), len(fields.encode())) < MAX_LINE_BYTES
    assert json.loads(exception)["exception"].endswith("the cause of it")


def test_logs_and_warnings_of_libraries_become_lines_of_the_same_form(captured):
    logging.getLogger("asyncio").error("Task %s was destroyed", "t1")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        configure_logs("info", captured.stream)
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(capture=False)
    assert [(line["level"], line["logger"]) for line in captured.lines] == [
        ("error", "asyncio"),
        ("warning", "uvicorn.error"),
        ("warning", "py.warnings"),
    ]
    assert captured.lines[0]["message"] == "Task t1 was destroyed"
    assert "old thing" in captured.lines[2]["message"]


def test_a_wrong_format_string_of_a_library_is_logged_unformatted(captured):
    record = logging.LogRecord("odd", logging.WARNING, "odd.py", 1, "%d of it", ("not a number",), None)
    ours = [
        handler for handler in logging.getLogger().handlers if type(handler).__module__ == "service.observability.logs"
    ]
    ours[0].handle(record)
    assert captured.lines[0]["message"] == "%d of it"


def test_a_level_of_a_librarys_own_is_logged_as_the_standard_level_below(captured):
    for level in (25, 39, 105):
        logging.getLogger("odd").log(level, "level %d", level)
    assert [(line["level"], line["message"]) for line in captured.lines] == [
        ("info", "level 25"),
        ("warning", "level 39"),
        ("critical", "level 105"),
    ]


class ClosedPipe(io.BytesIO):
    def write(self, _):
        raise BrokenPipeError


def test_a_closed_stdout_costs_only_the_line():
    with Captured() as captured:
        configure_logs("info", ClosedPipe())
        log_request(LINE)
        assert captured.text == ""


NOT_FOUND = ("/v1/layers/{layer}/attend", 404, "layer_not_found")
WRONG = ("/v1/layers/{layer}/attend", 422, "bad_shape")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def reported():
    return []


@pytest.fixture
def refusals(clock, reported):
    return RefusalLimit(clock, lambda kind, count: reported.append((kind, count)))


def test_the_first_hundred_identical_refusals_of_a_second_have_lines_and_the_rest_share_one_D9(
    refusals, clock, reported
):
    assert [refusals.admits(NOT_FOUND) for _ in range(250)] == [True] * REFUSAL_LINES + [False] * 150
    assert reported == []
    clock.advance(REFUSAL_WINDOW_S)
    assert reported == [(NOT_FOUND, 150)]
    clock.advance(REFUSAL_WINDOW_S)
    assert reported == [(NOT_FOUND, 150)]
    assert clock.num_calls == 0, "no timer runs while nothing is refused"


def test_an_ongoing_flood_has_one_line_a_second(refusals, clock, reported):
    def second(count):
        """Return how many of `count` refusals in one window are logged."""
        admitted = sum(refusals.admits(NOT_FOUND) for _ in range(count))
        clock.advance(REFUSAL_WINDOW_S)
        return admitted

    assert [second(count) for count in (500, 500, 400, 99, 99, 500, 500)] == [100, 0, 0, 0, 99, 100, 0]
    assert second(10) == 0
    assert [count for _, count in reported] == [400, 500, 400, 99, 400, 500, 10]
    assert clock.num_calls == 0


def test_after_a_pause_lines_are_written_again(refusals, clock, reported):
    for _ in range(2):
        assert [refusals.admits(NOT_FOUND) for _ in range(101)] == [True] * 100 + [False]
        clock.advance(2 * REFUSAL_WINDOW_S)
    assert reported == [(NOT_FOUND, 1)] * 2


def test_refusals_that_differ_in_route_status_or_code_do_not_suppress_each_other(refusals, clock, reported):
    kinds = [
        NOT_FOUND,
        WRONG,
        ("unmatched", *NOT_FOUND[1:]),
        (*NOT_FOUND[:2], "not_found"),
        (NOT_FOUND[0], 400, NOT_FOUND[2]),
    ]
    for _ in range(REFUSAL_LINES):
        assert all(refusals.admits(kind) for kind in kinds)
    assert not any(refusals.admits(kind) for kind in kinds)
    clock.advance(REFUSAL_WINDOW_S)
    assert sorted(reported) == sorted((kind, 1) for kind in kinds)


def test_a_few_refusals_are_in_no_sum_and_leave_no_timer(refusals, clock, reported):
    assert all(refusals.admits(NOT_FOUND) for _ in range(REFUSAL_LINES))
    clock.advance(REFUSAL_WINDOW_S)
    assert (reported, clock.num_calls) == ([], 0)


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from([NOT_FOUND, WRONG]), st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]))
    )
)
def test_every_refusal_has_a_line_or_is_in_a_sum_and_no_timer_is_left(steps):
    clock, sums, num_lines = ManualClock(), dict.fromkeys((NOT_FOUND, WRONG), 0), dict.fromkeys((NOT_FOUND, WRONG), 0)

    def report(kind, count):
        assert count > 0
        sums[kind] += count

    refusals = RefusalLimit(clock, report)
    for count, kind, pause_s in steps:
        num_lines[kind] += sum(refusals.admits(kind) for _ in range(count))
        clock.advance(pause_s)
    clock.advance(2 * REFUSAL_WINDOW_S)
    for kind in sums:
        assert num_lines[kind] + sums[kind] == sum(count for count, sent, _ in steps if sent == kind)
    assert clock.num_calls == 0


def test_without_a_loop_refusals_are_reported_at_the_end(refusals, clock, reported, monkeypatch):
    def without_loop(*_):
        raise RuntimeError("no running event loop")

    monkeypatch.setattr(clock, "call_at", without_loop)
    for _ in range(REFUSAL_LINES + 5):
        refusals.admits(NOT_FOUND)
    refusals.close()
    assert reported == [(NOT_FOUND, 5)]


def test_answers_are_never_suppressed_and_refusals_are_summarised_in_a_line_D9(captured):
    refused = LINE | dict(route="unmatched", status=404, code="not_found")
    for number in range(3 * REFUSAL_LINES):
        log_request(LINE)
        log_request(refused | dict(request_id=str(number)))
    finish_logs()
    assert [line["status"] for line in captured.lines if line["event"] == "request"].count(200) == 3 * REFUSAL_LINES
    refusals = [line for line in captured.lines if line.get("code") == "not_found"]
    assert [line["event"] for line in refusals] == ["request"] * REFUSAL_LINES + ["refusals_suppressed"]
    summed = refusals[-1]
    assert (summed["level"], summed["route"], summed["status"], summed["count"]) == (
        "info",
        "unmatched",
        404,
        2 * REFUSAL_LINES,
    )


def test_on_a_loop_the_sum_is_written_without_another_request():
    async def refuse():
        texts = asyncio.Queue[bytes]()
        configure_logs("info", type("Stream", (), {"write": lambda _, text: texts.put_nowait(text)})())
        for _ in range(REFUSAL_LINES + 1):
            log_request(LINE | dict(status=404, code="not_found"))
        async with asyncio.timeout(30):
            while b"refusals_suppressed" not in (text := await texts.get()):
                pass
        return json.loads(text)

    with Captured():
        assert asyncio.run(refuse())["count"] == 1


def test_a_serving_process_does_not_import_the_colours_of_the_command_line():
    """rich takes 4 MB in each process."""
    code = "import sys, service.app, service.worker.server; print('rich' in sys.modules); import rich; print(rich.__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "rich"]
