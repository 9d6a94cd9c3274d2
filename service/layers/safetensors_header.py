"""Safetensors headers: parses which tensors a file or body holds, where each of them lies, and its metadata.

The format: eight bytes with the header's length (little-endian), the header (a JSON object, blanks at its end), the
tensors' bytes (little-endian, C order). `layers/` reads it in files and `wire/` in request bodies.
Invariants: A header is accepted only if every size is right and the tensors fill the rest exactly (no hole, no overlap, no
byte after them), as the safetensors library requires, and if no key comes twice, which that library does not require. No
unchecked number sizes an allocation. Sizes are Python integers. Messages show names only through `label`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from service.errors import ServiceError
from service.layers.json_object import parse_object

LENGTH_BYTES = 8
MAX_RANK = 256  # no tensor has as many axes; the product of thousands of large sizes would take seconds
# Every dtype of the format, because the sizes of tensors that are not read must be right as well.
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_KEYS = {"dtype", "shape", "data_offsets"}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Position of one tensor: bytes `begin` to `end` of the whole file or body."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class HeaderReader:
    """Reads headers of `what` ("the file", "the body"); raises `failure` for every fault."""

    what: str
    failure: type[ServiceError]
    max_bytes: int
    label: Callable[[str], str]

    def length(self, first: bytes | bytearray | memoryview, size: int) -> int:
        """Return the header's length from the first eight bytes (or fewer, if there are no more) of `size` in all."""
        if size < LENGTH_BYTES:
            raise self.failure(f"{self.what} has {size} bytes, too few for safetensors")
        length = int.from_bytes(first[:LENGTH_BYTES], "little")
        if length > self.max_bytes:
            raise self.failure(
                f"{self.what} announces a header of {length} bytes, the limit is {self.max_bytes}: not safetensors"
            )
        if LENGTH_BYTES + length > size:
            raise self.failure(f"{self.what} announces a header of {length} bytes but has {size} bytes in all")
        return length

    def read(self, raw: bytes | bytearray, size: int) -> Header:
        """Return the header whose JSON is `raw`; the file or body has `size` bytes in all."""
        if not raw.startswith(b"{"):
            raise self.failure(f"{self.what}'s header is not a JSON object: not safetensors")
        fields = parse_object(raw, f"{self.what}'s header", self.failure)
        metadata = self._metadata(fields.pop("__metadata__", {}))
        start = LENGTH_BYTES + len(raw)
        tensors = {name: self._entry(name, value, start) for name, value in fields.items()}
        self._check_layout(tensors, start, size)
        return Header(tensors, metadata)

    def _metadata(self, value: object) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self.failure("the header's __metadata__ does not map names to strings")
        return value

    def _entry(self, name: str, value: object, start: int) -> TensorEntry:
        if not isinstance(value, dict) or value.keys() != _KEYS:
            raise self.failure(
                f"{self.label(name)} must have dtype, shape and data_offsets in the header and nothing else"
            )
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in BITS:
            raise self.failure(f"{self.label(name)} has a dtype that safetensors does not know")
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:  # noqa: PLR2004 - begin and end
            raise self.failure(f"{self.label(name)} has a shape or data_offsets that are not lists of counts")
        if len(shape) > MAX_RANK:
            raise self.failure(f"{self.label(name)} has {len(shape)} axes, expected at most {MAX_RANK}")
        begin, end = offsets
        if math.prod(shape) * BITS[dtype] != 8 * (end - begin):
            raise self.failure(
                f"{self.label(name)} spans {end - begin} bytes, which is not what its shape and dtype take"
            )
        return TensorEntry(dtype, tuple(shape), start + begin, start + end)

    def _check_layout(self, tensors: Mapping[str, TensorEntry], start: int, size: int) -> None:
        position = start
        for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != position:
                raise self.failure(f"there is a hole or an overlap in {self.what} before {self.label(name)}")
            position = entry.end
        if position != size:
            raise self.failure(f"the tensors end at byte {position} of {self.what}, which has {size} bytes")


def _are_counts(value: object) -> bool:
    if not isinstance(value, list):
        return False
    for item in value:  # noqa: SIM110 (a generator takes twice as long, and every safetensors request calls this)
        if type(item) is not int or item < 0:
            return False
    return True
