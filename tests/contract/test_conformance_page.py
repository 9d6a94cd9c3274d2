"""docs/conformance.md says what the conformance tests do."""

from tests.conformance.onnx_cases import onnx_cases
from tests.conformance.page import PAGE, page

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_the_one_that_the_tests_write():
    assert page(TEXT, onnx_cases()) == TEXT, "run `make conformance`"


def test_a_page_without_the_package_onnx_keeps_its_table():
    assert page(TEXT, []) == TEXT


def test_every_row_of_the_articles_has_a_line():
    assert all(f"| row {number} " in TEXT for number in range(1, 17))
    assert all(f"| example {letter} " in TEXT for letter in "abcde")
