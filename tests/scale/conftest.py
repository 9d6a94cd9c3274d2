"""Three replicas for the tests of a file, which are put right again after each, and the layers of all replicas."""

import pytest

from tests.integration.running import LAYERS, prepare
from tests.scale.replicas import replicas


@pytest.fixture(scope="session")
def layers_dir(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("scale"), LAYERS)


@pytest.fixture(scope="module")
def fleet(layers_dir):
    # The balancer sees within two seconds that a replica drains.
    with replicas(3, layers_dir, env={"ATTENTION_DRAIN_DELAY_S": "2.5"}) as three:
        yield three


@pytest.fixture
def three(fleet):
    yield fleet
    for replica in fleet:
        replica.restore()
