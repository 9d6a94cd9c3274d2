"""Clients: both send the same bytes and return the same results, and any bad answer raises a typed error."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, assert_type

import httpx2
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from attention_client import (
    Answer,
    AsyncClient,
    BadAnswer,
    Client,
    ConnectionFailed,
    Layer,
    Request,
    ServiceError,
    TopK,
    Weights,
    errors,
    masks,
)
from tests.doubles import run, turns
from tests.unit.client.answering import (
    FACTS,
    Answering,
    Hanging,
    answer_of,
    file_of,
    metadata_of,
    problem_of,
    read_request,
)

X = np.arange(6, dtype=np.float32).reshape(3, 2)
QUERIES = [
    X, X.astype(np.float16), X.astype(np.float64), X.astype(ml_dtypes.bfloat16), X[None], X.T[::-1],
    torch.tensor(X), torch.tensor(X).half(), torch.tensor(X).bfloat16(), torch.tensor(X).double()[None],
]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES, ids=lambda q: f"{type(q).__name__}-{q.dtype}-{q.ndim}")
def test_an_answer_has_the_array_type_of_its_query(face, query):
    service = Answering()
    answer = face(service).attend("small", query, weights="heads")
    assert type(answer.output) is type(query)
    assert answer.output.dtype == query.dtype
    assert bool((answer.output == query).all())
    assert type(answer.weights) is type(query)
    rows = query.shape[-2]
    assert tuple(answer.weights.shape) == (*query.shape[:-2], 4, rows, rows)


def test_an_answer_holds_the_facts_of_the_service(face):
    answer = face(Answering()).attend("small", X)
    assert answer.weights is None
    assert (answer.masked_rows, answer.layer, answer.digest, answer.request_id) == (1, "small", "sha256:00", "theirs")
    assert answer.batch == (2, 3, 4)
    assert answer.timing_ms == (0.5, 1.0, 2.5, 4.25)
    assert answer.timing_ms.total == 4.25


def test_a_request_is_one_safetensors_body_with_its_other_fields_in_metadata(face):
    service = Answering()
    wanted = [masks.attend([True, False], axes="s"), masks.causal("bottom_right"), masks.bias(np.zeros((3, 2))),
              masks.window(1, offset=[-2, 3]), masks.lengths(2), masks.ignore(torch.tensor([0, 1]))]  # fmt: skip
    face(service).attend(
        "small", X, X[:2], torch.tensor(X[:2]), masks=wanted, weights=Weights("mean", heads=np.arange(2), queries=range(1)),
        masked_rows="error", request_id="job-7",
    )  # fmt: skip
    request = service.seen[0]
    tensors, fields = read_request(request)
    assert (request.method, request.url.path) == ("POST", "/v1/layers/small/attend")
    assert request.headers["content-type"] == request.headers["accept"] == "application/vnd.safetensors"
    assert request.headers["content-length"] == str(len(request.content))
    assert request.headers["x-request-id"] == "job-7"
    assert fields == {
        "masks": [
            {"kind": "attend", "axes": "s"}, {"kind": "causal", "align": "bottom_right"}, {"kind": "bias"},
            {"kind": "window", "left": 1, "offset": [-2, 3]}, {"kind": "lengths"}, {"kind": "ignore"},
        ],
        "weights": {"form": "mean", "heads": [0, 1], "queries": [0]},
        "masked_rows": "error",
    }  # fmt: skip
    assert {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "query": ("torch.float32", (3, 2)), "key": ("torch.float32", (2, 2)), "value": ("torch.float32", (2, 2)),
        "masks.0.values": ("torch.bool", (2,)), "masks.2.values": ("torch.float64", (3, 2)),
        "masks.4.values": ("torch.int64", ()), "masks.5.values": ("torch.int64", (2,)),
    }  # fmt: skip


def test_positions_and_the_past_are_tensors_of_the_body(face):
    service = Answering()
    face(service).attend(
        "small", X, X[:2], positions=range(4, 7), key_positions=torch.arange(3), layer_masks="none",
        past_key=X[None], past_value=torch.tensor(X[None]),
    )  # fmt: skip
    tensors, fields = read_request(service.seen[0])
    assert fields == {"layer_masks": "none"}
    assert tensors.keys() == {"query", "key", "positions", "key_positions", "past_key", "past_value"}
    assert (tensors["positions"].dtype, tensors["positions"].tolist()) == (torch.int64, [4, 5, 6])
    assert tensors["key_positions"].tolist() == [0, 1, 2]


def test_the_present_of_a_layer_has_the_dtype_of_the_query(face):
    rows = torch.ones(1, 3, 2)
    service = Answering(answer_of({"output": torch.tensor(X), "present_key": rows, "present_value": rows.clone()}))
    answer = face(service).attend("small", X, X.astype(np.float64), present=True)
    assert read_request(service.seen[0])[1] == {"present": True}
    assert answer.present_key.shape == answer.present_value.shape == (1, 3, 2)
    assert face(Answering()).attend("small", X).present_key is None


@pytest.mark.parametrize(
    ("url", "asked"), [("http://x:1/", "http://x:1"), ("http://x:1//", "http://x:1"), ("http://x/attention/", "http://x/attention")]
)  # fmt: skip
def test_an_address_may_end_with_a_slash(face, url, asked):
    service = Answering()
    client = face(service, url=url)
    client.attend("small", X)
    assert client.is_ready()
    assert [str(request.url) for request in service.seen] == [f"{asked}/v1/layers/small/attend", f"{asked}/readyz"]


def test_a_plain_request_has_no_field_at_all(face):
    service = Answering()
    face(service).attend("small", X)
    assert metadata_of(service.seen[0].content) == {"request": "{}"}


def test_top_k_has_its_three_parts(face):
    answer = face(Answering()).attend("small", torch.ones(2, 3, 4), weights=Weights("top_k", k=2, heads=[1]))
    assert isinstance(answer.weights, TopK)
    assert answer.weights.values.shape == answer.weights.indices.shape == (2, 1, 3, 2)
    assert answer.weights.rest.shape == (2, 1, 3)
    assert answer.weights.indices.dtype == torch.int32


@pytest.mark.parametrize(
    ("arguments", "options", "kind"),
    [
        ((np.zeros((2, 3), int),), {}, errors.BadDtype),
        (([[1.0]],), {}, errors.InvalidInput),
        ((None, X), {}, errors.InvalidInput),
        ((X,), {"masks": [np.ones((3, 3), bool)]}, errors.MaskKindRequired),
        ((X,), {"masks": [masks.attend(np.array(["a"]))]}, errors.BadDtype),
        ((X,), {"masks": masks.causal()}, errors.InvalidInput),
        ((X,), {"masks": np.ones(3, bool)}, errors.MaskKindRequired),
        ((X,), {"masks": torch.ones(3, dtype=torch.bool)}, errors.MaskKindRequired),
        ((X,), {"masks": 5}, errors.InvalidInput),
        ((X,), {"masks": "causal"}, errors.InvalidInput),
        ((X,), {"masks": {"kind": "causal"}}, errors.InvalidInput),
        ((X,), {"masks": [masks.lengths(torch.ones(3, device="meta"))]}, errors.InvalidInput),
        ((X,), {"positions": [0.5, 1, 2]}, errors.BadDtype),
        ((X,), {"positions": [True, False, True]}, errors.BadDtype),
        ((X,), {"key_positions": [[1], [2, 3]]}, errors.BadShape),
        ((X,), {"positions": X}, errors.BadDtype),
        ((X,), {"past_key": [1]}, errors.InvalidInput),
        ((X,), {"request_id": 5}, errors.InvalidInput),
        ((X,), {"timeout_s": "3"}, errors.InvalidInput),
        ((X,), {"weights": {"form": "heads", "heads": {1}}}, errors.InvalidInput),
        ((X,), {"timeout_s": -1}, errors.InvalidInput),
    ],
)
def test_an_impossible_request_is_refused_before_it_is_sent(face, arguments, options, kind):
    service = Answering()
    with pytest.raises(kind) as raised:
        face(service).attend("small", *arguments, **options)
    assert raised.value.status is None
    assert not service.seen


@pytest.mark.parametrize("name", ["", "..", "a/b", "UP", "x" * 65, "a\n", None, 5, b"small"])
def test_an_illegal_layer_name_reaches_no_other_route(face, name):
    service = Answering()
    for ask in (lambda client: client.attend(name, X), lambda client: client.layer(name)):
        with pytest.raises(errors.LayerNotFound):
            ask(face(service))
    assert not service.seen


def test_the_services_error_is_raised_as_its_own_class(face):
    problem = problem_of(422, "bad_shape", "key has 3 features", param="/key")
    with pytest.raises(errors.BadShape, match="key has 3 features") as error:
        face(Answering(problem)).attend("small", X)
    assert (error.value.status, error.value.param, error.value.request_id) == (422, "/key", "theirs")


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in FACTS.items() if key != name}


BAD = {
    "html": httpx2.Response(200, text="<html>hello</html>"),
    "json": httpx2.Response(200, json={"output": []}),
    "empty": httpx2.Response(200, headers={"content-type": "application/vnd.safetensors"}),
    "no tensors": answer_of({}),
    "no output": answer_of({"weights": torch.ones(4, 3, 3)}),
    "rows missing": answer_of({"output": torch.ones(2, 2)}),
    "rank": answer_of({"output": torch.ones(1, 3, 2)}),
    "dtype": answer_of({"output": torch.ones(3, 2).double()}),
    "unknown dtype": answer_of({"output": torch.ones(3, 2).to(torch.uint8)}),
    "no facts": answer_of({"output": torch.ones(3, 2), "weights": torch.ones(4, 3, 3)}, {}),
    "facts are a list": answer_of({"output": torch.ones(3, 2), "weights": torch.ones(4, 3, 3)}, []),
    "facts are no json": answer_of({"output": torch.ones(3, 2), "weights": torch.ones(4, 3, 3)}, "{"),
    "no timing": answer_of({"output": torch.ones(3, 2), "weights": torch.ones(4, 3, 3)}, without("timing_ms")),
    "a redirect": httpx2.Response(307, headers={"location": "http://elsewhere"}),
}  # fmt: skip


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_a_malformed_answer_is_one_typed_error(face, answer):
    service = Answering(answer)
    with pytest.raises(BadAnswer) as raised:
        face(service).attend("small", X, weights="heads")
    assert raised.value.status == answer.status_code
    assert raised.value.request_id
    assert raised.value.__cause__ is None
    assert len(service.seen) == 1, "a request with a bad answer is not sent again"


@pytest.mark.parametrize("cut", [0, 4, 8, 9, 60, -1])
def test_a_body_that_is_cut_short_is_one_typed_error(face, cut):
    body = file_of({"output": torch.ones(3, 2)})[:cut]
    answer = httpx2.Response(200, content=body, headers={"content-type": "application/vnd.safetensors"})
    with pytest.raises(BadAnswer):
        face(Answering(answer)).attend("small", X)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"layers": 3}', b'{"layers": [{"name": 3}]}', b'{"layers": [7]}']
)
def test_a_malformed_list_of_layers_is_one_typed_error(face, body):
    with pytest.raises(BadAnswer):
        face(Answering(httpx2.Response(200, content=body))).layers()


def test_layers_have_their_widths_and_all_else_as_facts(face):
    client = face(Answering())
    [layer] = client.layers()
    assert isinstance(layer, Layer)
    assert (layer.name, layer.query_width, layer.num_heads, layer.limits) == ("small", 16, 4, {"tokens": 99})
    assert client.layer("small").facts["family"] == "torch-mha"


@pytest.mark.parametrize(
    ("answer", "is_ready"),
    [(httpx2.Response(200, json={"status": "ready", "since": 1}), True), (problem_of(503, "not_ready"), False),
     (problem_of(503, "engine_down"), False), (httpx2.ConnectError("x"), False), (httpx2.Response(502), False),
     (httpx2.Response(200), False), (httpx2.Response(200, text="<html>Welcome</html>"), False),
     (httpx2.Response(200, json=["ready"]), False), (httpx2.Response(200, json={"status": "ok"}), False),
     (httpx2.Response(302), False), (httpx2.Response(404), False), (httpx2.Response(500), False),
     (problem_of(403, "brand_new"), False), (httpx2.Response(200, headers={"content-encoding": "gzip"}), False)],
)  # fmt: skip
def test_ready_is_true_only_for_a_200_and_is_not_retried(face, answer, is_ready):
    service = Answering(answer)
    assert face(service).is_ready() is is_ready
    assert len(service.seen) == 1


def test_a_json_request_is_sent_unchanged(face):
    service = Answering()
    body = {"query": [[1.0]], "masks": [{"kind": "causal"}]}
    for given in (body, types.MappingProxyType(body)):
        assert face(service).attend_json("small", given) == {"echo": body}
    assert service.seen[0].headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "number",
    [float("nan"), float("-inf"), np.float64("inf"), np.array([1.0, np.nan])],
    ids=["nan", "-inf", "np", "array"],
)
def test_a_number_outside_json_is_refused_and_not_sent_as_null(face, number):
    service = Answering()
    with pytest.raises(errors.InvalidInput, match="finite"):
        face(service).attend_json("small", {"query": [[1.0, None, np.float32(2)]], "masks": ({"values": number},)})
    assert not service.seen


@pytest.mark.parametrize("number", [float("nan"), float("inf"), np.float32("nan")], ids=repr)
@pytest.mark.parametrize(
    "wishes",
    [lambda n: {"masks": [masks.causal(offset=n)]}, lambda n: {"masks": [masks.window(n, 0)]},
     lambda n: {"weights": {"form": "top_k", "k": n}}, lambda n: {"masked_rows": n}],
    ids=["offset", "left", "k", "masked_rows"],
)  # fmt: skip
def test_a_non_finite_field_is_refused_and_not_sent_as_null(face, wishes, number):
    service = Answering()
    with pytest.raises(errors.InvalidInput, match="finite"):
        face(service).attend("small", X, **wishes(number))
    assert not service.seen


def test_masks_may_be_none_or_any_iterable(face):
    service = Answering()
    client = face(service)
    wanted: Any
    for wanted in (None, [], (), (mask for mask in [masks.causal()])):
        client.attend("small", X, masks=wanted)
    assert [read_request(request)[1] for request in service.seen] == [{}, {}, {}, {"masks": [{"kind": "causal"}]}]


def test_an_array_subclass_is_sent_as_its_memory(face):
    class Other(np.ndarray):
        shape = property(lambda self: (1, 1))

    class Others(torch.Tensor):
        shape = (1, 1)  # type: ignore[assignment]

    service = Answering()
    client = face(service)
    for like in (X.view(Other), torch.tensor(X).as_subclass(Others)):
        assert client.attend("small", like, weights="heads").output.shape == (3, 2)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("transport", [httpx2.HTTPTransport(), "proxy", object()], ids=["sync", "text", "object"])
def test_a_transport_of_the_wrong_kind_is_refused_at_once(kind, transport):
    with pytest.raises(errors.InvalidInput, match="AsyncBaseTransport"):
        kind(transport=transport)


def test_an_intended_null_is_sent(face):
    service = Answering()
    body = {"query": [[1.0]], "weights": None, "masks": [{"kind": "window", "left": None, "right": 1}]}
    assert face(service).attend_json("small", body) == {"echo": body}


@pytest.mark.parametrize("window", [1, 3, 50])
def test_attend_many_keeps_the_order_of_its_items(face, window):
    items = [np.full((1, 2), i, np.float32) if i % 2 else Request(torch.full((1, 2), float(i))) for i in range(20)]
    answers = list(face(Answering()).attend_many("small", items, window=window))
    assert [float(answer.output[0, 0]) for answer in answers] == list(range(20))
    assert [type(answer.output) for answer in answers[:2]] == [torch.Tensor, np.ndarray]


def test_a_reused_array_is_sent_with_its_values_of_each_item(face):
    def items():
        one = np.empty((1, 2), np.float32)
        for i in range(9):
            one[:] = i
            yield one

    found = [float(answer.output[0, 0]) for answer in face(Answering()).attend_many("small", items(), window=4)]
    assert found == list(range(9))


def test_a_failed_item_raises_in_its_turn(face):
    items = [X, X, np.zeros(3, np.int64), X]
    answers = face(Answering()).attend_many("small", iter(items), window=4)
    assert next(answers).output.shape == (3, 2)
    assert next(answers).output.shape == (3, 2)
    with pytest.raises(errors.BadDtype) as raised:
        next(answers)
    assert raised.value.__notes__ == ["item 2 of attend_many"]
    assert list(answers) == []


def test_errors_may_be_returned_in_place_of_answers(face):
    service = Answering(problem_of(422, "non_finite"))
    items: list[Any] = [X, np.zeros(3, np.int64), X, None]
    found = list(face(service).attend_many("small", items, window=1, on_error="yield"))
    assert [type(outcome) for outcome in found] == [errors.NonFinite, errors.BadDtype, Answer, errors.InvalidInput]


async def cut_off(request):
    raise httpx2.ReadError("x")


@pytest.mark.parametrize(
    "trouble", [problem_of(422, "bad_shape"), cut_off, Hanging()], ids=["refused", "cut off", "late"]
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_failed_call_leaves_nothing_to_the_garbage_collector(kind, trouble):
    """Requests are large, and the collector counts objects, not bytes."""

    async def main() -> None:
        client = kind(transport=Answering(trouble).transport, attempts=1)
        query = X.copy()
        watched = weakref.ref(query)
        with contextlib.suppress(ServiceError):
            await client.attend("small", query, timeout_s=0.05 if isinstance(trouble, Hanging) else None)
        del query
        for _ in range(500):  # the client's thread may still be at work
            if watched() is not None:
                await asyncio.sleep(0.01)
        assert watched() is None
        if (closing := client.close()) is not None:
            await closing

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "odd",
    [{"window": 0}, {"window": 1.5}, {"window": float("nan")}, {"window": float("inf")}, {"window": "8"},
     {"window": None}, {"on_error": "Raise"}, {"on_error": None}, {"timeout_s": "3"}, {"items": None}, {"items": 5}],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_impossible_options_are_refused_at_the_call_and_not_at_the_first_answer(kind, odd):
    client = kind(transport=Answering().transport)
    with pytest.raises(errors.InvalidInput):
        client.attend_many("small", **{"items": [X], **odd})


def test_the_synchronous_client_refuses_async_items():
    async def items():
        yield X

    with Client(transport=Answering().transport) as client, pytest.raises(errors.InvalidInput, match="AsyncClient"):
        client.attend_many("small", items())


def test_the_async_client_accepts_an_async_iterator():
    async def items():
        for i in range(5):
            await asyncio.sleep(0)
            yield np.full((1, 2), i, np.float32)

    async def main() -> list[float]:
        async with AsyncClient(transport=Answering().transport) as client:
            return [float(answer.output[0, 0]) async for answer in client.attend_many("small", items(), window=2)]

    assert run(main) == [0, 1, 2, 3, 4]


def test_a_deadline_holds_for_the_whole_call(face):
    with pytest.raises(errors.DeadlineExceeded):
        face(Answering(Hanging())).attend("small", X, timeout_s=0.001)


def test_a_closed_client_raises_that_it_is_closed():
    client = Client(transport=Answering().transport)
    client.layers()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.layers()


def test_a_call_that_is_in_flight_when_the_client_closes_is_one_typed_error():
    hang = Hanging()
    service = Answering(hang, hang)
    client = Client(transport=service.transport)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.attend, "small", X)
        assert hang.has_begun.wait(20)
        client.close()
        with pytest.raises(ConnectionFailed, match="closed"):
            call.result()
    assert len(service.seen) == 1


def test_a_call_that_is_in_flight_when_the_asynchronous_client_closes_is_the_same_typed_error():
    service = Answering(Hanging(), problem_of(503, "draining", retry_after="60"))

    async def main() -> None:
        client = AsyncClient(transport=service.transport, timeout_s=None)
        calls = [asyncio.ensure_future(client.attend("small", X)) for _ in range(2)]
        await turns()
        assert len(service.seen) == 2, "one hangs, the other waits to ask again"
        await client.close()
        for call in calls:
            with pytest.raises(ConnectionFailed, match="closed"):
                await call
        with pytest.raises(RuntimeError, match="closed"):
            await client.attend("small", X)
        await client.close()

    run(main)
    assert len(service.seen) == 2


def test_an_asynchronous_client_refuses_another_loop():
    client = AsyncClient(transport=Answering().transport)
    asyncio.run(client.layers())
    with pytest.raises(RuntimeError, match="one for each loop"):
        asyncio.run(client.layers())
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="one for each loop"):
        pool.submit(lambda: asyncio.run(client.layers())).result()


def test_an_iterator_keeps_its_client_alive():
    answers = Client(transport=Answering().transport).attend_many("small", iter([X] * 3), window=1)
    gc.collect()
    assert len(list(answers)) == 3


def test_an_iterator_raises_after_its_client_is_closed():
    with Client(transport=Answering().transport) as client:
        answers = client.attend_many("small", [X] * 5, window=1)
        next(answers)
    with pytest.raises(RuntimeError, match="closed"):
        next(answers)


def test_an_unreferenced_client_leaves_no_thread():
    client = Client(transport=Answering().transport)
    client.layers()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "attention-client"]
    del client
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_threads_share_a_client():
    with Client(transport=Answering().transport) as client:
        threads = [threading.Thread(target=client.attend, args=("small", X)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(thread.name == "attention-client" for thread in threading.enumerate()) == 1


def test_an_interrupt_cancels_the_call(monkeypatch):
    """Ctrl-C interrupts the waiting caller; its call must not go on."""
    hang, result = Hanging(), Future.result

    def interrupted(future, timeout=None):
        if threading.current_thread() is not threading.main_thread():
            return result(future, timeout)  # the client's own loop may read a result too
        hang.has_begun.wait(20)
        raise KeyboardInterrupt

    with Client(transport=Answering(hang).transport) as client:
        with monkeypatch.context() as patch:
            patch.setattr("concurrent.futures.Future.result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.attend("small", X)
        assert hang.is_cancelled.wait(20)


def exit_code_of_fork(is_right: Callable[[], bool]) -> int:
    """Return the exit code of a forked process: 0 if `is_right` returns true there, 1 if it raises."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if is_right() else 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_uses_its_own_loop():
    with Client(transport=Answering().transport) as client:
        client.attend("small", X)
        assert exit_code_of_fork(lambda: client.attend("small", X).output.shape == (3, 2)) == 0
        assert client.attend("small", X).output.shape == (3, 2)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("end", [Client.close, lambda client: client.attend("small", X)], ids=["close", "attend"])
def test_a_process_forked_while_another_thread_starts_or_stops_the_client_does_not_hang(end):
    def has_ended() -> bool:
        end(client)
        return True

    with Client(transport=Answering().transport) as client:
        client.attend("small", X)
        thread, _ = client._started()
        with client._lock, thread._stopping:
            assert exit_code_of_fork(has_ended) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_items", [3, 9], ids=["all are in flight", "more to come"])
def test_an_iterator_begun_before_a_fork_raises_in_the_child(num_items):
    def names_the_fork() -> bool:
        with pytest.raises(RuntimeError) as raised:
            next(answers)
        return "fork" in str(raised.value)

    with Client(transport=Answering().transport) as client:
        answers = client.attend_many("small", [X] * num_items, window=3)
        next(answers)
        thread, _ = client._started()
        with thread._stopping:
            assert exit_code_of_fork(names_the_fork) == 0
        assert len(list(answers)) == num_items - 1


def test_importing_the_client_imports_nothing_heavy():
    script = "import sys, attention_client; print(*sorted({name.split('.')[0] for name in sys.modules}), *sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        "torch",
        "fastapi",
        "starlette",
        "pydantic",
        "uvicorn",
        "rich",
        "ml_dtypes",
        "structlog",
        "prometheus_client",
    }
    assert not heavy & set(found)
    assert "service" not in found


def test_the_types_state_the_array_type_of_the_answer():
    """mypy checks the types; at run time this is an ordinary call."""
    array: npt.NDArray[np.float32] = X
    with Client(transport=Answering().transport) as client:
        assert_type(client.attend("small", array), Answer[npt.NDArray[Any]])
        assert_type(client.attend("small", torch.tensor(X)).output, torch.Tensor)
        for answer in client.attend_many("small", [torch.tensor(X)]):
            assert_type(answer, Answer[torch.Tensor])
        for outcome in client.attend_many("small", [Request(array)], on_error="yield"):
            assert_type(outcome, Answer[npt.NDArray[Any]] | ServiceError)
