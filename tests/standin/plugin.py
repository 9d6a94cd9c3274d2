"""Runs tests with the stand-in GPU instead of the CPU: `python -m pytest -p tests.standin.plugin tests/unit/attention`.

EXCEPTIONS are the tests of these suites that do not hold on a GPU, each with its reason.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

from service.worker import service
from tests import attention_fixtures
from tests.standin.device import register

# Of each property; the suites draw more of them on the CPU, and here each operator takes some 50 µs longer.
MAX_EXAMPLES = 15
DEVICE = register()
attention_fixtures.DEVICE = DEVICE
os.environ["ATTENTION_EXACT"] = "true"  # whole services are to keep their bits
setattr(service, "pick_device", lambda _: DEVICE)  # noqa: B010 (the module does not export it)


class FewExamples(hypothesis.settings):
    def __init__(self, parent: hypothesis.settings | None = None, **given: Any) -> None:
        super().__init__(parent, **given | {"max_examples": min(MAX_EXAMPLES, given.get("max_examples", MAX_EXAMPLES))})


setattr(hypothesis, "settings", FewExamples)  # noqa: B010 (before the suites import it)

ONE_THREAD = "a GPU has one thread"
NO_INLINE = "a GPU computes beside the caller's thread, so no batch is inline"
ACCOUNT = "the stand-in keeps no account of its memory, and the test expects bytes of a CPU"
MEASURED = "the test counts memory of the CPU"
EXCEPTIONS = {
    "test_an_unreferenced_layer_frees_its_memory": ACCOUNT,
    "test_device_bytes_are_those_of_the_loaded_layers": ACCOUNT,
    "test_an_unloaded_layer_frees_its_memory": ACCOUNT,
    "test_short_and_long_batches_each_have_a_thread_with_the_configured_torch_threads": ONE_THREAD,
    "test_the_thread_of_long_batches_builds_a_variant_that_later_inline_batches_use": ONE_THREAD,
    "test_each_batch_tells_its_processor_time_and_its_filler_rows": ONE_THREAD,
    "test_short_and_inline_batches_are_answered_beside_a_long_one": ONE_THREAD,
    "test_a_stopped_batch_fails_and_the_next_one_runs": ONE_THREAD,
    "test_the_heap_is_not_trimmed_on_the_thread_of_long_batches": ONE_THREAD,
    "test_closing_joins_both_threads_within_one_time": ONE_THREAD,
    "test_an_inline_batch_is_computed_before_run_returns_with_the_same_bits": NO_INLINE,
    "test_the_error_of_a_failed_inline_batch_holds_no_frame_of_the_caller": NO_INLINE,
    "test_any_exception_of_an_inline_batch_fails_only_that_batch": NO_INLINE,
    "test_a_shared_key_is_never_copied_for_its_query_heads": MEASURED,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := EXCEPTIONS.get(getattr(item, "originalname", item.name)):
            item.add_marker(pytest.mark.skip(reason=reason))
