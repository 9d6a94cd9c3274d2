"""Ray Serve: replicas of the plain ASGI application, each one process with a batcher of its own (docs/ray.md).

`serve run deploy.ray.app:attention` from the root of the checkout, with `name=value` for a field of Options. The service's
settings are the ATTENTION_ variables of the process that runs it.
"""

import asyncio
import hashlib
import os
import signal
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

EXPORT_S = 5.0
LAYERS_FIXED = (
    "a replica of Ray Serve has no supervisor, so a change here would miss the other replicas: change the layer directory "
    "and deploy again"
)


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
    # Serve has an access log; Ray sends a worker's lines to the driver, one for each request.
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
        health_check_period_s=2,  # Serve replaces a replica that fails three
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=settings.drain_delay_s + settings.shutdown_grace_s,
    )
    if not options.in_store:
        return deployment.bind(None)
    if settings.layers_source:
        raise ValueError("in_store: the layers already come from ATTENTION_LAYERS_SOURCE")
    head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    return deployment.bind(serve.deployment(LayerFiles).options(ray_actor_options=head).bind(directory))


class LayerFiles:
    """Puts the files of the head's layer directory into the object store, and keeps the object as long as the application."""

    def __init__(self, directory: Path) -> None:
        paths = [path for path in directory.iterdir() if path.suffix in (".safetensors", ".model")]
        if not paths:
            raise ValueError(f"{directory} has no layer")
        files = {path.name: path.read_bytes() for path in paths}
        self._digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        self._object = ray.put(files)

    def object(self) -> tuple[dict[str, str], ray.ObjectRef]:
        """Return the digests of the files by their names, and the object."""
        return self._digests, self._object


class Replica:
    """One process of the service; without `files` its layers are those of the directory or of a source."""

    async def __init__(self, files: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        if files is not None or load_settings().layers_source:
            self._directory = tempfile.TemporaryDirectory(prefix="attention-layers-")
            os.environ["ATTENTION_LAYERS_DIR"] = self._directory.name
        if files is not None:
            digests, found = await files.object.remote()
            write_files(digests, await found, Path(self._directory.name))

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
        self._export = asyncio.get_running_loop().create_task(self._export_metrics())
        return build(self._service)

    async def check_health(self) -> None:
        """Raise RuntimeError while the replica is not ready; the first check comes after the layers are loaded."""
        if reason := self._service.why_not_ready():
            raise RuntimeError(reason)

    async def _export_metrics(self) -> None:
        series = RaySeries()
        while True:
            series.update(self._service.telemetry.metrics.collect())
            await asyncio.sleep(EXPORT_S)


def write_files(digests: Mapping[str, str], files: Mapping[str, bytes], directory: Path) -> None:
    """Write the files; raise ValueError if one is missing or has another digest."""
    for name, digest in digests.items():
        if hashlib.sha256(files.get(name, b"")).hexdigest() != digest:
            raise ValueError(f"{name}: the object in the store has other bytes than were put there")
        (directory / name).write_bytes(files[name])


def _leave(code: int) -> None:
    """End the process after a fault, so that Serve starts another; after a refused start the health check says why."""
    if code != EXIT_REFUSED:
        signal.raise_signal(signal.SIGTERM)


class RaySeries:
    """The service's counters and gauges as metrics of Ray, which adds deployment and replica; of a histogram sum and count."""

    def __init__(self) -> None:
        self._series: dict[str, Any] = {}
        self._counted: dict[tuple[str, ...], float] = {}

    def update(self, families: Any) -> None:
        for family, sample in ((each, sample) for each in families for sample in each.samples):
            if sample.name.endswith("_bucket"):
                continue
            kind = ray.serve.metrics.Gauge if family.type == "gauge" else ray.serve.metrics.Counter
            if sample.name not in self._series:
                self._series[sample.name] = kind(sample.name, family.documentation, tuple(sample.labels))
            if family.type == "gauge":
                self._series[sample.name].set(sample.value, sample.labels)
                continue
            key = (sample.name, *sample.labels.values())
            if more := sample.value - self._counted.get(key, 0.0):
                self._series[sample.name].inc(more, sample.labels)
                self._counted[key] = sample.value
