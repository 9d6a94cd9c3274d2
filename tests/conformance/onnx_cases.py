"""ONNX's own cases of its Attention operator (opsets 23 to 25), and each of them as a request of POST /v1/attention.

`onnx` makes the cases when its module is imported; without the package there are none. They are read from that one module,
because collecting the cases of all operators takes ten times as long.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch

HOW_TO_INSTALL = "ONNX's cases need the package onnx: pip install -c constraints.txt onnx"
# The scores that each qk_matmul_output_mode returns; mode 3 returns the weights.
STAGES = {0: "scaled", 1: "capped", 2: "masked"}
AXES = {1: "s", 2: "ls", 3: "hls", 4: "bhls"}
NAMES = {"Q": "query", "K": "key", "V": "value", "past_key": "past_key", "past_value": "past_value"}


class OnnxCase(NamedTuple):
    """Inputs, attributes and expected outputs of one node, by the operator's names."""

    name: str
    opset: int
    attributes: dict[str, Any]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    rtol: float
    atol: float


class Question(NamedTuple):
    """A request: tensors, masks with their values, the other fields; `notes` say what differs from the operator's words."""

    tensors: dict[str, torch.Tensor]
    masks: list[dict[str, object]]
    fields: dict[str, object]
    notes: tuple[str, ...]


def onnx_cases() -> list[OnnxCase]:
    """Return the cases in the package's order; none if `onnx` is not installed."""
    if importlib.util.find_spec("onnx") is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        helper = importlib.import_module("onnx.helper")
        node = importlib.import_module("onnx.backend.test.case.node")
        importlib.import_module("onnx.backend.test.case.node.attention")
        return [_case(helper, case) for case in node._NodeTestCases if case.model.graph.node[0].op_type == "Attention"]


def _case(helper: Any, case: Any) -> OnnxCase:
    node, (inputs, outputs) = case.model.graph.node[0], case.data_sets[0]
    return OnnxCase(
        case.name,
        case.model.opset_import[0].version,
        {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute},
        dict(zip([name for name in node.input if name], inputs, strict=True)),
        dict(zip([name for name in node.output if name], outputs, strict=True)),
        case.rtol,
        case.atol,
    )


def tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def question_of(case: OnnxCase) -> Question:
    """Return the request that asks for every output of the case."""
    given = case.attributes
    fields: dict[str, object] = {name: given[name] for name in ("scale", "softcap") if given.get(name)}
    notes = []
    fields["layout"] = "bhld" if case.inputs["Q"].ndim == 4 else "packed"
    if fields["layout"] == "packed":
        fields |= {"num_heads": given["q_num_heads"], "num_kv_heads": given["kv_num_heads"]}
    if "present_key" in case.outputs:
        fields["present"] = True
    if "qk_matmul_output" in case.outputs:
        mode = given.get("qk_matmul_output_mode", 0)
        fields |= {"weights": {"form": "heads"}} if mode == 3 else {"scores": {"stage": STAGES[mode]}}
    if "softmax_precision" in given:
        notes.append("`softmax_precision` is not sent: the softmax is float32, or float64 for float64")
    if case.inputs["Q"].dtype.itemsize == 2:
        notes.append(f"rtol {rtol_words(case)}: the oracle rounds every step to {case.inputs['Q'].dtype.name}")
    masks, notes_of_masks = _masks(case)
    tensors = {NAMES[name]: tensor(array) for name, array in case.inputs.items() if name in NAMES}
    return Question(tensors, masks, fields, (*notes_of_masks, *notes))


def rtol_of(case: OnnxCase) -> float:
    return {"float16": 2.0**-9, "bfloat16": 2.0**-6}.get(case.inputs["Q"].dtype.name, case.rtol)


def rtol_words(case: OnnxCase) -> str:
    return {"float16": "2⁻⁹", "bfloat16": "2⁻⁶"}.get(case.inputs["Q"].dtype.name, str(case.rtol))


def _masks(case: OnnxCase) -> tuple[list[dict[str, object]], list[str]]:
    """Return the masks in the operator's order, and what differs."""
    given, lengths = case.attributes, case.inputs.get("nonpad_kv_seqlen")
    past = case.inputs["past_key"].shape[2] if "past_key" in case.inputs else 0
    rows_axis = 2 if case.inputs["Q"].ndim == 4 else 1
    queries, keys = (case.inputs[name].shape[rows_axis] for name in "QK")
    masks: list[dict[str, object]] = []
    notes: list[str] = []
    offset: object = past
    if lengths is not None:
        offset = [int(length) - queries for length in lengths]
    if "attn_mask" in case.inputs:
        mask = case.inputs["attn_mask"]
        blocked, kind = (False, "attend") if mask.dtype == bool else (-np.inf, "bias")
        if short := past + keys - mask.shape[-1]:
            mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=blocked)
            notes.append(f"the mask is padded with {short} blocked keys, because a mask must have all keys or 1")
        masks.append({"kind": kind, "axes": AXES[mask.ndim], "values": tensor(mask)})
    if lengths is not None:
        masks.append({"kind": "lengths", "values": torch.from_numpy(lengths)})
    if given.get("is_causal"):
        masks.append({"kind": "causal", "offset": offset})
        if lengths is not None:
            notes.append("the offset n − L of each sequence is sent, because causal masks do not use the lengths")
    left, right = (given.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if left >= 0 or right >= 0:
        sides = {side: size for side, size in (("left", left), ("right", right)) if size >= 0}
        masks.append({"kind": "window", "offset": offset, **sides})
    return masks, notes
