"""Choice: selects one attention layer of a checkpoint by family, prefix and number.

Invariants: The result is exactly one layer, or a LayerError that says how to choose. No layer is taken because it comes first.
A number means the number in the checkpoint's own names.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.errors import LayerError
from service.layers.families import FAMILY_NAMES, Candidate, find_candidates
from service.layers.source import Source
from service.layers.wording import MAX_LISTED, bounded, listed, quoted

MAX_DEPTH = 10_000


def choose(source: Source, *, family: str | None, prefix: str | None, layer: int | None) -> Candidate:
    """Return the one layer that fits. `prefix` is the path of the layer's module or a parent; with `layer` both must fit."""
    if family is not None and family not in FAMILY_NAMES:
        raise LayerError(f"the family {quoted(family)} is unknown; known families are {', '.join(FAMILY_NAMES)}")
    keys = source.keys()
    found = find_candidates(keys, family)
    if not found:
        wanted = f"no layer of the family {family}" if family else "no known family of attention layers"
        sample = keys[:: max(1, len(keys) // MAX_LISTED)][:MAX_LISTED]  # spread, because sorted neighbours are similar
        raise LayerError(f"{wanted} in its {len(keys)} keys; found keys like {listed(sample)}")
    if prefix is not None:
        found = _below(found, prefix)
    if layer is not None:
        found = _numbered(found, layer, source.config)
    if len(found) > 1:
        raise LayerError(
            f"it has {len(found)} attention layers; choose one with --layer N or --prefix P: {listed(_modules(found))}"
        )
    return found[0]


def _modules(found: list[Candidate]) -> list[str]:
    return [candidate.module.rstrip(".") for candidate in found]


def _below(found: list[Candidate], prefix: str) -> list[Candidate]:
    path = prefix.rstrip(".")
    if exact := [candidate for candidate in found if candidate.module.rstrip(".") == path]:
        return exact
    matching = [candidate for candidate in found if not path or candidate.module.startswith(f"{path}.")]
    if not matching:
        raise LayerError(
            f"no attention layer has the prefix {quoted(prefix)}; the layers are {listed(_modules(found))}"
        )
    return matching


def _numbered(found: list[Candidate], layer: int, config: Mapping[str, object] | None) -> list[Candidate]:
    first = found[0]
    if len(found) == 1 and (first.family.is_shared_by_depths or first.number is None):
        numbers = list(range(_depth(config) if first.family.is_shared_by_depths else 1))
        matching = found
    else:
        numbers = sorted({candidate.number for candidate in found if candidate.number is not None})
        matching = [candidate for candidate in found if candidate.number == layer]
    if layer not in numbers:
        span = (
            f"attention layers numbered {numbers[0]} to {numbers[-1]} ({len(numbers)} in all)"
            if numbers
            else "no attention layer with a number in its name"
        )
        raise LayerError(f"layer {bounded(str(layer), 20)} is out of range; the checkpoint has {span}")
    return matching


def _depth(config: Mapping[str, object] | None) -> int:
    depth = (config or {}).get("num_hidden_layers")
    return depth if isinstance(depth, int) and 1 <= depth <= MAX_DEPTH else 1
