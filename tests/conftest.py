"""What holds for the whole suite: a test that asserts a time, or tries the image, runs only where it is asked for."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker in ("timed", "image"):
        if marker not in config.getoption("markexpr"):
            items[:] = [item for item in items if item.get_closest_marker(marker) is None]
