"""Store: reads and writes a directory of layers, one `<name>.safetensors` each; StoredLayer is one of them in memory.

Invariants: A StoredLayer that exists is complete: it has exactly the tensors of its spec, in one floating-point dtype, all
finite, and their digest. `source` says where the layer came from and is never a path. Nothing in a file is trusted when it is
read: header, metadata, tensors, values and digest are checked. Pickle is never tried.
Metadata: one key `spec`, a JSON object of the spec's fields and `source`, `family`, `digest`, `format_version`.

Digest: "sha256:" and the hex of SHA-256 over (1) the length of the header, 8 bytes little-endian; (2) the header: ASCII
JSON, sorted keys, no spaces, {"spec": `LayerSpec.to_json()`, `biases` sorted; "tensors": [[name, dtype, shape] by name]}
with dtypes named as in safetensors (F32 ...); (3) each tensor's bytes in that order, C order, little-endian, no gaps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch

from service.attention.spec import LayerSpec
from service.errors import LayerError
from service.layers.directory import NAME, Directory, check_name
from service.layers.safetensors_file import FILE_DTYPES, parse_object, read_header, read_tensor
from service.layers.wording import listed, quoted, shape_text

MAX_SOURCE = 200
DIGEST = re.compile("sha256:[0-9a-f]{64}")
DTYPE_NAMES = {dtype: name for name, dtype in FILE_DTYPES.items()} | {torch.uint8: "U8"}
FORMAT_VERSION = 1
PARTS_VERSION = 2
"""format_version of a layer with a part that version 1 does not know."""
MAX_LAYER_HEADER_BYTES = 64 * 1024  # headers of stored layers have about 2 KiB


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredLayer:
    """Its `tensors` have canonical names (`spec.tensor_shapes()`), on the CPU; `family` says which names the source used."""

    name: str
    spec: LayerSpec
    tensors: dict[str, torch.Tensor]
    source: str
    family: str
    digest: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_source(self.source)
        if NAME.fullmatch(self.family) is None:
            raise LayerError("the family must be 1 to 64 of a-z, 0-9, dot, underscore and hyphen")
        check_shapes(self.spec.tensor_shapes(), {name: tuple(tensor.shape) for name, tensor in self.tensors.items()})
        for name, tensor in self.tensors.items():
            if (
                tensor.dtype not in FILE_DTYPES.values()
                or tensor.layout != torch.strided
                or tensor.device.type != "cpu"
            ):
                raise LayerError(f"{quoted(name)} must be a dense CPU tensor of {', '.join(FILE_DTYPES)}")
            if not torch.isfinite(tensor).all():
                raise LayerError(f"{quoted(name)} holds NaN or infinity")
        found = sorted({DTYPE_NAMES[tensor.dtype] for tensor in self.tensors.values()})
        if len(found) > 1:
            raise LayerError(f"the tensors mix the dtypes {', '.join(found)}; a layer has one")
        object.__setattr__(self, "digest", digest(self.spec, self.tensors))

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["query.weight"].dtype


def check_source(source: str) -> None:
    """Raise LayerError unless a file may say that it comes from there."""
    if len(source) > MAX_SOURCE or not source.isprintable():
        raise LayerError(f"the source must have at most {MAX_SOURCE} characters, all printable")


def check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise LayerError unless `found` has exactly the expected tensors, in these shapes."""
    if missing := sorted(expected.keys() - found.keys()):
        raise LayerError(f"tensors are missing: {listed(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        raise LayerError(f"tensors unknown to the spec: {listed(extra)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise LayerError(f"{quoted(name)} has the shape {shape_text(found[name])}, expected {shape_text(shape)}")


def digest(spec: LayerSpec, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of a layer, independent of its name and source; the module docstring defines the byte layout."""
    return digest_of({"spec": {**spec.to_json(), "biases": sorted(spec.biases)}}, tensors)


def digest_of(header: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest over a header, to which the tensors' names, dtypes and shapes are added, and the tensors."""
    names = sorted(tensors)
    listing = [[name, DTYPE_NAMES[tensors[name].dtype], list(tensors[name].shape)] for name in names]
    header = {**header, "tensors": listing}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    seen = hashlib.sha256(len(text).to_bytes(8, "little") + text)
    for name in names:
        seen.update(tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return f"sha256:{seen.hexdigest()}"


class Store(Directory):
    """The layers of a directory."""

    kind = "layer"
    suffix = ".safetensors"

    def load(self, name: str) -> StoredLayer:
        """Return the layer; raise LayerMissing without a file, LayerNotLoaded if reading fails, LayerError if it is invalid."""
        with self.opened(name) as file:
            return _decode(name, file)

    def save(self, layer: StoredLayer, *, replace: bool = True) -> Path:
        """Write or replace the layer's file; without `replace` raise LayerExists if it is there."""
        return self.write(layer.name, _encode(layer), replace=replace)


def _version(spec: LayerSpec) -> int:
    return PARTS_VERSION if spec.has_parts else FORMAT_VERSION


def _encode(layer: StoredLayer) -> bytes:
    about_layer = {
        **layer.spec.to_json(),
        "source": layer.source,
        "family": layer.family,
        "digest": layer.digest,
        "format_version": _version(layer.spec),
    }
    text = json.dumps(about_layer, sort_keys=True, allow_nan=False)
    # safetensors refuses tensors that share memory, as those of a layer built in code may
    unshared = {
        key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in layer.tensors.items()
    }
    return safetensors.torch.save(unshared, metadata={"spec": text})


def _decode(name: str, file: io.BufferedReader) -> StoredLayer:
    header = read_header(file, max_bytes=MAX_LAYER_HEADER_BYTES)
    if header.metadata.keys() != {"spec"}:
        raise LayerError("not a stored layer: the file's metadata must have the one key spec; import the file first")
    fields = parse_object(header.metadata["spec"].encode("utf-8", "surrogatepass"), "the layer's spec", LayerError)
    version = fields.pop("format_version", None)
    if type(version) is not int or version not in (FORMAT_VERSION, PARTS_VERSION):
        raise LayerError(f"this release reads layers of format_version {FORMAT_VERSION} and {PARTS_VERSION} only")
    texts: dict[str, str] = {}
    for field in ("source", "family", "digest"):
        if not isinstance(text := fields.pop(field, None), str):
            raise LayerError(f"the layer's spec has no {field}")
        texts[field] = text
    spec = LayerSpec.from_json(fields)
    if version != _version(spec):
        raise LayerError(f"format_version {version} does not fit the layer's fields, expected {_version(spec)}")
    check_shapes(spec.tensor_shapes(), {key: entry.shape for key, entry in header.tensors.items()})
    tensors = {key: read_tensor(file, key, entry) for key, entry in header.tensors.items()}
    layer = StoredLayer(name, spec, tensors, texts["source"], texts["family"])
    if layer.digest != texts["digest"]:
        raise LayerError("the recorded digest does not match the tensors and the spec: the file was changed")
    return layer
