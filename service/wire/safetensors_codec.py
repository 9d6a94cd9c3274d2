"""Safetensors codec: reads a request from a safetensors file and writes an answer as one; templates skip repeated checks.

The tensors of a body are those of NAMES that its kind of request takes, and `masks.<i>.values`. Its metadata has one key,
`request`: the JSON of the other fields, masks without their values; positions may stand there too. Invariants: The whole header
is checked before any tensor is read. Nothing is copied: a tensor of a request is a view of its body. Both forms of a request take
the same path from here on, so they give the same bits and the same errors. An answer's tensors of wider dtypes come first, so
that each is aligned for a reader that maps the bytes.

Apart from the values, the checks of a request depend only on the layer and on the header and length of its body, and callers
repeat few of those. Every value of every request is checked. No template keeps a tensor of a request.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
import torch

from service.attention.call import POSITIONS, Call
from service.attention.spec import LayerSpec
from service.errors import BadBinary, NonFinite, ServiceError, UnknownField
from service.layers.safetensors_file import LENGTH_BYTES, Header, HeaderReader, TensorEntry
from service.wire.attend_request import CheckedRequest, Facts, RequestLimits, check_request, float_field
from service.wire.attention_request import TENSORS
from service.wire.body_faults import unless_compressed
from service.wire.json_document import MAX_TEXT_NUMBERS, parse
from service.wire.schemas import unknown_field
from service.wire.tensor_fields import BY_SAFETENSORS, BY_TORCH, TensorField
from service.wire.tensors import bytes_of, bytes_to_tensor

NAMES = (*TENSORS, *POSITIONS)
"""Every tensor that a request of any kind may have, masks aside."""
MAX_HEADER_BYTES = 256 * 1024
# Many small values take up to 0.25 µs a byte: a header of this length, or the JSON in it, takes up to 8 ms.
LONG_HEADER_BYTES = 32 * 1024
# Reading a header costs ten times as much as a cache lookup.
NUM_REMEMBERED = 256
MAX_REMEMBERED_BYTES = 512
_MASK_VALUES = re.compile(r"masks\.(0|[1-9][0-9]{0,3})\.values")
# Other writers put `format` into the metadata of every file, and a saved request has labels for /explore; both are ignored here.
_METADATA = {"request", "format", "labels", "key_labels"}


def parse_safetensors(body: bytearray, *, max_depth: int, max_numbers: int = MAX_TEXT_NUMBERS) -> dict[str, object]:
    """Return the document in `body`. Raises BadBinary if it is not a safetensors file, UnknownField for a tensor that belongs
    to no field, and the errors of `json_document.parse` for the JSON of the other fields.
    """
    header = read_header(body)
    if header.metadata.keys() - _METADATA:
        raise UnknownField("the header's __metadata__ may have only the key request")
    document: dict[str, object] = {}
    if (text := header.metadata.get("request", "{}")) != "{}":
        try:
            document |= parse(text.encode("utf-8", "surrogatepass"), max_depth=max_depth, max_numbers=max_numbers)
        except ServiceError as error:
            words = f"__metadata__.request: {error.message}"
            raise type(error)(words, param=error.param, shown=error.shown) from None
    _check_no_values(document)
    view = memoryview(body)
    for name, entry in header.tensors.items():
        dtype, data = BY_SAFETENSORS.get(entry.dtype), view[entry.begin : entry.end]
        _add_tensor(document, name, {"dtype": dtype.name if dtype else entry.dtype, "shape": entry.shape, "data": data})
    return document


def has_long_header(body: bytearray) -> bool:
    """Return whether reading the header of `body` may hold the event loop for long."""
    return int.from_bytes(body[:LENGTH_BYTES], "little") > LONG_HEADER_BYTES


def read_header(body: bytearray) -> Header:
    try:
        length = _READER.length(body, len(body))
    except BadBinary as error:
        raise unless_compressed(body, error) from None
    text = bytes(body[LENGTH_BYTES : LENGTH_BYTES + length])
    return (_remembered if length <= MAX_REMEMBERED_BYTES else _READER.read)(text, len(body))


def _label(name: str) -> str:
    """Return a tensor's name for an error about the header if it is one of the contract's, else "a tensor"."""
    return f'"{name}"' if name in NAMES or _MASK_VALUES.fullmatch(name) else "a tensor"


_READER = HeaderReader("the body", BadBinary, MAX_HEADER_BYTES, _label)
# Parsed headers are never modified, so requests may share one.
_remembered = functools.lru_cache(NUM_REMEMBERED)(_READER.read)


def _check_no_values(document: dict[str, object]) -> None:
    """Raise UnknownField for a field in the JSON that must be a tensor of the body: it could have two values otherwise."""
    for name in TENSORS:
        if name in document:
            raise UnknownField(f'"{name}" must be a tensor of the body, not a field of its JSON', param=f"/{name}")
    masks = document.get("masks")
    for i, mask in enumerate(masks if isinstance(masks, list) else ()):
        if isinstance(mask, dict) and "values" in mask:
            words = f'the values of a mask must be the tensor "masks.{i}.values"'
            raise UnknownField(words, param=f"/masks/{i}/values")


def _add_tensor(document: dict[str, object], name: str, tensor: dict[str, object]) -> None:
    if name in NAMES:
        if name in document:
            raise UnknownField(f'"{name}" is a tensor of the body and a field of its JSON; send one', param=f"/{name}")
        document[name] = tensor
        return
    found = _MASK_VALUES.fullmatch(name)
    if found is None:
        raise unknown_field([name], (*NAMES, "masks.<i>.values"), "", "tensor")
    index, masks = int(found.group(1)), document.get("masks")
    mask = masks[index] if isinstance(masks, list) and index < len(masks) else None
    if not isinstance(mask, dict):
        raise UnknownField(f'"{name}" belongs to no entry of masks', param="/masks")
    mask["values"] = tensor


class RequestTemplate(NamedTuple):
    """A CheckedRequest without its tensors: the other fields of its call, what follows the call, and the place of each tensor.

    Both are made anew for each request, because `_replace` takes a microsecond longer for each.
    """

    fields: Mapping[str, Any]
    rest: tuple[Any, ...]
    places: Mapping[str, tuple[TensorField, slice, torch.dtype, torch.Size]]

    @classmethod
    def of(cls, request: CheckedRequest, entries: Mapping[str, TensorEntry]) -> RequestTemplate | None:
        """Return the template of `request`; `entries` are the tensors of its header.

        Return None unless each of them is a field of the call whose values need only be finite: then cost and outcome depend on
        no value. A mask, positions, and a tensor of whole numbers or booleans, are checked in each request.
        """
        fields = request.call._asdict()
        places = {
            name: (float_field(name), slice(entries[name].begin, entries[name].end), tensor.dtype, tensor.shape)
            for name, tensor in fields.items()
            if name in entries and isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        }
        # Positions of the call may be made from its shapes alone; no template keeps a tensor.
        has_positions = isinstance(fields.get("positions"), torch.Tensor)
        if request.call.mask is not None or has_positions or places.keys() != entries.keys():
            return None
        return cls(fields | dict.fromkeys(places), request[1:], places)

    def read(self, body: bytearray) -> CheckedRequest:
        """Return the request in `body`, whose header is the one of this template; raises NonFinite."""
        view = memoryview(body)
        tensors = {
            name: bytes_to_tensor(view[part], field, dtype, shape)
            for name, (field, part, dtype, shape) in self.places.items()
        }
        return CheckedRequest(Call(**{**self.fields, **tensors}), *self.rest)


class RequestTemplates:
    """Decodes and checks safetensors bodies, faster if a template is known; one cache for all layers and threads."""

    def __init__(self, limits: RequestLimits, max_json_depth: int, max_numbers: int) -> None:
        self._limits = limits
        self._max_json_depth = max_json_depth
        self._max_numbers = max_numbers
        self.known: dict[tuple[str, str, bytes, int], RequestTemplate] = {}
        """At most NUM_REMEMBERED templates, by layer, digest (which identifies its spec), and the body's header and length."""

    def read(self, body: bytearray, name: str, digest: str, spec: LayerSpec) -> CheckedRequest:
        """Return the request for layer `name`; raises the errors of `parse_safetensors`, then those of `check_request`."""
        # The key includes the header's announced length, so a body that announces a wrong one matches no template.
        length = int.from_bytes(body[:LENGTH_BYTES], "little")
        start = bytes(body[: LENGTH_BYTES + min(length, MAX_REMEMBERED_BYTES)])
        key = (name, digest, start, len(body))
        if (template := self.known.get(key)) is not None:
            try:
                return template.read(body)
            except NonFinite:
                pass  # the checks below name the value by its index in the shape that the body says
        document = parse_safetensors(body, max_depth=self._max_json_depth, max_numbers=self._max_numbers)
        request = check_request(document, name, spec, self._limits)
        if length <= MAX_REMEMBERED_BYTES and (made := RequestTemplate.of(request, read_header(body).tensors)):
            if len(self.known) >= NUM_REMEMBERED:
                self.known.clear()
            self.known[key] = made
        return request


def write_safetensors(tensors: dict[str, torch.Tensor], facts: Facts) -> list[bytes | memoryview]:
    """Return the parts of the body: length and header, then each tensor's bytes."""
    header: dict[str, Any] = {"__metadata__": {"response": orjson.dumps(facts.to_json()).decode()}}
    parts, offset = [], 0
    if len(tensors) > 1:
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    for name, tensor in tensors.items():
        data = bytes_of(tensor)
        header[name] = {
            "dtype": BY_TORCH[tensor.dtype].safetensors,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    text = orjson.dumps(header)
    text += b" " * (-len(text) % LENGTH_BYTES)  # the tensors' bytes are aligned
    return [len(text).to_bytes(LENGTH_BYTES, "little") + text, *parts]
