"""Ray Serve: replicas of the plain ASGI application, each one process with a batcher of its own (docs/ray.md).

`serve run deploy.ray.app:attention` from the root of the checkout, with `name=value` for a field of Options. The service's
settings are the ATTENTION_ variables of the process that runs it.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray.serve.metrics
from pydantic import BaseModel, Field
from ray import serve

from service.settings import ENV_PREFIX, load_settings
from service.supervisor.supervisor import EXIT_REFUSED

LAYERS_FIXED = "a replica of Ray Serve cannot tell the others of a change: change the layer directory and deploy again"


class Options(BaseModel, extra="forbid"):
    """Arguments of `serve run`."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(8, ge=1)
    in_store: bool = False
    """send the head's layer directory through Ray's object store to the machines that do not have it"""


def attention(options: Options) -> serve.Application:
    """Return the application: one CPU for each compute thread of a replica, autoscaled on ongoing requests."""
    settings = load_settings()
    directory = settings.layers_dir.resolve()
    variables = {name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)}
    # Ray sends a worker's lines to the driver: none for each request, neither ours nor (logging_config) Serve's.
    variables = {"ATTENTION_LOG_LEVEL": "warning", **variables, "ATTENTION_LAYERS_DIR": str(directory)}
    deployment = serve.deployment(serve.ingress()(Replica)).options(
        name="attention",
        ray_actor_options={
            "num_cpus": settings.compute_threads,
            "num_gpus": int(settings.device == "cuda"),
            "runtime_env": {"env_vars": variables},
        },
        # More than the queue and a batch hold, so that a full replica refuses with its own 429, which knows when to retry. In
        # Serve's queues no deadline counts, and fewer would never fill a batch.
        max_ongoing_requests=2 * settings.queue_capacity,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            # A batch: while one is computed the next gathers.
            "target_ongoing_requests": settings.max_batch_requests or 16,
        },
        logging_config={"enable_access_log": False},
        health_check_period_s=2,  # Serve replaces a replica that fails three
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=settings.drain_delay_s + settings.shutdown_grace_s,
    )
    if not options.in_store:
        return deployment.bind(None)
    if settings.layers_source:
        raise ValueError("in_store: the layers already come from ATTENTION_LAYERS_SOURCE")
    on_head = serve.deployment(
        LayerFiles, ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    )
    return deployment.bind(on_head.bind(directory))


class LayerFiles:
    """Puts the files of the head's layer directory into the object store, and keeps the object as long as the application."""

    def __init__(self, directory: Path) -> None:
        layers = (path for path in directory.iterdir() if path.suffix in (".safetensors", ".model"))
        self._object = ray.put({path.name: path.read_bytes() for path in layers})

    def object(self) -> tuple[ray.ObjectRef]:
        """Return the object, unread: in a tuple, or Ray would wait for it here."""
        return (self._object,)


class Replica:
    """One process of the service; without `files` its layers are those of the directory or of a source."""

    async def __init__(self, files: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        if files is not None:
            self._held = _own_directory(await (await files.object.remote())[0])
        elif load_settings().layers_source:
            self._held = _own_directory({})

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application, made on the loop that it runs on; Serve calls it after the constructor."""
        # The driver, which does not need torch, imports this module too.
        from service.app import build, unsupervised
        from service.attention.heap import keep_freed
        from service.commands.serve import SWITCH_INTERVAL_S
        from service.worker.local_channel import LocalChannel

        keep_freed()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._service = unsupervised(LocalChannel(has_peers=True), _leave, LAYERS_FIXED)
        self._export = asyncio.get_running_loop().create_task(_export(self._service))
        return _without_request_id(build(self._service))

    async def check_health(self) -> None:
        """Raise RuntimeError while the replica is not ready; the first check comes after the layers are loaded."""
        if reason := self._service.why_not_ready():
            raise RuntimeError(reason)


def _own_directory(files: Mapping[str, bytes]) -> int:
    """Make a layer directory of the process with these files; it is removed once no process has the returned descriptor."""
    os.environ["ATTENTION_LAYERS_DIR"] = directory = tempfile.mkdtemp(prefix="attention-layers-")
    end, held = os.pipe()
    removes = ["/usr/bin/setsid", "--fork", "sh", "-c", 'read -r _; rm -rf "$0"', directory]
    subprocess.run(removes, stdin=end, check=True)  # noqa: S603 (not the replica's child, because Ray kills those too)
    os.close(end)
    for name, data in files.items():
        Path(directory, name).write_bytes(data)
    return held


def _without_request_id(app: Any) -> Any:
    """Return the application without X-Request-Id in its answers, because Serve adds one to each."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_on(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [each for each in message["headers"] if each[0] != b"x-request-id"]
            await send(message)

        await app(scope, receive, send_on)

    return answer


def _leave(code: int) -> None:
    """End the process after a fault, so that Serve starts another; after a refused start the health check says why."""
    if code != EXIT_REFUSED:
        signal.raise_signal(signal.SIGTERM)


async def _export(service: Any) -> None:
    """Give the service's counters and gauges to Ray, which adds deployment and replica; of a histogram sum and count."""
    series: dict[str, Any] = {}
    counted: dict[tuple[str, ...], float] = {}
    while True:
        families = service.telemetry.metrics.collect()
        for family, sample in (
            (each, one) for each in families for one in each.samples if not one.name.endswith("_bucket")
        ):
            kind = ray.serve.metrics.Gauge if family.type == "gauge" else ray.serve.metrics.Counter
            if sample.name not in series:
                series[sample.name] = kind(sample.name, family.documentation, tuple(sample.labels))
            key = (sample.name, *sample.labels.values())
            if family.type == "gauge":
                series[sample.name].set(sample.value, sample.labels)
            elif more := sample.value - counted.get(key, 0.0):
                series[sample.name].inc(more, sample.labels)
                counted[key] = sample.value
        await asyncio.sleep(5)
