"""Rules for the whole suite: which tests run only on request, which run beside which, and that none has a deadline. No test
leaves a process behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import processes

# No test may fail because the machine is busy, or for the first time in the hands of somebody who changed something else.
settings.register_profile("same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("random", settings.get_profile("same"), derandomize=False)
settings.load_profile("same")


SCALE = Path(__file__).parent / "scale"


def pytest_configure() -> None:
    processes.restore_signals()


@pytest.fixture(scope="session", autouse=True)
def no_process_stays() -> Iterator[None]:
    """Set up first, so ended last: what all fixtures and tests started has ended by then."""
    processes.adopt_orphans()
    before = processes.children()
    yield
    left = processes.end_children(within_s=20, but=before)
    assert not left, f"processes were left: {left}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep tests that take long, assert a time, need the image or several services for runs whose `-m` names them."""
    for item in items:
        if item.path.is_relative_to(SCALE):
            item.add_marker("scale")
    for marker in ("timed", "image", "scale", "long"):
        if marker not in config.getoption("markexpr"):
            items[:] = [item for item in items if item.get_closest_marker(marker) is None]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several tests run at once (`make test`), those that start processes run one after another beside all the others,
    because they wait most of their time; the others stay together by file, so that a file makes its fixtures once.

    Marks (`xdist_group`) do not do it: pytest-xdist 3.8 writes a group into a name that pytest 9 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "processes" if file.startswith("tests/e2e/") else file

    return ByFile(config, log)
