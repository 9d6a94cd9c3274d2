import asyncio
import contextlib
import io
import itertools

import pytest
import torch
from blockbuster import blockbuster_ctx

from service.attention import self_check
from service.observability.logs import configure_logs
from tests.integration.running import LAYERS, prepare, running

# /metrics reads one line of /proc.
# The trace of a fault of ours is formatted with its source lines.
MAY_BLOCK = [
    ("service/attention/heap.py", {"resident_bytes"}),
    ("service/observability/telemetry.py", {"faulted", "died"}),
]


@pytest.fixture(autouse=True)
def quiet_logs():
    configure_logs("info", io.BytesIO())


_PASSED: set[object] = set()
_CHECKS = self_check.checks


def _checks_once(layer):
    """The self-check; for a layer of a kind that has passed it, only its first forward pass."""
    key = (getattr(layer, "spec", None), layer.dtype, layer.least_rows, torch.get_num_threads())
    yield from itertools.islice(_CHECKS(layer), 1 if key in _PASSED else None)
    _PASSED.add(key)


@pytest.fixture(autouse=True)
def _layers_of_one_shape_are_checked_once(monkeypatch):
    """Run the whole self-check once for all services of these tests: its result is a property of the machine and the shapes."""
    monkeypatch.setattr(self_check, "checks", _checks_once)


@contextlib.contextmanager
def _guarded():
    """Any blocking call on the event loop other than those known fails the test."""
    with blockbuster_ctx("service") as guard:
        for function in guard.functions.values():
            for file, names in MAY_BLOCK:
                function.can_block_in(file, names)
        yield


@pytest.fixture
def served(tmp_path):
    """Runs `story(service)` against a whole service of its own."""

    def run(story, *, layers=LAYERS, **changed):
        prepare(tmp_path, layers)

        async def main():
            with _guarded():
                async with running(tmp_path, **changed) as service:
                    await story(service)

        asyncio.run(main())

    return run


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Runs `story(service)` against the one service of a module, for stories that leave it as it was."""
    directory = tmp_path_factory.mktemp("shared")
    prepare(directory, LAYERS)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        service = runner.run(stack.enter_async_context(running(directory)))

        async def main(story):
            with _guarded():
                await story(service)

        yield lambda story: runner.run(main(story))
        runner.run(stack.aclose())
