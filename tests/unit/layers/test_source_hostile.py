"""Source: hostile, broken and unsupported checkpoints are refused, and nothing in them is executed."""

from __future__ import annotations

import os
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save

from service.errors import LayerError
from service.layers.source import open_source
from tests.unit.layers.checkpoints import Bomb, save_npz
from tests.unit.layers.refusals import refused_source


def test_an_invalid_source_is_refused_in_one_sentence(tmp_path):
    """Missing, unreadable, or of the wrong kind; the message has no path and no text of a library."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    os.mkfifo(tmp_path / "pipe.pt")
    assert refused_source(tmp_path / "none.safetensors").endswith("the file does not exist")
    assert refused_source(tmp_path / "none").endswith("the file does not exist")
    assert "must be a directory or end in .safetensors, .npz, .pt, .pth, .bin, .ckpt" in refused_source(
        tmp_path / "x.gguf"
    )
    assert "neither *.safetensors nor pytorch_model.bin" in refused_source(tmp_path / "empty")
    assert "not a regular file" in refused_source(tmp_path / "pipe.npz")
    assert "not a regular file" in refused_source(tmp_path / "pipe.pt")


@pytest.mark.parametrize(
    "path",
    [
        "file:///etc/passwd",
        "http://169.254.169.254/model.safetensors",
        "a\0b",
        "x" * 5000,
        "\u202e.npz",
        "~/x.pt",
        "\ud800",
    ],
    ids=range(7),
)
def test_an_address_is_not_a_source(path):
    """F8: nothing is fetched; there is simply no such file."""
    message = refused_source(path)
    assert message.isascii()
    assert message.isprintable()


@pytest.mark.parametrize("model_args", [{1: 2}, {"rope_scale": torch.ones(3)}, {"n_head": torch.tensor(2)}], ids=str)
def test_model_args_that_are_no_options_are_refused(tmp_path, model_args):
    path = tmp_path / "ckpt.pt"
    torch.save({"model": {"W_q": torch.ones(2, 2)}, "model_args": model_args}, path)
    assert refused_source(path).endswith("model_args of the torch file must be options by name, none of them a tensor")


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "x.pt", "x.pth", "x.bin"])
@pytest.mark.parametrize(
    "content", [b"", b"\0" * 64, b"PK\x03\x04" + bytes(64), b"\x80\x02}q\x00.", b"\x93NUMPY", b"{}" * 99]
)
def test_rubbish_under_any_suffix_is_refused(tmp_path, name, content):
    """Nothing but LayerError, whatever the parser behind it raises."""
    (tmp_path / name).write_bytes(content)
    refused_source(tmp_path / name)


def test_every_truncation_of_every_kind_is_refused(tmp_path):
    """A file cut anywhere raises LayerError when it is opened or when the cut tensor is read."""
    save_npz(tmp_path / "x.npz", a=np.ones((2, 2)))
    torch.save({"a": torch.ones(2, 2)}, tmp_path / "x.pt")
    torch.save({"a": torch.ones(2, 2)}, tmp_path / "x.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "x.safetensors").write_bytes(save({"a": torch.ones(2, 2)}))
    for name in ("x.npz", "x.pt", "x.pth", "x.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for size in range(0, len(whole), max(1, len(whole) // 60)):
            (tmp_path / name).write_bytes(whole[:size])
            with pytest.raises(LayerError):
                open_source(tmp_path / name).entries["a"].read()


def test_pickled_code_is_refused_and_never_run(tmp_path):
    """weights_only for torch files, allow_pickle=False for npz; unpickling it would end this process."""
    torch.save({"a": torch.ones(1), "b": Bomb()}, tmp_path / "x.pt")
    torch.save({"a": Bomb()}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    np.savez(tmp_path / "x.npz", a=np.array([Bomb()], dtype=object))
    assert "not a torch file of plain tensors" in refused_source(tmp_path / "x.pt")
    assert "not a torch file of plain tensors" in refused_source(tmp_path / "old.bin")
    with pytest.raises(LayerError, match="'a' cannot be read from the archive"):
        open_source(tmp_path / "x.npz").entries["a"].read()


class Own(torch.nn.Module):
    """A module without modules of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.W_q = torch.nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("module", [torch.nn.MultiheadAttention(8, 2), Own()])
def test_a_whole_pickled_module_is_refused_with_what_to_save(tmp_path, module, nested, is_zip):
    """Bare, or in a dict beside an epoch; it is never unpickled."""
    saved = {"epoch": 3, "model": module} if nested else module
    torch.save(saved, tmp_path / "module.pt", _use_new_zipfile_serialization=is_zip)
    assert refused_source(tmp_path / "module.pt").endswith(
        ": the file is a whole pickled module, which is never unpickled; save `model.state_dict()` instead"
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_torchscript_program_is_refused_with_what_to_save(tmp_path):
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "script.pt")
    assert refused_source(tmp_path / "script.pt").endswith(
        ": the file is a TorchScript program, which is never run; save `model.state_dict()` of the module instead"
    )


def test_a_list_or_an_endless_dict_is_not_a_state_dict(tmp_path):
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save({"epoch": 1, "model": {"model": {"model": {"model": {}}}}}, tmp_path / "deep.pt")
    assert "no state dict" in refused_source(tmp_path / "list.pt")
    assert "no state dict" in refused_source(tmp_path / "deep.pt")


def test_unusual_tensors_are_refused_by_name(tmp_path):
    odd = {
        "sparse": torch.ones(2, 2).to_sparse(),
        "count": torch.ones(2, dtype=torch.int64),
        "complex": torch.ones(2) * 1j,
    }
    torch.save(odd, tmp_path / "x.pt")
    source = open_source(tmp_path / "x.pt")
    for key in odd:
        with pytest.raises(LayerError, match=f"'{key}' is not a dense tensor"):
            source.entries[key].read()


def test_a_tensor_that_repeats_its_numbers_is_refused(tmp_path):
    """A file of a kilobyte could ask for gigabytes; a part of a larger storage is read."""
    torch.save({"long": torch.ones(1).expand(2**15, 2**15), "part": torch.ones(9)[3:5]}, tmp_path / "x.pt")
    entries = open_source(tmp_path / "x.pt").entries
    with pytest.raises(LayerError, match=r"^'long' repeats its numbers"):
        entries["long"].read()
    assert entries["part"].read().tolist() == [1.0, 1.0]


def test_a_lack_of_memory_for_a_tensor_is_one_sentence(tmp_path, monkeypatch):
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    read = open_source(tmp_path / "x.pt").entries["w"].read

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch.Tensor, "clone", fail)
    with pytest.raises(LayerError, match=r"^'w' cannot be read from the file$"):
        read()


def test_an_archive_with_unexpected_members_is_refused(tmp_path):
    for members in (["a.txt"], ["a.npy", "b"], ["a.npy", "a.npy"]):
        with pytest.MonkeyPatch.context() as patch, zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            patch.setattr("warnings.warn", lambda *_args, **_more: None)  # zipfile warns of the name that comes twice
            for member in members:
                with archive.open(member, "w") as stream:
                    np.lib.format.write_array(stream, np.ones(2))
        assert "not an array or is there twice" in refused_source(tmp_path / "x.npz")


@pytest.mark.parametrize("shape", ["(-8, -8)", "(-1,)", "(4, -16)"])
def test_an_array_of_negative_size_is_refused(tmp_path, shape):
    """numpy reads such a header."""
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("W_q.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(256))
    message = refused_source(tmp_path / "x.npz")
    assert message.endswith(f"'W_q' has the shape [{shape.strip('(),')}], expected no negative size")
