"""StoredLayer: one named attention layer, with its tensors and the digest that identifies it.

Invariants: A StoredLayer that exists is complete: it has exactly the tensors of its spec, in one floating-point dtype, all
finite, and their digest. Names match `NAME`. `source` says where the layer came from and is never a path.

Digest: "sha256:" and the hex of SHA-256 over (1) the length of the header, 8 bytes little-endian; (2) the header: ASCII
JSON, sorted keys, no spaces, {"spec": the spec's fields, `biases` sorted; "tensors": [[name, dtype, shape] by name]}
with dtypes named as in safetensors (F32 ...); (3) each tensor's bytes in that order, C order, little-endian, no gaps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping

import torch

from service.attention.spec import LayerSpec
from service.errors import LayerError
from service.layers.safetensors_file import DTYPES
from service.layers.wording import listed, quoted, shape_text

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# The name of attention without a layer, which no layer can have.
SDPA = "sdpa"
MAX_SOURCE = 200
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
        if len(self.source) > MAX_SOURCE or not self.source.isprintable():
            raise LayerError(f"the source must have at most {MAX_SOURCE} characters, all printable")
        if NAME.fullmatch(self.family) is None:
            raise LayerError("the family must be 1 to 64 of a-z, 0-9, dot, underscore and hyphen")
        check_shapes(self.spec, {name: tuple(tensor.shape) for name, tensor in self.tensors.items()})
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided or tensor.device.type != "cpu":
                raise LayerError(f"{quoted(name)} must be a dense CPU tensor of {', '.join(DTYPES)}")
            if not torch.isfinite(tensor).all():
                raise LayerError(f"{quoted(name)} holds NaN or infinity")
        found = sorted({DTYPE_NAMES[tensor.dtype] for tensor in self.tensors.values()})
        if len(found) > 1:
            raise LayerError(f"the tensors mix the dtypes {', '.join(found)}; a layer has one")
        object.__setattr__(self, "digest", digest(self.spec, self.tensors))

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["query.weight"].dtype


def check_name(name: str) -> None:
    """Raise LayerError, without repeating the name, unless a layer may have it."""
    if NAME.fullmatch(name) is None:
        raise LayerError(
            "a layer's name is 1 to 64 of a-z, 0-9, dot, underscore and hyphen, and begins with a letter or a digit"
        )
    if name == SDPA:
        raise LayerError('the name "sdpa" is reserved for attention without a layer')


def check_shapes(spec: LayerSpec, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise LayerError unless `found` has exactly the spec's tensors, in the spec's shapes."""
    expected = spec.tensor_shapes()
    if missing := sorted(expected.keys() - found.keys()):
        raise LayerError(f"tensors are missing: {listed(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        raise LayerError(f"tensors unknown to the spec: {listed(extra)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise LayerError(f"{quoted(name)} has the shape {shape_text(found[name])}, expected {shape_text(shape)}")


def digest(spec: LayerSpec, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of a layer, independent of its name and source; the module docstring defines the byte layout."""
    names = sorted(tensors)
    header = {
        "spec": {**spec.to_json(), "biases": sorted(spec.biases)},
        "tensors": [[name, DTYPE_NAMES[tensors[name].dtype], list(tensors[name].shape)] for name in names],
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    seen = hashlib.sha256(len(text).to_bytes(8, "little") + text)
    for name in names:
        seen.update(tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return f"sha256:{seen.hexdigest()}"
