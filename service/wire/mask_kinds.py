"""Mask kinds: the JSON form, the meaning and the decoding of every kind of mask.

A new kind is one class and one entry of `Mask` here, its meaning as tensors in `attention/masks.py`, an example in
`api/openapi/examples.py`, and a constructor in the client. Invariants: Sizes never decide what an axis of values means. The rank
decides where it has one reading; elsewhere `axes` is required, so that B = L = S is never ambiguous. An axis has its full size
or 1. `lengths` never broadcast.
"""

from __future__ import annotations

import abc
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast, get_args

import torch
from pydantic import Field, SkipValidation
from typing_extensions import TypeAliasType

from service.attention import masks
from service.attention.masks import Sizes
from service.errors import BadMask, CausalAlignRequired, MaskAxesRequired, MaskKindRequired
from service.wire.field_names import instead, words_of
from service.wire.number_list import NumberList
from service.wire.schemas import Rows, StrictModel, Tensor, TensorObject
from service.wire.tensor_fields import TensorField, TensorKind
from service.wire.tensors import MAX_RANK, decode_tensor, rank_of

MAX_MASKS = 16
Lengths = TypeAliasType("Lengths", Annotated[Annotated[int, Field(ge=0)] | Rows | TensorObject, SkipValidation])
Offset = Annotated[int | list[int], SkipValidation]
Axes = TypeAliasType("Axes", Literal["s", "ls", "hls", "bs", "bls", "bhls"])
Align = TypeAliasType("Align", Literal["top_left", "bottom_right"])
_AXES_WORDS = (
    "b sequences, h heads, l query rows, s keys; default: by the rank, but required for 2 or 3 axes if query is a batch"
)
_VALUES_WORDS = (
    "[S], [L, S], [H, L, S]; in a batch also [B, H, L, S] and, by axes, [B, S], [B, L, S]; any axis may be 1"
)
_ALIGN_WORDS = "offset 0, or S - L; default: offset, or the length of the past; where L = S it may be left out"
_OFFSET_WORDS = "the key at which query row 0 stands, any whole number, or one for each sequence; default: by align"
_AXES_OF_ONE = {1: "s", 2: "ls", 3: "hls"}
_AXES_OF_BATCH = {1: "s", 4: "bhls"}
_READINGS = {
    2: '"bs" if they are [B, S] (keys of each sequence), "ls" if they are [L, S] (the same for all sequences)',
    3: '"bls" if they are [B, L, S] (the same for all heads), "hls" if they are [H, L, S] (the same for all sequences)',
}


class MaskPlace(NamedTuple):
    """The sizes that a mask must fit, the JSON pointers of the mask and of its values, and the number of keys of the past."""

    sizes: Sizes
    is_batch: bool
    param: str
    values_param: str
    past: int = 0

    @property
    def size_of(self) -> dict[str, int]:
        """The size of each axis by its letter."""
        return dict(zip("bhls", self.sizes, strict=True))


class MaskKind(StrictModel, abc.ABC):
    """One kind of mask."""

    kind: str

    @abc.abstractmethod
    def mask(self, place: MaskPlace) -> masks.Mask:
        """Return the mask as tensors. Raises BadMask, CausalAlignRequired, NonFinite and the errors of `decode_tensor`."""


class ValuedMask(MaskKind):
    """A kind with a tensor of values; `VALUES` is the kind of its numbers."""

    VALUES: ClassVar[TensorKind]
    values: Any


class TableMask(ValuedMask):
    """A kind with a value for each head, query row and key; `axes` names the axes of its values."""

    values: Tensor = Field(description=_VALUES_WORDS)
    axes: Annotated[Axes | None, Field(description=_AXES_WORDS)] = None

    def check_axes_of_batch(self, param: str, values_param: str) -> None:
        """Raise MaskAxesRequired if the rank of the values has two readings in a batch and `axes` does not choose one."""
        if self.axes is None and (rank := rank_of(self.values)) in _READINGS:
            name = "axes" if values_param.startswith(param) else f"the parameter {values_param.lstrip('/')}_axes"
            raise MaskAxesRequired(
                f"{words_of(values_param)} has {rank} axes, which have two readings in a batch: set {name} to "
                f"{_READINGS[rank]}",
                param=param,
            )

    def table(self, place: MaskPlace) -> torch.Tensor:
        """Return the values as [B|1, N|1, L|1, S|1]; raises BadMask if the values do not have the sizes of their axes, or 1."""
        if (rank := rank_of(self.values) or 0) > MAX_RANK:
            raise self._wrong_shape(place, f"{rank} axes")
        if not place.is_batch and "b" in (self.axes or ""):
            known, param = ", ".join(_AXES_OF_ONE.values()), f"{place.param}/axes"
            raise BadMask(
                f"{words_of(param)} must be one of {known}, because query is one sequence [L, d], got {self.axes}",
                param=param,
            )
        tensor = decode_tensor(self.values, TensorField(place.values_param, self.VALUES))
        axes = self.axes or (_AXES_OF_BATCH if place.is_batch else _AXES_OF_ONE).get(tensor.dim(), "")
        have, full = dict(zip(axes, tensor.shape, strict=False)), place.size_of
        if not axes or len(axes) != tensor.dim() or any(size not in (full[axis], 1) for axis, size in have.items()):
            raise self._wrong_shape(place, str(list(tensor.shape)))
        return tensor.reshape([have.get(axis, 1) for axis in full])

    def _wrong_shape(self, place: MaskPlace, found: str) -> BadMask:
        known = [axes for axes in get_args(Axes.__value__) if place.is_batch or "b" not in axes]
        *shapes, last = [f"{[place.size_of[axis] for axis in axes]} (axes {axes})" for axes in known]
        words = f"{', '.join(shapes)} or {last}, and any axis may be 1; got {found}"
        if self.axes is not None:
            words += f" as axes {self.axes}"
        return BadMask(f"{words_of(place.values_param)} must be {words}", param=place.values_param)


class AttendMask(TableMask):
    """true = may attend (torch scaled_dot_product_attention, ONNX, Keras, JAX)."""

    VALUES = TensorKind.BOOL
    kind: Literal["attend"] = Field(description="decides what the mask means")

    def mask(self, place: MaskPlace) -> masks.Mask:
        return masks.Allowed(self.table(place))


class IgnoreMask(TableMask):
    """true = blocked (torch nn.MultiheadAttention's attn_mask and key_padding_mask)."""

    VALUES = TensorKind.BOOL
    kind: Literal["ignore"] = Field(description="decides what the mask means")

    def mask(self, place: MaskPlace) -> masks.Mask:
        return masks.ignore(self.table(place))


class BiasMask(TableMask):
    """Added to the scaled scores; "-inf" = may not attend."""

    VALUES = TensorKind.BIAS
    kind: Literal["bias"] = Field(description="decides what the mask means")

    def mask(self, place: MaskPlace) -> masks.Mask:
        return masks.Added(self.table(place))


class LengthsMask(ValuedMask):
    """Only the first n keys: a number or [L] for one sequence, [B] or [B, L] for a batch."""

    VALUES = TensorKind.INT
    kind: Literal["lengths"] = Field(description="decides what the mask means")
    values: Lengths = Field(description="keys that a sequence or a query row may see, from 0 to S")

    def mask(self, place: MaskPlace) -> masks.Mask:
        """Return the mask of int64 [B|1, L|1]."""
        (b, _, queries, keys), param = place.sizes, place.values_param
        if isinstance(self.values, int) and not isinstance(self.values, bool):
            # Clamp the value so that it fits into int64; a value out of range stays so, and the check below finds it.
            tensor = torch.tensor(max(-1, min(self.values, keys + 1)))
        else:
            tensor = decode_tensor(self.values, TensorField(param, self.VALUES)).to(torch.int64)
        shapes = ((b,), (b, queries)) if place.is_batch else ((), (queries,))
        if tuple(tensor.shape) not in shapes:
            layout = f"[{b}] or [{b}, {queries}]" if place.is_batch else f"a number or [{queries}]"
            raise BadMask(f"{words_of(param)} must be {layout}, got {list(tensor.shape)}", param=param)
        if bool(((tensor < 0) | (tensor > keys)).any()):
            raise BadMask(f"{words_of(param)} must be from 0 to {keys}, the number of keys", param=param)
        return masks.lengths(tensor.reshape(b, -1) if place.is_batch else tensor.reshape(1, -1))


class _Aligned(MaskKind):
    """A kind that lines up query rows and keys."""

    align: Align | None = Field(default=None, description=_ALIGN_WORDS)
    offset: Offset | None = Field(default=None, description=_OFFSET_WORDS)

    def position(self, place: MaskPlace) -> int | list[int]:
        """Return the position of query row 0 among the keys.

        Raises BadMask for align together with offset, and for a bad offset; CausalAlignRequired if L is not S and nothing gives
        the position.
        """
        sizes = place.sizes
        if self.align is not None and self.offset is not None:
            raise BadMask(f"{words_of(place.param)} may have align or offset, not both", param=f"{place.param}/offset")
        if self.offset is not None:
            return _offsets(self.offset, place)
        if self.align is None and place.past:
            return place.past
        if self.align is None and sizes.queries != sizes.keys:
            raise CausalAlignRequired(
                f"{words_of(place.param)} needs align or offset: query has {sizes.queries} rows and key has {sizes.keys}; "
                "align top_left puts query 0 at key 0, bottom_right the last query at the last key",
                param=place.param,
            )
        return sizes.keys - sizes.queries if self.align == "bottom_right" else 0


def _offsets(value: object, place: MaskPlace) -> int | list[int]:
    """Return a whole number, or a list of one for each sequence of a batch; raises BadMask."""
    count = place.sizes.sequences
    if type(value) is int:
        return value
    if isinstance(value, NumberList) and value.shape == (count,) and value.is_whole:
        are_numbers = (value.first_boolean, value.first_minus_inf, value.fault) == (None, None, None)
        # Exact: integers that float64 would round stay in a list.
        value = [int(number) for number in value.values] if are_numbers else None
    is_list = isinstance(value, list) and len(value) == count and all(type(number) is int for number in value)
    if place.is_batch and is_list:
        return cast("list[int]", value)
    words = f" or a list of {count}, one for each sequence" if place.is_batch else ""
    param = f"{place.param}/offset"
    raise BadMask(f"{words_of(param)} must be a whole number{words}", param=param)


class CausalMask(_Aligned):
    """Query i sees keys up to i + offset; top_left = 0, bottom_right = S - L; may be left out only with a past or where L = S."""

    kind: Literal["causal"] = Field(description="decides what the mask means")

    def mask(self, place: MaskPlace) -> masks.Mask:
        return masks.causal(place.sizes, self.position(place))


class WindowMask(_Aligned):
    """Query i sees keys from i + offset - left to i + offset + right; null = open."""

    kind: Literal["window"] = Field(description="decides what the mask means")
    left: Annotated[int, Field(ge=0)] | None = Field(default=None, description="keys before it; default: all")
    right: Annotated[int, Field(ge=0)] | None = Field(default=None, description="keys after it; default: all")

    def mask(self, place: MaskPlace) -> masks.Mask:
        return masks.window(place.sizes, self.position(place), self.left, self.right)


_KINDS = AttendMask | IgnoreMask | LengthsMask | BiasMask | CausalMask | WindowMask
Mask = TypeAliasType("Mask", Annotated[_KINDS, Field(discriminator="kind")])
_MASKS_WORDS = f"at most {MAX_MASKS}; all must allow a position, and biases are added; default: none"
# A factory, because pydantic deep-copies a default list for every request.
MaskList = Annotated[list[Mask], Field(default_factory=list, max_length=MAX_MASKS, description=_MASKS_WORDS)]
MASK_KINDS: dict[str, type[MaskKind]] = {
    get_args(model.model_fields["kind"].annotation)[0]: model for model in get_args(_KINDS)
}


def kind_of(mask: object, param: str) -> type[MaskKind]:
    """Return the model of the mask's kind; raises MaskKindRequired, with an explanation, if it has none, BadMask if unknown."""
    if not isinstance(mask, dict) or "kind" not in mask:
        raise MaskKindRequired(
            'a mask must say what its values mean: write {"kind": "attend", "values": …} where true = may attend, or '
            '{"kind": "ignore", …} where true = blocked. A bare array is refused because torch\'s own two conventions '
            f"contradict each other. Kinds: {', '.join(MASK_KINDS)}",
            param=param,
        )
    kind = mask["kind"]
    if not isinstance(kind, str) or kind not in MASK_KINDS:
        words = f"must be one of {', '.join(MASK_KINDS)}{instead(kind, MASK_KINDS)}"
        raise BadMask(f"{words_of(param)}.kind {words}", param=f"{param}/kind")
    return MASK_KINDS[kind]
