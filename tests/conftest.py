"""What holds for the whole suite: a test that asserts a time runs only where it is asked for."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "timed" not in config.getoption("markexpr"):
        items[:] = [item for item in items if item.get_closest_marker("timed") is None]
