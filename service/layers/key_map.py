"""Key map: the keys of one attention layer as the caller names them, for a source of no known family.

Invariants: A map names whole keys: query, key, value and output, or qkv and output. The bias of a key is the key with its last
`weight` replaced by `bias`, if the source has it. A weight is [out, in]. A fused one holds all rows of query, then of key, then
of value; if it is [d, 3d] instead, it and the output are [in, out]. The layer's module is the parent that the keys share, or the
parent of that if it is a list of numbered parts.
"""

from __future__ import annotations

import difflib
import itertools
import os.path
from collections.abc import Iterable, Mapping

from service.attention.spec import PROJECTIONS
from service.errors import LayerError
from service.layers.family import QKV_BIAS, QKV_WEIGHT, Candidate, Family, has_stacked_columns
from service.layers.source import Source, as_kept
from service.layers.unsupported import ROTARY, reason_of_names
from service.layers.wording import MAX_NAMED, listed, quoted

HOW = "--map query=KEY key=KEY value=KEY output=KEY, or --fused qkv --map qkv=KEY output=KEY"


def parse_key_map(pairs: Iterable[str], fused: str | None = None) -> dict[str, str] | None:
    """Return the keys of `ROLE=KEY` pairs by role, or None if nothing is given; raise LayerError that shows the whole form."""
    keys: dict[str, str] = {}
    for pair in pairs:
        role, _, key = pair.partition("=")
        if not key or role in keys or key in keys.values():
            why = "repeats a role or a key" if key else "is not ROLE=KEY"
            raise LayerError(f"--map {quoted(pair)} {why}; the form is {HOW}")
        keys[role] = key
    if not keys and fused is None:
        return None
    roles = ("qkv", "output") if fused or "qkv" in keys else PROJECTIONS
    if lacking := [role for role in roles if role not in keys]:
        raise LayerError(f"--map lacks {', '.join(lacking)}; the form is {HOW}")
    if surplus := sorted(keys.keys() - set(roles)):
        raise LayerError(f"--map takes no {listed(surplus)} here; the form is {HOW}")
    if fused not in {None, "qkv"}:
        raise LayerError(f"--fused must be qkv; the form is {HOW}")
    return keys


def mapped(key_map: Mapping[str, str], source: Source) -> Candidate:
    """Return the layer of the named keys and their biases, below the module that they share."""
    keys = {role: existing_key(key, f"--map {role}", source) for role, key in key_map.items()}
    if len(set(keys.values())) < len(keys):
        raise LayerError(f"--map names one key for two roles: {listed(keys.values())}")
    parts: dict[str, tuple[str, ...]] = {}
    for role, key in keys.items():
        parts[key] = QKV_WEIGHT if role == "qkv" else (f"{role}.weight",)
        before, has_weight, after = key.rpartition("weight")
        if has_weight and (bias := f"{before}bias{after}") in source.entries:
            # A key that the map names is not taken as a bias, so that its shape is checked as a weight's.
            parts.setdefault(bias, QKV_BIAS if role == "qkv" else (f"{role}.bias",))
    prefix = "".join(os.path.commonprefix(list(parts)).rpartition(".")[:2])  # noqa: RUF071 (letter by letter is meant)
    if all(key.removeprefix(prefix).partition(".")[0].isdecimal() for key in parts):
        prefix = "".join(prefix[:-1].rpartition(".")[:2])
    is_transposed = any(
        has_stacked_columns(source.entries[key].shape) for key, names in parts.items() if names == QKV_WEIGHT
    )
    below = {key.removeprefix(prefix): names for key, names in parts.items()}
    return Candidate(Family(name="mapped", parts=below, equal=(), transposed=is_transposed), prefix)


def existing_key(key: str, option: str, source: Source) -> str:
    """Return the key as the source has it; raise LayerError that shows the nearest if it has none."""
    found = key if key in source.entries else as_kept(key)
    if found in source.entries:
        return found
    is_map = option.startswith("--map")
    likely = (name for name, entry in source.entries.items() if not is_map or len(entry.shape) == 2)  # noqa: PLR2004
    near = difflib.get_close_matches(found[:500], itertools.islice(likely, 10_000), n=1, cutoff=0)
    hint = f"; the nearest is {quoted(near[0])}" if near else ", and no matrix"
    raise LayerError(f"it has no key {quoted(found)} ({option}){hint}")


def unknown_family_text(source: Source) -> str:
    """Return the error text for a source of no known family: how to name the keys, and some of the keys that it has."""
    keys = list(source.entries)
    likely = [key for key in keys if "att" in key.lower()] or keys
    sample = likely[:: max(1, len(likely) // MAX_NAMED)][:MAX_NAMED]  # spread, because sorted neighbours are similar
    # As in most rotary models, a key may be narrower than its query.
    pairs = [
        (entry.shape, source.entries.get(key.replace("q_proj", "k_proj"), entry).shape)
        for key, entry in source.entries.items()
    ]
    reason = reason_of_names(keys) or (ROTARY if any(key[:1] < query[:1] for query, key in pairs) else None)
    hint = f"; its names look like those of an unsupported model: {reason}" if reason else ""
    return (
        f"no known family of attention layers in its {len(keys)} keys; name the four weights with {HOW}, and --heads H"
        f"{hint}; found keys like {listed(sample)}"
    )
