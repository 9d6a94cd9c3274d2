"""What holds for the whole suite: what runs only where it is asked for, and what runs beside what."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that asserts a time, or tries the image, runs only where it is asked for. Tests that start processes wait most of
    their time: where several run at once (`make test`), those run one after another beside all the others.
    """
    for marker in ("timed", "image"):
        if marker not in config.getoption("markexpr"):
            items[:] = [item for item in items if item.get_closest_marker(marker) is None]
    for item in items:
        if item.get_closest_marker("e2e") is not None:
            item.add_marker(pytest.mark.xdist_group("processes"))
