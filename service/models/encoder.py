"""Encoder: the hidden states of a BERT-family model, computed over stored layers, and one layer's attention on them.

Legend: L tokens, D model width, K requested states. State n is in front of layer n; the last is behind the last layer.
Invariants: One sequence after another, in fresh memory, so that a call's bits depend on the call alone (P1). A layer attends
through its variant for the service's dtype, by the code that serves its own route, so that states sent there give the same bits.
Everything else is float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from service.attention import cost
from service.attention.call import Answer, Call
from service.attention.engine import LoadedLayer
from service.attention.layer import Layer
from service.attention.masks import Sizes
from service.attention.progress import stop_point
from service.errors import LayerError
from service.models.stored_model import ACTIVATIONS, StoredModel


class EncoderCall(NamedTuple):
    """One sequence: `ids` and `types` [L]. The answer is the attention of layer `layer`, or else `states`, [K, L, D].

    `attend` is the layer's call with everything but its query, whose place `placeholder` takes.
    """

    ids: torch.Tensor
    types: torch.Tensor
    layer: int = 0
    attend: Call | None = None
    states: tuple[int, ...] = ()

    @property
    def query(self) -> torch.Tensor:
        """A tensor with the first two axes and the dtype of the answer's output."""
        return placeholder(len(self.ids), 0, len(self.states)) if self.attend is None else self.attend.query


def placeholder(length: int, width: int, count: int = 1) -> torch.Tensor:
    """Return a float32 tensor [count, L, D] in the place of states, without memory of its own."""
    return torch.zeros(1, 1, 1).expand(count, length, width)


class Encoder:
    """A stored model over its loaded layers, whose digests the caller has compared; computes in float32 on `device`."""

    num_bytes: int
    dtype = torch.float32
    least_rows = 1
    is_sequential = False

    def __init__(self, stored: StoredModel, layers: Sequence[LoadedLayer], *, device: torch.device) -> None:
        self.options = stored.options
        self.device = device
        self.depth = len(layers)
        self._layers = [_checked(loaded, stored.options.width) for loaded in layers]
        self._tensors = {name: tensor.to(device, self.dtype) for name, tensor in stored.tensors.items()}
        self._activation = ACTIVATIONS[stored.options.activation]
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def forward(self, calls: Sequence[EncoderCall]) -> list[Answer]:
        """Return one answer per call, in order."""
        return [self._attended(call) if call.states == () else self._collected(call) for call in calls]

    def flops(self, length: int, depth: int) -> int:
        """Return the floating-point operations of the state in front of layer `depth`, for a sequence of `length`."""
        options, layers = self.options, [layer.spec for layer in self._layers[:depth]]
        attention = sum(cost.flops(spec, Sizes(1, spec.num_heads, length, length), None, None) for spec in layers)
        return attention + 4 * length * options.width * options.inner_width * len(layers)

    def _attended(self, call: EncoderCall) -> Answer:
        assert call.attend is not None, "a call without states attends. This is a bug."
        *_, x = self._states(call, call.layer)
        return self._layers[call.layer].forward([call.attend._replace(query=x.to("cpu"))])[0]

    def _collected(self, call: EncoderCall) -> Answer:
        found = {n: x for n, x in enumerate(self._states(call, max(call.states))) if n in call.states}
        return Answer(torch.cat([found[n] for n in call.states]).to("cpu"))

    def _states(self, call: EncoderCall, last: int) -> Iterator[torch.Tensor]:
        """Yield the states [1, L, D] in front of each layer, up to that in front of layer `last`."""
        x = self._embedded(call.ids.to(self.device), call.types.to(self.device))
        yield x
        for n, layer in enumerate(self._layers[:last]):
            stop_point()
            (attended,) = layer.forward([Call(x.to("cpu"))])
            x = self._norm(f"{n}.attention_norm", x + attended.output.to(self.device))
            x = self._norm(f"{n}.norm", x + self._linear(f"{n}.outer", self._activation(self._linear(f"{n}.inner", x))))
            yield x

    def _embedded(self, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        """Return the sum of the embeddings. With an offset (RoBERTa) the id before it is padding, which takes no position."""
        pad, tensors = self.options.position_offset - 1, self._tensors
        is_token = (ids != pad).long()
        x = tensors["embeddings.word"][ids] + tensors["embeddings.position"][is_token.cumsum(0) * is_token + pad]
        if self.options.types:  # RoBERTa's tokenizers give a pair types of which the model has only the first
            x = x + tensors["embeddings.type"][types.clamp(max=self.options.types - 1)]
        x = self._norm("embeddings.norm", x[None])
        return self._linear("embeddings.project", x) if self.options.is_projected else x

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.options.eps)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])


def _checked(loaded: LoadedLayer, width: int) -> Layer:
    """Return the layer's variant in the service's dtype; raise LayerError unless it takes and gives states of `width`."""
    layer = next(iter(loaded.variants.values()))
    assert isinstance(layer, Layer), "a model's layers are stored ones. This is a bug."
    spec = layer.spec
    widths = spec.query_width, spec.key_width, spec.value_width, spec.out_width
    if set(widths) != {width}:
        raise LayerError(f"a layer of the model has widths {', '.join(map(str, widths))}; the model has {width}")
    return layer
