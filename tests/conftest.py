"""Rules for the whole suite: which tests run only on request, and which run beside which."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep tests that take long, assert a time or need the image for runs whose `-m` names them. Tests that start processes
    wait most of their time: where several run at once (`make test`), these run one after another beside all the others.
    """
    for marker in ("timed", "image", "long"):
        if marker not in config.getoption("markexpr"):
            items[:] = [item for item in items if item.get_closest_marker(marker) is None]
    for item in items:
        if item.get_closest_marker("e2e") is not None:
            item.add_marker(pytest.mark.xdist_group("processes"))
