"""Layers at run time: loaded, replaced and unloaded in every process or in none, without effect on admitted requests."""

import asyncio
import contextlib
import errno
import gc
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from service.layers.store import Store
from service.supervisor.coordinator import Coordinator
from service.supervisor.status import DesiredState, Phase, State, WorkerStatus
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
            await process.until(lambda process=process: process.service._registry.applied.version)
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


def test_an_unchanged_layer_is_a_200_and_nothing_is_loaded(service):
    async def story(one, two):
        held = one.service.catalog.get("small")
        answer = await two.client.put(PATH)
        assert (answer.status_code, answer.json()["digest"]) == (200, held.digest)
        assert one.service.catalog.get("small") is held

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
        held = weakref.ref(one.service.catalog.get("small").loaded)
        before = one.engine.device_bytes
        await outputs(one)
        store.save(small_layer("small", scale=0.25))
        await one.client.put(PATH)
        await outputs(one)
        await one.until(lambda: one.service._registry.applied.phase is Phase.SETTLED)
        gc.collect()
        assert held() is None
        assert one.engine.device_bytes == before
        await one.client.delete(PATH)
        await outputs(one, "zero")
        await one.until(lambda: one.engine.device_bytes < before)

    service(story, count=1)


def test_every_layer_can_be_unloaded_and_loaded_again(service):
    async def story(one):
        for layer in LAYERS:
            assert (await one.client.delete(f"/v1/layers/{layer.name}")).status_code == 204
        assert (await one.client.get("/v1/layers")).json() == {"layers": []}
        assert (await one.client.get("/readyz")).status_code == 200
        assert (await one.client.get("/openapi.json")).status_code == 200
        assert (await one.client.put(PATH)).status_code == 201
        await outputs(one)

    service(story, count=1)


def forged(old: bytes = b"", new: bytes = b"", *, tail: bytes = b"") -> Callable[[bytes], bytes]:
    """A stored layer's file with something else in its header, or other last bytes."""

    def forge(file: bytes) -> bytes:
        size = int.from_bytes(file[:8], "little")
        header, data = file[8 : 8 + size], file[8 + size :]
        assert old in header
        header = header.replace(old, new, 1)
        return len(header).to_bytes(8, "little") + header + data[: len(data) - len(tail)] + tail

    return forge


NAN = b"\x00\x00\xc0\x7f"
DAMAGES = {
    "F1-empty": lambda _: b"",
    "F1-seven-bytes": lambda file: file[:7],
    "F1-header-longer-than-the-file": lambda file: (2**32 - 1000).to_bytes(8, "little") + file[8:],
    "F1-header-of-2-to-the-63": lambda file: (2**63).to_bytes(8, "little") + file[8:],
    "F1-header-of-0": lambda file: bytes(8) + file[8:],
    "F1-cut": lambda file: file[:-1],
    "F3-trailing-bytes": lambda file: file + b"PK\x03\x04",
    "F3-hole": forged(b"[0,", b"[4,"),
    "F4-another-key": forged(b'"key.weight"', b'"kee.weight"'),
    "F5-shape": forged(b"[16,16]", b"[2,9223372036854775807]"),
    "F5-shape-wraps": forged(b"[16,16]", b"[2,18446744073709551614]"),
    "F6-nan": forged(tail=NAN),
    "F7-a-zip-in-disguise": lambda _: b"PK\x03\x04" + b"\0" * 100,
    "F7-a-pickle-in-disguise": lambda _: b"\x80\x04\x95" + b"." * 100,
    "F15-duplicate-key": forged(b"{", b'{"key.weight":0,'),
    "F15-depth": lambda _: (20_000).to_bytes(8, "little") + b"[" * 20_000,
    "F15-invalid-utf-8": forged(b'"key.weight"', b'"\xff\xfe"'),
    "other-weights-than-the-digest-says": forged(tail=b"\0\0\0\0"),
}


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_f14_a_broken_file_is_a_422_with_the_reason_and_the_old_version_is_served(service, tmp_path, damage):
    async def story(one, two):
        before = await outputs(one)
        file = tmp_path / "layers" / "small.safetensors"
        file.write_bytes(damage(file.read_bytes()))
        answer = await one.client.put(PATH)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
        assert answer.json()["detail"].startswith('layer "small": ')
        assert str(tmp_path) not in answer.text
        assert len(answer.content) <= 4096
        assert await outputs(one) == await outputs(two) == before
        assert (await one.client.get("/readyz")).status_code == 200
        assert (await one.samples())['attention_layer_load_failures_total{reason="layer_error"}'] == 1

    service(story)


def test_f8_a_link_out_of_the_layer_directory_is_a_refusal(service, tmp_path, store):
    async def story(one):
        outside = Store(tmp_path / "elsewhere")
        outside.save(small_layer("small", scale=0.25))
        (tmp_path / "layers" / "linked.safetensors").symlink_to(tmp_path / "elsewhere" / "small.safetensors")
        answer = await one.client.put("/v1/layers/linked")
        assert answer.status_code == 422
        assert str(tmp_path) not in answer.text
        assert "elsewhere" not in answer.text

    service(story, count=1)


NAMES = ["..%2Fetc", "a%2F..%2Fb", "%2Fetc%2Fpasswd", "model%2F", "%20..", "%09", "x" * 65, "x" * 10_000, "Small", "%00", "é", "%E2%80%AE", ".small", "-x"]  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"T25-{name[:12]}")
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_an_illegal_layer_name_is_not_found_and_no_file_is_opened(service, monkeypatch, name, method):
    async def story(one):
        monkeypatch.setattr(Store, "load", None)
        answer = await one.client.request(method, f"/v1/layers/{name}")
        assert answer.status_code in (404, 405)
        assert answer.json()["code"] in ("layer_not_found", "not_found", "method_not_allowed")

    service(story, count=1)


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


def test_a_process_that_does_not_acknowledge_aborts_the_rollout(service, store):
    async def story(one, two):
        before = await outputs(one)
        store.save(small_layer("small", scale=0.25))
        deafen(two)
        answer = await one.client.put(PATH)
        assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
        assert await outputs(one) == await outputs(two) == before

    service(story, layer_change_s=0.2)


def test_without_every_process_up_a_rollout_is_refused(service, tmp_path, store):
    async def story(one, two):
        before = await outputs(one)
        store.save(small_layer("small", scale=0.25))
        two.channel.coordinator.leave(two.channel.pid)
        answer = await one.client.put(PATH)
        assert (answer.status_code, answer.json()["detail"]) == (503, "1 of 2 processes are up")
        assert await outputs(one) == before

    service(story, heartbeat_s=60)


def test_concurrent_rollouts_run_one_after_another_or_are_refused(service, store):
    async def story(one, two):
        for name in "abcd":
            store.save(small_layer(name))
        answers = await asyncio.gather(
            *(process.client.put(f"/v1/layers/{name}") for name in "abcd" for process in (one, two))
        )
        assert {answer.status_code for answer in answers} <= {200, 201, 503}
        assert 201 in {answer.status_code for answer in answers}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 503)
        for name in "abcd":
            assert (await one.client.put(f"/v1/layers/{name}")).status_code in (200, 201)
        assert one.service.catalog.names() == two.service.catalog.names()
        assert one.service.catalog.names() == sorted(["a", "b", "c", "d", "cross", "small", "zero"])

    service(story)


SWAPS = {
    "the-old-one": lambda file, old: file.write_bytes(old),
    "another-one": lambda file, old: Store(file.parent).save(small_layer("small", scale=2.0)),
    "none": lambda file, old: file.unlink(),
    "half-of-one": lambda file, old: file.write_bytes(old[:500]),
    "a-directory": lambda file, old: (file.unlink(), file.mkdir()),
    "a-pipe": lambda file, old: [file.unlink(), os.mkfifo(file)],  # type: ignore[func-returns-value]
    "a-loop-of-links": lambda file, old: (file.unlink(), file.symlink_to(file)),
}


@pytest.mark.parametrize(("swap", "slow"), [*((swap, 1) for swap in SWAPS), ("the-old-one", 0)], ids=str)
def test_a_file_swapped_during_prepare_is_a_409_and_nothing_changes_D1(service, store, tmp_path, swap, slow):
    async def story(*both):
        one, two = both
        file = tmp_path / "layers" / "small.safetensors"
        before, old = (await outputs(one), await outputs(two)), file.read_bytes()
        store.save(small_layer("small", scale=0.25))
        release = hold(both[slow])
        changing = asyncio.ensure_future(one.client.put(PATH))
        await one.until(lambda: one.channel.service.desired.phase is not Phase.SETTLED)
        SWAPS[swap](file, old)
        release()
        answer = await changing
        assert (answer.status_code, answer.json()["code"]) == (409, "layer_changed")
        assert int(answer.headers["retry-after"]) >= 1
        assert (await outputs(one), await outputs(two)) == before
        for process in both:
            assert process.refusals == []
            assert not [task for task in process.service._tasks if task.done()]
            assert (await process.client.get("/readyz")).status_code == 200
        file.rmdir() if file.is_dir() else file.unlink(missing_ok=True)
        store.save(small_layer("small", scale=0.125))
        assert (await two.client.put(PATH)).status_code == 200
        assert await outputs(one) == await outputs(two) != before[0]

    service(story)


class SlowFiles:
    """Each reading of a layer's file waits, in the threads that read, until the test lets it go on."""

    def __init__(self, monkeypatch):
        self.begun: queue.Queue[str] = queue.Queue()
        self.goes_on = threading.Event()
        self.slow = None
        load = Store.load

        def load_slowly(store, name):
            if name == self.slow:
                self.begun.put(name)
                assert self.goes_on.wait(20)
            return load(store, name)

        monkeypatch.setattr(Store, "load", load_slowly)

    async def until_read(self):
        await asyncio.to_thread(self.begun.get, timeout=20)


@pytest.fixture
def slow_files(monkeypatch):
    files = SlowFiles(monkeypatch)
    yield files
    files.goes_on.set()


def test_a_slow_file_delays_no_other_rollout(service, store, slow_files):
    async def story(one, two):
        store.save(small_layer("fresh"))
        slow_files.slow = "small"
        reading = asyncio.ensure_future(one.client.put(PATH))
        await slow_files.until_read()
        assert (await two.client.put("/v1/layers/fresh")).status_code == 201
        assert (await one.client.delete("/v1/layers/zero")).status_code == 204
        for process in (one, two):
            assert (await process.attend({"query": X})).status_code == 200
        slow_files.goes_on.set()
        assert (await reading).status_code == 200
        assert one.service.catalog.names() == two.service.catalog.names() == ["cross", "fresh", "small"]

    service(story)


def test_an_aborted_rollout_leaves_no_process_loading(service, store, slow_files):
    """The aborted rollout still reads the file when the next change is made."""

    async def story(one, two):
        before = await outputs(one)
        store.save(small_layer("small", scale=0.25))
        release = hold(two)
        leave = asyncio.Event()
        changing = asyncio.ensure_future(request_until(leave, one, "PUT", b""))
        await one.until(lambda: one.service._registry.applied.phase is Phase.PREPARE)
        slow_files.slow = "small"
        release()
        await slow_files.until_read()
        leave.set()
        assert await changing == []
        assert (await one.client.delete("/v1/layers/zero")).status_code == 204
        assert (await outputs(one), await outputs(two)) == (before, before)
        slow_files.goes_on.set()

    service(story)


def test_the_answer_to_a_put_describes_the_layer_of_that_put(service):
    """Another admin's DELETE may follow at once."""

    async def story(one, two):
        async def ask(process, method, times):
            return [(await process.client.request(method, PATH)).status_code for _ in range(times)]

        asked = await asyncio.gather(*(ask(p, m, 30) for p in (one, two) for m in ("PUT", "DELETE", "PUT")))
        assert {status for some in (asked[0], asked[2], asked[3], asked[5]) for status in some} <= {200, 201, 409, 503}
        assert {status for some in (asked[1], asked[4]) for status in some} <= {204, 404, 503}

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
        await one.until(lambda: one.service._registry.applied.phase is not Phase.SETTLED)
        leave.set()
        assert await changing == []
        await one.until(lambda: one.service._registry.applied.phase is Phase.SETTLED)
        assert "small" in one.service.catalog.names()
        release()
        await two.until(lambda: two.service._registry.applied.version == one.service._registry.applied.version)
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
    await process.client._transport.app(scope, receive, send)
    return sent


def test_a_rollout_whose_author_died_is_aborted(service, store):
    async def story(one, two):
        before = await outputs(two)
        store.save(small_layer("fresh"))
        release = hold(two)
        changing = asyncio.ensure_future(one.client.put("/v1/layers/fresh"))
        await one.until(lambda: one.service._registry.applied.phase is Phase.PREPARE)
        one.channel.coordinator.leave(one.channel.pid)
        release()
        await two.until(lambda: two.service._registry.applied == DesiredState(3, Phase.SETTLED, _digests()))
        assert two.service.catalog.names() == ["cross", "small", "zero"]
        assert await outputs(two) == before
        changing.cancel()

    service(story)


def test_a_process_that_starts_later_serves_the_desired_state_rather_than_the_directory(tmp_path, store):
    prepare(tmp_path, LAYERS)

    async def main():
        async with processes(tmp_path) as (one, two):
            store.save(small_layer("fresh"))
            store.save(small_layer("unasked"))
            assert (await one.client.put("/v1/layers/fresh")).status_code == 201
            assert (await one.client.delete("/v1/layers/zero")).status_code == 204
            async with running(tmp_path, channel=LocalChannel(one.channel.coordinator, pid=3), admin=True) as later:
                assert later.service.catalog.names() == ["cross", "fresh", "small"] == two.service.catalog.names()

    asyncio.run(main())


def test_a_process_that_starts_with_a_changed_file_is_unready_and_serves_the_other_layers(tmp_path, store):
    prepare(tmp_path, LAYERS)

    async def main():
        coordinator = Coordinator(2, time.monotonic)
        async with running(tmp_path, channel=LocalChannel(coordinator, pid=1), admin=True, wait=False) as one:
            await one.until(lambda: one.service._registry.applied.version)
            for name in ("small", "zero"):
                store.save(small_layer(name, scale=0.25, add_zero_attn=name == "zero"))
            async with running(tmp_path, channel=LocalChannel(coordinator, pid=2), admin=True, wait=False) as two:
                await two.until(lambda: two.service._registry.applied.version)
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


def test_a_restored_file_is_found_without_a_request(tmp_path, store):
    prepare(tmp_path, LAYERS)

    async def main():
        coordinator = Coordinator(1, time.monotonic)
        coordinator.desired = DesiredState(1, Phase.SETTLED, _digests())
        file = tmp_path / "layers" / "small.safetensors"
        file.rename(tmp_path / "away")
        async with running(tmp_path, channel=LocalChannel(coordinator, pid=1), wait=False, probe_s=0.05) as one:
            await one.until(lambda: one.service._registry.applied.version)
            assert "no file of that name" in (await one.client.get("/readyz")).json()["detail"]
            (tmp_path / "away").rename(file)
            await one.until(lambda: one.service.why_not_ready() is None)
            assert (await one.samples())['attention_layer_load_failures_total{reason="layer_missing"}'] == 1

    asyncio.run(main())


def test_a_draining_process_refuses_rollouts_and_aborts_its_own(service, store):
    async def story(one, two):
        store.save(small_layer("small", scale=0.25))
        before = await outputs(one)
        deafen(two)
        changing = asyncio.ensure_future(one.client.put(PATH))
        await one.until(lambda: one.service._registry.applied.phase is Phase.PREPARE)
        one.service.begin_drain()
        assert ((await changing).status_code, (await changing).json()["code"]) == (503, "draining")
        assert (await one.client.delete(PATH)).json()["code"] == "draining"
        assert await outputs(one) == before

    service(story)


def test_an_unwritable_run_directory_stops_no_rollout(service):
    """It holds only metrics."""

    def restore():
        raise OSError(errno.ENOSPC, "No space left on device")

    async def story(one):
        one.service.readiness._restore = restore
        await one.until(lambda: one.service.why_not_ready() is not None)
        assert (await one.client.delete(PATH)).status_code == 204
        assert (await one.client.put(PATH)).status_code == 201

    service(story, count=1, heartbeat_s=0.02)


def test_a12_without_an_admin_key_no_client_may_change_layers(service):
    async def story(one):
        for method in ("PUT", "DELETE"):
            answer = await one.client.request(method, PATH)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert (await one.client.get(PATH)).status_code == 200

    service(story, count=1, admin=False)


def test_openapi_describes_the_admin_routes_with_examples(service):
    async def story(one):
        allow = (await one.client.options(PATH)).headers["allow"]
        assert allow == "DELETE, GET, HEAD, OPTIONS, PUT"
        page = (await one.client.get("/openapi.json")).json()["paths"]["/v1/layers/{layer}"]
        assert set(page) == {"get", "put", "delete"}
        assert set(page["put"]["responses"]) == {"200", "201", "401", "403", "404", "409", "422", "503"}
        assert set(page["delete"]["responses"]) == {"204", "401", "403", "404", "503"}
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


def test_a_process_with_another_state_is_not_up(tmp_path):
    """One that still starts has no layers to change."""
    prepare(tmp_path, LAYERS)

    async def main():
        coordinator = Coordinator(2, time.monotonic)
        async with running(tmp_path, channel=LocalChannel(coordinator, pid=1), admin=True, wait=False) as one:
            await one.until(lambda: one.service._registry.applied.version)
            coordinator.join(-1, lambda _: None)
            coordinator.report(-1, WorkerStatus(State.STARTING))
            assert (await one.client.delete(PATH)).json()["detail"] == "1 of 2 processes are up"
            assert coordinator.desired == DesiredState(1, Phase.SETTLED, _digests())

    asyncio.run(main())


def _digests():
    return {layer.name: layer.digest for layer in sorted(LAYERS, key=lambda layer: layer.name)}
