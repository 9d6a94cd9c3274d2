"""The outline of an array: its brackets and commas, without what stands between them. Its shape is read off from here.

Its law: an outline has a shape exactly if it equals, byte for byte, the outline of a regular array of that shape.
`[x]` and `[]` have the same outline; whoever reads the values must see that none is missing.
"""

from __future__ import annotations

import numpy as np

from service.errors import BadJson, JsonTooDeep
from service.wire.pace import Pace

MAX_RANK = 8
_SLICE_BYTES = 256 * 1024
# Where brackets are fewer, counting the commas between them is cheaper than dropping all other bytes (1 ns each).
_MIN_BYTES_A_BRACKET = 256
_PROBE_BYTES = 512
_MAX_COUNT = 2**16 - 1


def counted_outline(text: bytes, positions: list[int]) -> bytes:
    """Brackets and commas of a text without strings, from the places of its few brackets."""
    marks = np.frombuffer(text, dtype=np.uint8)
    is_comma = marks == ord(",")
    if not positions:
        return b"," * np.count_nonzero(is_comma)
    starts = np.array(positions)
    before = np.count_nonzero(is_comma[: positions[0]])
    if (starts[1:] - starts[:-1]).max(initial=len(text) - positions[-1]) <= _MAX_COUNT:
        behind = np.add.reduceat(is_comma.view(np.uint8), starts, dtype=np.uint16)
    else:  # 32 bits would take three times as long, and rows this long are few
        behind = np.array([np.count_nonzero(row) for row in np.split(is_comma, starts[1:])])
        behind[0] -= before
    places = np.add.accumulate(behind, dtype=np.intp) + np.arange(before, before + len(behind))
    outline = np.full(int(places[-1]) + 1, ord(","), dtype=np.uint8)
    outline[places - behind] = marks[starts]
    return outline.tobytes()


def few_brackets(text: bytes) -> list[int] | None:
    """Where the brackets stand, or None where they are many."""
    many = len(text) // _MIN_BYTES_A_BRACKET
    if text.count(b"]", 0, _PROBE_BYTES) > _PROBE_BYTES // _MIN_BYTES_A_BRACKET:
        return None
    positions: list[int] = []
    opening, closing = text.find(b"["), text.find(b"]")
    while len(positions) <= many:
        if opening < 0 and closing < 0:
            return positions
        if closing < 0 or 0 <= opening < closing:
            positions.append(opening)
            opening = text.find(b"[", opening + 1)
        else:
            positions.append(closing)
            closing = text.find(b"]", closing + 1)
    return None


async def infer_shape(outline: bytes, pace: Pace) -> tuple[int, ...] | None:
    """The shape of a regular nested list with this outline, or None.

    From the inside out: the innermost list ends at the first bracket, the next at the first two, and each must be made
    of repetitions of the one before.
    """
    start = outline[: MAX_RANK + 1]
    rank = len(start) - len(start.lstrip(b"["))
    if not 1 <= rank <= MAX_RANK or not outline.endswith(b"]"):
        return None
    length = 0  # of the outline of one list at the level before
    entries: list[int] = []
    for level in range(1, rank + 1):
        opening = rank - level
        closing = await _find(outline, b"]" * level, pace) + level - 1 if level < rank else len(outline) - 1
        count, rest = divmod(closing - opening, length + 1)
        if rest or count < 1 or not await _repeats(outline, opening + 1, closing, length + 1, pace):
            return None
        entries.append(count)
        length = closing + 1 - opening
    return tuple(reversed(entries))


async def _find(outline: bytes, brackets: bytes, pace: Pace) -> int:
    """Where the brackets first stand; -1 if nowhere."""
    for start in range(0, len(outline), _SLICE_BYTES):
        found = outline.find(brackets, start, start + _SLICE_BYTES + len(brackets) - 1)
        if found >= 0:
            return found
        await pace.give_way()
    return -1


async def _repeats(outline: bytes, start: int, end: int, period: int, pace: Pace) -> bool:
    """Whether `outline[start:end]` is one text of `period - 1` bytes over and over, separated by commas.

    A period of 1 is the innermost list: nothing but commas.
    """
    if end - start < period:
        return True
    for first in range(start, end - period, _SLICE_BYTES):
        last = min(first + _SLICE_BYTES, end - period)
        if outline[first:last] != outline[first + period : last + period]:
            return False
        await pace.give_way()
    return outline[start + period - 1] == ord(",")


async def examine_outline(outline: bytes, *, max_depth: int, pace: Pace) -> tuple[int, int]:
    """How deep an outline without a shape is nested, and which of its entries is the first unlike entry 0.

    Raises BadJson where the brackets do not balance, JsonTooDeep where they open further than allowed.
    """
    marks = np.frombuffer(outline, dtype=np.uint8)
    depth = deepest = 0
    first_entry_end = len(outline) - 1
    for start in range(0, len(marks), _SLICE_BYTES):
        part = marks[start : start + _SLICE_BYTES]
        steps = (part == ord("[")).astype(np.int32) - (part == ord("]"))
        depths = np.cumsum(steps, dtype=np.int32) + depth
        depth = int(depths[-1])
        deepest = max(deepest, int(depths.max()))
        if deepest > max_depth:
            raise JsonTooDeep(f"the body is nested deeper than {max_depth} levels")
        is_last = start + len(part) == len(marks)
        if (depths[: len(part) - is_last] < 1).any() or (is_last and depth != 0):
            raise BadJson("the body is not valid JSON: the brackets of an array do not match")
        separators = np.flatnonzero((depths == 1) & (part == ord(",")))
        if len(separators) and first_entry_end == len(outline) - 1:
            first_entry_end = start + int(separators[0])
        await pace.give_way()
    return deepest, await _first_odd_entry(outline, first_entry_end, pace)


async def _first_odd_entry(outline: bytes, first_entry_end: int, pace: Pace) -> int:
    marks = np.frombuffer(outline, dtype=np.uint8)[1:-1]
    period = first_entry_end  # one entry with its comma
    for first in range(0, len(marks) - period, _SLICE_BYTES):
        last = min(first + _SLICE_BYTES, len(marks) - period)
        differs = marks[first:last] != marks[first + period : last + period]
        if differs.any():
            return (first + int(differs.argmax()) + period) // period
        await pace.give_way()
    # All before the last are alike: either the last is shorter, or every one is as irregular as entry 0.
    return (len(marks) + 1) // period if (len(marks) + 1) % period else 0
