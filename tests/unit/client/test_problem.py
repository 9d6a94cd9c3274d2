"""Problems: an error response is raised as the class that has its code."""

import json

import pytest

from attention_client import errors
from attention_client.answer import Reply, check
from attention_client.errors import BadAnswer, ClientError, ConnectionFailed, ServiceError


def tree(kind: type[ServiceError]) -> list[type[ServiceError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


OWN = {ClientError, BadAnswer, ConnectionFailed}
KINDS = [kind for kind in tree(ServiceError)[1:] if kind.__module__ == errors.__name__ and kind not in OWN]


def raised(status: int, body: object, **headers: str) -> ServiceError:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with pytest.raises(ServiceError) as raised:
        check(Reply(status, named, content, "id-1"))
    assert (raised.value.status, raised.value.request_id) == (status, "id-1")
    return raised.value


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_every_code_of_the_service_raises_its_own_class(kind):
    error = raised(418, {"code": kind.code, "detail": "words", "param": "/query"}, retry_after="7")
    assert type(error) is kind
    assert (error.message, str(error), error.param, error.retry_after_s) == ("words", "words", "/query", 7)


def test_a_refusal_without_retry_after_names_no_time():
    assert raised(429, {"code": "queue_full", "detail": "x"}).retry_after_s is None


def test_method_not_allowed_names_the_allowed_methods():
    error = raised(405, {"code": "method_not_allowed", "detail": "x"}, allow="GET, HEAD")
    assert isinstance(error, errors.MethodNotAllowed)
    assert error.allow == "GET, HEAD"


@pytest.mark.parametrize(
    ("status", "of_service", "of_proxy"),
    [(400, errors.Rejected, errors.Rejected), (418, errors.Rejected, errors.Rejected), (429, errors.Refused, errors.Refused),
     (500, errors.Failed, ConnectionFailed), (501, errors.Failed, errors.Failed), (502, ConnectionFailed, ConnectionFailed),
     (503, errors.Refused, errors.Refused), (504, errors.DeadlineExceeded, ConnectionFailed),
     (301, BadAnswer, BadAnswer), (204, BadAnswer, BadAnswer)],
)  # fmt: skip
def test_an_unknown_code_and_a_page_of_a_proxy_raise_the_branch_of_their_status(status, of_service, of_proxy):
    newer = raised(status, {"code": "brand_new", "detail": "a reason"})
    assert (type(newer), newer.message) == (of_service, "brand_new: a reason")
    for body in (b"<html>Bad Gateway</html>", b"", b"upstream timed out", b'{"detail": "Internal Server Error"}'):
        page = raised(status, body, retry_after="2")
        assert (type(page), page.retry_after_s) == (of_proxy, 2)
        assert str(status) in page.message


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{" * 9999, b"\xff", b'{"code": 1, "detail": "x"}', b'{"code": "invalid"}'],
)  # fmt: skip
def test_without_a_problem_body_the_status_decides(body):
    assert type(raised(422, body)) is errors.Rejected


def test_a_foreign_subclass_is_never_raised():
    class Mine(errors.InvalidInput):
        code = "of_my_own"

    assert type(raised(422, {"code": "of_my_own", "detail": "x"})) is errors.Rejected


def test_errors_of_the_client_alone_are_a_branch_of_the_same_tree():
    assert {kind.code for kind in tree(ClientError)} == {"client_error", "connection_failed", "bad_answer"}
    assert issubclass(ClientError, ServiceError)
