"""Layers at run time: loaded, replaced and unloaded in every process or in none, without effect on admitted requests."""

import asyncio
import contextlib
import time

import pytest

from service.layers.store import Store
from service.supervisor.coordinator import Coordinator
from service.supervisor.status import DesiredState, Phase
from service.worker.local_channel import LocalChannel
from tests.integration.running import ADMIN_KEY, LAYERS, Running, prepare, running, small_layer

X = [[0.5] * 16, [-0.25] * 16]  # two rows, for with one key the scale does not matter
PATH = "/v1/layers/small"


@contextlib.asynccontextmanager
async def processes(directory, count=2, **changed):
    """`count` processes over one directory with one coordinator, each with an engine of its own."""
    coordinator = Coordinator(count, time.monotonic)
    async with contextlib.AsyncExitStack() as stack:
        started: list[Running] = []
        for slot in range(count):
            channel = LocalChannel(coordinator, pid=slot + 1)
            options = {"heartbeat_s": 1.0, "wait": False, "admin": True, **changed}
            started.append(await stack.enter_async_context(running(directory, channel=channel, **options)))
        for process in started:
            await process.until(lambda process=process: process.channel.status.version)
        for process in started:
            await process.until(lambda process=process: process.service.why_not_ready() is None)
        yield started


def deafen(process: Running) -> None:
    """The process lives and no longer follows the desired state."""
    (reconciler,) = (task for task in process.service._tasks if task.get_name() == "reconciler")
    reconciler.cancel()


@pytest.fixture
def service(tmp_path):
    """Runs `story(*processes)`; `store` is theirs."""

    def run(story, count=2, **changed):
        prepare(tmp_path, LAYERS)

        async def main():
            async with processes(tmp_path, count, **changed) as started:
                await story(*started)

        asyncio.run(main())

    return run


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "layers")


async def outputs(process, layer="small"):
    answer = (await process.attend({"query": X}, layer)).json()
    return answer["output"], answer["layer"]["digest"]


def test_a_new_layer_is_served_by_every_process_before_the_answer(service, store):
    async def story(one, two):
        store.save(small_layer("fresh"))
        assert (await one.attend({"query": X}, "fresh")).status_code == 404
        answer = await one.client.put("/v1/layers/fresh")
        assert answer.status_code == 201
        assert answer.json() == (await two.client.get("/v1/layers/fresh")).json()
        assert await outputs(one, "fresh") == await outputs(two, "fresh")
        for process in (one, two):
            assert [layer["name"] for layer in (await process.client.get("/v1/layers")).json()["layers"]] == [
                "cross", "fresh", "small", "zero",
            ]  # fmt: skip
            index = (await process.client.post("/v2/repository/index")).json()
            assert "fresh" in [model["name"] for model in index]
            assert (await process.client.get("/v2/models/fresh/ready")).status_code == 200
            assert 'attention_layer_load_seconds{layer="fresh"}' in await process.samples()
            assert (await process.client.get("/readyz")).status_code == 200

    service(story)


def test_a_replaced_layer_is_served_everywhere_and_no_answer_mixes_versions(service, store):
    async def story(one, two):
        before = await outputs(one)
        store.save(small_layer("small", scale=0.25))
        seen = []
        done = asyncio.Event()

        async def ask(process):
            while not done.is_set():
                seen.append(await outputs(process))

        asking = [asyncio.ensure_future(ask(process)) for process in (one, two, one, two)]
        assert (await two.client.put(PATH)).status_code == 200
        done.set()
        await asyncio.gather(*asking)
        after = await outputs(one)
        assert after == await outputs(two)
        assert before[0] != after[0]
        assert before[1] != after[1]
        assert {str(pair) for pair in seen} <= {str(before), str(after)}, (
            "an answer's bits and digest are of one version"
        )

    service(story)


def test_an_admitted_request_is_answered_by_its_version(service, store):
    async def story(one):
        before = await outputs(one)
        one.engine.gate.clear()
        waiting = [asyncio.ensure_future(outputs(one)) for _ in range(3)]
        await one.until(lambda: one.service.batcher.num_queued + one.service.batcher.num_running == 3)
        store.save(small_layer("small", scale=0.25))
        changing = asyncio.ensure_future(one.client.put(PATH))
        await asyncio.sleep(0.05)
        one.engine.gate.set()
        assert (await changing).status_code == 200
        assert [await found for found in waiting] == [before] * 3
        assert await outputs(one) != before

    service(story, count=1, probe_s=3600)


def test_after_an_unload_queued_requests_are_answered_and_new_ones_are_not_found(service):
    async def story(one, two):
        before = await outputs(one)
        one.engine.gate.clear()
        waiting = [asyncio.ensure_future(outputs(one)) for _ in range(3)]
        await one.until(lambda: one.service.batcher.num_queued + one.service.batcher.num_running == 3)
        assert (await two.client.delete(PATH)).status_code == 204
        for process in (one, two):
            answer = await process.attend({"query": X})
            assert (answer.status_code, answer.json()["code"]) == (404, "layer_not_found")
            assert (await process.client.get(PATH)).status_code == 404
            assert (await process.client.get("/v2/models/small")).status_code == 404
        one.engine.gate.set()
        assert [await found for found in waiting] == [before] * 3
        assert (await two.client.delete(PATH)).status_code == 404
        assert not [name for name in await one.samples() if 'layer="small"' in name]
        assert (await one.client.get("/readyz")).status_code == 200
        assert (await one.client.put(PATH)).status_code == 201
        assert await outputs(two) == before

    service(story, probe_s=3600)


def test_an_unloaded_layer_frees_its_memory(service, store):
    async def story(one):
        async def device_bytes() -> float:
            return float((await one.samples())['attention_device_memory_bytes{device="cpu"}'])

        async def until(is_right) -> None:
            async with asyncio.timeout(10):
                while not is_right(await device_bytes()):  # noqa: ASYNC110 (what is waited for is state, not an event)
                    await asyncio.sleep(0.01)

        before = await device_bytes()
        for path in ("/v1/layers", "/openapi.json"):  # these documents are kept, and not the layers that they describe
            await one.client.get(path)
        store.save(small_layer("small", scale=0.25))
        await one.client.put(PATH)
        await outputs(one)
        await until(lambda now: now == before)
        await one.client.delete(PATH)
        await until(lambda now: now < before)

    service(story, count=1, heartbeat_s=0.02)


def test_f14_a_broken_file_is_a_422_with_the_reason_and_the_old_version_is_served(service, tmp_path):
    async def story(one, two):
        before = await outputs(one)
        file = tmp_path / "layers" / "small.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        answer = await one.client.put(PATH)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
        assert answer.json()["detail"].startswith('layer "small": ')
        assert str(tmp_path) not in answer.text
        assert await outputs(one) == await outputs(two) == before
        assert (await one.client.get("/readyz")).status_code == 200
        assert (await one.samples())['attention_layer_load_failures_total{reason="layer_error"}'] == 1

    service(story)


def test_a_name_without_a_file_is_not_found(service):
    async def story(one):
        answer = await one.client.put("/v1/layers/absent")
        assert (answer.status_code, answer.json()["code"]) == (404, "layer_not_found")
        assert (await one.client.delete("/v1/layers/absent")).status_code == 404

    service(story, count=1)


def test_a_process_that_cannot_load_a_layer_aborts_the_rollout(service, store):
    async def story(one, two):
        before = await outputs(one)
        store.save(small_layer("small", scale=0.25))

        def refuse(spec, tensors):
            raise RuntimeError("secret words of a library")

        load, two.engine.load = two.engine.load, refuse
        answer = await one.client.put(PATH)
        assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
        assert "secret" not in answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert await outputs(one) == await outputs(two) == before
        assert (await one.client.get("/readyz")).status_code == 200
        two.engine.load = load
        assert (await one.client.put(PATH)).status_code == 200
        assert await outputs(one) == await outputs(two) != before

    service(story)


@pytest.mark.parametrize("slow", [0, 1], ids=["the process that was asked", "another"])
def test_a_file_swapped_during_prepare_is_a_409_and_nothing_changes_D1(service, store, tmp_path, slow):
    async def story(*both):
        one, two = both
        file = tmp_path / "layers" / "small.safetensors"
        before, old = (await outputs(one), await outputs(two)), file.read_bytes()
        store.save(small_layer("small", scale=0.25))
        release = hold(both[slow])
        changing = asyncio.ensure_future(one.client.put(PATH))
        await one.until(lambda: one.channel.service.desired.phase is not Phase.SETTLED)
        file.write_bytes(old)
        release()
        answer = await changing
        assert (answer.status_code, answer.json()["code"]) == (409, "layer_changed")
        assert int(answer.headers["retry-after"]) >= 1
        assert (await outputs(one), await outputs(two)) == before
        for process in both:
            assert process.refusals == []
            assert (await process.client.get("/readyz")).status_code == 200
        store.save(small_layer("small", scale=0.125))
        assert (await two.client.put(PATH)).status_code == 200
        assert await outputs(one) == await outputs(two) != before[0]

    service(story)


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
@pytest.mark.parametrize("body", [b"", b"he is still sending this"], ids=["silent", "sending"])
def test_a_disconnect_aborts_the_rollout_and_frees_the_lock(service, store, method, body):
    async def story(one, two):
        before = await outputs(one), await outputs(two)
        store.save(small_layer("small", scale=0.25))
        release = hold(two)
        leave = asyncio.Event()
        changing = asyncio.ensure_future(request_until(leave, one, method, body))
        await one.until(lambda: one.has_reached(Phase.PREPARE))
        leave.set()
        assert await changing == []
        await one.until(lambda: one.has_reached(Phase.SETTLED))
        assert "small" in one.service.catalog.names()
        release()
        await two.until(lambda: two.has_reached(Phase.SETTLED))
        assert (await outputs(one), await outputs(two)) == before
        samples = await one.samples()
        assert samples['attention_cancelled_total{stage="receiving"}'] == 1
        assert samples["attention_in_flight_requests"] == 0
        assert (await two.client.request(method, PATH)).status_code in (200, 204)

    service(story)


def hold(process):
    """It does not apply the desired state until the returned function is called."""
    apply = process.service._registry.apply
    gate = asyncio.Event()

    async def held(desired: DesiredState, **options) -> None:
        await gate.wait()
        await apply(desired, **options)

    process.service._registry.apply = held
    return gate.set


async def request_until(leave, process, method, body):
    """Return the messages sent to a client that disconnects when `leave` is set."""
    sent = []
    pieces = [body]

    async def send(message):
        sent.append(message)

    async def receive():
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": bool(body)}
        await leave.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": method,
        "path": PATH,
        "headers": [(b"x-api-key", ADMIN_KEY.encode())],
        "query_string": b"",
        "root_path": "",
    }
    await process.transport.app(scope, receive, send)
    return sent


def test_a_process_that_starts_with_a_changed_file_is_unready_and_serves_the_other_layers(tmp_path, store):
    prepare(tmp_path, LAYERS)

    async def main():
        coordinator = Coordinator(2, time.monotonic)
        async with running(tmp_path, channel=LocalChannel(coordinator, pid=1), admin=True, wait=False) as one:
            await one.until(lambda: one.channel.status.version)
            for name in ("small", "zero"):
                store.save(small_layer(name, scale=0.25, add_zero_attn=name == "zero"))
            async with running(tmp_path, channel=LocalChannel(coordinator, pid=2), admin=True, wait=False) as two:
                await two.until(lambda: two.channel.status.version)
                ready = await two.client.get("/readyz")
                assert (ready.status_code, ready.json()["code"]) == (503, "not_ready")
                assert "not the version that is served" in ready.json()["detail"]
                answer = await two.attend({"query": X})
                assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
                assert two.service.catalog.names() == ["cross"]
                old = await outputs(one)
                assert (await one.client.delete("/v1/layers/cross")).status_code == 204, "another's lack is no refusal"
                assert (await one.client.put(PATH)).status_code == 200, "PUT heals it"
                assert await outputs(one) == await outputs(two) != old
                assert (await two.client.put("/v1/layers/zero")).status_code == 200
                assert await outputs(one, "zero") == await outputs(two, "zero")
                assert (await two.client.get("/readyz")).status_code == 200

    asyncio.run(main())


def test_a_draining_process_refuses_rollouts_and_aborts_its_own(service, store):
    async def story(one, two):
        store.save(small_layer("small", scale=0.25))
        before = await outputs(one)
        deafen(two)
        changing = asyncio.ensure_future(one.client.put(PATH))
        await one.until(lambda: one.has_reached(Phase.PREPARE))
        one.service.begin_drain()
        assert ((await changing).status_code, (await changing).json()["code"]) == (503, "draining")
        assert (await one.client.delete(PATH)).json()["code"] == "draining"
        assert await outputs(one) == before

    service(story)


def test_openapi_describes_the_admin_routes_with_examples(service):
    async def story(one):
        allow = (await one.client.options(PATH)).headers["allow"]
        assert allow == "DELETE, GET, HEAD, OPTIONS, PUT"
        page = (await one.client.get("/openapi.json")).json()["paths"]["/v1/layers/{layer}"]
        assert set(page) == {"get", "put", "delete"}
        assert set(page["put"]["responses"]) == {"200", "201", "401", "403", "404", "409", "422", "503"}
        assert set(page["delete"]["responses"]) == {"204", "401", "403", "404", "409", "503"}
        for method in ("put", "delete"):
            assert page[method]["parameters"][0]["example"] == "cross"

    service(story, count=1)


def test_each_rollout_is_counted_and_logged_once(service):
    async def story(one):
        await one.client.put(PATH)
        await one.client.delete(PATH)
        await one.client.delete(PATH)
        samples = await one.samples()
        route = "/v1/layers/{layer}"
        statuses = {s: samples[f'attention_requests_total{{route="{route}",status="{s}"}}'] for s in (200, 204, 404)}
        assert statuses == {200: 1, 204: 1, 404: 1}

    service(story, count=1)


def _digests():
    return {layer.name: layer.digest for layer in sorted(LAYERS, key=lambda layer: layer.name)}
