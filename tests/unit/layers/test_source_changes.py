"""Source: a checkpoint that is replaced or written to while it is imported is refused, never mixed of two versions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from service.errors import LayerError
from service.layers import importer
from service.layers.importer import import_layer
from service.layers.source import Entry, open_source
from tests.unit.layers.checkpoints import bert, random, save_npz, save_safetensors

CHANGED = "changed while it was read; import it again when it is complete"


def made(number: int) -> dict[str, torch.Tensor]:
    return {key: value + number for key, value in bert(1).items()}


def single(path: Path, number: int) -> Path:
    return save_safetensors(path / "x.safetensors", made(number))


def archive(path: Path, number: int) -> Path:
    return save_npz(path / "x.npz", **{key: value.numpy() for key, value in made(number).items()})


def torch_zip(path: Path, number: int) -> Path:
    torch.save(made(number), path / "x.ckpt")
    return path / "x.ckpt"


def shards(path: Path, number: int) -> Path:
    tensors = made(number)
    for part, keep in (("a", True), ("b", False)):
        chosen = {key: value for key, value in tensors.items() if ("key" in key) is keep}
        save_safetensors(path / f"{part}.safetensors", chosen)
    names = {key: "a.safetensors" if "key" in key else "b.safetensors" for key in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (path / "config.json").write_text(json.dumps({"num_attention_heads": 2}))
    return path


KINDS = {"safetensors": single, "npz": archive, "torch": torch_zip, "shards": shards}


def import_while(path: Path, change: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Import, and make the change between the reading of the third tensor and of the next."""
    read, count = importer._read, iter(range(100))

    def slow(family, spec, present, source):
        def wrapped(entry: Entry) -> Callable[[], torch.Tensor]:
            def act() -> torch.Tensor:
                if next(count) == 3:
                    change()
                return entry.read()

            return act

        for key, entry in source.entries.items():
            source.entries[key] = Entry(entry.shape, wrapped(entry))
        return read(family, spec, present, source)

    patch.setattr(importer, "_read", slow)
    import_layer(path, name="x", heads=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_replaced_by_rename_meanwhile_is_refused(tmp_path, monkeypatch, kind):
    """The new file is as whole as the old one, with the same names and sizes."""
    (tmp_path / "new").mkdir()
    path = KINDS[kind](tmp_path, 0)
    new = KINDS[kind](tmp_path / "new", 1)

    def change() -> None:
        for file in new.iterdir() if new.is_dir() else [new]:
            file.rename(tmp_path / file.name)

    with pytest.raises(LayerError, match=CHANGED):
        import_while(path, change, monkeypatch)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"])
def test_each_file_of_a_directory_counts(tmp_path, monkeypatch, name):
    path = shards(tmp_path, 0)

    def change() -> None:
        (path / "new").write_bytes((path / name).read_bytes())
        (path / "new").rename(path / name)

    with pytest.raises(LayerError, match=f"'{name}' {CHANGED}"):
        import_while(path, change, monkeypatch)


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_a_file_that_is_written_to_meanwhile_is_refused(tmp_path, monkeypatch, kind):
    """In place, so that it is the same inode and has the same size."""
    path = KINDS[kind](tmp_path, 0)

    def change() -> None:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(file.read(1))
        os.utime(path, ns=(1, 1))

    with pytest.raises(LayerError, match=CHANGED):
        import_while(path, change, monkeypatch)


def test_a_file_that_vanishes_is_refused(tmp_path, monkeypatch):
    path = single(tmp_path, 0)
    with pytest.raises(LayerError, match=f"'x.safetensors' {CHANGED}"):
        import_while(path, path.unlink, monkeypatch)


def test_a_change_between_the_header_and_the_first_tensor_is_refused(tmp_path):
    """Also if the new file cannot be read."""
    path = single(tmp_path, 0)
    source = open_source(path)
    path.write_bytes(b"")
    with pytest.raises(LayerError, match=CHANGED), source.files.unchanged():
        next(iter(source.entries.values())).read()


def test_an_unchanged_source_is_imported(tmp_path, monkeypatch):
    """The wrapper of these tests changes nothing."""
    import_while(shards(tmp_path, 0), lambda: None, monkeypatch)
    save_npz(tmp_path / "y.npz", W_q=random(2, 2).numpy(), W_k=np.ones((2, 2)), W_v=np.ones((2, 2)))
    assert import_layer(tmp_path / "y.npz", name="x").dtype == torch.float64
