"""Call and Answer: the input of one request to a layer or to attention without a layer, and its result.

Legend: B sequences, L query rows, S key rows, P of them past, D model width, N heads, G key/value heads, H head width, V value
head width; N' and L' are the heads and rows that a call selects. Invariants: `wire/` checks a call before it exists, so
`attention/` trusts its shapes. A call holds everything that its answer depends on and nothing of other calls.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch

from service.attention.masks import CombinedMask

PER_SEQUENCE = ("query", "key", "value", "past_key", "past_value")
POSITIONS = ("positions", "key_positions")
# Scores are multiplied by the scale, then capped, then masked.
Stage = Literal["scaled", "capped", "masked"]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightsWanted:
    """Selects the attention weights to return, or the scores at a `stage`, which have the form "heads".

    Form "contributions" has the shape of "heads": the length of what each key adds to the head's output after the output
    projection (Kobayashi et al. 2020). `heads` and `queries` None = all, in order. Only form "top_k" has a `k`.
    """

    form: Literal["heads", "mean", "top_k", "contributions"]
    k: int | None = None
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    stage: Stage | None = None


class Call(NamedTuple):
    """One attention call: query [B, L, Dq]; key [B, S, Dk], None = the query; value [B, S, Dv], None = the key.

    `positions` [B|1, L] and `key_positions` [B|1, P + S], int64, are both given or both None, which means 0, 1, … each. The
    layer's window is in `mask`. `past_key` [B, G, P, H] and `past_value` [B, G, P, V] come together; they stand before the keys
    of the call, normalised and rotated, as an answer's present. A present has the bits that the whole sequence would give it; the
    output of a row behind a past is that row's of the whole sequence within rounding (1e-6 in float32), because a kernel sums
    over rows of another shape in another order.
    """

    query: torch.Tensor
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    mask: CombinedMask | None = None
    weights: WeightsWanted | None = None
    scores: WeightsWanted | None = None
    has_lse: bool = False
    has_entropy: bool = False
    positions: torch.Tensor | None = None
    key_positions: torch.Tensor | None = None
    past_key: torch.Tensor | None = None
    past_value: torch.Tensor | None = None
    has_present: bool = False

    @property
    def asks_more(self) -> bool:
        """Whether the call requests anything beside its output."""
        return self.weights is not None or self.scores is not None or self.has_lse or self.has_entropy

    @property
    def is_self_attention(self) -> bool:
        return self.key is None and self.value is None

    @property
    def source(self) -> torch.Tensor:
        """The tensor that the keys are projected from."""
        return self.query if self.key is None else self.key

    @property
    def num_past(self) -> int:
        return 0 if self.past_key is None else self.past_key.shape[2]

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions of the query rows [B|1, L] and of all keys [B|1, P + S]."""
        if self.positions is not None and self.key_positions is not None:
            return self.positions, self.key_positions
        return torch.arange(self.query.shape[1])[None], torch.arange(self.num_past + self.source.shape[1])[None]

    def sequences(self) -> list[Call]:
        """Split the call into calls of one sequence each."""
        parts = []
        for b in range(self.query.shape[0]):
            fields = {name: x[b : b + 1] for name in PER_SEQUENCE if (x := getattr(self, name)) is not None}
            places = {name: x[b % len(x)][None] for name in POSITIONS if (x := getattr(self, name)) is not None}
            mask = None if self.mask is None else self.mask.of_sequence(b)
            parts.append(self._replace(**fields, **places, mask=mask))
        return parts


class AttentionCall(NamedTuple):
    """Attention without a layer: query [B, N, L, H], key [B, G, S - P, H], value [B, G, S - P, V].

    Query head n uses key and value head n // (N / G). `past_key` [B, G, P, H] and `past_value` [B, G, P, V] stand before key and
    value. `softcap` c turns a score s into c·tanh(s/c), before the masks. `sinks` [N] are logits that count only in the softmax's
    denominator. `mask` covers the S keys.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float | None = None
    past_key: torch.Tensor | None = None
    past_value: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask: CombinedMask | None = None
    weights: WeightsWanted | None = None
    scores: WeightsWanted | None = None
    has_lse: bool = False
    has_entropy: bool = False
    has_present: bool = False
    rows_first: bool = False
    """Whether the output lies in memory as [B, L, N, V], which is the layout of the request."""

    @property
    def is_explicit(self) -> bool:
        """Whether a sequence is computed by the definition, block by block.

        torch's fused kernel has neither softcap nor sinks, and at unequal head widths it copies each key for each query head.
        """
        return self.softcap is not None or self.sinks is not None or self.query.shape[3] != self.value.shape[3]


class TopK(NamedTuple):
    """The k largest weights of each row: values and int32 indices [B, N', L', k], and the sum of the others [B, N', L']."""

    values: torch.Tensor
    indices: torch.Tensor
    rest: torch.Tensor


Weights = torch.Tensor | TopK


class Extras(NamedTuple):
    """What a call requests beside its output, as in an Answer; None for what it does not request."""

    weights: Weights | None = None
    scores: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    present_key: torch.Tensor | None = None
    present_value: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Output [B, L, D], or [B, N, L, V] without a layer, in the query's dtype, and what else the call requests.

    Weights [B, N', L', S] (forms "heads" and "contributions"), [B, L', S] ("mean"), or TopK; scores [B, N', L', S]; lse
    [B, N, L], the natural log-sum-exp of the masked scores; entropy [B, N, L], of each row of weights in nats. present_key
    [B, G, S, H] and present_value [B, G, S, V]: the keys with their past, without a layer in the dtype of the key, with one in
    that of the query, normalised and rotated.
    """

    output: torch.Tensor
    weights: Weights | None = None
    scores: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    present_key: torch.Tensor | None = None
    present_value: torch.Tensor | None = None
