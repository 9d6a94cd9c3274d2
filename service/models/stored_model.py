"""Stored model: the companion file `<name>.model` of an encoder, beside the files of its layers in the layer directory.

Invariants: A StoredModel that exists is complete: it has exactly the tensors that its options demand, all finite, and their
digest. Its layers are those of the directory, by name and digest; their tensors are not in it. Nothing in a file is trusted when
it is read, and no file is mapped.
Format: safetensors; metadata: one key `model`, a JSON object of `ModelAbout` and `format_version`. The tokenizer.json is the
tensor `tokenizer` of bytes. The digest is that of `layers/store.py`, over the options, the layers' digests and all tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.nn.functional as F

from service.errors import LayerError
from service.layers.directory import NAME, Directory, check_name
from service.layers.safetensors_file import FILE_DTYPES, Header, parse_object, read_header, read_tensor
from service.layers.store import DIGEST, check_shapes, check_source, digest_of
from service.layers.wording import quoted

FORMAT_VERSION = 1
MAX_MODEL_HEADER_BYTES = 2**20  # 24 layers have 30 KiB
TOKENIZER = "tokenizer"
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class LayerRef(NamedTuple):
    name: str
    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class ModelOptions:
    """Sizes of an encoder, and what it computes; `position_offset` is the position of the first token.

    `embedding_width` is `width` unless a projection follows the embeddings. `types` is 0 without embeddings of types.
    """

    width: int
    embedding_width: int
    inner_width: int
    vocabulary: int
    positions: int
    position_offset: int
    types: int
    eps: float
    activation: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name in {"types", "position_offset"} else 1
            if field.type == "int" and (type(value) is not int or value < least):
                raise LayerError(f"the model's {field.name} must be a whole number of at least {least}")
        if not isinstance(self.eps, float) or not 0 < self.eps < 1:
            raise LayerError("the model's eps must be a decimal number between 0 and 1")
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            raise LayerError(f"the model's activation must be one of {', '.join(ACTIVATIONS)}")
        if self.max_tokens < 1:
            raise LayerError("the model has no position for a token")

    @property
    def max_tokens(self) -> int:
        return self.positions - self.position_offset

    def tensor_shapes(self, depth: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by its name, except `tokenizer`'s; weights are [out, in], as a torch Linear's."""
        width, embedding, inner = self.width, self.embedding_width, self.inner_width
        rows = {"word": self.vocabulary, "position": self.positions, "type": self.types}
        modules: dict[str, tuple[int, ...]] = {"embeddings.norm": (embedding,)}
        if self.is_projected:
            modules["embeddings.project"] = width, embedding
        for n in range(depth):
            modules |= {f"{n}.attention_norm": (width,), f"{n}.norm": (width,)}
            modules |= {f"{n}.inner": (inner, width), f"{n}.outer": (width, inner)}
        tables = {f"embeddings.{name}": (count, embedding) for name, count in rows.items() if count}
        weights = {f"{name}.weight": shape for name, shape in modules.items()}
        return tables | weights | {f"{name}.bias": shape[:1] for name, shape in modules.items()}

    @property
    def is_projected(self) -> bool:
        return self.embedding_width != self.width


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelAbout:
    """What a model's file says of it without its tensors; `digest` is checked only by `StoredModel`."""

    name: str
    family: str
    source: str
    options: ModelOptions
    layers: tuple[LayerRef, ...]
    digest: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        check_source(self.source)
        refs_fit = all(NAME.fullmatch(name) and DIGEST.fullmatch(digest) for name, digest in self.layers)
        if not self.layers or not refs_fit or NAME.fullmatch(self.family) is None:
            raise LayerError("the model's family and layers must be names, and each layer must have a digest")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredModel(ModelAbout):
    """A whole model, on the CPU; the digest is computed if none is given."""

    tensors: Mapping[str, torch.Tensor]
    tokenizer: bytes

    def __post_init__(self) -> None:
        super().__post_init__()
        found = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        check_shapes(self.options.tensor_shapes(len(self.layers)), found)
        if not self.tokenizer:
            raise LayerError("the model's tokenizer is empty")
        for name, tensor in self.tensors.items():
            # float32 is what a forward pass computes in
            if tensor.dtype not in FILE_DTYPES.values() or not torch.isfinite(tensor.float()).all():
                raise LayerError(f"{quoted(name)} must be of {', '.join(FILE_DTYPES)}, and finite in float32")
        header = {"model": {"options": dataclasses.asdict(self.options), "layers": [ref.digest for ref in self.layers]}}
        computed = digest_of(header, self.all_tensors)
        if self.digest not in {"", computed}:
            raise LayerError("the recorded digest does not match the tensors and the options: the file was changed")
        object.__setattr__(self, "digest", computed)

    @property
    def all_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, and the tokenizer as one."""
        return {**self.tensors, TOKENIZER: torch.frombuffer(bytearray(self.tokenizer), dtype=torch.uint8)}


class ModelStore(Directory):
    """The models of a layer directory."""

    kind = "model"
    suffix = ".model"

    def about(self, name: str) -> ModelAbout:
        """Return what the header says; raise LayerMissing, LayerNotLoaded or LayerError as `Store.load` does."""
        with self._read(name) as (_, _, found):
            return found

    def load(self, name: str) -> StoredModel:
        """Return the whole model, checked; raises the same."""
        with self._read(name) as (file, header, found):
            tensors = {key: read_tensor(file, key, entry) for key, entry in header.tensors.items() if key != TOKENIZER}
            tokenizer = read_tensor(file, TOKENIZER, header.tensors[TOKENIZER], {"U8": torch.uint8})
            return StoredModel(**vars(found), tensors=tensors, tokenizer=tokenizer.numpy().tobytes())

    def save(self, model: StoredModel, *, replace: bool = True) -> Path:
        """Write or replace the model's file; without `replace` raise LayerExists if it is there."""
        fields = {name: getattr(model, name) for name in ("family", "source", "digest")}
        fields |= {"options": dataclasses.asdict(model.options), "layers": [ref._asdict() for ref in model.layers]}
        text = json.dumps({**fields, "format_version": FORMAT_VERSION}, sort_keys=True, allow_nan=False)
        raw = safetensors.torch.save(model.all_tensors, metadata={"model": text})
        return self.write(model.name, raw, replace=replace)

    @contextlib.contextmanager
    def _read(self, name: str) -> Iterator[tuple[io.BufferedReader, Header, ModelAbout]]:
        """Yield the file, its header with the entries that the options demand, and what it says."""
        with self.opened(name) as file:
            header = read_header(file, max_bytes=MAX_MODEL_HEADER_BYTES)
            if header.metadata.keys() != {"model"}:
                raise LayerError("not a stored model: the file's metadata must have the one key model")
            raw = header.metadata["model"].encode("utf-8", "surrogatepass")
            found = _about(name, parse_object(raw, "the model's metadata", LayerError))
            shapes = {key: entry.shape for key, entry in header.tensors.items()}
            tokenizer = shapes.pop(TOKENIZER, ())
            if len(tokenizer) != 1:
                raise LayerError("the model has no tokenizer, a list of bytes")
            check_shapes(found.options.tensor_shapes(len(found.layers)), shapes)
            yield file, header, found


def _about(name: str, fields: dict[str, Any]) -> ModelAbout:
    version = fields.pop("format_version", None)
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise LayerError(f"this release reads models of format_version {FORMAT_VERSION} only")
    try:
        options = ModelOptions(**fields.pop("options"))
        layers = tuple(LayerRef(**ref) for ref in fields.pop("layers"))
        if not all(isinstance(text, str) for text in (*fields.values(), *(text for ref in layers for text in ref))):
            raise LayerError("the model's family, source, digest and layers must be texts")
        if DIGEST.fullmatch(fields["digest"]) is None:
            raise LayerError("the model's digest is not one")
        return ModelAbout(name=name, options=options, layers=layers, **fields)
    except (KeyError, TypeError) as error:
        raise LayerError("the model's metadata lacks a field or has an unknown one") from error
