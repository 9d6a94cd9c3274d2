"""The real Prometheus with the configuration of deploy/, on a free port, asking faster than it would in earnest."""

import math
import subprocess
from pathlib import Path

import httpx2
import yaml

from tests import processes

PROMETHEUS = Path(__file__).parents[2] / "deploy" / "prometheus"
SCRAPE_S = 1


class PrometheusServer:
    """Scrapes the services at `targets` (host:port); gone at the end of the block."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(PROMETHEUS / path) for path in config["rule_files"]]
        (job,) = config["scrape_configs"]
        job["scrape_timeout"] = "1s"
        job["static_configs"] = [{"targets": targets}]
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._log = folder / "log"
        self._folder = folder
        self.url = f"http://127.0.0.1:{processes.free_port()}"
        self._session = httpx2.Client(base_url=self.url, timeout=30)

    def __enter__(self):
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder}/prometheus.yml",
                    f"--storage.tsdb.path={self._folder}/data",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
            )
        self.eventually(self._is_ready, "Prometheus is ready")
        return self

    def __exit__(self, *_):
        self._session.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(encoding="utf-8")
        try:
            return self._session.get("/-/ready").status_code == 200
        except httpx2.HTTPError:
            return False

    def eventually(self, condition, what: str, within_s: float = 60) -> None:
        processes.eventually(condition, what, within_s)

    def get(self, path: str, **params):
        """The data of an API call that must succeed."""
        answer = self._session.get(f"/api/v1/{path}", params=params)
        told = answer.json()
        assert told["status"] == "success", (params, told)
        return told["data"]

    def query(self, expression: str) -> list[tuple[dict, float]]:
        """Labels and value of every series now."""
        found = self.get("query", query=expression)
        assert found["resultType"] == "vector", expression
        return [(series["metric"], float(series["value"][1])) for series in found["result"]]

    def numbers(self, expression: str, since: float, until: float) -> list[float]:
        """Every finite value between two moments, of all series."""
        found = self.get("query_range", query=expression, start=since, end=until, step=SCRAPE_S)["result"]
        values = [float(value) for series in found for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]

    def rules(self) -> list[dict]:
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def alerts(self) -> dict[str, str]:
        """Name to state (pending, firing) of those that are not quiet."""
        return {alert["labels"]["alertname"]: alert["state"] for alert in self.get("alerts")["alerts"]}
