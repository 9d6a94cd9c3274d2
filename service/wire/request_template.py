"""RequestTemplates: what binary requests have in common that differ in nothing but the values of their tensors.

Callers send the same few shapes again and again, and what is checked of a request beside its values depends on the header of its
body and on the layer alone. Laws: a pattern is learnt from a request that went the whole way through the desk and was found good,
and only from one without masks, whose cost and fate depend on values; every value of every request is looked at; no pattern
keeps a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from service.attention.call import Call, WeightsWanted
from service.attention.spec import LayerSpec
from service.batching.job import Cost
from service.layers.safetensors_header import TensorEntry
from service.wire.attend_request import KEY, QUERY, VALUE, CheckedRequest, RequestLimits, check_request
from service.wire.safetensors_document import (
    MAX_REMEMBERED_BYTES,
    NUM_REMEMBERED,
    header_of,
    parse_safetensors,
    read_header,
)
from service.wire.schemas import checked_request
from service.wire.tensor_values import TensorField, bytes_to_tensor
from service.wire.tensors import TensorForm


class Place(NamedTuple):
    """Where one tensor lies in the body: `shape` is as the caller wrote it, `batch_shape` is [B, L, D]."""

    field: TensorField
    dtype: torch.dtype
    shape: tuple[int, ...]
    batch_shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor, field: TensorField, entry: TensorEntry) -> Place:
        return cls(field, tensor.dtype, entry.shape, tuple(tensor.shape), entry.begin, entry.end)

    def read(self, body: memoryview) -> torch.Tensor:
        """Raises NonFinite."""
        data = body[self.begin : self.end]
        return bytes_to_tensor(data, self.field, self.dtype, self.shape, self.batch_shape)


class RequestTemplate(NamedTuple):
    """A checked request without its tensors."""

    layer: str
    query: Place
    key: Place | None
    value: Place | None
    weights: WeightsWanted | None
    cost: Cost
    is_batch: bool
    form: TensorForm

    @classmethod
    def of(cls, request: CheckedRequest, entries: Mapping[str, TensorEntry]) -> RequestTemplate:
        """`entries` are those of the header that the request came with."""
        call = request.call
        query = Place.of(call.query, QUERY, entries["query"])
        key = None if call.key is None else Place.of(call.key, KEY, entries["key"])
        value = None if call.value is None else Place.of(call.value, VALUE, entries["value"])
        return cls(call.layer, query, key, value, call.weights, request.cost, request.is_batch, request.form)

    def read(self, body: bytearray) -> CheckedRequest:
        """The request that `body` is, whose header is this pattern's; raises NonFinite."""
        view = memoryview(body)
        query = self.query.read(view)
        key = None if self.key is None else self.key.read(view)
        value = None if self.value is None else self.value.read(view)
        call = Call(self.layer, query, key, value, None, self.weights)
        return CheckedRequest(call, self.cost, 0, self.is_batch, self.form)


class RequestTemplates:
    """The way of a safetensors body through the desk, shorter where its pattern is known; one for all layers and threads."""

    def __init__(self, limits: RequestLimits, max_json_depth: int, max_numbers: int) -> None:
        self._limits = limits
        self._max_json_depth = max_json_depth
        self._max_numbers = max_numbers
        self._known: dict[tuple[str, str, bytes, int], RequestTemplate] = {}

    @property
    def num_known(self) -> int:
        """How many patterns are known, at most NUM_REMEMBERED."""
        return len(self._known)

    def read(self, body: bytearray, name: str, digest: str, spec: LayerSpec) -> CheckedRequest:
        """The request for layer `name`, whose `digest` stands for its spec; raises what `check_request` and before it
        `parse_safetensors` and `checked_request` raise.
        """
        header = header_of(body)
        key = (name, digest, header, len(body))
        if (pattern := self._known.get(key)) is not None:
            return pattern.read(body)
        document = checked_request(
            parse_safetensors(body, max_depth=self._max_json_depth, max_numbers=self._max_numbers)
        )
        request = check_request(document, name, spec, self._limits)
        if request.call.mask is None and len(header) <= MAX_REMEMBERED_BYTES:
            if len(self._known) >= NUM_REMEMBERED:
                self._known.clear()
            self._known[key] = RequestTemplate.of(request, read_header(header, len(body)).tensors)
        return request
