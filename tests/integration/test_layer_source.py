"""ATTENTION_LAYERS_SOURCE: the processes of a service serve the published set, all of it or what they served before."""

import asyncio
import shutil
import threading
import time
from typing import Any

import pytest

from service.attention.engine import Engine
from service.layers.layer_set import LayerSet, publish
from service.layers.set_source import SetSource
from service.layers.store import Store
from service.models.stored_model import ModelStore
from service.worker.layer_follower import RETRY_LOOKS
from service.worker.local_channel import LocalChannel
from tests.integration import models
from tests.integration.running import running, small_layer
from tests.integration.test_layer_admin import outputs, processes

FIRST = [small_layer("small"), small_layer("old")]
SECOND = [small_layer("small", scale=0.25), small_layer("fresh")]
POLL_S = 0.05


class Source:
    """A directory in which a test publishes sets."""

    def __init__(self, directory) -> None:
        self.directory = directory / "published"
        self._files = directory / "files"
        self.settings = {"layers_source": str(self.directory), "layers_source_poll_s": POLL_S}

    def publish(self, layers, model=None) -> LayerSet:
        shutil.rmtree(self._files, ignore_errors=True)
        store, companions = Store(self._files), ModelStore(self._files)
        found = {store.save(layer): layer.digest for layer in layers}
        if model is not None:
            found[companions.save(model)] = model.digest
        return publish(found, self.directory)


@pytest.fixture
def source(tmp_path):
    return Source(tmp_path)


async def listed(process):
    return (await process.client.get("/v1/layers")).json()


async def until(process, digest=None, fault=None) -> Any:
    """Wait until `GET /v1/layers` names that set, if one is given, and a fault with that part, or none."""
    async with asyncio.timeout(20):
        while True:
            found = (await listed(process)).get("layer_set", {"digest": "", "fault": ""})
            is_fault = found["fault"] is None if fault is None else fault in (found["fault"] or "")
            if is_fault and digest in (None, found["digest"]):
                return found
            await asyncio.sleep(POLL_S)


async def why_not_ready(process, part: str) -> None:
    async with asyncio.timeout(20):
        while part not in (await process.client.get("/readyz")).json()["detail"]:  # noqa: ASYNC110 (it is asked over HTTP)
            await asyncio.sleep(POLL_S)


def names(answer) -> list[str]:
    return [layer["name"] for layer in answer["layers"]]


def test_every_process_serves_the_new_set_and_only_it_and_no_request_changes_layers(tmp_path, source):
    async def main():
        first = source.publish(FIRST)
        async with processes(tmp_path, **source.settings) as (one, two):
            found = await until(one, digest=first.digest)
            assert (found["source"], names(await listed(two))) == (str(source.directory), ["old", "small"])
            before = await outputs(one)
            second = source.publish(SECOND)
            for process in (one, two):
                assert (await until(process, digest=second.digest))["since"] > found["since"]
                assert names(await listed(process)) == ["fresh", "small"]
                assert (await outputs(process)) not in (before, None)
                for method in ("put", "delete"):
                    answer = await getattr(process.client, method)("/v1/layers/small")
                    assert (answer.status_code, answer.json()["code"]) == (409, "layers_fixed")
                    assert "ATTENTION_LAYERS_SOURCE" in answer.json()["detail"]
            assert (await outputs(one)) == (await outputs(two))

    asyncio.run(main())


def garbage(source: Source) -> None:
    """A set whose bytes are those of the manifest, and no layer."""
    source._files.mkdir(exist_ok=True)
    path = source._files / "small.safetensors"
    path.write_bytes(b"no layer")
    publish({path: "sha256:" + "0" * 64}, source.directory)


def another_digest(source: Source) -> None:
    path = Store(source._files).save(small_layer("small", scale=0.125))
    publish(
        {path: FIRST[0].digest, Store(source._files).save(small_layer("x")): "sha256:" + "0" * 64}, source.directory
    )


DAMAGES = {
    "no layer": (garbage, "the set is refused: "),
    "another layer's digest": (another_digest, "the set is refused: "),
    "away": (lambda source: shutil.rmtree(source.directory), "layer-set.json: the file does not exist"),
    "no manifest": (
        lambda source: (source.directory / "layer-set.json").write_bytes(b"\xff"),
        "not valid JSON in UTF-8",
    ),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_fault_changes_nothing_that_is_served_is_reported_once_and_ends(tmp_path, source, damage, reason):
    async def main():
        first = source.publish(FIRST)
        async with processes(tmp_path, **source.settings) as (one, two):
            before = await outputs(one)
            damage(source)
            for process in (one, two):
                found = await until(process, fault=reason)
                assert found["digest"] == first.digest
                assert (await outputs(process)) == before
                assert (await process.client.get("/readyz")).status_code == 200
            second = source.publish(SECOND)
            await until(two, digest=second.digest)

    asyncio.run(main())


def test_a_set_that_the_engine_refuses_is_tried_again_but_not_at_each_look(tmp_path, source, monkeypatch):
    async def main():
        first = source.publish(FIRST)
        async with processes(tmp_path, count=1, **source.settings) as (one,):
            await until(one, digest=first.digest)
            second, num_loads, load = source.publish([small_layer("small", scale=0.25)]), 0, Engine.load

            def refuse(engine, build, **options):
                nonlocal num_loads
                num_loads += 1
                raise MemoryError

            monkeypatch.setattr(Engine, "load", refuse)
            await until(one, fault="there is no memory for it")
            began = time.monotonic()
            await asyncio.sleep(10 * POLL_S)
            assert 1 <= num_loads <= 2 + (time.monotonic() - began) / (RETRY_LOOKS * POLL_S)
            monkeypatch.setattr(Engine, "load", load)
            await until(one, digest=second.digest)

    asyncio.run(main())


def test_without_a_set_the_service_is_not_ready_with_the_reason_until_the_first_is_published(tmp_path, source):
    async def main():
        options = {"admin": True, "wait": False, **source.settings}
        async with running(tmp_path, **options) as one:
            await why_not_ready(one, "does not exist")
            assert (await one.attend({"query": [[0.5] * 16]})).status_code == 503
            assert (await one.client.put("/v1/layers/small")).status_code == 409
            garbage(source)
            await why_not_ready(one, 'layer "small"')
            first = source.publish(FIRST)
            await until(one, digest=first.digest)
            assert (await one.client.get("/readyz")).status_code == 200
            assert one.refusals == []

    asyncio.run(main())


def test_a_service_that_shares_the_directory_of_another_says_so(tmp_path, source):
    async def main():
        source.publish(FIRST)
        async with (
            running(tmp_path, **source.settings),
            running(tmp_path, channel=LocalChannel(pid=7), wait=False, **source.settings) as other,
        ):
            await why_not_ready(other, "if it is of another service, set an ATTENTION_LAYERS_DIR for each")

    asyncio.run(main())


def test_a_service_starts_with_the_set_that_it_served_last_if_the_source_is_away(tmp_path, source):
    async def main():
        first = source.publish(FIRST)
        async with running(tmp_path, **source.settings) as one:
            await until(one, digest=first.digest)
        source.publish(SECOND)
        (source.directory / "layer-set.json").rename(tmp_path / "hidden")
        async with running(tmp_path, **source.settings) as one:
            await until(one, digest=first.digest, fault="does not exist")
            (tmp_path / "hidden").rename(source.directory / "layer-set.json")
            await until(one)
            assert names(await listed(one)) == ["fresh", "small"]

    asyncio.run(main())


def test_a_read_that_hangs_is_reported_and_the_set_that_was_served_last_is_served_meanwhile(
    tmp_path, source, monkeypatch
):
    opened, gate = SetSource._opened, threading.Event()

    async def main():
        first = source.publish(FIRST)
        async with running(tmp_path, **source.settings) as one:
            await until(one, digest=first.digest)
        second = source.publish(SECOND)
        monkeypatch.setattr(SetSource, "_opened", lambda source, name: gate.wait(20) and opened(source, name))
        for name, changed in (("PATIENCE_S", POLL_S), ("MIN_BYTES_PER_S", 2**30)):
            monkeypatch.setattr(f"service.layers.set_source.{name}", changed)
        monkeypatch.setattr("service.worker.layer_follower.CHECK_S", POLL_S)
        async with running(tmp_path, **source.settings) as one:
            await until(one, digest=first.digest, fault="does not answer")
            gate.set()
            await until(one, digest=second.digest)

    asyncio.run(main())


def test_nothing_of_it_blocks_the_event_loop_and_a_model_is_of_the_set(served, source):
    before, after = (models.small_model(max_tokens=tokens) for tokens in (12, 14))

    async def story(one):
        async def digest():
            answer = await one.client.post("/v1/models/tiny/attend", json={"text": "the animal", "layer": 1})
            return answer.json()["model"]["digest"]

        assert await digest() == before.digest
        second = await asyncio.to_thread(source.publish, models.LAYERS, after)
        await until(one, digest=second.digest)
        assert await digest() == after.digest
        assert (await one.client.get("/v1/models")).json()["models"][0]["digest"] == after.digest

    source.publish(models.LAYERS, before)
    served(story, layers=[], **source.settings)


def test_two_sets_in_quick_succession_end_with_the_last(tmp_path, source):
    async def main():
        source.publish(FIRST)
        async with processes(tmp_path, **source.settings) as (one, two):
            for _ in range(4):
                for layers in (SECOND, FIRST):
                    source.publish(layers)
                    await asyncio.sleep(POLL_S / 2)
            last = source.publish([small_layer("last")])
            for process in (one, two):
                await until(process, digest=last.digest)
                assert names(await listed(process)) == ["last"]

    asyncio.run(main())
