"""Examples: small request bodies that a served layer answers with 200 as they stand.

Invariant: they are made from the layer's own widths, so every example on a page runs.
"""

from __future__ import annotations

from typing import Any

from service.attention.spec import LayerSpec


def attend_examples(spec: LayerSpec) -> dict[str, Any]:
    """Return small attend bodies that this layer answers with 200 as they stand."""
    rows = _rows(3, spec.query_width)
    query: dict[str, Any] = {"query": rows}
    if spec.needs_key:
        query["key"] = _rows(3, spec.key_width)
    if spec.needs_value:
        query["value"] = _rows(3, spec.value_width)
    memory = {"key": _rows(4, spec.key_width), "value": _rows(4, spec.value_width)}
    bodies = {
        "self-attention": ("Three tokens attend to each other", query),
        "weights": ("The same, with the weights of head 0", {**query, "weights": {"form": "heads", "heads": [0]}}),
        "causal": ("No looking ahead", {**query, "masks": [{"kind": "causal"}]}),
        "batch": (
            "Two sequences of three tokens, of which the last of the second is padding",
            {
                **{name: [tensor, tensor] for name, tensor in query.items()},
                "masks": [{"kind": "attend", "axes": "bs", "values": [[True, True, True], [True, True, False]]}],
            },
        ),
        "cross-attention": (
            "Three queries over four keys, of which the last is padding; the two strongest keys of each row",
            {
                "query": rows,
                **memory,
                "masks": [{"kind": "lengths", "values": 3}],
                "weights": {"form": "top_k", "k": 2},
            },
        ),
    }
    return {name: {"summary": summary, "value": body} for name, (summary, body) in bodies.items()}


def attention_examples() -> dict[str, Any]:
    """Return small bodies of attention without a layer that run as they stand."""
    two = {"query": _rows(3, 4), "key": _rows(5, 4), "value": _rows(5, 2)}
    heads = {"query": [_rows(1, 4)] * 4, "key": [_rows(1, 4)] * 2, "value": [_rows(1, 4)] * 2, "layout": "hld"}
    past = {"past_key": [_rows(3, 4)] * 2, "past_value": [_rows(3, 4)] * 2, "present": True}
    bodies = {
        "plain": ("Three queries over five keys, with the weights", {**two, "weights": {"form": "heads"}}),
        "causal": (
            "No looking ahead, the masked scores and their log-sum-exp",
            {**two, "masks": [{"kind": "causal", "align": "top_left"}], "scores": {"stage": "masked"}, "lse": True},
        ),
        "decode": (
            "One new row of four query heads that share two key and value heads, behind a past of three rows",
            {**heads, **past, "masks": [{"kind": "causal"}]},
        ),
        "packed": (
            "Two heads side by side, with a scale, a softcap and a sink for each head",
            {
                **{name: _rows(3, 4) for name in ("query", "key", "value")},
                "layout": "packed",
                "num_heads": 2,
                "scale": 0.5,
                "softcap": 20.0,
                "sinks": [0.0, 0.5],
            },
        ),
    }
    return {name: {"summary": summary, "value": body} for name, (summary, body) in bodies.items()}


def _rows(count: int, width: int) -> list[list[float]]:
    """Return short decimal numbers that differ from row to row."""
    return [[round(((7 * i + 3 * j) % 11 - 5) / 10, 1) for j in range(width)] for i in range(count)]


def infer_examples(spec: LayerSpec) -> dict[str, Any]:
    """Return small bodies of the Open Inference Protocol that this layer answers with 200 as they stand."""
    inputs = [_input("query", 3, spec.query_width)]
    if spec.needs_key:
        inputs.append(_input("key", 3, spec.key_width))
    if spec.needs_value:
        inputs.append(_input("value", 3, spec.value_width))
    bodies = {
        "output": ("Three tokens attend to each other", {"inputs": inputs}),
        "weights": (
            "No looking ahead, and the weights averaged over the heads",
            {"id": "42", "inputs": inputs, "parameters": {"causal": "top_left", "weights": "mean"}},
        ),
        "padding": (
            "The last token is padding",
            {
                "inputs": [*inputs, {"name": "attend_mask", "datatype": "BOOL", "shape": [1, 3], "data": [1, 1, 0]}],
                "parameters": {"attend_mask_axes": "bs"},
            },
        ),
    }
    return {name: {"summary": summary, "value": body} for name, (summary, body) in bodies.items()}


def _input(name: str, rows: int, width: int) -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": [1, rows, width], "data": [_rows(rows, width)]}
