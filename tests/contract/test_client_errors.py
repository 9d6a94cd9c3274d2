"""The client raises the classes that the service has: the same names, codes and parents."""

from attention_client import errors as client_errors
from service import errors as service_errors


def tree(module) -> dict[str, tuple[str | None, list[str]]]:
    """For each class of errors its code and the names of its parents, the nearest first."""
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return {
        kind.__name__: (getattr(kind, "code", None), [base.__name__ for base in kind.__mro__[1:]]) for kind in kinds
    }


def test_the_client_has_every_error_of_the_service_and_three_of_its_own():
    found = tree(client_errors)
    own = {name: found.pop(name) for name in ("ClientError", "ConnectionFailed", "BadAnswer")}
    assert found == tree(service_errors)
    assert all("ServiceError" in parents for _, parents in own.values())
