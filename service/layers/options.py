"""Options: what a checkpoint's config says of the model of one layer, and what that model's class says of the rest.

Invariants: The section of the config that names one of the family's models governs; without one, the whole config. Class defaults
count only with such a section, because a number that nothing records is not guessed. null is a value.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping

from service.errors import LayerError
from service.layers.families import plain
from service.layers.family import Candidate, Family
from service.layers.wording import MAX_NAME, bounded, quoted

Config = Mapping[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    said: Config
    defaults: Config = dataclasses.field(default_factory=dict)

    def get(self, name: str) -> object:
        return self.said[name] if name in self.said else self.defaults.get(name)

    def number(self, name: str) -> float:
        """Return a number above 0; raise LayerError if nothing says it, or if it is none."""
        if self.get(name) is None:
            raise LayerError(f"nothing says {name}; it is read from the config.json in or beside the source")
        return positive(name, self.get(name))

    def count(self, name: str | int) -> int:
        value = self.number(name) if isinstance(name, str) else name
        if value != int(value):
            raise LayerError(f"{name} in config.json must be a whole number")
        return int(value)


def positive(name: str, value: object) -> float:
    """Return the number; raise LayerError unless it is finite and above 0."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**53:
        return value
    raise LayerError(f"{name} in config.json must be a number above 0, not {shown(value)}")


def shown(value: object) -> str:
    return bounded(ascii(value), MAX_NAME)


def agreed(found: Mapping[str, object]) -> object:
    """Return the one value that all names give, None if there is none; raise LayerError if they contradict each other."""
    values = list(found.values())
    if any(value != values[0] for value in values):
        listing = ", ".join(f"{quoted(name)} {shown(value)}" for name, value in found.items())
        raise LayerError(f"config.json contradicts itself: {listing}")
    return values[0] if values else None


def sections(config: Config, without: frozenset[str] = frozenset()) -> Iterator[tuple[str, Config]]:
    """Yield the config and each mapping inside it, with the beginning of the names of its options."""
    waiting: deque[tuple[str, object]] = deque([("", config)])
    while waiting:
        path, value = waiting.popleft()
        if isinstance(value, Mapping):
            yield path, value
            # label2id has names of classes, which may be any words.
            waiting += [(f"{path}{key}.", inner) for key, inner in value.items() if key not in {"label2id", *without}]
        elif isinstance(value, list | tuple):
            waiting += [(path, inner) for inner in value]


def _models(config: Config) -> Iterator[tuple[str, str, Config]]:
    """Yield each `model_type` of the config in plain form, after the place of its section and before the section."""
    for path, section in sections(config):
        if isinstance(model := section.get("model_type"), str):
            yield path, plain(model), section


def models(config: Config) -> set[str]:
    return {model for _, model, _ in _models(config)}


def governing(family: Family, prefix: str, config: Config) -> Config | None:
    """Return the section of the family's model; of several, the one whose name the prefix has."""
    known = {plain(model) for model in family.models}
    found = [(path, section) for path, model, section in _models(config) if model in known]
    named = [section for path, section in found if path.partition(".")[0].removesuffix("_config") in prefix.split(".")]
    return next(iter(named or [section for _, section in found]), None)


def options_of(chosen: Candidate, config: Config) -> Options:
    section = governing(chosen.family, chosen.prefix, config)
    return Options(config) if section is None else Options(section, chosen.family.defaults)
