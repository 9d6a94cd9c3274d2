"""LayerFacts: what `GET /v1/layers` tells of one layer, as far as a load needs it."""

from __future__ import annotations

import dataclasses
from typing import Any

BYTES_OF_A_NUMBER = 13
"""As text in a list: sign, eight digits or so, an exponent now and then, a comma."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerFacts:
    """Widths in features; limits as the target has them for one request."""

    name: str
    digest: str
    query_width: int
    key_width: int
    value_width: int
    num_heads: int
    numerics: dict[str, Any]
    max_body_bytes: int
    max_tokens: int
    max_cells: int

    @classmethod
    def read(cls, told: dict[str, Any]) -> LayerFacts:
        limits = told["limits"]
        return cls(
            told["name"],
            told["digest"],
            told["query_width"],
            told["key_width"],
            told["value_width"],
            told["num_heads"],
            told["numerics"],
            limits["body_bytes"],
            limits["tokens"],
            limits["cells"],
        )

    def widths(self) -> dict[str, int]:
        """The tensors that a request must bring: a key or value of another width cannot be the query's."""
        found = {"query": self.query_width}
        if self.key_width != self.query_width:
            found["key"] = self.key_width
        if self.value_width != self.key_width:
            found["value"] = self.value_width
        return found

    @property
    def max_rows(self) -> int:
        """Rows of the longest request that fits as nested lists, the largest form."""
        by_body = self.max_body_bytes * 9 // 10 // (BYTES_OF_A_NUMBER * sum(self.widths().values()))
        by_cells = int((self.max_cells // self.num_heads) ** 0.5)
        return max(1, min(by_body, self.max_tokens // 2, by_cells))
