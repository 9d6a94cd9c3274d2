"""What Prometheus and Grafana show is true: the real server scrapes the real service, every rule and panel finds its series."""

import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import yaml

from tests.e2e.prometheus_server import SCRAPE_S, PrometheusServer
from tests.e2e.started import Started, X
from tests.integration.running import LAYERS, prepare

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install prometheus"
    ),
]

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "attention.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['id']}-{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
SCALED = yaml.safe_load((ROOT / "deploy/kubernetes/overlays/keda/scaledobject.yaml").read_text(encoding="utf-8"))
QUERIES += [pytest.param(one["metadata"]["query"], id=str(one["name"])) for one in SCALED["spec"]["triggers"]]
V2_INPUT = {"name": "query", "shape": [1, 2, 16], "datatype": "FP32", "data": [0.5] * 32}
LOADED_SCRAPES = 8


def ask_of_all_kinds(session: httpx2.Client, address: tuple[str, int]) -> None:
    """Answers of two layers, weights, a masked row, the other protocol, refusals, and a client that disconnects."""
    wants_weights = {**X, "weights": {"form": "heads"}, "masks": [{"kind": "lengths", "values": 0}]}
    for path, body, status in (
        ("/v1/layers/small/attend", X, 200),
        ("/v1/layers/zero/attend", X, 200),
        ("/v1/layers/small/attend", wants_weights, 200),
        ("/v2/models/small/infer", {"inputs": [V2_INPUT]}, 200),
        ("/v1/layers/nobody/attend", X, 404),
        ("/v1/layers/small/attend", {"query": [[1.0]]}, 422),
    ):
        assert session.post(path, json=body).status_code == status
    with socket.create_connection(address) as caller:
        head = b"POST /v1/layers/small/attend HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        caller.sendall(head + b"Content-Length: 99\r\n\r\n{")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A service of two processes, scraped while all kinds of requests come; `since` and `until` are that time."""
    folder = tmp_path_factory.mktemp("watched")
    prepare(folder, LAYERS)
    service = Started(folder / "layers", workers=2, heartbeat_s=0.2)
    try:
        service.wait_ready()
        address = ("127.0.0.1", service.port)
        target = f"127.0.0.1:{address[1]}"
        with PrometheusServer(folder / "prometheus", [target]) as prometheus:
            since, scraped = time.time(), 0
            with httpx2.Client(base_url=service.url) as session:
                while scraped < LOADED_SCRAPES:
                    ask_of_all_kinds(session, address)
                    scraped = sum(value for _, value in prometheus.query('count_over_time(up{job="attention"}[2m])'))
            yield SimpleNamespace(
                service=service, prometheus=prometheus, target=target, since=since, until=time.time() + SCRAPE_S
            )
    finally:
        service.end()


def test_prometheus_scrapes_the_service(watched):
    (found,) = watched.prometheus.query("up")
    assert found == ({"__name__": "up", "job": "attention", "instance": watched.target}, 1.0)


def test_every_rule_is_evaluated_without_an_error(watched):
    def all_evaluated() -> bool:
        return all(rule["health"] != "unknown" for rule in watched.prometheus.rules())

    watched.prometheus.eventually(all_evaluated, "every rule was evaluated once")
    rules = watched.prometheus.rules()
    assert len(rules) > 30
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    for rule in rules:
        watched.prometheus.get("query", query=rule["query"])


def test_every_record_has_a_value(watched):
    records = [rule["name"] for rule in watched.prometheus.rules() if rule["type"] == "recording"]
    empty = [name for name in records if not watched.prometheus.numbers(name, watched.since, watched.until)]
    assert records
    assert not empty


def test_only_the_alert_of_refusals_is_pending(watched):
    """A sixth of the requests name no layer and a sixth are wrong: after 15 minutes the alert would fire.

    This test does not ask whether a busy machine answers all others in time.
    """
    alerts = watched.prometheus.alerts()
    assert alerts.pop("AttentionRefusals") == "pending"
    assert {name for name in alerts if not name.startswith("AttentionLatency")} == set()


def test_every_metric_of_the_rules_and_the_dashboard_is_on_the_metrics_page(watched):
    page = httpx2.get(f"{watched.service.url}/metrics").text
    told = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
    expressions = [rule["query"] for rule in watched.prometheus.rules()]
    expressions += [target["expr"] for panel in PANELS for target in panel["targets"]]
    # A recorded name has a colon before this part.
    named = {name for text in expressions for name in re.findall(r"(?<![\w:])attention_\w+", text)}
    assert len(named) > 25
    assert not named - told


def grafana(expression: str, **variables: str) -> str:
    """As Grafana writes a query out: its own intervals, then the reader's choices."""
    values = {"__rate_interval": f"{4 * SCRAPE_S}s", "job": "attention", **variables}
    written = re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)
    assert "$" not in written
    return written


@pytest.mark.parametrize("expression", QUERIES)
def test_every_query_of_the_dashboard_finds_data(watched, expression):
    """For all services and layers, and for those that its reader chose (written as an escaped regular expression)."""
    chosen = {"instance": watched.target.replace(".", r"\\."), "layer": "(small|zero)"}
    for variables in ({"instance": ".*", "layer": ".*"}, chosen):
        written = grafana(expression, **variables)
        assert watched.prometheus.numbers(written, watched.since, watched.until), written


@pytest.mark.parametrize(
    ("title", "least"),
    [
        ("Answers by route and status", 0.5),
        ("Cancelled requests", 0.1),
        ("Refused, by reason", 0.1),
        ("Queue time", 1e-6),
        ("Forward pass of a batch", 1e-6),
        ("Where the time goes", 1e-6),
        ("Requests in a batch", 1),
        ("Tokens in a batch", 1),
        ("Weights and masked rows", 0.1),
        ("Resident memory", 2**24),
        ("Device memory", 1),
        ("Processes", 2),
    ],
)
def test_a_panel_shows_the_load(watched, title, least):
    """The series exist, and none of these panels can be zero under this load."""
    expressions = [target["expr"] for panel in PANELS if panel["title"] == title for target in panel["targets"]]
    numbers = [
        value
        for expression in expressions
        for value in watched.prometheus.numbers(
            grafana(expression, instance=".*", layer=".*"), watched.since, watched.until
        )
    ]
    assert max(numbers) >= least


def test_prometheus_has_the_counters_of_both_processes(watched):
    page = watched.service.samples()
    (_, received) = watched.prometheus.query("attention_received_total")[0]
    watched.prometheus.eventually(
        lambda: watched.prometheus.query("attention_received_total")[0][1] == page["attention_received_total"],
        f"Prometheus has all that was received, not {received}",
    )


def test_the_variables_of_the_dashboard_have_values(watched):
    found = {}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] != "query":
            continue
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert asked
        metric, label = asked.groups()
        selector = grafana(metric, instance=".*", layer=".*")
        found[variable["name"]] = watched.prometheus.get(f"label/{label}/values", **{"match[]": selector})
    assert found == {
        "job": ["attention"],
        "instance": [watched.target],
        "layer": ["cross", "sdpa", "small", "zero"],
    }


def test_the_death_of_a_process_and_the_end_of_the_service_raise_alerts(serve, tmp_path):
    service = serve(workers=2, heartbeat_s=0.2)
    service.wait_ready()
    with PrometheusServer(tmp_path / "prometheus", [service.url.removeprefix("http://")]) as prometheus:
        prometheus.eventually(lambda: prometheus.query("attention_ready_processes == 2"), "both are seen")
        os.kill(service.line(event="worker_started", worker=0)["pid"], signal.SIGKILL)
        prometheus.eventually(
            lambda: prometheus.alerts().get("AttentionProcessReplaced") == "firing", "the replacement is told of"
        )
        prometheus.eventually(lambda: prometheus.query("attention_ready_processes == 2"), "both are ready again")
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        # It fires after a minute of that (deploy/prometheus/tests/life.yml).
        prometheus.eventually(lambda: prometheus.alerts().get("AttentionDown") == "pending", "nobody answers")
