"""The layers of all replicas."""

import pytest

from tests.integration.running import LAYERS, prepare


@pytest.fixture(scope="session")
def layers_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scale")
    prepare(directory, LAYERS)
    return directory / "layers"
