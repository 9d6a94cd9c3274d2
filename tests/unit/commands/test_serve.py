"""What a process of the service is given before it serves."""

import sys

import pytest
import typer

from service.attention import heap as memory
from service.commands import serve
from service.observability import logs


@pytest.fixture
def served(monkeypatch):
    """The switch interval and whether freed memory was to be kept, as they were when serving began."""
    found: dict[str, object] = {}
    kept: list[bool] = []
    interval = sys.getswitchinterval()

    def run(*_):
        found.update(interval=sys.getswitchinterval(), kept=list(kept))
        return 3

    monkeypatch.setattr(memory, "keep_freed", lambda: kept.append(True))
    monkeypatch.setattr(logs, "configure_logs", lambda level, worker: None)
    monkeypatch.setattr(serve, "_run", run)
    yield found
    sys.setswitchinterval(interval)


def test_a_worker_keeps_freed_memory_and_shares_the_interpreter_quickly(served, tmp_path):
    with pytest.raises(typer.Exit) as ended:
        serve.worker(port=1, slot=0, channel=0, run_dir=tmp_path)
    assert ended.value.exit_code == 3
    assert served["kept"] == [True]
    assert served["interval"] == pytest.approx(serve.SWITCH_INTERVAL_S)
