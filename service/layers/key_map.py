"""Key map: the keys of one attention layer as the caller names them, for a source of no known family.

Invariants: A map names whole keys: query, key, value and output, or qkv and output. The bias of a key is the key with its last
`weight` replaced by `bias`, if the source has it. A weight is [out, in]. A fused one holds all rows of query, then of key, then
of value; if it is [d, 3d] instead, it and the output are [in, out]. A rotary layer is refused: its module has a rotary key, or
the source has no config and the keys have names that only rotary models have.
"""

from __future__ import annotations

import difflib
import itertools
import os.path
import re
from collections.abc import Iterable, Mapping

from service.attention.spec import PROJECTIONS
from service.errors import LayerError
from service.layers.families import QKV_BIAS, QKV_WEIGHT, ROTARY, Candidate, Family, has_stacked_columns
from service.layers.source import COMPILED, Source
from service.layers.wording import MAX_NAMED, listed, quoted

HOW = "--map query=KEY key=KEY value=KEY output=KEY, or --fused qkv --map qkv=KEY output=KEY"
ROTARY_KEYS = re.compile(r"rotary|inv_freq")
# Llama, Mistral, Qwen, Gemma and Phi; GPT-NeoX; Meta's own Llama; GGUF.
ROTARY_NAMES = re.compile(
    r"rotary|inv_freq|(^|\.)model\.layers\.\d+\.|(^|\.)gpt_neox\.|\.attention\.query_key_value\.|(^|\.)layers\.\d+\.attention\.w[qk]\.|^blk\."
)


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
    keys = {role: key if key in source.entries else key.replace(COMPILED, "") for role, key in key_map.items()}
    if len(set(keys.values())) < len(keys):
        raise LayerError(f"--map names one key for two roles: {listed(keys.values())}")
    parts: dict[str, tuple[str, ...]] = {}
    for role, key in keys.items():
        if key not in source.entries:
            weights = (known for known, entry in source.entries.items() if len(entry.shape) == 2)  # noqa: PLR2004
            near = difflib.get_close_matches(key[:500], itertools.islice(weights, 10_000), n=1, cutoff=0)
            hint = f"; the nearest is {quoted(near[0])}" if near else ", and no matrix"
            raise LayerError(f"it has no key {quoted(key)} (--map {role}){hint}")
        parts[key] = QKV_WEIGHT if role == "qkv" else (f"{role}.weight",)
        before, has_weight, after = key.rpartition("weight")
        if has_weight and (bias := f"{before}bias{after}") in source.entries:
            # A key that the map names is not taken as a bias, so that its shape is checked as a weight's.
            parts.setdefault(bias, QKV_BIAS if role == "qkv" else (f"{role}.bias",))
    prefix = "".join(os.path.commonprefix(list(parts)).rpartition(".")[:2])  # noqa: RUF071 (letter by letter is meant)
    rotary = [key for key in source.entries if key.startswith(prefix) and ROTARY_KEYS.search(key)]
    if rotary := rotary or [key for key in parts if ROTARY_NAMES.search(key) and source.config is None]:
        raise LayerError(f"{listed(rotary)}: names of a rotary model; {ROTARY}")
    is_transposed = any(
        has_stacked_columns(source.entries[key].shape) for key, names in parts.items() if names == QKV_WEIGHT
    )
    below = {key.removeprefix(prefix): names for key, names in parts.items()}
    return Candidate(Family(name="mapped", parts=below, ignored=("",), equal=(), transposed=is_transposed), prefix)


def unknown_family_text(source: Source) -> str:
    """Return the error text for a source of no known family: how to name the keys, and some of the keys that it has."""
    keys = list(source.entries)
    likely = [key for key in keys if "att" in key.lower()] or keys
    sample = likely[:: max(1, len(likely) // MAX_NAMED)][:MAX_NAMED]  # spread, because sorted neighbours are similar
    rotary = f"{ROTARY}, and its names look like one" if any(_looks_rotary(key, source) for key in keys) else ROTARY
    return (
        f"no known family of attention layers in its {len(keys)} keys; name the four weights with {HOW}, and --heads H; "
        f"{rotary}; found keys like {listed(sample)}"
    )


def _looks_rotary(key: str, source: Source) -> bool:
    """Return whether a key is named as in rotary models, or its key projection is narrower than its query's."""
    projected = source.entries.get(key.replace("q_proj", "k_proj"), source.entries[key])
    return ROTARY_NAMES.search(key) is not None or projected.shape[:1] < source.entries[key].shape[:1]
