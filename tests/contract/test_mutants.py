"""Each planted fault of `tests/mutants` still has a place in the code, and tests that exist."""

import pytest

from tests.mutants.plant import FAULTS, ROOT, Fault, files_without_fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place_and_tests_that_exist(fault: Fault):
    mutated = fault.planted_in(fault.file().read_text())

    compile(mutated, fault.path, "exec")
    assert [test for test in fault.tests if not (ROOT / "tests" / test).exists()] == []


def test_the_names_of_faults_differ():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40


def test_each_file_of_the_core_has_a_fault():
    assert files_without_fault() == []
