"""Field names: the nearest name is suggested only if it is clear which one is meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.wire.field_names import hint, instead, nearest

FLOATS = ("float16", "bfloat16", "float32", "float64")
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists)


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("Float32", FLOATS, "float32"),
        ("torch.float32", FLOATS, "float32"),
        ("bfloat", FLOATS, "bfloat16"),
        ("TOP_LEFT", ("top_left", "bottom_right"), "top_left"),
    ],
)
def test_a_name_of_another_case_or_spelling_gets_the_one_that_is_meant(name, known, meant):
    assert nearest(name, known) == f'; did you mean "{meant}"?'


@pytest.mark.parametrize("name", ["float", "f", "", "quaternion", None, 5, ["float32"]])
def test_nothing_is_suggested_where_several_names_or_none_may_be_meant(name):
    assert nearest(name, FLOATS) == ""


@given(JSON)
def test_any_value_is_answered_with_what_came(value):
    assert instead(value, FLOATS).startswith(", got ")


@given(st.text("é漢!<", min_size=1))
def test_a_text_that_is_no_name_is_never_shown(text):
    assert not set(text) & set(instead(text, FLOATS) + hint(text, FLOATS))
