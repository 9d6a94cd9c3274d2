"""Program of the environment .venv-ray: a cluster on this machine whose head has no CPU for replicas and whose two nodes have one
each; `serve run` puts the application on it. It takes commands as lines of stdin and answers each with one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client

ROOT = Path(__file__).parents[2]
STORE = {"object_store_memory": 80 * 2**20}


class Machines:
    """The cluster; a command is the name of a method and at most one argument."""

    def __init__(self, port: int, *arguments: str) -> None:
        fast = {"metrics_report_interval_ms": 1000}
        head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False, "_system_config": fast, **STORE}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            self.add_node()
        ray.init(address=self._cluster.address, namespace="serve", logging_level="error", log_to_driver=False)
        # One machine has one port, so only the head has a proxy.
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        command = [Path(sys.executable).with_name("serve"), "run", "--address", self._cluster.address]
        self._run = subprocess.Popen([*command, "deploy.ray.app:attention", *arguments], cwd=ROOT, stdout=sys.stderr)

    def replicas(self) -> list[list[object]]:
        """Node and pid of each running replica."""
        details = _get_global_client().get_serve_details()
        found = details["applications"].get("default", {}).get("deployments", {}).get("attention", {"replicas": []})
        return [[one["node_id"], one["pid"]] for one in found["replicas"] if one["state"] == "RUNNING"]

    def add_node(self) -> None:
        self._cluster.add_node(num_cpus=1, **STORE)

    def kill_node(self, node_id: str) -> None:
        [node] = [one for one in self._cluster.worker_nodes if one.node_id == node_id]
        self._cluster.remove_node(node, allow_graceful=False)

    def metrics_urls(self) -> list[str]:
        live = [node for node in ray.nodes() if node["Alive"]]
        return [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in live]

    def end(self) -> None:
        self._run.send_signal(signal.SIGINT)
        self._run.wait(30)
        ray.shutdown()
        self._cluster.shutdown()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else Ray prints
    machines = Machines(int(sys.argv[1]), *sys.argv[2:])
    try:
        for line in sys.stdin:
            name, *arguments = line.split()
            print(json.dumps(getattr(machines, name)(*arguments)), file=answers, flush=True)
    finally:
        machines.end()


if __name__ == "__main__":
    main()
