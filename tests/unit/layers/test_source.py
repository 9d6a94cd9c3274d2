"""Source: every supported file type gives the same tensors, and only the requested bytes are read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from service.errors import LayerError
from service.layers.source import open_source
from tests.unit.layers.checkpoints import entry, random, raw_file, save_directory, save_npz, save_safetensors
from tests.unit.layers.refusals import refused_source

TENSORS = {"a.weight": random(3, 2), "a.bias": random(3), "half": random(4, dtype=torch.bfloat16)}


def torch_files(tmp_path: Path) -> dict[str, Path]:
    names = ("zip.pt", "legacy.pth", "nested.bin", "module.pt", "parameter.pt", "lightning.ckpt")
    files = {name: tmp_path / name for name in names}
    torch.save(TENSORS, files["zip.pt"])
    torch.save(TENSORS, files["legacy.pth"], _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "model": {"state_dict": TENSORS}}, files["nested.bin"])
    torch.save({"state_dict": TENSORS, "optimizer": {"lr": 0.1}}, files["module.pt"])
    torch.save({key: torch.nn.Parameter(value) for key, value in TENSORS.items()}, files["parameter.pt"])
    torch.save({"state_dict": TENSORS, "epoch": 3, "pytorch-lightning_version": "2.4"}, files["lightning.ckpt"])
    return files


@pytest.mark.parametrize(
    "name", ["zip.pt", "legacy.pth", "nested.bin", "module.pt", "parameter.pt", "lightning.ckpt", "x.safetensors", "d"]
)
def test_every_kind_of_file_gives_the_same_names_shapes_and_bits(tmp_path, name):
    """A torch file old or new, bare or nested, a safetensors file, a Hugging Face directory."""
    if name == "d":
        path = save_directory(tmp_path / "d", TENSORS)
    elif name == "x.safetensors":
        path = save_safetensors(tmp_path / name, TENSORS)
    else:
        path = torch_files(tmp_path)[name]
    source = open_source(path)
    assert source.label == name
    assert source.config is None
    assert list(source.entries) == sorted(TENSORS)
    for key, value in TENSORS.items():
        assert source.entries[key].shape == tuple(value.shape)
        tensor = source.entries[key].read()
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert tensor.dtype == value.dtype
        assert torch.equal(tensor, value)


def test_an_npz_gives_its_arrays(tmp_path):
    """Every float dtype, Fortran order and foreign byte order; integers beside them are an error only when they are read."""
    plain = np.arange(6, dtype=np.float64).reshape(2, 3)
    path = save_npz(
        tmp_path / "x.npz",
        plain=plain,
        fortran=np.asfortranarray(plain),
        big=plain.astype(">f4"),
        half=plain.astype(np.float16),
        count=np.array(3),
    )
    source = open_source(path)
    assert list(source.entries) == ["big", "count", "fortran", "half", "plain"]
    assert {key: source.entries[key].shape for key in ("plain", "count")} == {"plain": (2, 3), "count": ()}
    dtypes = {"plain": torch.float64, "fortran": torch.float64, "big": torch.float32, "half": torch.float16}
    for key, dtype in dtypes.items():
        tensor = source.entries[key].read()
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.tolist() == plain.tolist()
    with pytest.raises(LayerError, match="'count' holds int64"):
        source.entries["count"].read()


def test_a_compressed_npz_is_read_too(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", a=np.ones((2, 2), np.float32))
    assert open_source(tmp_path / "x.npz").entries["a"].read().tolist() == [[1, 1], [1, 1]]


def test_a_directory_gives_its_config(tmp_path):
    source = open_source(save_directory(tmp_path / "d", TENSORS, {"num_attention_heads": 2}))
    assert source.config == {"num_attention_heads": 2}


def sharded(path: Path, weight_map: dict[str, object] | None = None) -> Path:
    path.mkdir()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_safetensors(path / first, {"a.weight": TENSORS["a.weight"]})
    save_safetensors(path / second, {"a.bias": TENSORS["a.bias"], "half": TENSORS["half"]})
    if weight_map is None:
        weight_map = {"a.weight": first, "a.bias": second, "half": second}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_shards_are_one_source(tmp_path):
    """By the index, or without one if no tensor comes twice."""
    path = sharded(tmp_path / "d")
    for _ in range(2):
        source = open_source(path)
        assert all(torch.equal(source.entries[key].read(), value) for key, value in TENSORS.items())
        (path / "model.safetensors.index.json").unlink(missing_ok=True)
    save_safetensors(path / "again.safetensors", {"half": TENSORS["half"]})
    assert "more than one file of the directory has 'half'" in refused_source(path)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "", ".", "..", "x\0.safetensors", "pytorch_model.bin",
     "file:///x.safetensors", 5, None, ["x.safetensors"]],
    ids=range(12),
)  # fmt: skip
def test_a_shard_outside_the_directory_is_refused(tmp_path, shard):
    """F8: even if it exists."""
    save_safetensors(tmp_path / "x.safetensors", TENSORS)
    message = refused_source(sharded(tmp_path / "d", {"a.weight": shard}))
    assert "maps 'a.weight' to no .safetensors file of the directory" in message


def test_a_wrong_index_is_refused(tmp_path):
    shard = "model-00001-of-00002.safetensors"
    assert "no shard has 'b'" in refused_source(sharded(tmp_path / "a", {"a.weight": shard, "b": shard}))
    assert "does not exist" in refused_source(sharded(tmp_path / "b", {"a.weight": "gone.safetensors"}))
    assert "no weight_map" in refused_source(sharded(tmp_path / "c", {}))
    for text in ("[]", "{", '{"weight_map": [1]}', '{"a": 1, "a": 2}'):
        (tmp_path / "c" / "model.safetensors.index.json").write_text(text)
        assert "model.safetensors.index.json" in refused_source(tmp_path / "c")


def test_a_directory_with_only_a_torch_file_is_read(tmp_path):
    """A safetensors file beside it wins."""
    (tmp_path / "d").mkdir()
    torch.save({"only.in.bin": random(2)}, tmp_path / "d" / "pytorch_model.bin")
    assert list(open_source(tmp_path / "d").entries) == ["only.in.bin"]
    save_safetensors(tmp_path / "d" / "model.safetensors", TENSORS)
    assert list(open_source(tmp_path / "d").entries) == sorted(TENSORS)


def test_a_huggingface_cache_of_links_is_followed(tmp_path):
    """Its snapshot directories hold links to blobs elsewhere."""
    blob = save_safetensors(tmp_path / "blob.safetensors", TENSORS)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(blob)
    assert list(open_source(tmp_path / "snapshot").entries) == sorted(TENSORS)


def test_only_the_bytes_of_the_requested_tensors_are_read(tmp_path):
    """A checkpoint of 64 GiB (a sparse file of a few KiB): reading one tensor reads nothing of the rest."""
    value = random(2, 2)
    huge = 1 << 36
    header = {"embeddings": entry("U8", [huge], 0, huge), "w": entry("F32", [2, 2], huge, huge + 16)}
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(raw_file(header))
        file.seek(huge, os.SEEK_CUR)
        file.write(value.numpy().tobytes())
    before = read_bytes()
    assert torch.equal(open_source(path).entries["w"].read(), value)
    assert read_bytes() - before < 64 * 1024


def read_bytes() -> int:
    """Return how many bytes this process has read through system calls so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_a_torch_file_is_mapped_not_read(tmp_path):
    """Of 64 MiB less than 8 are read for one small tensor; its copy keeps no mapping of the file."""
    path = tmp_path / "x.pt"
    torch.save({"embeddings": torch.zeros(16 << 20), "w": random(2, 2)}, path)
    before = read_bytes()
    tensor = open_source(path).entries["w"].read()
    assert read_bytes() - before < 8 << 20
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(tensor, random(2, 2))
