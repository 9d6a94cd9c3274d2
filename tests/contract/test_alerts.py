"""Alerts: the real promtool takes configuration and rules, each alert was seen firing and quiet, and leads to a page."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from service.api.attend_route import ATTENTION_ROUTE, INFER_ROUTES, ROUTE

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)


def rules(name: str) -> list[dict]:
    groups = yaml.safe_load((PROMETHEUS / "rules" / name).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = rules("alerts.yml")


def promtool(*arguments) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_configuration_and_the_rules():
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


@needs_promtool
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_promtool_passes_the_tests_of_every_alert(path):
    promtool("test", "rules", path)


def test_the_latency_objective_and_the_panels_cover_every_attention_route():
    dashboard = (ROOT / "deploy" / "grafana" / "dashboards" / "attention.json").read_text(encoding="utf-8")
    texts = [(PROMETHEUS / "rules" / "recording.yml").read_text(encoding="utf-8"), dashboard.replace('\\"', '"')]
    patterns = re.findall(r'route=~"([^"]+)"', "".join(texts))
    assert len(patterns) > 14
    for route in (ROUTE, ATTENTION_ROUTE, *INFER_ROUTES):
        assert all(re.fullmatch(pattern, route) for pattern in patterns), route


@pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_is_tested_firing_and_quiet(alert):
    tried = [
        bool(case["exp_alerts"])
        for path in TESTS
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == alert["alert"]
    ]
    assert set(tried) == {True, False}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_severity_and_a_section_of_the_runbook(alert):
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert {"summary", "description", "runbook_url"} == set(alert["annotations"])
    name = alert["alert"]
    assert alert["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
    section = re.search(rf"^### {name}\n(.*?)(?=^#|\Z)", OPERATIONS, re.DOTALL | re.MULTILINE)
    assert section, f"docs/operations.md has no section {name}"
    for part in ("**Means**", "**Look at**", "**Do**"):
        assert part in section[1], part


def test_the_runbook_describes_no_removed_alert():
    assert set(re.findall(r"^### (Attention\w+)$", OPERATIONS, re.MULTILINE)) == {rule["alert"] for rule in ALERTS}


def test_an_alert_or_the_dashboard_reads_every_recording_rule():
    read = (PROMETHEUS / "rules" / "alerts.yml").read_text(encoding="utf-8")
    read += (ROOT / "deploy" / "grafana" / "dashboards" / "attention.json").read_text(encoding="utf-8")
    unread = [rule["record"] for rule in rules("recording.yml") if rule["record"] not in read]
    assert not unread
