"""Items that wait: what the policy needs of a job and nothing else, with strategies that draw them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count

from hypothesis import strategies as st

from service.batching.job import Cost
from service.batching.policy import BatchLimits, Lanes

WIDE = BatchLimits(max_requests=10**6, max_tokens=10**9, max_cells=10**12, max_weights_bytes=10**12)


def cost(tokens: int = 1, *, cells: int = 1, weights_bytes: int = 0, input_bytes: int = 1, flops: int = 1) -> Cost:
    return Cost(
        sequences=1, tokens=tokens, cells=cells, weights_bytes=weights_bytes, input_bytes=input_bytes, flops=flops
    )


@dataclass(eq=False)
class Item:
    lane: Hashable = "a"
    cost: Cost = field(default_factory=cost)
    caller: Hashable = None
    number: int = field(default_factory=count().__next__)

    def __repr__(self) -> str:
        return f"{self.lane}{self.number}"


def lanes_of(items) -> Lanes[Item]:
    lanes: Lanes[Item] = Lanes()
    for item in items:
        lanes.append(item)
    return lanes


def drained(lanes: Lanes[Item], limits: BatchLimits) -> list[list[Item]]:
    batches = []
    while batch := lanes.take(limits):
        batches.append(batch)
    return batches


def limits(**changes: int) -> BatchLimits:
    values = dict(max_requests=10**6, max_tokens=10**9, max_cells=10**12, max_weights_bytes=10**12) | changes
    return BatchLimits(**values)


costs = st.builds(
    cost,
    st.integers(1, 60),
    cells=st.integers(1, 60),
    weights_bytes=st.integers(0, 60),
    input_bytes=st.integers(0, 99),
    flops=st.integers(0, 10**9),
)
items = st.lists(st.builds(Item, st.sampled_from("abcd"), costs), max_size=40)
some_limits = st.builds(
    BatchLimits,
    max_requests=st.integers(1, 8),
    max_tokens=st.integers(1, 90),
    max_cells=st.integers(1, 90),
    max_weights_bytes=st.integers(1, 90),
)


def keeps(batch: list[Item], bounds: BatchLimits) -> bool:
    return (
        len(batch) <= bounds.max_requests
        and sum(item.cost.tokens for item in batch) <= bounds.max_tokens
        and sum(item.cost.cells for item in batch) <= bounds.max_cells
        and sum(item.cost.weights_bytes for item in batch) <= bounds.max_weights_bytes
    )
