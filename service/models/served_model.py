"""Served model: a model on the engine over the served layers, and the self-check of an encoder.

Invariants: A served model holds the layers that it computes with, so that a request is answered by one version of them. Its name
among layers begins with `models/`, which no layer's does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from service.attention.call import Call, WeightsWanted
from service.attention.engine import LoadedLayer, QueryCall
from service.attention.self_check import RATED, checks, rated
from service.errors import LayerError, LayerNotLoaded
from service.layers.catalog import Catalog, ServedLayer
from service.models.encoder import Encoder, EncoderCall, placeholder
from service.models.stored_model import ModelAbout
from service.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class ServedModel:
    """`layers` are those that its encoder computes with; `name` is its label among layers in lanes, metrics and logs."""

    about: ModelAbout
    tokenizer: Tokenizer
    layers: Sequence[ServedLayer]
    loaded: LoadedLayer
    layer_set: str = ""

    @property
    def name(self) -> str:
        return f"models/{self.about.name}"

    @property
    def digest(self) -> str:
        return self.about.digest

    @property
    def encoder(self) -> Encoder:
        (found,) = self.loaded.variants.values()
        assert isinstance(found, Encoder), "a model's variant is an encoder. This is a bug."
        return found

    def fits(self, catalog: Catalog) -> bool:
        """Return whether these layers are still served, and of the set that the model's file is of."""
        return self.layer_set == catalog.layer_set and all(
            catalog.layers.get(layer.name) is layer for layer in self.layers
        )

    def output_bytes(self, call: QueryCall) -> int:
        """Return the bytes of the output or the states [K, L, D], in float32."""
        return call.query.shape[0] * call.query.shape[1] * self.about.options.width * call.query.element_size()


class ModelState(NamedTuple):
    """What is known of a model: what its file says, its layers if they are served, and why it cannot be used now."""

    name: str
    about: ModelAbout | None
    layers: Sequence[ServedLayer]
    fault: str | None


def find_layers(about: ModelAbout, catalog: Catalog) -> list[ServedLayer]:
    """Return the model's layers in order; raise LayerError if one is not served, or in another version."""
    for name, digest in about.layers:
        if (layer := catalog.layers.get(name)) is None or layer.digest != digest:
            why = "is not served" if layer is None else "is served in another version"
            raise LayerError(
                f'model "{about.name}": its layer "{name}" {why}; load that layer, or import the model again'
            )
    return [catalog.layers[name] for name, _ in about.layers]


def sample_call(encoder: Encoder, length: int, weights: WeightsWanted | None = None) -> EncoderCall:
    """Return a call of the last layer, on the first ids of the vocabulary."""
    options = encoder.options
    ids = torch.arange(min(length, options.max_tokens)) % options.vocabulary
    attend = Call(placeholder(len(ids), options.width), weights=weights)
    return EncoderCall(ids, torch.zeros_like(ids), encoder.depth - 1, attend)


@checks.register
def _(encoder: Encoder) -> Iterator[bool]:
    for length in (1, 14):
        calls = [sample_call(encoder, length, weights) for weights in (None, WeightsWanted("heads"))]
        alone, *together = (answer.output for answer in encoder.forward([calls[0], *calls]))
        if not alone.isfinite().all():
            raise LayerNotLoaded("its hidden states are not finite in the service's dtype")
        yield all(torch.equal(alone, output) for output in together)


@rated.register
def _(encoder: Encoder) -> tuple[Sequence[EncoderCall], int]:
    sample = sample_call(encoder, RATED[2])
    call = sample._replace(attend=None, states=(encoder.depth,))
    return [call], encoder.flops(len(call.ids), encoder.depth)
