"""Start, readiness and end of one process."""

import asyncio
import errno
import shutil
import time

import pytest
import torch

from service.attention.call import Call
from service.attention.layer import Layer
from service.layers.store import Store
from service.supervisor.coordinator import Coordinator
from service.supervisor.status import State, WorkerStatus
from service.worker.local_channel import LocalChannel
from tests.integration.running import LAYERS, in_service, prepare, running, small_layer

X = [[0.5] * 16]


@in_service(wait=False)
async def test_l1_before_layers_are_loaded_requests_are_refused_and_healthz_is_200(service):
    ready = await service.client.get("/readyz")
    assert (ready.status_code, ready.json()["code"]) == (503, "not_ready")
    assert (await service.client.get("/healthz")).status_code == 200
    answer = await service.attend({"query": X})
    assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
    assert answer.headers["retry-after"] == "1"
    assert (await service.client.get("/v1/layers")).status_code == 503
    await service.until(lambda: service.service.why_not_ready() is None)
    assert (await service.attend({"query": X})).status_code == 200


def test_f13_strict_a_broken_layer_refuses_the_start(tmp_path):
    prepare(tmp_path, LAYERS)
    (tmp_path / "layers" / "broken.safetensors").write_bytes(b"\0" * 100)

    async def main():
        async with running(tmp_path, wait=False) as service:
            await service.until(lambda: service.refusals)
            assert 'layer "broken"' in service.refusals[0]
            assert (await service.client.get("/readyz")).status_code == 503

    asyncio.run(main())


def test_f13_lenient_the_other_layers_are_served(tmp_path):
    prepare(tmp_path, LAYERS)
    (tmp_path / "layers" / "broken.safetensors").write_bytes(b"\0" * 100)

    async def main():
        async with running(tmp_path, strict_layers=False) as service:
            assert (await service.attend({"query": X})).status_code == 200
            assert (await service.attend({"query": X}, "broken")).status_code == 404
            assert (await service.samples())['attention_layer_load_failures_total{reason="layer_error"}'] == 1

    asyncio.run(main())


@pytest.mark.parametrize("error", [RuntimeError("secret words"), MemoryError()], ids=["L2-raises", "L2-memory"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_layer_that_fails_its_first_forward_passes_is_never_served(tmp_path, monkeypatch, error, strict):
    """Strict: the start is refused; lenient: the others are served."""
    prepare(tmp_path, LAYERS)
    forward = Layer.forward

    def failing(self, calls):
        if self.spec.extra_keys:  # the layer "zero"
            raise error
        return forward(self, calls)

    monkeypatch.setattr(Layer, "forward", failing)

    async def main():
        async with running(tmp_path, strict_layers=strict, wait=not strict) as service:
            if strict:
                await service.until(lambda: service.refusals)
                assert 'layer "zero"' in service.refusals[0]
                assert "secret" not in service.refusals[0]
                assert (await service.client.get("/readyz")).status_code == 503
                return
            assert service.service.catalog.names() == ["cross", "small"]
            assert (await service.samples())['attention_layer_load_failures_total{reason="layer_not_loaded"}'] == 1

    asyncio.run(main())


def test_a_replacement_listens_once_it_can_answer_unless_it_is_alone(tmp_path):
    """The kernel gives it connections from then on, and its mates could answer them meanwhile."""
    prepare(tmp_path, LAYERS)

    async def main():
        coordinator = Coordinator(1, time.monotonic)
        async with running(tmp_path, wait=False, channel=LocalChannel(coordinator, pid=1)) as first:
            assert (await first.attend({"query": X})).status_code == 503
            await first.until(lambda: first.service.why_not_ready() is None)
            async with running(tmp_path, wait=False, channel=LocalChannel(coordinator, pid=2)) as replacement:
                assert (await replacement.attend({"query": X})).status_code == 200
        async with running(tmp_path, wait=False) as alone:
            assert (await alone.attend({"query": X})).status_code == 503

    asyncio.run(main())


def test_no_process_is_ready_before_its_port_is_open(tmp_path):
    """Otherwise a client that has waited for readiness would reach only the other processes."""
    prepare(tmp_path, LAYERS)

    async def main():
        async with running(tmp_path, wait=False, listens=False) as service:
            await service.until(lambda: service.service.why_not_ready() == "the port is not open yet")
            assert service.service._channel.status.state is State.STARTING
            service.service.readiness.port_opened()
            await service.until(lambda: service.service.why_not_ready() is None)

    asyncio.run(main())


def put_a_broken_layer(directory):
    (directory / "broken.safetensors").write_bytes(b"no layer")


@pytest.mark.parametrize(("lay", "words"), [(shutil.rmtree, "does not exist"), (put_a_broken_layer, 'layer "broken"')])
def test_a_missing_directory_and_one_whose_layers_all_fail_refuse_the_start(tmp_path, lay, words):
    """An empty one serves attention without a layer (`test_attention.py`)."""
    prepare(tmp_path, [])
    lay(tmp_path / "layers")

    async def main():
        async with running(tmp_path, wait=False) as service:
            await service.until(lambda: service.refusals)
            assert words in service.refusals[0]

    asyncio.run(main())


@in_service()
async def test_l9_readiness_fails_when_the_drain_begins_and_requests_are_still_answered(service):
    service.service.begin_drain()
    ready = await service.client.get("/readyz")
    assert (ready.status_code, ready.json()["detail"]) == (503, "draining")
    assert (await service.attend({"query": X})).status_code == 200
    service.service.stop_admitting()
    answer = await service.attend({"query": X})
    assert (answer.status_code, answer.json()["code"]) == (503, "draining")


def test_accepted_requests_are_answered_at_shutdown(tmp_path):
    prepare(tmp_path, LAYERS)
    kept: list[asyncio.Future] = []

    async def main():
        async with running(tmp_path, probe_s=3600) as service:
            service.engine.gate.clear()
            kept.extend(asyncio.ensure_future(service.attend({"query": X})) for _ in range(5))
            batcher = service.service.batcher
            await service.until(lambda: batcher.num_queued + batcher.num_running == 5)
        for task in kept:
            assert (await task).status_code == 200

    asyncio.run(main())


def test_a_process_reports_the_work_since_its_last_heartbeat_at_its_end(tmp_path):
    prepare(tmp_path, LAYERS)

    async def main():
        async with running(tmp_path, heartbeat_s=60.0) as service:
            for _ in range(3):
                assert (await service.attend({"query": X})).status_code == 200
            telemetry = service.service.telemetry
        return telemetry.metrics.render().decode()

    told = dict(line.rsplit(" ", 1) for line in asyncio.run(main()).splitlines() if not line.startswith("#"))
    assert told['attention_layer_requests_total{layer="small",outcome="success"}'] == "3.0"
    assert float(told["attention_compute_busy_seconds_total"]) > 0


@in_service()
async def test_requests_of_every_form_before_the_listener_closed_are_answered(service):
    """L5 Their headers were read, their bodies come late."""
    begun, late = asyncio.Event(), asyncio.Event()

    async def body():
        yield b'{"query": [['
        begun.set()
        await late.wait()
        yield b",".join([b"0.5"] * 16) + b"]]}"

    headers = {"content-type": "application/json"}
    came = asyncio.ensure_future(service.client.post("/v1/layers/small/attend", content=body(), headers=headers))
    await begun.wait()
    service.service.begin_drain()
    service.service.stop_admitting()
    late.set()
    assert (await came).status_code == 200
    assert (await service.client.post("/v2/models/small/infer", content=b"{}")).status_code == 503


def test_a_run_directory_that_cannot_be_written_ends_no_process(served):
    is_full = False

    def restore():
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return False

    async def story(service):
        nonlocal is_full
        is_full = True
        await service.until(lambda: service.service.why_not_ready() is not None)
        assert (await service.attend({"query": X})).status_code == 200
        assert "No space left" in (await service.client.get("/readyz")).json()["detail"]
        is_full = False
        await service.until(lambda: service.service.why_not_ready() is None)

    served(story, restore=restore)


@in_service()
async def test_a_fault_of_the_main_task_is_logged_and_ends_the_process(service):
    service.service.readiness.probe = None  # whatever breaks in it
    await service.until(lambda: service.refusals)
    assert "internal fault" in service.refusals[0]
    assert (await service.client.get("/readyz")).status_code == 503


def test_readiness_needs_every_process(served):
    coordinator = Coordinator(1, time.monotonic)

    async def story(service):
        coordinator.join(-1, lambda _: None)
        coordinator.report(-1, WorkerStatus(State.STARTING, "layers are being loaded"))
        ready = await service.client.get("/readyz")
        assert ready.status_code == 503
        assert "starting" in ready.json()["detail"]
        coordinator.report(-1, WorkerStatus(State.READY))
        assert (await service.client.get("/readyz")).status_code == 200

    served(story, channel=LocalChannel(coordinator, pid=1))


@in_service(layers=[small_layer("zero")], probe_s=0.05)
async def test_a_layer_that_stops_answering_makes_the_service_unready(service):
    service.engine.wrong = lambda call: isinstance(call, Call)  # "zero" is the only layer
    await service.until(lambda: service.service.why_not_ready() is not None)
    assert 'layer "zero" has not answered' in (await service.client.get("/readyz")).json()["detail"]
    service.engine.wrong = lambda call: False
    await service.until(lambda: service.service.why_not_ready() is None)


@in_service()
async def test_the_first_float64_request_converts_the_layer_once(service):
    wide = {"dtype": "float64", "shape": [1, 16], "data": X[0]}
    for _ in range(2):
        assert (await service.attend({"query": wide})).status_code == 200
    catalog = service.service.catalog
    made = [name for name in catalog.names() if torch.float64 in catalog.get(name).loaded.variants]
    assert made == ["small"]


@in_service()
async def test_the_store_is_read_once_at_the_start(service, tmp_path):
    before = (await service.attend({"query": X})).json()["output"]
    await asyncio.to_thread(Store(tmp_path / "layers").save, small_layer("small", scale=0.25))
    assert (await service.attend({"query": X})).json()["output"] == before
