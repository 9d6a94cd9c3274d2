"""Plan: it is the same after an exec, when it is read back from the arguments."""

from pathlib import Path

import pytest

from service.supervisor.plan import Plan


@pytest.mark.parametrize("run_dir", [None, Path("/some/where")])
def test_a_plan_survives_a_round_trip_through_arguments(run_dir):
    plan = Plan(("run", "{port}"), {"A": "1"}, "::1", 80, 3, 1.5, 30.0, 60.0, run_dir)
    assert Plan.of_arguments(plan.arguments, {"A": "1"}) == plan
    assert "A" not in plan.arguments, "what is in the environment may be nobody else's business"
