import asyncio
import io
import itertools

import pytest
import torch
from blockbuster import blockbuster_ctx

from service.attention import engine, self_check
from service.observability.logs import configure_logs
from tests.integration.running import LAYERS, prepare, running

# A heartbeat is a file of 100 bytes on a memory file system; /metrics reads one line of /proc.
# The trace of a fault of ours is formatted with its source lines.
MAY_BLOCK = [
    ("service/supervisor/worker_status.py", {"write", "_read", "_read_all"}),
    ("service/attention/heap.py", {"resident_bytes"}),
    ("service/worker/desired_state.py", {"read", "locked", "write", "begin"}),
    ("service/observability/telemetry.py", {"faulted", "died"}),
]


@pytest.fixture(autouse=True)
def quiet_logs():
    configure_logs("info", io.StringIO())


@pytest.fixture(autouse=True, scope="package")
def _layers_of_one_shape_are_checked_once():
    """Run the whole self-check once for all services of these tests, then its first forward pass alone: its result is a
    property of the machine and the shapes.
    """
    checks, passed = self_check.checks, set()

    def checks_once(layer):
        key = (getattr(layer, "spec", None), layer.dtype, torch.get_num_threads())
        yield from itertools.islice(checks(layer), 1 if key in passed else None)
        passed.add(key)

    with pytest.MonkeyPatch.context() as patch:
        for module in (self_check, engine):
            patch.setattr(module, "checks", checks_once)
        yield


@pytest.fixture
def served(tmp_path):
    """Runs `story(service)` against a whole service; any other blocking call on the event loop fails the test."""

    def run(story, *, layers=LAYERS, **rollout):
        prepare(tmp_path, layers)

        async def main():
            with blockbuster_ctx("service") as guard:
                for function in guard.functions.values():
                    for file, names in MAY_BLOCK:
                        function.can_block_in(file, names)
                async with running(tmp_path, **rollout) as service:
                    await story(service)

        asyncio.run(main())

    return run
