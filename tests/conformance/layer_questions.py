"""What is imported and asked: words of `layers import`, and requests with the place of what the layer's own code answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tests.conformance.layer_cases import CALLS, CASES, FEATURES, STATES, TOLERANCES, Call, Kind, LayerCase
from tests.conformance.packaged_models import packaged_cases

Tensors = dict[str, torch.Tensor]
Fields = dict[str, Any]
PARTS = ("query", "key", "output", "weights")
CAUSAL = {"kind": "causal", "align": "top_left"}
FRAMEWORK_ANSWERS = "answers"
# Checkpoint, layer, its number, its module where the number is not enough.
_FRAMEWORKS = [
    *[
        ("torch", f"{kind}-{number}", number, module.format(number))
        for number in range(2)
        for kind, module in (
            ("encoder", "encoder.layers.{}.self_attn"),
            ("decoder", "decoder.layers.{}.self_attn"),
            ("cross", "decoder.layers.{}.multihead_attn"),
        )
    ],
    *[(name, f"self-{number}", number, "") for name in ("timm", "timm-norm") for number in range(2)],
    *[(name, "cross", None, "") for name in ("keras", "keras-grouped", "linen", "nnx")],
]


class Question(NamedTuple):
    """A request, and where the answers of the family's own code lie: a file and the start of its keys.

    `key_pads` [B, S] are masked; of the answer, the rows count that are no `row_pads` [B, L].
    """

    name: str
    answers: str
    prefix: str
    fields: Fields
    positions: list[list[int]] | None = None
    key_pads: torch.Tensor | None = None
    row_pads: torch.Tensor | None = None

    def reference(self, files: dict[str, Tensors]) -> Tensors:
        found = {part: files[self.answers].get(f"{self.prefix}/{part}") for part in PARTS}
        return {part: tensor for part, tensor in found.items() if tensor is not None}

    def request(self, reference: Tensors) -> tuple[Tensors, Fields]:
        """Its tensors and fields; weights in the form that the reference has."""
        tensors = {part: tensor for part, tensor in reference.items() if part in {"query", "key"}}
        if self.positions is not None:
            tensors["positions"] = torch.tensor(self.positions)
        masks = list(self.fields.get("masks", ()))
        if self.key_pads is not None:
            tensors[f"masks.{len(masks)}.values"] = self.key_pads
            masks.append({"kind": "ignore", "axes": "bs"})
        is_mean = "weights" in reference and reference["weights"].dim() == 3  # without heads
        return tensors, {**self.fields, "masks": masks, "weights": {"form": "mean" if is_mean else "heads"}}


class Imported(NamedTuple):
    """A layer: the checkpoint, absolute or below the directory of all, and the words of its import."""

    name: str
    source: str
    words: tuple[str, ...]
    questions: tuple[Question, ...]
    tolerances: Mapping[str, float] = TOLERANCES


def imported_layers() -> list[Imported]:
    found = [_of_case(case, name) for case in (*CASES, *packaged_cases()) for name in case.imports]
    return [*found, *_of_frameworks()]


def _of_case(case: LayerCase, name: str) -> Imported:
    number, kind = case.imports[name]
    prefix = ("--prefix", kind.prefix.format(number)) if kind.prefix else ()
    questions = [_question(case, kind, name, call) for call in case.calls]
    if kind.is_relative:
        questions.append(questions[2]._replace(name="far", positions=[list(range(4000, 4033))]))
    if kind.is_relative and kind.is_source:  # it has the lengths of the sources
        questions[-1] = questions[0]._replace(name="far", positions=questions[-1].positions)
    words = ("--layer", str(number), *prefix, *kind.options)
    return Imported(name, case.path or case.name, words, tuple(questions), kind.tolerances)


def _question(case: LayerCase, kind: Kind, name: str, call: Call) -> Question:
    fields: Fields = {"masks": [CAUSAL]} if kind.is_causal_by_mask else {}
    positions = call.positions if case.has_positions else None
    found = Question(call.name, case.name, f"{name}/{call.name}", fields, positions)
    if STATES in {kind.entry, case.given} or call.name != "padded":
        return found
    rows, sources = (torch.tensor(call.pads(lengths)) for lengths in (call.lengths, call.sources))
    if kind.is_source:
        return found._replace(key_pads=sources, row_pads=sources)
    if kind.is_cross:
        return found._replace(key_pads=None if case.given == FEATURES else sources, row_pads=rows)
    return found._replace(key_pads=rows, row_pads=rows)


def _of_frameworks() -> Iterator[Imported]:
    for source, layer, number, module in _FRAMEWORKS:
        words = ("--heads", "4") if number is None else ("--heads", "4", "--layer", str(number))
        fields = {"masks": [CAUSAL]} if (source, layer[:-2]) == ("torch", "decoder") else {}
        questions = (
            Question(call.name, FRAMEWORK_ANSWERS, f"{source}/{layer}/{call.name}", fields) for call in CALLS[:3]
        )
        prefix = ("--prefix", module) if module else ()
        yield Imported(f"{source}-{layer}", f"{source}.safetensors", (*words, *prefix), tuple(questions))
