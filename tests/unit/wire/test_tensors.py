"""Tensors: every form gives the same bits, what does not fit is refused with words, and nothing but ServiceErrors leaves."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import (
    BadDtype,
    BadEncoding,
    BadJson,
    BadMask,
    BadShape,
    CostLimit,
    InvalidInput,
    NonFinite,
    ServiceError,
    UnknownField,
)
from service.wire import tensor_fields
from service.wire.json_document import parse
from service.wire.tensor_fields import TensorField, TensorKind
from service.wire.tensors import TensorForm, answer_form, decode_tensor
from tests.unit.wire.strict_reference import Documents, regular, strict

FLOAT, BIAS, BOOL, INT = TensorKind.FLOAT, TensorKind.BIAS, TensorKind.BOOL, TensorKind.INT
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}


class Decoded(NamedTuple):
    tensor: torch.Tensor
    form: TensorForm


def test_a_dtype_counts_by_its_values_wherever_its_entry_stands():
    """The module with its first entry moved to the end, and with another float there."""
    source = Path(tensor_fields.__file__).read_text(encoding="utf-8")
    first = next(line for line in source.splitlines(keepends=True) if line.startswith("    Dtype("))
    more = first.replace('"float16", torch.float16', '"float8_e5m2", torch.float8_e5m2')
    head, end, rest = source.replace(first, "").partition("\n)\nBY_")
    module: dict[str, Any] = {"__name__": "with_another_order"}
    exec(compile(f"{head}\n{first}{more}{end[1:]}{rest}", "with_another_order", "exec"), module)
    names = {kind: [dtype.name for dtype in module[kind]] for kind in ("FLOATS", "WHOLES")}
    assert names == {
        "FLOATS": ["bfloat16", "float32", "float64", "float16", "float8_e5m2"],
        "WHOLES": ["int32", "int64"],
    }
    assert module["BOOL"].name == "bool"


def decoded(text: str, kind: TensorKind = FLOAT) -> Decoded:
    query = parse(f'{{"query":{text}}}'.encode(), max_depth=64)["query"]
    return Decoded(decode_tensor(query, TensorField("/query", kind)), answer_form(query, None))


def refused(text: str, kind: TensorKind = FLOAT) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        decoded(text, kind)
    if not isinstance(caught.value, BadJson):
        assert caught.value.param is not None
        assert caught.value.param.startswith("/query")
    assert len(caught.value.message) < 300
    return caught.value


def in_object(dtype: str = "float32", shape: Any = (2,), data: Any = (1, 2), **more: Any) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data": data, **more})


def base64_of(tensor: torch.Tensor) -> str:
    return base64.b64encode(bytes(tensor.reshape(-1).view(torch.uint8).tolist())).decode()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


UNKNOWN_DTYPES: list[Any] = [
    "complex64",
    "object",
    "U8",
    "float32 ",
    "F32",
    "int8",
    "",
    {},
    None,
    32,
    ["float32"],
    "x" * 5000,
]
NO_TENSORS = ["null", '"x"', '"' + "A" * 4000 + '"', "{}", in_object(data=None), in_object(data={}), in_object(data=1)]


class TestForms:
    @pytest.mark.parametrize("count", [3, 2_000])
    def test_all_forms_of_a_tensor_give_the_same_bits(self, count):
        """Lists, flat lists and base64, short and long, in every dtype."""
        for dtype in FLOATS:
            tensor = torch.randn(count, 2, 3, dtype=torch.float64).to(dtype)
            name = str(dtype).removeprefix("torch.")
            flat = decoded(in_object(name, tensor.shape, tensor.reshape(-1).tolist()))
            packed = decoded(in_object(name, tensor.shape, base64_of(tensor)))
            assert flat.form is TensorForm.LIST
            assert packed.form is TensorForm.BASE64
            assert same_bits(flat.tensor, tensor)
            assert same_bits(packed.tensor, tensor)
        nested = decoded(json.dumps(tensor.tolist()))
        assert nested.form is TensorForm.NESTED
        assert same_bits(nested.tensor, tensor.to(torch.float32))

    def test_masks_and_lengths(self):
        """true, false, 0 and 1 are booleans; whole numbers are int64; objects have their own dtype."""
        for repeat in (1, 300):
            flags = [True, False, 1, 0] * repeat
            assert same_bits(decoded(json.dumps(flags), BOOL).tensor, torch.tensor(flags).bool())
            assert same_bits(decoded(json.dumps([flags]), BOOL).tensor, torch.tensor([flags]).bool())
            numbers = [0, 5, 2**53 - 1, -7] * repeat
            assert same_bits(decoded(json.dumps(numbers), INT).tensor, torch.tensor(numbers))
            small = torch.tensor([0, 5, 2**31 - 1, -7] * repeat, dtype=torch.int32)
            for data in (small.tolist(), base64_of(small)):
                assert same_bits(decoded(in_object("int32", [len(small)], data), INT).tensor, small)
            for dtype in (torch.bool, torch.int32, torch.int64):
                given = torch.tensor(flags).to(dtype)
                for data in (given.tolist(), base64_of(given)):
                    text = in_object(str(dtype).removeprefix("torch."), [len(flags)], data)
                    assert same_bits(decoded(text, BOOL).tensor, given.bool())

    def test_minus_infinity_is_for_biases(self):
        for repeat in (1, 300):
            texts = ['"-inf"', "0.5", "-7e9", "-0.0"] * repeat
            text = f"[{','.join(texts)}]"
            values = torch.tensor([-math.inf, 0.5, -7e9, -0.0] * repeat)
            assert same_bits(decoded(text, BIAS).tensor, values)
            for dtype in FLOATS[1:]:
                name = str(dtype).removeprefix("torch.")
                shape = [4 * repeat]
                listed = f'{{"dtype":"{name}","shape":{shape},"data":{text}}}'
                assert same_bits(decoded(listed, BIAS).tensor, values.to(dtype))
                assert same_bits(
                    decoded(in_object(name, shape, base64_of(values.to(dtype))), BIAS).tensor, values.to(dtype)
                )
            for kind in (FLOAT, INT, BOOL):
                assert ' the string "-inf" at index [0]' in refused(text, kind).message

    def test_numbers_alone_are_tensors_without_axes(self):
        assert same_bits(decoded("5", INT).tensor, torch.tensor(5))
        assert same_bits(decoded("2.5").tensor, torch.tensor(2.5))
        assert same_bits(decoded("true", BOOL).tensor, torch.tensor(True))
        assert same_bits(decoded(in_object("float64", [], [7])).tensor, torch.tensor(7.0, dtype=torch.float64))

    def test_empty_axes_are_accepted(self):
        """T4: the request knows which axes may be empty, and says so in its own words."""
        assert decoded("[]").tensor.shape == (0,)
        assert decoded("[[],[]]").tensor.shape == (2, 0)
        for data in list[Any]([[], ""]):
            for dtype in ("float16", "bfloat16", "float32", "float64"):
                assert decoded(in_object(dtype, [3, 0, 2], data)).tensor.shape == (3, 0, 2)
            assert decoded(in_object("bool", [0], data), BOOL).tensor.shape == (0,)

    def test_the_tensor_is_writable(self):
        """Nothing else uses its memory, and torch does not warn."""
        for text in ("[1,2]", in_object("float64"), in_object("float32", [2], base64_of(torch.ones(2)))):
            decoded(text).tensor.add_(1)


class TestShapes:
    @pytest.mark.parametrize("more", [-1, 1, None])
    @pytest.mark.parametrize("count", [1, 6, 5_000])
    def test_the_product_must_be_the_count(self, count, more):
        """T1: and the message has both numbers."""
        shape = [count, 2 if more is None else 1]
        got = count if more is None else count + more
        if more is None:
            got = count
        error = refused(in_object("float32", shape, [0.5] * got))
        assert isinstance(error, BadShape)
        assert f"{got} values" in error.message
        assert str(math.prod(shape)) in error.message
        error = refused(in_object("float32", shape, base64_of(torch.ones(got))))
        assert isinstance(error, BadShape)
        assert f"{4 * got} bytes" in error.message
        assert str(4 * math.prod(shape)) in error.message

    @pytest.mark.parametrize(
        "shape",
        [
            [2**4, 2**60 + 2],
            [2**2, 2**60 + 2],
            [2**32, 2**32],
            [2**63, 2],
            [2**64],
            [10**4000, 10**4000],
            [0, 2**62, 2**62],
        ],
    )
    @pytest.mark.parametrize("data", [[], [1, 2, 3, 4], "AAAA", ""])
    def test_products_that_would_overflow_are_refused_at_once(self, shape, data):
        """T2: and nothing is allocated."""
        assert isinstance(refused(in_object("float32", shape, data)), CostLimit | BadShape)

    @pytest.mark.parametrize("size", [-1, 2.0, 2.5, "8", True, None, {}, 1e3, "a" * 2000])
    def test_sizes_are_whole_numbers(self, size):
        """T3."""
        for shape in ([size], [2, size], [[size]], size):
            assert isinstance(refused(in_object("float32", shape)), BadShape)

    @pytest.mark.parametrize("rank", [5, 64, 100_000])
    def test_more_than_four_axes_are_refused(self, rank):
        """T5: in shapes and in nested lists."""
        assert isinstance(refused(in_object("float32", [1] * rank, [1])), BadShape)
        for inner in ("1", ",".join(["1"] * 700)):
            assert isinstance(refused("[" * 5 + inner + "]" * 5), BadShape)

    @pytest.mark.parametrize(
        "text", ["[[1,2],[3]]", "[[1],2]", "[1,[2]]", "[[[1]],[2]]", "[[],[1]]", "[[1],[]]", "[[1,2],[3,[4]]]"]
    )
    @pytest.mark.parametrize("repeat", [1, 500])
    def test_ragged_lists_are_refused(self, text, repeat):
        """J16."""
        text = text.replace("1", ",".join("1" * repeat))
        for kind in (FLOAT, BOOL, INT, BIAS):
            assert isinstance(refused(text, kind), BadShape)

    def test_data_of_an_object_is_flat(self):
        for shape in ([1, 2], [2]):
            assert isinstance(refused(in_object("float32", shape, [[1, 2]])), BadShape)


class TestDtypes:
    @pytest.mark.parametrize("dtype", UNKNOWN_DTYPES)
    @pytest.mark.parametrize("kind", [FLOAT, BOOL, INT, BIAS])
    def test_unknown_dtypes_are_refused_with_what_is_allowed(self, dtype, kind):
        """T8."""
        error = refused(in_object(dtype), kind)
        assert isinstance(error, BadDtype)
        assert "must be one of" in error.message

    def test_each_kind_has_its_dtypes(self):
        for kind, names in (
            (FLOAT, ["bool", "int32", "int64"]),
            (BOOL, LARGEST),
            (INT, ["bool", *LARGEST]),
            (BIAS, ["int32"]),
        ):
            for name in names:
                assert isinstance(refused(in_object(name, [1], [1]), kind), BadDtype)

    def test_members_are_dtype_shape_and_data(self):
        error = refused(in_object(data=None, secret="value"))
        assert isinstance(error, UnknownField)
        assert "secret" not in error.message
        for missing in ("dtype", "shape", "data"):
            members = {name: value for name, value in json.loads(in_object()).items() if name != missing}
            error = refused(json.dumps(members))
            assert type(error) is InvalidInput
            assert missing in error.message

    @pytest.mark.parametrize(
        "value",
        NO_TENSORS,
    )
    def test_a_value_that_is_no_tensor_is_refused(self, value):
        assert isinstance(refused(value), InvalidInput)


class TestValues:
    @pytest.mark.parametrize("wrong", ["true", '"1.5"', '"NaN"', "null", "{}", '"-inf"', "[]"])
    @pytest.mark.parametrize("at", [0, 7, 700])
    def test_the_first_value_that_is_no_number_is_reported_by_its_index(self, wrong, at):
        """J11."""
        items = ["[1,2]"] * 701
        items[at] = f"[1,{wrong}]"
        error = refused("[" + ",".join(items[: at + 1]) + f",[{wrong},1]]")
        assert isinstance(error, InvalidInput)
        if wrong not in {"{}", "[]"}:
            assert f"at index [{at}][1]" in error.message
            assert "expected a number" in error.message

    def test_an_object_late_in_a_long_list_is_detected(self):
        """Objects keep a list from being read fast, not from being read."""
        assert "an object at index [8000]" in refused("[" + "1," * 8000 + "{},1]").message
        assert "an object at index [0][0]" in refused("[[{}]" + ",[1]" * 8000 + "]").message
        assert isinstance(refused("[[{}]" + ",[1]" * 8000 + ",[1,2]]"), BadShape)

    def test_a_value_of_another_kind_is_a_bad_mask_in_a_boolean_field_and_a_bad_dtype_elsewhere(self):
        for text in ('["x"]', "[2.5]", "[1e3]"):
            assert type(refused(text, INT)) is BadDtype
            assert isinstance(refused(text, BOOL), BadMask)

    @pytest.mark.parametrize("wrong", ["2", "0.5", "-1", '"true"', "null", '"-inf"', "1.0", "0.0", "1e0", "255"])
    @pytest.mark.parametrize("repeat", [1, 400])
    def test_masks_accept_only_true_false_0_and_1(self, wrong, repeat):
        assert isinstance(refused("[" + "true,0," * repeat + wrong + "]", BOOL), BadMask)

    def test_bytes_of_a_boolean_are_0_or_1(self):
        for wrong in (2, 128, 255):
            data = base64.b64encode(bytes([0, 1, wrong, 1])).decode()
            error = refused(in_object("bool", [2, 2], data), BOOL)
            assert isinstance(error, BadMask)
            assert "[1][0]" in error.message
        for dtype in (torch.int32, torch.int64):
            data = base64_of(torch.tensor([1, 0, -1], dtype=dtype))
            assert isinstance(refused(in_object(str(dtype).removeprefix("torch."), [3], data), BOOL), BadMask)

    @pytest.mark.parametrize(
        "wrong", ["2.5", "3.0", "1e2", "true", "null", '"3"', str(2**53), str(2**53 + 1), str(2**70), "-1e300"]
    )
    @pytest.mark.parametrize("repeat", [1, 400])
    def test_lengths_are_written_as_whole_numbers(self, wrong, repeat):
        assert isinstance(refused("[" + "3," * repeat + wrong + "]", INT), BadDtype)

    def test_the_bounds_of_int32_are_inclusive(self):
        for number in (2**31, -(2**31) - 1):
            assert isinstance(refused(in_object("int32", [1], [number]), INT), BadDtype)

    @pytest.mark.parametrize("dtype", LARGEST)
    def test_numbers_beyond_the_dtype_are_refused_and_the_largest_are_accepted(self, dtype):
        """J17, with the exact border: halfway to the next power of two rounds up and is refused."""
        largest = LARGEST[dtype]
        mantissa = {"float16": 11, "bfloat16": 8, "float32": 24}[dtype]
        border = largest + math.ulp(largest) * 2 ** (52 - mantissa)
        for sign, repeat in itertools.product((1, -1), (1, 400)):
            for number in (largest, math.nextafter(border, 0)):
                found = decoded(in_object(dtype, [repeat], [sign * number] * repeat)).tensor
                assert (found.double() == sign * largest).all()
            for number in (border, 1e39, 1.7e308):
                text = in_object(dtype, [repeat], [0.5] * (repeat - 1) + [sign * number])
                error = refused(text)
                assert isinstance(error, NonFinite)
                assert f"[{repeat - 1}]" in error.message
        assert isinstance(refused(in_object("float16", [1], [70000])), NonFinite)
        assert isinstance(refused("[3.5e38]"), NonFinite)

    @pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
    def test_numbers_beyond_float64_are_not_finite(self, number):
        """J6."""
        for text in (number, f"[{number}]", f"[[0],[{number}]]", "[" + "0," * 600 + number + "]"):
            for kind in (FLOAT, BIAS):
                assert isinstance(refused(text, kind), NonFinite)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_binary_nan_and_infinity_are_refused_with_their_index(self, dtype):
        """Ruling 10: only a bias may have -inf, and no field +inf or NaN, of any payload or sign."""
        for count in (3, 300_000):
            for wrong, kind in itertools.product((math.nan, math.inf, -math.inf), (FLOAT, BIAS)):
                tensor = torch.ones(count, dtype=dtype)
                tensor[-2] = wrong
                text = in_object(str(dtype).removeprefix("torch."), [count], base64_of(tensor))
                if wrong == -math.inf and kind is BIAS:
                    assert same_bits(decoded(text, kind).tensor, tensor)
                    continue
                error = refused(text, kind)
                assert isinstance(error, NonFinite)
                assert f"[{count - 2}]" in error.message

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_every_value_of_a_half_precision_dtype_round_trips(self, dtype):
        """All 63,488 (65,024) finite bit patterns, -0.0 and denormals included."""
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        values = bits.view(getattr(torch, dtype))
        values = values[values.isfinite()]
        assert same_bits(decoded(in_object(dtype, [len(values)], values.tolist())).tensor, values)
        assert same_bits(decoded(in_object(dtype, [len(values)], base64_of(values))).tensor, values)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_random_bit_patterns_round_trip(self, dtype):
        size = {"float32": torch.int32, "float64": torch.int64}[dtype]
        bits = torch.randint(torch.iinfo(size).min, torch.iinfo(size).max, (20_000,), dtype=size)
        values = bits.view(getattr(torch, dtype))
        values = torch.cat([values[values.isfinite()], torch.tensor([-0.0, 5e-324, 1e-45, 1.4e-45]).to(values.dtype)])
        assert same_bits(decoded(in_object(dtype, [len(values)], values.tolist())).tensor, values)

    @pytest.mark.parametrize(("dtype", "mantissa"), [("float16", 11), ("bfloat16", 8), ("float32", 24)])
    def test_rounding_is_to_nearest_even_in_one_step(self, dtype, mantissa):
        """Values around every kind of tie, compared with exact fractions."""
        rng = random.Random(mantissa)
        values = []
        for _ in range(600):
            exact = rng.randrange(2 ** (mantissa - 1), 2**mantissa) * 2 + rng.choice((0, 1))
            scale = rng.randrange(-8, 4)
            tie = math.ldexp(exact, scale)
            values += [tie, math.nextafter(tie, math.inf), math.nextafter(tie, 0), -tie, rng.gauss(0, 1)]
        found = decoded(in_object(dtype, [len(values)], values)).tensor.double().tolist()
        assert found == [_nearest_even(value, mantissa) for value in values]


def _nearest_even(value: float, mantissa: int) -> float:
    exponent = math.frexp(value)[1] - mantissa
    return float(round(Fraction(value) / Fraction(2) ** exponent) * Fraction(2) ** exponent)


class TestBase64:
    @pytest.mark.parametrize(
        "text",
        [
            "AAAAAA", "AAAAAA=", "AAAAAA===", "=AAAAAA=", "AAAA=AAA", "AA==AAAA", "AAAAAB==", "AAAAAAB=", "AAAA AA=", "AAAAAA= ",
            "\nAAAAAA=", "AA_-AA==", "AAAé", "A", "====", "AAA\u0000", "AAAA\r\nAA",
        ],
    )  # fmt: skip
    def test_bad_base64_is_bad_encoding(self, text):
        """B9, ruling 9: padding, alphabet, white space, stray bits."""
        assert isinstance(refused(in_object("float32", [1], text)), BadEncoding)
        long = base64_of(torch.ones(300_000 * 3)) + text
        assert isinstance(refused(in_object("float32", [900_001], long)), BadEncoding)

    def test_padding_between_slices_is_bad_encoding(self):
        slices = "AAAA" * (2**18 - 1) + "AA=="
        assert isinstance(refused(in_object("float32", [1], slices + slices)), BadEncoding)

    @pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 2**18 * 3 - 1, 2**18 * 3, 2**18 * 3 + 1])
    def test_every_length_decodes(self, count):
        flags = torch.randint(0, 2, (count,), dtype=torch.uint8)
        text = base64.b64encode(flags.numpy().tobytes()).decode()
        assert same_bits(decoded(in_object("bool", [count], text), BOOL).tensor, flags.bool())

    def test_escaped_slashes_are_slashes(self):
        for count in (2, 3_000):
            values = torch.full((count,), -1.7014117e38).view(torch.int32).bitwise_or(0x3FFFFF).view(torch.float32)
            text = in_object("float32", [count], base64_of(values)).replace("/", "\\/")
            assert "\\/" in text
            assert same_bits(decoded(text).tensor, values)

    @settings(max_examples=150)
    @given(st.text("AB/+=-_ \n", max_size=12))
    def test_exactly_one_text_stands_for_each_byte_string(self, text):
        """What is accepted encodes back to itself."""
        try:
            expected = base64.b64decode(text, validate=True)
            is_canonical = base64.b64encode(expected).decode() == text
        except ValueError:
            is_canonical = False
        body = in_object("bool", [len(expected) if is_canonical else 1], text)
        try:
            decoded(body, BOOL)
            assert is_canonical
        except BadEncoding:
            assert not is_canonical
        except BadMask:
            assert is_canonical


class TestAnyValue:
    @settings(max_examples=300)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.sampled_from(["dtype", "shape", "data", "x"]), inner, max_size=4)
                | st.fixed_dictionaries(
                    {
                        "dtype": st.sampled_from(["float32", "float16", "bool", "int64", "bfloat16", "x"]),
                        "shape": inner | st.lists(st.integers(-1, 3), max_size=5),
                        "data": inner,
                    }
                )
            ),
            max_leaves=12,
        ),
        st.sampled_from(TensorKind),
    )
    def test_only_service_errors_leave(self, value, kind):
        """Whatever Python value comes in."""
        with contextlib.suppress(ServiceError):
            decode_tensor(value, TensorField("/query", kind))

    @pytest.mark.parametrize("seed", range(4))
    def test_nested_lists_are_read_as_by_python_and_numpy(self, seed):
        """Random tensors of all kinds of elements, in any spacing: accepted exactly if regular and of the kind."""
        documents = Documents(seed)
        for _ in range(400):
            text = documents.tensor()
            body = f'{{"query":{text}}}'.encode()
            try:
                known = regular(strict(body, max_depth=64)["query"])
            except ServiceError:
                known = None
            for kind, dtype in ((BIAS, torch.float32), (FLOAT, torch.float32)):
                if known is None or not fits(text, known, kind):
                    refused(text, kind)
                    continue
                expected = known[0].astype(np.float32).reshape(known[1])
                assert same_bits(decoded(text, kind).tensor, torch.from_numpy(expected).to(dtype))


def fits(text: str, known: tuple[np.ndarray, tuple[int, ...]], kind: TensorKind) -> bool:
    """Whether a regular list is of this kind, looking at the text again."""
    with np.errstate(over="ignore"):
        overflows = (np.isinf(known[0].astype(np.float32)) & np.isfinite(known[0])).any()
    has_strings = '"' in text
    return not (overflows or "true" in text or "false" in text or (has_strings and kind is FLOAT) or len(known[1]) > 4)
