"""Request-template cache: skips repeated checks of binary requests that differ only in the values of tensors.

Callers send the same few shapes repeatedly. Apart from the values, the checks of a request depend only on the layer and on the
header and length of its body. Invariants: A template comes from a request that passed every check and has no masks, because with
masks the cost and the outcome depend on values. Every value of every request is checked. No template keeps a tensor.
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
from service.wire.safetensors_codec import (
    MAX_REMEMBERED_BYTES,
    NUM_REMEMBERED,
    header_of,
    parse_safetensors,
    read_header,
)
from service.wire.tensor_values import TensorField, bytes_to_tensor
from service.wire.tensors import TensorForm


class Place(NamedTuple):
    """The position of one tensor in the body; `shape` is as the caller wrote it, `batch_shape` is [B, L, D]."""

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
        """Return the tensor; raises NonFinite."""
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
        """Return the template of `request`; `entries` are the tensors of its header."""
        call = request.call
        query = Place.of(call.query, QUERY, entries["query"])
        key = None if call.key is None else Place.of(call.key, KEY, entries["key"])
        value = None if call.value is None else Place.of(call.value, VALUE, entries["value"])
        return cls(call.layer, query, key, value, call.weights, request.cost, request.is_batch, request.form)

    def read(self, body: bytearray) -> CheckedRequest:
        """Return the request in `body`, whose header is the one of this template; raises NonFinite."""
        view = memoryview(body)
        query = self.query.read(view)
        key = None if self.key is None else self.key.read(view)
        value = None if self.value is None else self.value.read(view)
        call = Call(self.layer, query, key, value, None, self.weights)
        return CheckedRequest(call, self.cost, 0, self.is_batch, self.form)


class RequestTemplates:
    """Decodes and checks safetensors bodies, faster if a template is known; one cache for all layers and threads."""

    def __init__(self, limits: RequestLimits, max_json_depth: int, max_numbers: int) -> None:
        self._limits = limits
        self._max_json_depth = max_json_depth
        self._max_numbers = max_numbers
        self._known: dict[tuple[str, str, bytes, int], RequestTemplate] = {}

    @property
    def num_known(self) -> int:
        """The number of cached templates, at most NUM_REMEMBERED."""
        return len(self._known)

    def read(self, body: bytearray, name: str, digest: str, spec: LayerSpec) -> CheckedRequest:
        """Return the request for layer `name`; the `digest` identifies its spec.
        Raises the errors of `parse_safetensors`, then those of `check_request`.
        """
        header = header_of(body)
        key = (name, digest, header, len(body))
        if (pattern := self._known.get(key)) is not None:
            return pattern.read(body)
        document = parse_safetensors(body, max_depth=self._max_json_depth, max_numbers=self._max_numbers)
        request = check_request(document, name, spec, self._limits)
        if request.call.mask is None and len(header) <= MAX_REMEMBERED_BYTES:
            if len(self._known) >= NUM_REMEMBERED:
                self._known.clear()
            self._known[key] = RequestTemplate.of(request, read_header(header, len(body)).tensors)
        return request
