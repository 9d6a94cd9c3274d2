"""How `serve` starts: with many descriptors of its parent."""

import sys

import pytest

from tests.e2e.started import Started
from tests.integration.running import LAYERS, prepare

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

# Opens descriptors up to that number, and becomes the command that follows.
INHERITED = """
import os, resource, sys
number, command = int(sys.argv[1]), sys.argv[2:]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(number + 500, 4096),) * 2)
while os.dup(0) < number - 1:
    pass
for descriptor in range(3, number):
    os.set_inheritable(descriptor, True)
os.execv(command[0], command)
"""


@pytest.mark.parametrize("number", [1100, 4000])
def test_descriptors_that_a_parent_leaves_open_change_nothing(tmp_path, number):
    """select takes no descriptor above 1,023."""
    prepare(tmp_path, LAYERS[:1])
    before = (sys.executable, "-c", INHERITED, str(number))
    service = Started(tmp_path / "layers", before=before, workers=2, heartbeat_s=0.2)
    try:
        service.wait_ready()
        assert service.attend().status_code == 200
        service.process.terminate()
        assert service.process.wait(30) == 0
        assert service.line(event="stopped")["exit_code"] == 0
    finally:
        service.end()
