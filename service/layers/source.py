"""Source: a checkpoint of any supported file type as named tensors that are read one at a time.

Invariants: Opening reads names and shapes; `Entry.read` reads the bytes of one tensor. Torch files that are not zip archives are
read whole. Nothing is fetched or executed: pickle goes through `torch.load(weights_only=True)` and npz never unpickles. Shards
lie in the checkpoint's own directory. A file that is replaced or written to while it is read is refused by `Files.unchanged`.
This module turns other libraries' exceptions into LayerErrors of one sentence. Only `layers import` and `layers check` use it;
the server reads a Store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from service.errors import LayerError
from service.layers.safetensors_file import FILE_DTYPES, open_regular, parse_object, read_header, read_tensor
from service.layers.wording import about, listed, quoted, shape_text, translated

MAX_JSON_BYTES = 64 * 1024 * 1024
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
NESTED_UNDER = ("state_dict", "model_state_dict", "model")
# What torch.compile puts into the names of a module's tensors.
COMPILED = "_orig_mod."
ZIP_MAGIC = b"PK\x03\x04"
_NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


class Files:
    """Opens the files of one source, and keeps the inode, size and times that each had before it was first opened."""

    def __init__(self) -> None:
        self._versions: dict[Path, tuple[int, ...] | None] = {}

    def open(self, path: Path) -> io.BufferedReader:
        self._versions.setdefault(path, _version(path))
        return open_regular(path)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise LayerError, also instead of another one, if a file is replaced or written to meanwhile."""
        try:
            yield
        finally:
            if changed := [path.name for path, version in self._versions.items() if _version(path) != version]:
                raise LayerError(f"{listed(changed)} changed while it was read; import it again when it is complete")


def _version(path: Path) -> tuple[int, ...] | None:
    found = path.stat() if path.exists() else None
    return found and (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint; `label` is the name of its file or directory, `config` the config.json or the `model_args` that it has.

    Keys are sorted, and as `as_kept` returns them.
    """

    label: str
    config: Mapping[str, object] | None
    entries: Mapping[str, Entry]
    files: Files = dataclasses.field(default_factory=Files)


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a directory, or a file by its suffix, with the config.json in or beside it. Raises LayerError with one sentence."""
    where, files = Path(path), Files()
    label = Path(os.path.abspath(where)).name  # noqa: PTH100 - "." and ".." get their names, links keep theirs
    with about(f"source {quoted(label)}"):
        try:
            is_directory = where.is_dir()
            entries, config = (_directory_entries if is_directory else _file_entries)(where, files)
            beside = (where if is_directory else where.parent) / "config.json"
            if config is None and beside.exists():
                config = _read_object(beside, files)
        except (OSError, ValueError) as error:  # a parent without permission, a NUL in the path
            raise LayerError("the file or directory does not exist or cannot be opened") from error
    renamed = {as_kept(key): entry for key, entry in entries.items()}
    # The names are kept if two of them would become one.
    return Source(label, config, dict(sorted((renamed if len(renamed) == len(entries) else entries).items())), files)


def as_kept(key: str) -> str:
    """Return a key without what torch.compile adds, and with the dots that Keras' and Flax' paths have as slashes."""
    return key.replace(COMPILED, "").replace("/", ".")


def _file_entries(path: Path, files: Files) -> tuple[dict[str, Entry], dict[str, object] | None]:
    """Return the tensors of a file, and nanoGPT's `model_args` if it has them."""
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return _safetensors_entries(path, files), None
    if suffix == ".npz":
        return _npz_entries(path, files), None
    if suffix in TORCH_SUFFIXES:
        return _torch_entries(path, files)
    open_regular(path).close()
    raise LayerError(f"a source must be a directory or end in .safetensors, .npz, {', '.join(TORCH_SUFFIXES)}")


def _directory_entries(directory: Path, files: Files) -> tuple[dict[str, Entry], dict[str, object] | None]:
    """Return the same of the first that exists: the single file, the index's shards, all *.safetensors, pytorch_model.bin."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return _file_entries(single, files)
    if index.exists():
        return _indexed_entries(directory, index, files), None
    if found := sorted(entry for entry in directory.iterdir() if entry.suffix == ".safetensors"):
        return _joined_entries(found, files), None
    if (directory / "pytorch_model.bin").exists():
        return _file_entries(directory / "pytorch_model.bin", files)
    raise LayerError("the directory has neither *.safetensors nor pytorch_model.bin")


def _read_object(path: Path, files: Files) -> dict[str, object]:
    with about(path.name), files.open(path) as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise LayerError(f"{path.name} has more than {MAX_JSON_BYTES} bytes")
    return parse_object(raw, path.name, LayerError, any_number=True)


def _safetensors_entries(path: Path, files: Files) -> dict[str, Entry]:
    with files.open(path) as file:
        header = read_header(file)

    def read(name: str) -> torch.Tensor:
        with open_regular(path) as file:
            return read_tensor(file, name, header.tensors[name])

    return {name: Entry(entry.shape, functools.partial(read, name)) for name, entry in header.tensors.items()}


def _joined_entries(paths: list[Path], files: Files) -> dict[str, Entry]:
    joined: dict[str, Entry] = {}
    for path in paths:
        with about(quoted(path.name)):
            entries = _safetensors_entries(path, files)
            if twice := sorted(joined.keys() & entries.keys()):
                raise LayerError(f"more than one file of the directory has {listed(twice)}")
        joined |= entries
    return joined


def _indexed_entries(directory: Path, index: Path, files: Files) -> dict[str, Entry]:
    weight_map = _read_object(index, files).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LayerError(f"{index.name} has no weight_map")

    def is_shard(name: object) -> bool:
        return isinstance(name, str) and "\0" not in name and name == Path(name).name and name.endswith(".safetensors")

    if outside := [key for key, shard in weight_map.items() if not is_shard(shard)]:
        raise LayerError(f"{index.name} maps {listed(outside)} to no .safetensors file of the directory")
    joined = _joined_entries([directory / shard for shard in sorted(set(weight_map.values()))], files)
    if missing := sorted(weight_map.keys() - joined.keys()):
        raise LayerError(f"no shard has {listed(missing)}, which {index.name} lists")
    return joined


def _npz_entries(path: Path, files: Files) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    sentence = "the file is not a readable .npz archive"
    with files.open(path) as file, translated(sentence), zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            key = member.removesuffix(".npy")
            if key == member or key in entries:
                raise LayerError(f"the archive holds {quoted(member)}, which is not an array or is there twice")
            with archive.open(member) as stream, translated(f"{quoted(key)} is not a plain array"):
                shape = _NPY_HEADERS[np.lib.format.read_magic(stream)](stream)[0]
            if any(size < 0 for size in shape):
                raise LayerError(f"{quoted(key)} has the shape {shape_text(shape)}, expected no negative size")
            entries[key] = Entry(shape, functools.partial(_read_npz, path, member))
    return entries


def _read_npz(path: Path, member: str) -> torch.Tensor:
    name = quoted(member.removesuffix(".npy"))
    with translated(f"{name} cannot be read from the archive"), np.load(path, allow_pickle=False) as archive:
        array = archive[member]
        if array.dtype.kind != "f" or array.dtype.itemsize not in {2, 4, 8}:
            raise LayerError(f"{name} holds {array.dtype.name}, expected float16, float32 or float64")
        native = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
        return torch.from_numpy(native)


def _torch_entries(path: Path, files: Files) -> tuple[dict[str, Entry], dict[str, object] | None]:
    """Return the tensors of a torch file, and nanoGPT's `model_args` if it has them."""
    with files.open(path) as file:
        is_zip = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    sentence = (
        "the file is not a torch file of plain tensors (it is read with weights_only=True); save `model.state_dict()`"
    )
    with translated(sentence), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own storage classes in files before 1.6
        # Only zip archives can be memory-mapped; then an import reads one layer.
        loaded: object = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    tensors, config = _state_dict(loaded), loaded.get("model_args") if isinstance(loaded, dict) else None
    entries = {key: Entry(tuple(value.shape), functools.partial(_plain, key, value)) for key, value in tensors.items()}
    if not isinstance(config, dict):
        return entries, None
    if not all(isinstance(key, str) and not isinstance(value, torch.Tensor) for key, value in config.items()):
        raise LayerError("the model_args of the torch file must be options by name, none of them a tensor")
    return entries, config


def _state_dict(loaded: object) -> dict[str, torch.Tensor]:
    """Return the tensors of the innermost NESTED_UNDER dict; tensors beside such a dict, as nanoGPT's best loss, do not count."""
    for _ in NESTED_UNDER:
        if not isinstance(loaded, dict):
            break
        nested = next((loaded[key] for key in NESTED_UNDER if isinstance(loaded.get(key), dict)), None)
        tensors = {str(key): value for key, value in loaded.items() if isinstance(value, torch.Tensor)}
        if tensors and nested is None:
            return tensors
        loaded = nested
    raise LayerError(
        f"the torch file holds no state dict of tensors, at its top level or under {', '.join(NESTED_UNDER)}"
    )


def _plain(key: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in FILE_DTYPES.values():
        raise LayerError(f"{quoted(key)} is not a dense tensor of float16, bfloat16, float32 or float64")
    if tensor.untyped_storage().nbytes() < tensor.nbytes:  # a file of a kilobyte could ask for gigabytes
        raise LayerError(f"{quoted(key)} repeats its numbers: the file holds fewer than its shape has")
    with translated(f"{quoted(key)} cannot be read from the file"):
        return tensor.detach().clone(memory_format=torch.contiguous_format)
