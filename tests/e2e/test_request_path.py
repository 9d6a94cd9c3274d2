"""The way of a request stays short: it enters at most so many files of service/ (`make path` prints them)."""

import pytest

from tests.request_path import paths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

# Aims: 40 for JSON, 32 for safetensors; two queues and the stop flag added two files, the values behind a mask one (large
# JSON: `attention_weights.py` attends to every sequence that shares no call), deadlines of connections and transfers to a GPU
# one each, the check that two tensors fit one (large JSON).
# The figures are what there is; a commit of its own raises one, with its reason.
MAX_FILES = {"JSON": 39, "safetensors": 35, "Open Inference": 36, "large JSON": 40}


@pytest.mark.long
def test_a_request_enters_few_files():
    found = paths()
    assert found.keys() == MAX_FILES.keys()
    for name, files in found.items():
        assert "http/connection.py" in files
        assert "attention/layer.py" in files
        assert len(files) <= MAX_FILES[name], files
