"""Small forms of the figures whose outcome does not depend on how busy the machine is; those with times run only on request.

`make torture` runs them in full, with those that have times in them.
"""

import asyncio
import socket
import time

import pytest

from tests.torture.figure import Form
from tests.torture.figures import (
    bombs,
    checkpoints,
    disconnects,
    documents,
    fuzz,
    half_close,
    isolation,
    large_bodies,
    large_text,
    layer_race,
    log_flood,
    new_worker,
    one_key,
    overload,
    run_directory,
    sigterm,
    slow_readers,
    trickle,
    unread_log,
    whales,
)
from tests.torture.raw_connection import attend, reset_at_close
from tests.torture.subject import Subject

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def form(directory, share) -> Form:
    return Form(share=share, soak_s=0, seed=20261121, directory=directory)


@pytest.mark.long
@pytest.mark.parametrize(
    ("figure", "share"),
    [
        pytest.param(fuzz, 0.015, id="fuzz"),
        pytest.param(isolation, 0.01, id="isolation-T14-T19-T20-X1"),
        pytest.param(disconnects, 0.04, id="disconnects-X12"),
        pytest.param(checkpoints, 0.02, id="checkpoints-F1-F3-F5-F6-F7-F15"),
        pytest.param(layer_race, 0.02, id="layer-race-D1"),
        pytest.param(log_flood, 0.02, id="log-flood-D9"),
        pytest.param(run_directory, 0.01, id="run-directory-D4"),
        pytest.param(unread_log, 0.01, id="unread-log-D3"),
    ],
)
def test_a_small_form_misses_no_target(tmp_path, figure, share):
    rows = list(figure.measure(form(tmp_path, share)))
    assert [row for row in rows if row.is_met is False] == []
    assert any(row.is_met for row in rows)


@pytest.mark.timed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "figure",
    [
        pytest.param(sigterm, id="sigterm-L4"),
        pytest.param(overload, id="overload-Q3-Q10"),
        pytest.param(trickle, id="trickle-H20-H21"),
        pytest.param(bombs, id="bombs-H2-H15"),
        pytest.param(large_bodies, id="large-bodies"),
        pytest.param(half_close, id="half-close-D6"),
        pytest.param(slow_readers, id="slow-readers-D9"),
        pytest.param(new_worker, id="new-worker-D9"),
        pytest.param(documents, id="documents-D5"),
        pytest.param(large_text, id="large-text-D2"),
        pytest.param(whales, id="whales-D7"),
        pytest.param(one_key, id="one-key-D8"),
    ],
)
def test_a_figure_with_times_misses_no_target(tmp_path, figure):
    rows = list(figure.measure(form(tmp_path, 0.05)))
    assert [row for row in rows if row.is_met is False] == []


@pytest.mark.long
def test_a_bomb_is_refused_with_its_status_H2_H15_J12(tmp_path):
    """The statuses; times and peaks are for a quiet machine."""
    with Subject(tmp_path / "bombs", workers=1) as subject:
        for bomb in bombs.BOMBS:
            if bomb.needs is None:
                replies, _ = asyncio.run(bombs.throw(subject, bomb.write()))
                assert [told for told in (bombs.what_is_wrong(reply, bomb) for reply in replies) if told] == [], (
                    bomb.name
                )


@pytest.mark.long
def test_a_client_that_pipelines_and_disconnects_is_no_fault(tmp_path):
    with Subject(tmp_path / "pipelined", workers=1) as subject:
        for _ in range(20):
            caller = socket.create_connection(("127.0.0.1", subject.port))
            reset_at_close(caller)
            caller.sendall(attend([[0.5] * 16] * 40) * 5)
            time.sleep(0.004)
            caller.close()
        time.sleep(0.5)
        assert subject.faults() == []
