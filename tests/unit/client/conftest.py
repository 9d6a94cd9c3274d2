import pytest
import stamina.instrumentation


@pytest.fixture(autouse=True, scope="package")
def _retries_are_told_to_nobody():
    """Disable the hooks of stamina: they print each retry and register a series that other tests do not expect."""
    stamina.instrumentation.set_on_retry_hooks([])
    yield
    stamina.instrumentation.set_on_retry_hooks(None)
