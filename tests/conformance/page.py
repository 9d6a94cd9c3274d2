"""Writes the tables of docs/conformance.md from the conformance tests: `make conformance`.

A row of the articles is the docstring of its test: the first line says what is requested, the rest what differs and why. Rows of
torch, ONNX, Keras, Flax and JAX are made from their cases. Without the package onnx its table stays as it is.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.conformance import parity_cases, test_articles, torch_cases
from tests.conformance.onnx_cases import OnnxCase, onnx_cases, question_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
NOTHING = "nothing"


class Erratum(NamedTuple):
    """A figure that an article prints, the correct one, and the test in test_articles.py that proves it."""

    article: str
    what: str
    printed: str
    right: str
    test: Any


_A, _B = test_articles.test_example_a_two_tokens, test_articles.test_example_b_is_one_hot_scaled_or_not
_D = test_articles.test_example_d_the_first_demo
ERRATA = (
    Erratum("003, section 2", "K", "[[1, 2], [1, 1]]", "[[0, 2], [1, 1]]", _A),
    Erratum("003, section 2", "QKᵀ", "[[4, 2], [2, 2]]", "[[0, 2], [2, 2]]", _A),
    Erratum("003, section 2", "divisor", "√3, of the model width", "√2, of d_k", _A),
    Erratum("003, section 2", "softmax", "[[.88, .12], [.5, .5]]", "[[0.195570, 0.804430], [0.5, 0.5]]", _A),
    Erratum("003, section 2", "output", "[[1.88, 1.0], [1.5, 1.0]]", "[[1.195570, 1.0], [1.5, 1.0]]", _A),
    Erratum(
        "003, section 2",
        "softmax([4, 2]/√3)",
        ".88, .12 (not divided)",
        "0.760368, 0.239632",
        test_articles.test_example_a_what_the_printed_softmax_is,
    ),
    Erratum("003, section 2", "conclusion", "token 1 attends mostly to itself", "to token 2 (0.80)", _A),
    Erratum("003, section 6", "unscaled row 1", ".001 .018 .981", "1.80e-35, 4.25e-18, 1.0", _B),
    Erratum("003, section 6", "unscaled row 2", "0 .002 .998", "4.6e-91, 6.8e-46, 1.0", _B),
    Erratum("003, section 6", "scaled row 1", ".011 .269 .720", "4.25e-18, 2.06e-9, 0.99999999794", _B),
    Erratum("003, section 6", "scaled row 2", ".002 .092 .906", "6.8e-46, 2.6e-23, 1.0", _B),
    Erratum("003, section 6", "scaled row 3", "0 .024 .976", "1.1e-73, 3.3e-37, 1.0", _B),
    Erratum(
        "003, section 6",
        "conclusion",
        "scaling smooths x = 1 … 12",
        "both are one-hot; x / 10 shows it",
        test_articles.test_example_b_divided_by_ten,
    ),
    Erratum(
        "003",
        "q·k for d_k = 64",
        "tens or hundreds",
        "tens: the standard deviation is 8",
        test_articles.test_example_c_the_variance_of_scores,
    ),
    Erratum(
        "003",
        "scaling",
        "only 1/√d_k works",
        "T5 has 1, muP 1/d; torch, ONNX, Keras and JAX take any factor",
        test_articles.test_claim_other_scales_than_the_root_of_d,
    ),
    Erratum("002", "dtype of the float32 code", "float32", "float64 under NumPy 2", _D),
    Erratum(
        "002",
        "a fully blocked row",
        "weights of 0.1: the mean of the values",
        "zeros; −1e9 is −inf in float16",
        test_articles.test_row_6_a_fully_blocked_row,
    ),
    Erratum(
        "002",
        "picture of the weights",
        "a pattern of `*`, `+` and `.`",
        "every weight is from .134 to .150: only `.`",
        test_articles.test_example_d_the_demo_of_the_legend_shows_nothing,
    ),
    Erratum(
        "002",
        "`stable_attention`",
        'a "log-sum-exp trick"',
        "the maximum subtracted; `lse` is the log-sum-exp",
        test_articles.test_row_12_stable_attention,
    ),
    Erratum(
        "004",
        "a valid length of 0",
        "the mean of the values",
        "zeros",
        test_articles.test_row_15_a_valid_length_of_zero,
    ),
)


def page(before: str, cases: Sequence[OnnxCase]) -> str:
    """Return the page with the present tables of the tests; without cases of ONNX, its table is the one in `before`."""
    found = before
    tables = {
        "articles": _table(("case", "request", "differs"), _article_rows()),
        "layers": list(_layer_lines()),
        "errata": _table(("article", "what", "printed", "right", "test"), _errata_rows()),
        "torch": _table(("case", "shape of query", "request"), _torch_rows()),
        "parity": _table(("case", "shape of query", "request", "differs"), _parity_rows()),
    }
    if cases:
        tables["onnx"] = _table(("case", "opset", "request", "differs"), _onnx_rows(cases))
    for name, lines in tables.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        head, rest = found.split(start)
        found = "\n".join([head + start, *lines, end + rest.split(end)[1]])
    return found


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a line with the number of rows, and the table."""
    rows = list(rows)
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    return [f"{len(rows)} cases:", "", *lines]


def _article_rows() -> Iterator[Sequence[str]]:
    """Yield a row for each test of the articles, in the order of the file."""
    for name, test in vars(test_articles).items():
        if name.startswith("test_"):
            asked, *differs = (inspect.getdoc(test) or "").splitlines()
            words = name.removeprefix("test_").replace("_", " ")
            yield [words, asked, " ".join(differs).strip() or NOTHING]


def _errata_rows() -> Iterator[Sequence[str]]:
    for one in ERRATA:
        yield [*one[:4], f"`{one.test.__name__}`"]


def _layer_lines() -> Iterator[str]:
    """Yield the first line of each test module that uses a stored layer."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.stem not in {"test_articles", "test_torch_attention", "test_onnx_attention", "test_parity"}:
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            yield f"- `{path.name}`: {doc.splitlines()[0]}"


def _as_json(fields: Mapping[str, object], masks: Sequence[Mapping[str, object]]) -> str:
    """Return a request as JSON, without its tensors."""
    shown = {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
    kinds = [{name: value for name, value in mask.items() if name != "values"} for mask in masks]
    return f"`{json.dumps(shown | ({'masks': kinds} if kinds else {}))}`"


def _torch_rows() -> Iterator[Sequence[str]]:
    for case in torch_cases.CASES:
        yield [case.name, case.shape.words, _as_json(case.fields, case.masks)]


def _parity_rows() -> Iterator[Sequence[str]]:
    for case in parity_cases.CASES:
        asked = case.asked("float64")
        fields = {name: asked[name] for name in ("layout", "scale") if name in asked}
        masks = [{"kind": mask.kind, **mask.fields} for mask in asked["masks"]]
        yield [case.name, case.shape.words, _as_json(fields, masks), case.system.differs]


def _onnx_rows(cases: Sequence[OnnxCase]) -> Iterator[Sequence[str]]:
    for case in cases:
        question = question_of(case)
        past = ", `past_key`, `past_value`" if "past_key" in question.tensors else ""
        request = f"{_as_json(question.fields, question.masks)}{past}"
        yield [case.name.removeprefix("test_"), str(case.opset), request, "; ".join(question.notes) or NOTHING]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), onnx_cases()), encoding="utf-8")
