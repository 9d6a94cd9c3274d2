"""Store: saving and loading, names and links, and failures of the file system."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch

from service.errors import LayerError, LayerNotLoaded
from service.layers.directory import LayerExists
from service.layers.store import Store, StoredLayer
from tests.unit.layers.checkpoints import spec, stored
from tests.unit.layers.refusals import refused_load


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "layers")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"biases": (), "has_bias_kv": True, "add_zero_attn": True},
        {"biases": ("query",), "has_output": False},
        {"key_width": 4, "value_width": 5, "out_width": 7, "value_head_width": 2, "scale": 0.1},
        {"num_heads": 4, "num_kv_heads": 2},
    ],
    ids=["plain", "bias_kv", "no output", "widths", "shared heads"],
)
def test_a_saved_layer_is_loaded_unchanged(store, dtype, changes):
    """Name, spec, source, family, digest and every bit."""
    layer = stored(dtype=dtype, **changes)
    path = store.save(layer)
    back = store.load("tiny")
    assert path == store.directory / "tiny.safetensors"
    assert (back.name, back.spec, back.source, back.family) == ("tiny", layer.spec, "a test (bert)", "bert")
    assert back.digest == layer.digest
    assert back.tensors.keys() == layer.tensors.keys()
    assert all(torch.equal(back.tensors[key], value) and back.dtype == dtype for key, value in layer.tensors.items())


def test_the_file_is_plain_safetensors_with_a_spec(store):
    """Other tools can read it: canonical names, and one metadata key with JSON."""
    layer = stored()
    store.save(layer)
    with safetensors.safe_open(store.directory / "tiny.safetensors", "pt") as file:
        assert set(file.keys()) == set(layer.spec.tensor_shapes())
        assert file.metadata().keys() == {"spec"}
        fields = json.loads(file.metadata()["spec"])
    about = {"source": "a test (bert)", "family": "bert", "digest": layer.digest, "format_version": 1}
    assert fields == layer.spec.to_json() | about


def test_a_layer_whose_tensors_share_memory_is_stored_whole(store):
    """safetensors itself refuses such tensors."""
    block = torch.arange(36.0).reshape(6, 6)
    tensors = {key: block if len(shape) == 2 else block[0] for key, shape in spec().tensor_shapes().items()}
    layer = StoredLayer("tiny", spec(), {**tensors, "key.weight": block.T}, "x", "bert")
    store.save(layer)
    assert store.load("tiny").digest == layer.digest


def test_saving_is_repeatable_to_the_byte(store):
    path = store.save(stored())
    first = path.read_bytes()
    store.save(stored())
    assert path.read_bytes() == first


def test_names_are_sorted_and_foreign_files_left_out(store):
    for name in ("b", "a", "a.b"):
        store.save(stored(name))
    for foreign in ("README.md", "Upper.safetensors", ".a.tmp", ".hidden.safetensors", "x.safetensors.bak"):
        (store.directory / foreign).write_bytes(b"")
    assert store.names() == ["a", "a.b", "b"]


def test_a_missing_directory_is_reported(store, tmp_path):
    with pytest.raises(LayerError, match="the layer directory does not exist"):
        store.names()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LayerError, match="cannot be read"):
        Store(tmp_path / "file").names()
    assert "no file of that name" in refused_load(store)


def test_a_failed_save_leaves_the_old_layer_and_nothing_else(store, monkeypatch):
    """F14: a full disk at the last moment."""
    old = stored()
    store.save(old)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LayerError, match=r'^layer "tiny": the layer directory cannot be written$'):
        store.save(stored(scale=0.25))
    monkeypatch.undo()
    assert store.load("tiny").digest == old.digest
    assert [entry.name for entry in store.directory.iterdir()] == ["tiny.safetensors"]


@pytest.mark.parametrize("has_links", [True, False], ids=["hard links", "none"])
def test_of_several_layers_that_are_saved_under_one_name_at_once_one_is_stored(store, monkeypatch, has_links):
    """Also where the file system has no hard links."""

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", refused)
    layers = [stored(scale=1 / (1 + number)) for number in range(6)]
    start = threading.Barrier(len(layers))

    def save(layer: StoredLayer) -> bool:
        start.wait()
        try:
            return bool(store.save(layer, replace=False))
        except LayerExists:
            return False

    with ThreadPoolExecutor(len(layers)) as pool:
        is_stored = list(pool.map(save, layers))
    assert is_stored.count(True) == 1
    assert store.load("tiny").digest == layers[is_stored.index(True)].digest
    assert [entry.name for entry in store.directory.iterdir()] == ["tiny.safetensors"]


def test_a_layer_is_stored_in_a_directory_that_may_not_be_read(store, monkeypatch):
    """The rename has succeeded by then. Root may read every directory, so the refusal is played."""
    open_, layer = os.open, stored()

    def refuse_directories(path, flags, *args, **kwargs):
        if flags & os.O_DIRECTORY:
            raise PermissionError(13, "Permission denied")
        return open_(path, flags, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse_directories)
        store.save(layer)
    assert store.load("tiny").digest == layer.digest


def test_a_directory_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LayerError, match="cannot be written"):
        Store(tmp_path / "file" / "below").save(stored())


def test_a_file_with_the_reserved_name_is_listed_and_refused(store):
    """An operator who has one learns why it is not served."""
    store.save(stored("other")).rename(store.directory / "sdpa.safetensors")
    assert store.names() == ["sdpa"]
    with pytest.raises(LayerError, match='the name "sdpa" is reserved'):
        store.load("sdpa")


def test_the_content_is_synced_before_the_rename(store, monkeypatch):
    """A crash after the rename must not leave an empty file under the name."""
    events = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        events.append("sync")
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    store.save(stored())
    assert events == ["sync", "rename", "sync"]


@pytest.mark.parametrize("name", ["../tiny", "/etc/passwd", "a/b", "..", "", "tiny\0", "TINY", "tiny\n", "x" * 5000])
def test_f8_a_name_that_is_a_path_reaches_no_file(store, name):
    """F8: the rule for names refuses it before any access to the file system."""
    store.save(stored())
    Store(store.directory.parent).save(stored())
    with pytest.raises(LayerError, match=r"^a layer's name is"):
        Store(store.directory).load(name)


def test_f8_a_link_out_of_the_directory_is_refused_and_one_inside_is_followed(store, tmp_path):
    """Kubernetes mounts files through links within the directory."""
    store.save(stored())
    outside = Store(tmp_path / "outside")
    secret = outside.save(stored("secret"))
    (store.directory / "data").mkdir()
    (store.directory / "tiny.safetensors").rename(store.directory / "data" / "x")
    (store.directory / "tiny.safetensors").symlink_to("data/x")
    (store.directory / "out.safetensors").symlink_to(secret)
    (store.directory / "up.safetensors").symlink_to("../outside/secret.safetensors")
    (store.directory / "gone.safetensors").symlink_to("nothing")
    (store.directory / "loop.safetensors").symlink_to("loop.safetensors")
    (store.directory / "through").symlink_to(tmp_path / "outside")
    (store.directory / "via.safetensors").symlink_to("through/secret.safetensors")
    sibling = Store(tmp_path / "layers-2")
    sibling.save(stored("near"))
    (store.directory / "near.safetensors").symlink_to("../layers-2/near.safetensors")
    assert store.load("tiny").digest == stored().digest
    for name in ("out", "up", "via", "near"):
        assert "outside the layer directory" in refused_load(store, name)
    assert "no file of that name" in refused_load(store, "gone")
    assert "cannot be opened" in refused_load(store, "loop")


def test_the_directory_itself_may_be_a_link(store, tmp_path):
    store.save(stored())
    (tmp_path / "link").symlink_to(store.directory)
    assert Store(tmp_path / "link").load("tiny").digest == stored().digest


def test_saving_over_a_link_replaces_the_link(store, tmp_path):
    """Nothing outside is written."""
    store.save(stored("other"))
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (store.directory / "tiny.safetensors").symlink_to(victim)
    store.save(stored())
    assert victim.read_bytes() == b"precious"
    assert store.load("tiny").digest == stored().digest


def test_a_pipe_or_a_directory_under_a_layers_name_is_refused(store):
    store.save(stored("other"))
    os.mkfifo(store.directory / "pipe.safetensors")
    (store.directory / "dir.safetensors").mkdir()
    assert store.names() == ["dir", "other", "pipe"]
    assert "not a regular file" in refused_load(store, "pipe")
    assert "not a regular file" in refused_load(store, "dir")


def test_a_file_above_the_limit_is_refused_before_it_is_read(store):
    """A sparse file of a terabyte, which would not fit into memory."""
    path = store.save(stored())
    size = path.stat().st_size
    assert Store(store.directory, size).load("tiny").digest == stored().digest
    with path.open("r+b") as file:
        file.truncate(2**40)
    message = refused_load(Store(store.directory, size))
    assert f"has {2**40} bytes, the limit is {size} (ATTENTION_MAX_LAYER_BYTES)" in message


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't allocate memory"), OSError(24, "too many")], ids=repr
)
def test_every_error_of_a_library_becomes_a_layer_error(store, monkeypatch, error):
    """When memory or descriptors are short, libraries raise many types; none may end the process."""
    store.save(stored())

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch, "isfinite", fail)
    assert "could not read the file" in refused_load(store)
    with pytest.raises(LayerNotLoaded):
        store.load("tiny")


def test_loading_keeps_no_reference_to_the_file(store):
    """The file may shrink or vanish while the layer serves; a live mapping would be a SIGBUS."""
    path = store.save(stored())
    layer = store.load("tiny")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    store.load("tiny")
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert str(path) not in Path("/proc/self/maps").read_text()
    path.write_bytes(b"")
    assert dataclasses.replace(layer).digest == stored().digest


@pytest.mark.parametrize("call", ["open", "lstat", "fstat", "readinto"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_fault_of_the_machine_is_no_fault_of_the_file(store, monkeypatch, call, code):
    """A client repeats a change that fails with LayerNotLoaded; after a LayerError somebody must mend the file."""
    store.save(stored())
    descriptors = len(list(Path("/proc/self/fd").iterdir()))

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        if call == "readinto":
            patched.setattr(io, "FileIO", type("Failing", (io.FileIO,), {"readinto": fail}))
        else:
            patched.setattr(os, call, fail)
        with pytest.raises(LayerNotLoaded, match=r'^layer "tiny": '):
            store.load("tiny")
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.mark.parametrize("code", [errno.EACCES, errno.ELOOP, errno.ENXIO], ids=errno.errorcode.get)
def test_a_file_that_must_not_be_opened_is_a_fault_of_the_file(store, monkeypatch, code):
    store.save(stored())

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        with pytest.raises(LayerError, match="cannot be opened") as caught:
            store.load("tiny")
    assert type(caught.value) is LayerError
