"""Console: a person reads one line an event, and nothing in it reaches the terminal as more than text."""

import re
import subprocess
import sys
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.errors import printable
from service.observability import line_writer
from service.observability.console import console_renderer
from service.observability.line_writer import use_format
from service.observability.logs import MAX_LINE_BYTES, get_logger, log_request
from tests.unit.observability.test_logs import LINE, Captured

HEAD = {"timestamp": "2026-11-27T10:00:00.123456Z", "level": "info", "event": "draining", "version": "0.1.0"}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def zone(monkeypatch):
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def captured(monkeypatch):
    """What this process logs for a person, without colours."""
    monkeypatch.setattr(line_writer, "console", None)
    use_format("plain")
    with Captured() as captured:
        yield captured


def rendered(*, colours=False, **fields) -> str:
    line = console_renderer(colours=colours)({**HEAD, **fields}).decode()
    assert line.endswith("\n")
    return line[:-1]


@pytest.mark.usefixtures("zone")
def test_a_line_has_the_local_time_the_level_the_event_and_its_fields():
    assert rendered(worker=0, signal="SIGTERM", reason="no room") == (
        "12:00:00 [info     ] draining         worker=0 signal='SIGTERM' reason='no room'"
    )


@pytest.mark.usefixtures("zone")
def test_colours_change_nothing_else():
    line = rendered(colours=True, worker=0, reason="no room")
    assert line != rendered(worker=0, reason="no room")
    assert COLOUR.sub("", line) == rendered(worker=0, reason="no room")


def test_a_request_shows_what_a_person_looks_for(captured):
    log_request({**LINE, "code": "bad_shape", "status": 422, "detail": "query has 2 features"})
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d \[info     \] request          route='/v1/layers/\{layer\}/attend' method='POST' status=422 "
        r"code='bad_shape' layer='minilm-l0' tokens=48 total_ms=2.0 detail='query has 2 features'\n",
        captured.text,
    )


@given(st.text(), st.booleans())
@example("\x1b[2J\x1b]0;title\x07", True)
@example("a\n12:00:00 [info     ] stopped", False)
@example("\u202egnp.exe \x9b31m\x7f\u2028\r", True)
@example("\ud800", False)
def test_a_value_moves_no_cursor_and_begins_no_line(value, colours):
    line = COLOUR.sub("", rendered(colours=colours, key=value, detail=[value], exception=f"Error: {value}"))
    rows = line.split("\n")
    assert all(row == printable(row) for row in rows)
    assert all(row.startswith("    ") for row in rows[1:])


@given(st.dictionaries(st.text("abcdef", min_size=1), st.text() | st.integers() | st.floats(), max_size=30))
def test_a_line_fits_into_one_write(fields):
    line_writer.console = console_renderer(colours=True)
    try:
        with Captured() as captured:
            get_logger().info(
                "event", **{f"_{name}": value for name, value in fields.items()}, exception="é\x00" * 9999
            )
        assert 0 < len(captured.stream.getvalue()) <= MAX_LINE_BYTES
    finally:
        line_writer.console = None


@pytest.mark.parametrize("event", ["listening", "layer_loaded", "layers_served"])
def test_what_each_worker_does_at_the_start_is_not_shown(captured, event):
    get_logger().info(event)
    get_logger().info("layers_changed")
    assert "layers_changed" in captured.text
    assert event not in captured.text


def test_lost_lines_are_reported_in_the_same_form(monkeypatch):
    monkeypatch.setattr(line_writer, "console", console_renderer(colours=False))
    assert b"[warning  ] log_lines_dropped lines=3" in line_writer.log_line("warning", "log_lines_dropped", lines=3)


def test_json_does_not_load_the_renderer_in_the_supervisor():
    code = "import service.supervisor.supervisor, sys; print('structlog' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
