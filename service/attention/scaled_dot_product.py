"""ScaledDotProduct: attention on the caller's own query, key and value, a layer without parameters.

Legend: N heads, G key/value heads, L query rows, S key rows, P of them past, H head width, V value head width.

Invariants: Each sequence is computed alone, in fresh aligned memory, so its bits depend on the call alone (P1). Its shape,
softcap, sinks and head widths choose the kernel, and behind a mask values near the end of the dtype's range; what is requested
beside the output does not (P2). No key or value head is copied for the query heads that share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from service.attention import kernels
from service.attention.attention_weights import Scores, Values, attend_extreme, extras, joined, to_host
from service.attention.call import Answer, AttentionCall, Extras
from service.attention.kernels import Heads
from service.attention.masks import lowered_on
from service.attention.progress import stop_point


class ScaledDotProduct:
    """softmax(softcap(q·kᵀ·scale) + mask)·v (Vaswani et al. 2017, eq. 1) in one dtype on one device."""

    num_bytes = 0

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.is_sequential = False  # written by the engine; a sequence never shares a product here
        self.least_rows = 1
        self._like = torch.empty(0, dtype=dtype, device=device)

    def forward(self, calls: Sequence[AttentionCall]) -> list[Answer]:
        """Return one answer per call, in order."""
        return [self._answer(call) for call in calls]

    def _answer(self, call: AttentionCall) -> Answer:
        outputs = _empty_output(call)
        most = torch.finfo(self.dtype).max  # a float64 sink beyond float32 would be infinite, and its row NaN
        sinks = None if call.sinks is None else call.sinks.to(self._like).clamp(-most, most)
        found: list[Extras] = []
        is_extreme = not self._is_within_safe_range(call)
        for sequence, output in enumerate(outputs):
            heads = self._heads(call, sequence)
            mask = lowered_on(call.mask, sequence, self._like)
            source = Scores(heads.q, heads.k, mask, call.scale, call.softcap, sinks)
            found.append(to_host(extras(source, call, Values(heads.v))))
            # Behind the extras, because the host waits for this copy.
            output.copy_(_attended(call, source, heads.v, is_extreme=is_extreme))
            if mask is not None:
                output.add_(0.0)  # a weight of 0 times a negative value gives -0.0
            stop_point()
        more = joined(found)
        if call.has_present:
            present_key = _present(call.past_key, call.key)
            more = more._replace(present_key=present_key, present_value=_present(call.past_value, call.value))
        return Answer(outputs, *more)

    def _is_within_safe_range(self, call: AttentionCall) -> bool:
        """Return whether each value is in `kernels.safe_range`, also those of a wider dtype than that of the computation.

        Not asked of small sequences without a mask, whose output is by the definition in any case.
        """
        keys = sum(x.shape[2] for x in (call.past_key, call.key) if x is not None)
        if call.mask is None and call.query.shape[1:3].numel() * keys <= kernels.MAX_SMALL_SCORES:
            return True
        tensors = (call.query, call.key, call.value, call.past_key, call.past_value)
        most = kernels.safe_range(self.dtype, call.query.shape[3], call.scale)
        return kernels.are_within((x for x in tensors if x is not None), most)

    def _heads(self, call: AttentionCall, sequence: int) -> Heads:
        """Return fresh copies in the compute dtype: a kernel reads unaligned memory by other instructions."""
        inputs = (call.query,), (call.past_key, call.key), (call.past_value, call.value)
        parts = [[x[sequence].to(self._like) for x in tensors if x is not None] for tensors in inputs]
        # `cat` copies a single part as well; two parts are the past and the rows behind it.
        return Heads(*(torch.cat(rows, dim=1) for rows in parts))


def _attended(call: AttentionCall, source: Scores, v: torch.Tensor, *, is_extreme: bool) -> torch.Tensor:
    """Return the output o_NLV of one sequence; `is_extreme` says that values of the call may be beyond the safe range."""
    heads, mask = Heads(source.q, source.k, v), source.mask
    if call.is_explicit:
        return source.attended(v, is_extreme=is_extreme)
    if is_extreme:
        return attend_extreme(heads, mask, call.scale, _fused)
    return _fused(heads, mask, call.scale)


def _fused(heads: Heads, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Return the output o_NLV of one sequence, one kernel call for the query heads that share a key/value head."""
    if len(heads.q) == len(heads.k):
        return kernels.attend(heads, mask, scale)
    shared = len(heads.q) // len(heads.k)
    masks = mask.split(shared) if mask is not None and mask.shape[0] > 1 else [mask] * len(heads.k)
    found = []
    for q, k, v, part in zip(heads.q.split(shared), heads.k.split(1), heads.v.split(1), masks, strict=True):
        group = Heads(q, k.expand(shared, -1, -1), v.expand(shared, -1, -1))
        found.append(kernels.attend(group, part, scale))
    return found[0] if len(found) == 1 else torch.cat(found)


def _empty_output(call: AttentionCall) -> torch.Tensor:
    b, n, queries, _ = call.query.shape
    width = call.value.shape[3]
    if call.rows_first:
        return torch.empty(b, queries, n, width, dtype=call.query.dtype).transpose(1, 2)
    return torch.empty(b, n, queries, width, dtype=call.query.dtype)


def _present(past: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new.contiguous() if past is None else torch.cat([past, new], dim=2)
