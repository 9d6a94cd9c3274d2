"""Options: environment names, what cannot be, and what stays out of reports."""

import argparse

import pytest

from attention_load.plan import OPTIONS, Plan, add_options
from tests.unit.loadtest.plans import plan


class Listed:
    """A parser that keeps what is added."""

    def __init__(self):
        self.added = {}

    def add_argument(self, name, /, **settings):
        self.added[name] = settings


def test_every_option_has_an_environment_name_a_default_and_a_meaning():
    parser = Listed()
    add_options(parser)
    assert len(parser.added) == len(OPTIONS)
    for name, settings in parser.added.items():
        assert settings["env_var"] == "LOADTEST_" + name.removeprefix("--").replace("-", "_").upper()
        assert isinstance(settings["default"], settings["type"])
        assert settings["help"]


def test_the_page_shows_neither_key_nor_path():
    parser = Listed()
    add_options(parser)
    hidden = {name for name, settings in parser.added.items() if not settings["include_in_web_ui"]}
    assert hidden == {"--api-key", "--json-report"}


def test_every_option_is_read():
    assert {option for option, *_ in OPTIONS} == set(Plan.__dataclass_fields__) - {"run"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peak_users": 0}, "--peak-users must be at least 1"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"hold_s": -1.0}, "--hold-s must not be negative"),
        ({"slo_error_ratio": -0.1}, "--slo-error-ratio must not be negative"),
        ({"shape": "ramp", "slo_p99_ms": 0}, "a ramp needs --slo-p99-ms"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes, told):
    with pytest.raises(ValueError, match=told):
        plan(**changes)


def test_a_worker_gets_the_masters_plan_with_the_key_and_a_report_has_none():
    found = plan(api_key="secret", run=3)
    assert Plan(**found.to_message()) == found
    assert "secret" not in str(found.to_report())


def test_goodput_counts_within_its_own_limit_or_else_the_99th_percentiles():
    assert plan(good_within_ms=50, slo_p99_ms=100).objectives.limit_ms == 50
    assert plan(slo_p99_ms=100).objectives.limit_ms == 100
    assert plan(slo_p99_ms=0).objectives.limit_ms == float("inf")


def test_a_long_soak_is_counted_in_longer_slots():
    assert plan(shape="smoke").slot_s == 0.5
    assert plan(shape="soak", hold_s=86_400).slot_s > 40


def test_the_run_is_zero_where_nobody_said():
    assert Plan.read(argparse.Namespace(**plan().to_report(), api_key="")).run == 0
