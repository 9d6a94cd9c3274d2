"""A whole service inside a test: the real engine and layers, ASGI in process, no socket."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import torch
from opentelemetry.trace import Tracer

from service.api.auth.key_ring import Role, line_for
from service.api.outer_middleware import OuterMiddleware
from service.app import build
from service.attention.engine import Engine
from service.attention.spec import LayerSpec
from service.errors import ServiceError
from service.layers.store import Store, StoredLayer
from service.observability.telemetry import Telemetry
from service.settings import load_settings
from service.supervisor.status import Phase
from service.worker.local_channel import LocalChannel
from service.worker.service import Service
from tests import processes
from tests.doubles import lone_metrics

ADMIN_KEY = "the-admins-own"


def small_layer(name: str, **changed) -> StoredLayer:
    """Seeded random tensors; 16 wide with 4 heads by default."""
    width = 16
    shape = dict(
        query_width=width, key_width=width, value_width=width, out_width=width, num_heads=4, num_kv_heads=4,
        head_width=4, value_head_width=4, scale=0.5, biases=("query", "key", "value", "output"),
    )  # fmt: skip
    spec = LayerSpec(**{**shape, **changed})
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    tensors = {n: torch.randn(*size, generator=generator) * 0.5 for n, size in spec.tensor_shapes().items()}
    return StoredLayer(name, spec, tensors, "made for a test", "torch-mha")


LAYERS = [
    small_layer("small"),
    small_layer("cross", key_width=12, value_width=20, head_width=4, value_head_width=6),
    small_layer("zero", add_zero_attn=True),
]


class HeldEngine(Engine):
    """The real engine behind a gate: closed, batches wait in the compute thread, all; `wrong` decides which calls fail."""

    def __init__(self, options) -> None:
        super().__init__(options)
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[int] = []
        self.wrong = lambda call: False

    def run(self, batch, *, is_inline=False, is_long=False):
        return super().run(batch, is_inline=is_inline and self.gate.is_set(), is_long=is_long)

    def _run(self, batch):
        self.gate.wait(20)
        self.batches.append(len(batch))
        if any(self.wrong(work.call) for work in batch):
            raise RuntimeError("a secret reason")
        return super()._run(batch)


@dataclasses.dataclass
class Running:
    client: httpx2.AsyncClient
    service: Service
    refusals: list[str]
    channel: LocalChannel
    application: OuterMiddleware
    transport: httpx2.ASGITransport

    @property
    def engine(self) -> HeldEngine:
        assert isinstance(self.service.engine, HeldEngine)
        return self.service.engine

    def has_reached(self, phase: Phase) -> bool:
        """Whether the desired state is in this phase, and this process has reported that it has applied it."""
        desired = self.channel.service.desired
        return desired.phase is phase and self.channel.status.version == desired.version

    async def attend(self, body: dict, layer: str = "small", **kwargs) -> httpx2.Response:
        return await self.client.post(f"/v1/layers/{layer}/attend", json=body, **kwargs)

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 (what is waited for is state, not an event)
                await asyncio.sleep(0.001)

    async def samples(self) -> dict[str, float]:
        return processes.samples((await self.client.get("/metrics")).text)


def prepare(directory: Path, layers) -> Path:
    """The files that a service finds when it starts; returns the layer directory."""
    for layer in layers:
        Store(directory / "layers").save(layer)
    (directory / "layers").mkdir(exist_ok=True)
    return directory / "layers"


@contextlib.asynccontextmanager
async def running(
    directory: Path,
    *,
    wait: bool = True,
    listens: bool = True,
    admin: bool = False,
    channel: LocalChannel | None = None,
    restore: Callable[[], bool] = lambda: False,
    tracer: Tracer | None = None,
    **changed,
):
    """A service over a prepared directory, ready (unless `wait` is false), with these settings changed.

    With `admin` there are API keys, and the client has the admin's.
    """
    if admin:
        (directory / "keys").write_text(line_for(ADMIN_KEY, Role.ADMIN), encoding="ascii")
        changed["api_keys_file"] = directory / "keys"
    channel = channel or LocalChannel()
    settings = load_settings(
        **{"layers_dir": directory / "layers", "device": "cpu", "workers": 1, "heartbeat_s": 0.02, **changed}
    )
    refusals: list[str] = []
    metrics = await asyncio.to_thread(lone_metrics)  # it looks for files, before the loop of a real process starts
    telemetry = Telemetry(metrics, tracer)

    def leave(_: int) -> None:
        refusals.append(channel.status.start_error or str(service.why_not_ready()))

    service = Service(settings, telemetry, channel, leave, HeldEngine, restore)
    edge = build(service)
    headers = {"x-api-key": ADMIN_KEY} if admin else {}
    transport = httpx2.ASGITransport(app=edge)
    async with (
        lifespan(edge),
        httpx2.AsyncClient(transport=transport, base_url="http://service", timeout=30, headers=headers) as client,
    ):
        if listens:
            service.readiness.port_opened()
        found = Running(client, service, refusals, channel, edge, transport)
        if wait:
            await found.until(lambda: _is_ready(service))
        yield found
        found.engine.gate.set()
    channel.coordinator.leave(channel.pid)


def _is_ready(service: Service) -> bool:
    try:
        return service.why_not_ready() is None
    except ServiceError:
        return False


@contextlib.asynccontextmanager
async def lifespan(app):
    """The server's side of ASGI's lifespan protocol."""
    inbox: asyncio.Queue = asyncio.Queue()
    outbox: asyncio.Queue = asyncio.Queue()
    task = asyncio.ensure_future(app({"type": "lifespan", "state": {}}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        await inbox.put({"type": "lifespan.shutdown"})
        assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
        await task


def in_service(
    *, fixture: str = "served", **settings: Any
) -> Callable[[Callable[..., Awaitable[object]]], Callable[..., None]]:
    """Make a test of a coroutine function whose first parameter is a service of these settings; the fixture runs it."""

    def decorate(test: Callable[..., Awaitable[object]]) -> Callable[..., None]:
        @functools.wraps(test)
        def sync_test(**named: Any) -> None:
            run = named.pop(fixture)
            run(lambda service: test(service, **named), **settings)

        signature = inspect.signature(test)
        _, *others = signature.parameters.values()
        run = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        sync_test.__dict__["__signature__"] = signature.replace(parameters=[run, *others])
        return sync_test

    return decorate


in_shared_service = functools.partial(in_service, fixture="shared")
"""The same for tests that leave the service as it was, and count nothing: all those of a file ask one service."""
