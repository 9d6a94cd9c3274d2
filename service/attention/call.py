"""Call and Answer: the input of one request to a layer, and its result.

Legend: B sequences, L query rows, S key rows, D model width. Invariants: `wire/` checks a call before it exists, so
`attention/` trusts its shapes. A call holds everything that its answer depends on and nothing of other calls.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch

from service.attention.masks import CombinedMask


@dataclasses.dataclass(frozen=True, slots=True)
class WeightsWanted:
    """Selects the attention weights to return; `heads` and `queries` None = all, in order. Only form "top_k" has a `k`."""

    form: Literal["heads", "mean", "top_k"]
    k: int | None = None
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32


class Call(NamedTuple):
    """One attention call: query [B, L, Dq]; key [B, S, Dk], None = the query; value [B, S, Dv], None = the key."""

    layer: str
    query: torch.Tensor
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    mask: CombinedMask | None = None
    weights: WeightsWanted | None = None

    @property
    def is_float64(self) -> bool:
        """A float64 query computes in float64, any other in the layer's dtype."""
        return self.query.dtype == torch.float64

    @property
    def is_self_attention(self) -> bool:
        return self.key is None and self.value is None

    @property
    def source(self) -> torch.Tensor:
        """The tensor that the keys are projected from."""
        return self.query if self.key is None else self.key

    def sequences(self) -> list[Call]:
        """Split the call into calls of one sequence each."""
        parts = []
        for b in range(self.query.shape[0]):
            key, value = (None if x is None else x[b : b + 1] for x in (self.key, self.value))
            mask = None if self.mask is None else self.mask.of_sequence(b)
            parts.append(self._replace(query=self.query[b : b + 1], key=key, value=value, mask=mask))
        return parts


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """The k largest weights of each row: values and int32 indices [B, N', L', k], and the mass not returned [B, N', L']."""

    values: torch.Tensor
    indices: torch.Tensor
    rest: torch.Tensor


Weights = torch.Tensor | TopK


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Output [B, L, D] in the query's dtype; weights [B, N', L', S] (form "heads"), [B, L', S] ("mean"), or TopK."""

    output: torch.Tensor
    weights: Weights | None = None
