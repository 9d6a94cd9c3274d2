"""Layer: one multi-head attention layer on one device in one dtype; it runs a batch of calls without padding.

Legend: T packed rows, R = T plus filler rows, K a width padded to a multiple of 4, N heads, G key/value heads, L query rows, S
key rows, H head width, V value head width.

Invariants: On a CPU, a call's bits do not depend on other calls of the batch (P1). Which projections are fused depends on the
call and the layer. Each product has enough rows that a row's bits do not depend on the others. Sequences run one by one, or
together where `kernels.may_share` allows it; on a GPU all unmasked self-attention is one launch. Where this machine's products
break the rule for rows, the self-check raises `least_rows`; where no row count keeps it, the layer is `is_sequential` and takes
one sequence at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from service.attention import kernels, projection
from service.attention.attention_weights import attend_with_extras, extras_alone, joined, to_host
from service.attention.call import Answer, Call, Extras
from service.attention.kernels import Heads
from service.attention.masks import lowered_on
from service.attention.progress import note_filler, stop_point
from service.attention.projection import ROWS_IN_BLOCKS, SIZES, Packed, Plain, Projection
from service.attention.query_key import QueryKey, largest_row
from service.attention.relative_bias import DistanceBias
from service.attention.spec import LayerSpec
from service.attention.transfers import awaited
from service.errors import LayerNotLoaded

# Sort order of a batch: unmasked self-attention whose sequences share an attention call, other self-attention, cross-attention.
SHARED, SELF, CROSS = range(3)
# Rows of one pass on a CPU. More rows are no faster. The memory of a pass, 14 KiB a row at a width of 512, is most of what a
# process takes at its peak.
MAX_ROWS = 2**10
# Query, key and value with at most this many weights are fused even if cross-attention then needs a second copy of them. In a
# larger layer the 20 µs that fusing saves a call do not show.
MAX_FUSED_WEIGHTS = 2**20
INPUTS = ("query", "key", "value")
# Rows of a weight whose magnitudes are summed at once, so that the temporary stays small.
GAIN_ROWS = 256


class Layer:
    """One attention layer; `tensors` match `spec.tensor_shapes()` and are copied into `dtype` on `device`."""

    def __init__(
        self, spec: LayerSpec, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.is_sequential = False
        moved = _finite({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, dtype)
        self._widths = [len(moved[f"{name}.weight"]) for name in INPUTS]
        self._has_one_input_width = spec.query_width == spec.key_width == spec.value_width
        self.sizes = projection.row_counts(dtype, _most_weights(moved))
        """Row counts that packed products may have, largest first; the self-check may leave out the smallest."""
        self._inputs, self._fused = self._input_projections(moved)
        self._output = self._packed(projection.side_by_side(moved, ["output"])) if spec.has_output else None
        # For contributions. The stored matrix is in memory anyway, for the layer in other dtypes.
        self._output_DK = self._output.weight if isinstance(self._output, Plain) else tensors.get("output.weight")
        self._appended = _extra_columns(spec, moved)
        self._safe_input = _safe_input(spec, moved, dtype)
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._query_key = QueryKey(spec, moved, self._like) if spec.norm or spec.rotary else None
        self._bias = None if spec.relative_bias is None else DistanceBias(spec.relative_bias, moved["relative_bias"])
        sinks = moved["sinks"].to(torch.promote_types(dtype, torch.float32)) if spec.has_sinks else None
        self._attended = functools.partial(
            attend_with_extras, scale=spec.scale, output_DK=self._output_DK, softcap=spec.softcap, sinks=sinks
        )
        # Query, key and value have the same heads of the same width, and the layer adds neither keys nor anything to scores.
        is_plain = not (spec.extra_keys or spec.relative_bias or spec.is_explicit)
        self._has_plain_heads = len(set(self._widths)) == 1 and is_plain
        self._takes_any_lengths = self._has_plain_heads and kernels.takes_any_lengths(self._like, spec.head_width)
        self.is_fused = self._fused is not None
        """Whether self-attention computes query, key and value in one matrix product."""
        self.products = used = [*self._inputs, *(one for one in (self._fused, self._output) if one is not None)]
        self.least_rows = max(one.least_rows for one in used)
        """Of any product of the layer; the self-check may raise it."""
        self._is_packed = any(isinstance(one, Packed) for one in used)
        # The input projections are slices of an unpacked fused one, and have no memory of their own.
        held = used[len(INPUTS) :] if isinstance(self._fused, Plain) else used
        self.num_bytes = sum(one.num_bytes for one in held)
        """Bytes that the layer's matrices take on its device."""

    @property
    def product_sizes(self) -> list[int]:
        """Row counts of the layer's packed products, largest first; empty if no projection is packed (`projection.py`)."""
        return [size for size in self.sizes if size >= self.least_rows] if self._is_packed else []

    @property
    def row_rules(self) -> list[tuple[int, tuple[int, ...]]]:
        """Least rows and sizes that the self-check may choose: first fewer rows, as most requests have few, then more sizes."""
        least = self.least_rows
        if self.device.type != "cpu":
            return [(least, self.sizes), *([(ROWS_IN_BLOCKS, self.sizes)] if least < ROWS_IN_BLOCKS else [])]
        rows = [least, *(size for size in self.sizes[::-1] if size > least)]
        kinds = dict.fromkeys((self.sizes, SIZES))
        return [(few, sizes) for few in rows for sizes in kinds if few <= max(sizes[0], least)]

    def set_row_rule(self, least_rows: int, sizes: tuple[int, ...]) -> None:
        """Compute products of at least so many rows from now on, and packed ones of these sizes."""
        self.least_rows, self.sizes = least_rows, sizes

        def changed(one: Projection) -> Projection:
            return dataclasses.replace(one, sizes=sizes) if isinstance(one, Packed) else one

        self._inputs = [changed(one) for one in self._inputs]
        self._fused, self._output = (one and changed(one) for one in (self._fused, self._output))

    def _packed(self, plain: Plain) -> Projection:
        return projection.packed(plain, self.sizes)

    def _input_projections(self, moved: Mapping[str, torch.Tensor]) -> tuple[Sequence[Projection], Projection | None]:
        """Return separate query, key and value projections, and the fused one where self-attention gains by it."""
        # In float64 fused and separate projections round differently.
        if not self._has_one_input_width or self.dtype == torch.float64:
            return [self._packed(projection.side_by_side(moved, [name])) for name in INPUTS], None
        together = projection.side_by_side(moved, INPUTS)
        stops = itertools.accumulate(self._widths)
        # Slices share memory, so unpacked weights exist once.
        slices = [together.rows(stop - width, stop) for width, stop in zip(self._widths, stops, strict=True)]
        separate = [self._packed(part) for part in slices]
        needs_a_copy = any(isinstance(one, Packed) for one in separate)
        is_fused = not needs_a_copy or together.num_weights <= MAX_FUSED_WEIGHTS
        return separate, self._packed(together) if is_fused else None

    def forward(self, calls: Sequence[Call]) -> list[Answer]:
        """Return one answer per call, in order.

        The calls of a pass share matrix products. A sequential layer computes one sequence at a time.
        """
        if not self.is_sequential:
            return self._forward(calls)
        return [_joined([self._forward([part])[0] for part in call.sequences()]) for call in calls]

    def _forward(self, calls: Sequence[Call]) -> list[Answer]:
        """Compute calls in their sort order (SHARED, SELF, CROSS), pass by pass; return answers in the order of `calls`."""
        may_share = functools.cache(self.may_share)  # checks each length once
        sort_keys = [self._sort_key(call, may_share) for call in calls]
        order = sorted(range(len(calls)), key=sort_keys.__getitem__)
        answers: dict[int, Answer] = {}
        # Rows of each call's larger product: query rows or key rows.
        rows = [call.query.shape[0] * max(call.query.shape[1], call.source.shape[1]) for call in calls]
        passes = [order] if self._like.device.type != "cpu" else _passes(order, rows)
        for indices in passes:
            stop_point()
            found = self._run_pass([calls[i] for i in indices], [sort_keys[i] for i in indices])
            answers.update(zip(indices, found, strict=True))
        return [answers[i] for i in range(len(calls))]

    def _sort_key(self, call: Call, may_share: Callable[[int], bool]) -> tuple[int, int]:
        """Return the call's sort key; SHARED calls come first, ordered by length."""
        if not (self._has_one_input_width and call.is_self_attention):
            return CROSS, 0
        length = call.query.shape[1]
        is_plain = call.mask is None and call.past_key is None and not call.has_present
        is_plain = is_plain and (self._takes_any_lengths or not call.asks_more)
        return (SHARED, length) if is_plain and may_share(length) and not self._is_extreme(call) else (SELF, 0)

    def _is_extreme(self, call: Call) -> bool:
        """Return whether projections may be beyond `kernels.safe_range`, where torch's fused kernel is not right.

        False of unmasked sequences that are computed by the definition, and on a GPU.
        """
        if call.mask is None and self._bias is None:
            keys = call.num_past + call.source.shape[1] + self.spec.extra_keys
            scores = self.spec.num_heads * call.query.shape[1] * keys
            if self._like.device.type != "cpu" or kernels.is_plain_small(self._like, scores):
                return False
        inputs = (x for x in (call.query, call.key, call.value) if x is not None)
        if not kernels.are_within(inputs, self._safe_input):
            return True
        if call.past_key is None or call.past_value is None:
            return False
        most = kernels.safe_range(self.dtype, self.spec.head_width, self.spec.scale)
        return not kernels.are_within((call.past_key, call.past_value), most)

    def may_share(self, length: int) -> bool:
        """Return whether unmasked self-attention of several sequences of this length is one call of a kernel."""
        shape = self.spec.num_heads, length, self.spec.head_width
        return self._has_one_input_width and self._has_plain_heads and kernels.may_share(shape, self._like)

    def _run_pass(self, calls: Sequence[Call], sort_keys: Sequence[tuple[int, int]]) -> list[Answer]:
        """Return the answers of one pass, whose calls are in their sort order."""
        shapes = [call.query.shape[:2] for call in calls]
        tokens = sum(count * length for count, length in shapes)
        width = self.spec.num_heads * self.spec.value_head_width
        context_RK = self._like.new_empty(
            self._rows_with_filler(tokens, int(self._output is not None)), projection.padded_width(width)
        )
        projection.fill(context_RK, tokens, width)
        extras = self._attend_all(calls, sort_keys, context_RK[:tokens, :width])
        output = context_RK[:, :width] if self._output is None else self._output(context_RK, self.least_rows)
        if output.device.type != "cpu":  # in one copy, converted there
            output = awaited(
                output[:tokens], functools.reduce(torch.promote_types, {call.query.dtype for call in calls})
            )
        parts = zip(calls, projection.split(output, shapes), extras, strict=True)
        return [
            Answer(part.to(call.query)) if found is None else Answer(part.to(call.query), *found)
            for call, part, found in parts
        ]

    def _rows_with_filler(self, tokens: int, num_products: int) -> int:
        """Round the row count up; the difference counts as filler of the batch, once for each product."""
        rows = self.padded_rows(tokens)
        note_filler((rows - tokens) * num_products)
        return rows

    def padded_rows(self, tokens: int) -> int:
        """Return how many rows a product for so many tokens has."""
        multiple = projection.row_multiple(self.least_rows, self.device)
        return projection.padded_rows(tokens, self.least_rows, self.sizes if self._is_packed else (), multiple)

    def _attend_all(
        self, calls: Sequence[Call], sort_keys: Sequence[tuple[int, int]], context_TD: torch.Tensor
    ) -> list[Extras | None]:
        """Write the heads' output of all sequences, in order; return what each call requests beside it."""
        num_shared, num_self = (sum(kind <= last for kind, _ in sort_keys) for last in (SHARED, SELF))
        extras: list[Extras | None] = []
        views: list[Heads] = []
        row = 0  # of the first sequence that shares no call
        if num_self:
            columns = self._project_self(calls[:num_self])
            row, extras = self._attend_shared(calls[:num_shared], columns, context_TD)
            if num_shared == len(calls):
                return extras
            lengths = _lengths([call.query for call in calls[num_shared:num_self]])
            views += self._split_heads([x_RD[row:] for x_RD in columns], [lengths] * 3)
        views += self._project_cross(calls[num_self:])
        outputs = _head_views(context_TD[row:], self.spec.num_heads, [heads.q.shape[1] for heads in views])
        each = zip(views, outputs, strict=True)
        return extras + [self._attend(call, itertools.islice(each, call.query.shape[0])) for call in calls[num_shared:]]

    def _attend_shared(
        self, calls: Sequence[Call], columns: Sequence[torch.Tensor], context_TD: torch.Tensor
    ) -> tuple[int, list[Extras | None]]:
        """Write the heads' output of calls of kind SHARED, in order; return the number of their rows, and their extras."""
        num_heads, scale, row = self.spec.num_heads, self.spec.scale, 0
        if calls and self._takes_any_lengths:
            return self._attend_any_lengths(calls, columns, context_TD)
        for length, group in itertools.groupby(calls, key=lambda call: call.query.shape[1]):
            rows = slice(row, row + length * sum(call.query.shape[0] for call in group))
            kernels.attend_same_length([x[rows] for x in columns], num_heads, length, scale, context_TD[rows])
            row = rows.stop
        return row, [None] * len(calls)

    def _attend_any_lengths(
        self, calls: Sequence[Call], columns: Sequence[torch.Tensor], context_TD: torch.Tensor
    ) -> tuple[int, list[Extras | None]]:
        """Do the same on a GPU in one launch for all lengths, and one product and softmax for the weights of a sequence."""
        lengths = _lengths([call.query for call in calls])
        rows, scale = sum(lengths), self.spec.scale
        heads = Heads(*(x_RD[:rows].view(rows, self.spec.num_heads, self.spec.head_width) for x_RD in columns))
        context_TD[:rows].copy_(kernels.attend_any_lengths(heads, lengths, lengths, scale).flatten(1))
        if not any(call.asks_more for call in calls):
            return rows, [None] * len(calls)
        views = iter(self._split_heads(columns, [lengths] * 3))
        extras: list[Extras | None] = []
        for call in calls:
            own = list(itertools.islice(views, call.query.shape[0]))
            found = [extras_alone(one, None, scale, call, self._output_DK) for one in own if call.asks_more]
            extras.append(to_host(joined(found)) if found else None)
        return rows, extras

    def _project_self(self, calls: Sequence[Call]) -> Sequence[torch.Tensor]:
        """Return q [R, N·H], k [R, G·H] and v [R, G·V] of the same rows: those of self-attention."""
        parts = [call.query for call in calls]
        if self._fused is None:
            return self._normalised(self._project(self._inputs, parts), calls)
        (qkv_RW,) = self._project([self._fused], parts)
        if self._query_key is None:
            return qkv_RW.split_with_sizes(self._widths, dim=-1)
        qk_RW, v_RW = qkv_RW.split_with_sizes([sum(self._widths[:2]), self._widths[2]], dim=-1)
        return [*self._query_key.of_self(qk_RW, calls), v_RW]

    def _normalised(self, columns: Sequence[torch.Tensor], calls: Sequence[Call]) -> Sequence[torch.Tensor]:
        """Return q, k and v of the calls with query and key normalised and rotated, where the layer does so."""
        return columns if self._query_key is None else [*self._query_key(columns[0], columns[1], calls), columns[2]]

    def _project_cross(self, calls: Sequence[Call]) -> list[Heads]:
        """Return each sequence's query, key and value, each projected by its own matrix."""
        if not calls:
            return []
        inputs = (
            [call.query for call in calls],
            [call.source for call in calls],
            [call.source if call.value is None else call.value for call in calls],
        )
        columns = [self._project([one], parts)[0] for one, parts in zip(self._inputs, inputs, strict=True)]
        return self._split_heads(self._normalised(columns, calls), [_lengths(parts) for parts in inputs])

    def _project(self, projections: Sequence[Projection], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Pack the parts once and return one product per projection."""
        tokens = sum(part.shape[0] * part.shape[1] for part in parts)
        x_RK = projection.pack(parts, self._rows_with_filler(tokens, len(projections)), like=self._like)
        return [product(x_RK, self.least_rows) for product in projections]

    def _split_heads(self, columns: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]]) -> list[Heads]:
        """Return each sequence's rows of query, key and value as views."""
        counts = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        return list(itertools.starmap(Heads, zip(*map(_head_views, columns, counts, lengths), strict=True)))

    def _attend(self, call: Call, sequences: Iterable[tuple[Heads, torch.Tensor]]) -> Extras | None:
        """Write the heads' output of each sequence of one call to its view o_NLV; return what it requests beside it."""
        found = []
        is_extreme, asked = self._is_extreme(call), call if call.asks_more else None
        masks = call.mask if self._bias is None else self._bias.with_masks(call)
        for b, (views, output) in enumerate(sequences):
            mask = lowered_on(masks, b, self._like, self.spec.extra_keys)
            past = [] if call.past_key is None or call.past_value is None else [call.past_key[b], call.past_value[b]]
            heads = self._kernel_heads(views, past)
            context, extras = self._attended(heads, mask, asked=asked, is_extreme=is_extreme)
            # A weight of 0 times a negative value gives -0.0, to which adding 0 gives 0.
            output.copy_(context) if mask is None else torch.add(context, 0.0, out=output)
            if call.has_present:
                extras = _with_present(extras or Extras(), views, past, call.query.dtype)
            found += [] if extras is None else [extras]
            stop_point()
        return to_host(joined(found)) if found else None

    def _kernel_heads(self, views: Heads, past: Sequence[torch.Tensor]) -> Heads:
        """Return one sequence as kernels take it: copied, with past and extra keys, and shared key and value heads repeated."""
        q, k, v = kernels.copied(views)
        if past:
            k, v = (torch.cat([old.to(self._like), new], dim=1) for old, new in zip(past, (k, v), strict=True))
        if self.spec.extra_keys:
            k, v = (torch.cat(parts, dim=1) for parts in zip((k, v), self._appended, strict=True))
        if self.spec.num_kv_heads != self.spec.num_heads:
            shared = self.spec.num_heads // self.spec.num_kv_heads
            k, v = k.repeat_interleave(shared, dim=0), v.repeat_interleave(shared, dim=0)
        return Heads(q, k, v)


def _with_present(found: Extras, views: Heads, past: Sequence[torch.Tensor], dtype: torch.dtype) -> Extras:
    """Return extras of one sequence with its keys and values behind their past, in `dtype`."""
    pairs = (past[:1], views.k), (past[1:], views.v)
    key, value = (torch.cat([*(old.to(x.device, dtype) for old in olds), x.to(dtype)], dim=1) for olds, x in pairs)
    return found._replace(present_key=key.unsqueeze(0), present_value=value.unsqueeze(0))


def _finite(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors; raise LayerNotLoaded if one has an infinite value, with which every answer would be NaN."""
    if beyond := [name for name, tensor in tensors.items() if not all(map(math.isfinite, tensor.aminmax()))]:
        raise LayerNotLoaded(f"values of {', '.join(beyond)} exceed {str(dtype).removeprefix('torch.')}")
    return tensors


def _safe_input(spec: LayerSpec, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> float:
    """Return a magnitude: projections of smaller inputs, and the columns that the layer appends, are in `kernels.safe_range`.

    Neither sinks nor a relative bias matter: both are finite, and behind any finite bias no score in that range overflows.
    """
    gain, offset = 1.0, 0.0
    wide = torch.promote_types(dtype, torch.float32)
    for name in INPUTS:
        parts = tensors[f"{name}.weight"].split(GAIN_ROWS)
        gain = max(gain, *(rows.abs().sum(1, dtype=wide).max().item() for rows in parts))
    for name in ("bias_k", "bias_v", *(f"{name}.bias" for name in INPUTS)):
        offset = max(offset, kernels.largest(tensors[name]) if name in tensors else 0.0)
    # A pair turned by 45 degrees may have all of its length in one feature.
    turn = 1.0 if spec.rotary is None else max(1.0, math.sqrt(2) * spec.rotary.attention_factor)
    # Half, because 16 bits round a projection up by 1 %.
    most = kernels.safe_range(dtype, spec.head_width, spec.scale) / 2 / turn
    return (most - offset) / gain if largest_row(spec, tensors) < most else 0.0


def _most_weights(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the number of weights of the layer's largest product: query, key and value together, or the output."""
    inputs = sum(tensors[f"{name}.weight"].numel() for name in INPUTS)
    return max(inputs, tensors["output.weight"].numel() if "output.weight" in tensors else 0)


def _passes(order: Sequence[int], rows: Sequence[int]) -> list[list[int]]:
    """Split calls, in order, into the fewest passes of similar size; a pass exceeds MAX_ROWS rows by at most one call."""
    total = sum(rows)
    num = -(-total // MAX_ROWS)
    passes: dict[int, list[int]] = {}
    before = 0
    for i in order:
        passes.setdefault(before * num // total, []).append(i)
        before += rows[i]
    return list(passes.values())


def _lengths(parts: Sequence[torch.Tensor]) -> list[int]:
    """Return the length of every sequence of parts [B, L, D]."""
    return [part.shape[1] for part in parts for _ in range(part.shape[0])]


def _head_views(x_RD: torch.Tensor, num_heads: int, rows: Sequence[int]) -> list[torch.Tensor]:
    """Split consecutive groups of `rows` into views [N, rows, D/N]; filler rows are left out."""
    num_rows, width = x_RD.shape
    x_NRH = x_RD.view(num_rows, num_heads, width // num_heads).transpose(0, 1)
    return list(x_NRH.split_with_sizes([*rows, num_rows - sum(rows)], dim=1)[: len(rows)])


def _extra_columns(spec: LayerSpec, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the keys [G, E, H] and values [G, E, V] that the layer appends: `bias_k`/`bias_v` first, then zeros."""
    columns = []
    for name, width in (("bias_k", spec.head_width), ("bias_v", spec.value_head_width)):
        column = tensors["query.weight"].new_zeros(spec.num_kv_heads, spec.extra_keys, width)
        if spec.has_bias_kv:
            column[:, 0] = tensors[name].view(-1, width)
        columns.append(column)
    return columns


def _joined(answers: Sequence[Answer]) -> Answer:
    """Join answers of single sequences into one; the inverse of `Call.sequences`."""
    parts = [Extras(*(getattr(answer, name) for name in Extras._fields)) for answer in answers]
    return Answer(torch.cat([answer.output for answer in answers]), *joined(parts))
