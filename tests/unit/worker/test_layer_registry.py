"""Layer registry: what a process holds and serves while the layer directory changes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Self

import pytest

from service.errors import LayerError, LayerMissing, LayerNotLoaded
from service.layers.store import Store, StoredLayer
from service.supervisor.status import DesiredState, Phase
from service.worker.layer_registry import LayerRegistry
from tests.unit.layers.checkpoints import stored

SETTLED = DesiredState(1, Phase.SETTLED, {"a": "old", "still": "one"})
OTHER_FILE = 'layer "a": the file in the layer directory is not the version that is served'


class Directory:
    """By file name, the digest, or the error that reading it raises."""

    def __init__(self, **files: Any) -> None:
        self.files = files
        self.reads: list[str] = []

    def of_set(self, _: str) -> Self:
        return self

    def names(self) -> list[str]:
        return sorted(self.files)

    def load(self, name: str) -> Any:
        self.reads.append(name)
        if isinstance(self.files[name], Exception):
            raise self.files[name]
        return SimpleNamespace(name=name, digest=self.files[name], spec=None, tensors={})


class Engine:
    """Loads at once, or fails with `error`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_sequential = False

    def load(self, build: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        loaded = SimpleNamespace(is_sequential=self.is_sequential, least_rows=48)
        done.set_result(loaded) if self.error is None else done.set_exception(self.error)
        return done

    def release(self) -> None:
        pass


class Listener:
    def __init__(self) -> None:
        self.missing: list[str] = []
        self.refused: list[tuple[str, str]] = []

    def layer_loaded(self, name: str, loaded: Any) -> None: ...

    def layer_refused(self, name: str, error: LayerError) -> None:
        self.refused.append((name, error.message))

    def serving(self, names: list[str], num_layers: int, layer_set: str = "") -> None: ...

    def layer_not_loaded(self, reason: str, code: str) -> None:
        self.missing.append(reason)


class Room:
    """A layer registry that serves SETTLED, with its collaborators."""

    def __init__(self) -> None:
        self.directory, self.engine, self.listener = Directory(a="old", still="one"), Engine(), Listener()
        self.registry = LayerRegistry(self.directory, self.engine, self.listener)  # type: ignore[arg-type]
        self.apply(SETTLED)
        self.directory.reads.clear()

    def apply(self, desired: DesiredState) -> None:
        asyncio.run(self.registry.apply(desired))

    @property
    def served(self) -> dict[str, str]:
        assert self.registry.catalog is not None
        return {name: layer.digest for name, layer in self.registry.catalog.layers.items()}


@pytest.fixture
def room():
    made = Room()
    yield made
    made.registry.close()


def test_the_results_of_the_self_checks_are_told_by_digest(room):
    room.engine.is_sequential = True
    room.apply(DesiredState(2, layers={"a": "old", "still": "one"}))
    assert room.registry.least_rows == {"old": 48, "one": 48}
    room.directory.files["a"] = "new"
    room.apply(DesiredState(3, layers={"a": "new", "still": "one"}))
    assert room.registry.least_rows == {"new": 0, "one": 48}, "0: it is sequential"


@pytest.fixture
def first_load(tmp_path):
    """Load three stored layers, the middle one damaged; return the digests by name, and the listener."""
    for name in ("c", "b", "a"):
        Store(tmp_path / "layers").save(stored(name))
    (tmp_path / "layers" / "b.safetensors").write_bytes(b"rubbish")

    def load(directory: str, *, strict: bool) -> tuple[dict[str, str], Listener]:
        listener = Listener()
        registry = LayerRegistry(Store(tmp_path / directory), Engine(), listener)  # type: ignore[arg-type]
        try:
            return asyncio.run(registry.load_directory(strict=strict)), listener
        finally:
            registry.close()

    return load


def test_one_bad_layer_does_not_stop_the_others(first_load):
    """F13, lenient: the refusal of the bad layer says why."""
    digests, listener = first_load("layers", strict=False)
    assert digests == {name: stored(name).digest for name in ("a", "c")}
    ((name, reason),) = listener.refused
    assert (name, reason[:11]) == ("b", 'layer "b": ')


def test_strict_raises_the_first_failure(first_load):
    """F13, strict."""
    with pytest.raises(LayerError, match=r'^layer "b": '):
        first_load("layers", strict=True)


@pytest.mark.parametrize("strict", [True, False])
def test_a_missing_directory_is_a_failure_either_way_and_an_empty_one_gives_no_layers(first_load, tmp_path, strict):
    with pytest.raises(LayerError, match="does not exist"):
        first_load("none", strict=strict)
    (tmp_path / "empty").mkdir()
    assert first_load("empty", strict=strict)[0] == {}


FOUND = {
    "put-back": ("old", LayerError(OTHER_FILE)),
    "another-one": ("third", LayerError(OTHER_FILE)),
    "gone": (
        LayerMissing("no file of that name"),
        LayerMissing("no file of that name"),
    ),
    "damaged": (
        LayerError("tensors are missing"),
        LayerError("tensors are missing"),
    ),
    "no-memory": (
        LayerNotLoaded("no memory for it"),
        LayerNotLoaded("no memory for it"),
    ),
    "as-meant": ("new", None),
}


@pytest.mark.parametrize(("found", "refusal"), FOUND.values(), ids=FOUND)
def test_a_file_that_changes_during_prepare_is_only_an_objection_D1(room, found, refusal):
    room.directory.files["a"] = found
    room.apply(SETTLED.prepare({"a": "new"}))
    assert repr(room.registry.refusal) == repr(refusal)
    assert room.served == SETTLED.layers
    assert room.directory.reads == ["a"]
    back = SETTLED.prepare({"a": "new"}).abort()
    room.directory.files["still"] = LayerMissing("nobody reads it")
    room.apply(back)
    assert (room.served, room.registry.refusal, room.registry.fault) == (SETTLED.layers, None, None)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("out of memory"), "there is no memory for it, or its first forward passes failed"),
        (LayerNotLoaded("values of key.weight exceed float16"), "values of key.weight exceed float16"),
    ],
    ids=["memory", "range"],
)
def test_a_layer_that_the_engine_cannot_load_is_no_objection_to_its_file(room, error, why):
    room.directory.files["a"] = "new"
    room.engine.error = error
    room.apply(SETTLED.prepare({"a": "new"}))
    assert repr(room.registry.refusal) == repr(LayerNotLoaded(f'layer "a": {why}'))
    assert room.served == SETTLED.layers


@pytest.mark.parametrize("file", ["old", "new", "third"])
def test_a_process_that_starts_during_a_rollout_loads_the_version_of_the_file_and_lacks_the_other_D1(room, file):
    """The directory has at most one of the two versions of a name."""
    fresh = Room()
    fresh.registry._loaded.clear()
    fresh.directory.files["a"] = file
    desired = SETTLED.prepare({"a": "new"})
    for phase in (desired, desired.serve()):
        fresh.apply(phase)
        wanted = {"a": phase.served["a"]} if phase.served["a"] == file else {}
        assert fresh.served == {"still": "one", **wanted}
        assert (fresh.registry.refusal is None) == (file == "new")
    fresh.registry.close()


def test_a_missing_layer_is_reported_once_for_many_attempts(room):
    room.apply(SETTLED.prepare({"a": None}).serve().settle())
    room.directory.files["a"] = "third"
    for _ in range(3):
        room.apply(SETTLED)
    assert room.registry.fault == OTHER_FILE
    assert room.listener.missing == [OTHER_FILE]
    assert room.registry.refusal is None, "no change of it was requested"


def test_a_layer_that_cannot_be_loaded_delays_no_change_of_another(room):
    """Its file may be large or slow, and every process reads it before it acknowledges a phase."""
    lost = DesiredState(2, Phase.SETTLED, {"a": "lost", "still": "one"})
    room.apply(lost)
    room.directory.files["b"] = "new"
    room.directory.reads.clear()
    prepare = lost.prepare({"b": "new"})
    for desired in (prepare, prepare.serve(), prepare.serve().settle()):
        room.apply(desired)
        assert (room.registry.fault, room.registry.refusal) == (OTHER_FILE, None)
    assert room.directory.reads == ["b"]
    assert room.served == {"b": "new", "still": "one"}
    room.apply(desired)
    assert room.directory.reads == ["b", "a"]
    assert room.listener.missing == [OTHER_FILE]
    room.apply(desired.prepare({"a": "lost"}))
    assert room.directory.reads == ["b", "a", "a"], "a change of the layer itself"
    assert room.registry.refusal is not None
    room.directory.files["a"] = "lost"
    room.apply(desired.prepare({"a": "lost"}).serve())
    assert (room.registry.fault, room.registry.refusal) == (None, None)


def test_reading_a_digest_delays_no_rollout(room):
    """A digest for an admin is read on its own thread, so a slow file does not delay a rollout that all processes await."""

    async def story() -> None:
        loop, slow, goes_on = asyncio.get_running_loop(), asyncio.Event(), Future[None]()
        load = room.directory.load

        def load_slowly(name: str) -> Any:
            if name == "slow":
                loop.call_soon_threadsafe(slow.set)
                goes_on.result()
            return load(name)

        room.directory.load = load_slowly
        room.directory.files |= {"slow": "s", "a": "new"}
        asking = asyncio.ensure_future(room.registry.digest("slow"))
        await slow.wait()
        await room.registry.apply(SETTLED.prepare({"a": "new"}))
        assert room.registry.refusal is None
        assert room.registry.is_reading
        goes_on.set_result(None)
        assert await asking == "s"

    asyncio.run(story())
    assert not room.registry.is_reading


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_layer_that_cannot_be_served_leaves_the_memory_without_a_collection(tmp_path, monkeypatch, is_damaged):
    """A worker freezes its objects, so full collections are rare: a cycle would keep a layer for each retry."""
    store = Store(tmp_path)
    store.save(stored("a"))
    found: list[weakref.ref[Any]] = []
    post_init = StoredLayer.__post_init__

    def seen(layer: StoredLayer) -> None:
        found.extend(weakref.ref(tensor) for tensor in layer.tensors.values())
        post_init(layer)
        if is_damaged:
            raise LayerError("found only now")

    monkeypatch.setattr(StoredLayer, "__post_init__", seen)
    registry = LayerRegistry(store, Engine(), Listener())  # type: ignore[arg-type]

    async def story() -> None:
        desired = DesiredState(1, Phase.PREPARE, {"a": "other"}, {}, ("a",))
        await registry.apply(desired)
        assert registry.fault is not None
        assert registry.refusal is not None
        if is_damaged:
            with pytest.raises(LayerError, match="found only now"):
                await registry.digest("a")

    gc.collect()
    gc.disable()
    try:
        asyncio.run(story())
        for thread in (registry._load_thread, registry._digest_thread):
            thread.shutdown()  # wait until its frames have ended
        assert found
        assert [ref() for ref in found if ref() is not None] == []
    finally:
        gc.enable()
