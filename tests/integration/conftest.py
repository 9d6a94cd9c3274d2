import asyncio
import io

import pytest
from blockbuster import blockbuster_ctx

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
