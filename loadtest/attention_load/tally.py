"""Tally: what became of the requests, by slot of time, small enough to be sent from a worker to its master.

Laws: latency stands for right answers alone, a refusal and an error have none; a slot is a span of the wall clock, so that
tallies of several processes add up and a phase can be cut out of their sum; buckets grow by 1 %, so a quantile is never told
too low and at most 1 % too high; what `merge` takes is what `to_message` gave.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

GROWTH = math.log(1.01)
MAX_EXAMPLES = 10


class Outcome(enum.Enum):
    RIGHT = "right"
    REFUSED = "refused"
    FAILED = "failed"
    WRONG = "wrong"
    """It was answered, and with other bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settled:
    """One request; status 0: no answer. `is_good`: right and within the latency that goodput asks for."""

    name: str
    status: int
    outcome: Outcome
    latency_ms: float
    is_good: bool = False
    was_checked: bool = False
    told: str = ""


@dataclasses.dataclass(slots=True)
class Slot:
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    buckets: Counter[int] = dataclasses.field(default_factory=Counter)

    def merge(self, other: Slot) -> None:
        self.counts.update(other.counts)
        self.buckets.update(other.buckets)

    @property
    def total(self) -> int:
        return sum(self.counts[outcome.value] for outcome in Outcome)

    @property
    def failed(self) -> int:
        return self.counts[Outcome.FAILED.value] + self.counts[Outcome.WRONG.value]

    def quantile_ms(self, share: float) -> float | None:
        """Upper edge of the bucket that holds it; None where nothing was answered."""
        wanted, seen = share * self.buckets.total(), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= wanted:
                return math.exp(bucket * GROWTH)
        return None


class Tally:
    def __init__(self, slot_s: float = 0.5) -> None:
        self.slot_s = slot_s
        self.slots: dict[int, Slot] = {}
        self.statuses: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.checked = 0
        self.wrong = 0
        self.examples: list[str] = []

    def add(self, settled: Settled, at_s: float) -> None:
        slot = self.slots.setdefault(math.floor(at_s / self.slot_s), Slot())
        slot.counts[settled.outcome.value] += 1
        if settled.outcome is Outcome.RIGHT:
            slot.counts["good"] += settled.is_good
            slot.buckets[math.ceil(math.log(max(settled.latency_ms, 0.01)) / GROWTH)] += 1
        self.statuses[str(settled.status)] += 1
        self.names[settled.name] += 1
        self.checked += settled.was_checked
        self.wrong += settled.outcome is Outcome.WRONG
        if settled.told:
            self._keep([settled.told])

    def to_message(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "slots": {number: [dict(slot.counts), dict(slot.buckets)] for number, slot in self.slots.items()},
            "statuses": dict(self.statuses),
            "names": dict(self.names),
            "checked": self.checked,
            "wrong": self.wrong,
            "examples": self.examples,
        }

    def merge(self, message: dict[str, Any]) -> None:
        for number, (counts, buckets) in message["slots"].items():
            self.slots.setdefault(number, Slot()).merge(Slot(Counter(counts), Counter(buckets)))
        self.statuses.update(message["statuses"])
        self.names.update(message["names"])
        self.checked += message["checked"]
        self.wrong += message["wrong"]
        self._keep(message["examples"])

    def between(self, begin_s: float, end_s: float) -> tuple[Slot, float]:
        """The sum of the slots that lie wholly in this span, and how many seconds they are."""
        numbers = range(math.ceil(begin_s / self.slot_s), math.floor(end_s / self.slot_s))
        return self._sum(self.slots[n] for n in numbers if n in self.slots), len(numbers) * self.slot_s

    def whole(self) -> tuple[Slot, float]:
        """The sum of all slots, and the seconds from the first to the last."""
        slots = max(self.slots, default=0) - min(self.slots, default=1) + 1
        return self._sum(self.slots.values()), slots * self.slot_s

    def _sum(self, slots: Iterable[Slot]) -> Slot:
        total = Slot()
        for slot in slots:
            total.merge(slot)
        return total

    def _keep(self, told: Iterable[str]) -> None:
        """A few different ones are enough to see what is wrong."""
        for text in told:
            if text not in self.examples and len(self.examples) < MAX_EXAMPLES:
                self.examples.append(text)
