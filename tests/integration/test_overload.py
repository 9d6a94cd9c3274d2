"""Overload, deadlines, disconnects, failing engines: which requests are refused or answered, and what is counted."""

import asyncio
import contextlib

import numpy as np
import pytest

from tests.integration.running import in_service

X = [[0.5] * 16]


async def blocked(service):
    """Closes the gate and sends one request into the engine; returns its task."""
    service.engine.gate.clear()
    task = asyncio.ensure_future(service.attend({"query": X}))
    await service.until(lambda: service.service.batcher.num_running == 1)
    return task


@in_service(queue_capacity=5, probe_s=3600)
async def test_exactly_the_capacity_of_the_queue_is_admitted_and_the_rest_gets_retry_after(service):
    """Q1, Q2."""
    running = await blocked(service)
    tasks = [asyncio.ensure_future(service.attend({"query": X})) for _ in range(8)]
    await service.until(lambda: sum(task.done() for task in tasks) == 3)
    refused = [task.result() for task in tasks if task.done()]
    assert {answer.status_code for answer in refused} == {429}
    assert {answer.json()["code"] for answer in refused} == {"queue_full"}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert (await service.client.get("/healthz")).status_code == 200
    assert (await service.client.get("/readyz")).status_code == 200
    service.engine.gate.set()
    answers = [await task for task in tasks if task not in refused]
    assert sum(answer.status_code == 200 for answer in answers) == 5
    assert (await running).status_code == 200
    samples = await service.samples()
    assert samples['attention_rejected_total{reason="queue_full"}'] == 3
    assert samples["attention_queued_requests"] == samples["attention_queued_bytes"] == 0


@pytest.mark.parametrize("timeout_ms", ["20", "20".zfill(5000)], ids=["plain", "zeros"])
@in_service(probe_s=3600)
async def test_a_request_whose_deadline_passes_in_the_queue_is_never_executed(service, timeout_ms):
    """Q4."""
    running = await blocked(service)
    late = await service.attend({"query": X * 3}, headers={"x-request-timeout-ms": timeout_ms})
    assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
    service.engine.gate.set()
    await running
    assert (await service.attend({"query": X})).status_code == 200
    assert service.engine.batches.count(1) >= 2
    samples = await service.samples()
    assert samples["attention_batch_tokens_sum"] < 3 + 20


@in_service(probe_s=3600)
async def test_a_disconnect_frees_its_queue_entry_and_is_counted_once(service):
    running = await blocked(service)
    leaving = await leave_while_queued(service)
    assert leaving == []
    assert service.service.batcher.num_queued == 0
    service.engine.gate.set()
    await running
    samples = await service.samples()
    assert samples['attention_cancelled_total{stage="queued"}'] == 1
    assert samples["attention_received_total"] == 2
    assert samples["attention_in_flight_requests"] == 0


async def leave_while_queued(service) -> list:
    """A request over bare ASGI whose connection closes while it waits; what was sent to it."""
    body = b'{"query": [[' + b",".join([b"0.5"] * 16) + b"]]}"
    messages: asyncio.Queue = asyncio.Queue()
    sent: list = []

    async def send(message):
        sent.append(message)

    await messages.put({"type": "http.request", "body": body})
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/layers/small/attend",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
        "root_path": "",
    }
    edge = service.client._transport.app
    task = asyncio.ensure_future(edge(scope, messages.get, send))
    await service.until(lambda: service.service.batcher.num_queued == 1)
    await messages.put({"type": "http.disconnect"})
    await task
    return sent


@in_service(probe_s=3600)
async def test_x1_one_failing_member_of_a_batch_fails_alone(service):
    service.engine.wrong = lambda call: call.query.shape[1] == 7
    running = await blocked(service)
    tasks = [asyncio.ensure_future(service.attend({"query": X * n})) for n in (1, 2, 3, 7, 4, 5, 6, 8)]
    await service.until(lambda: service.service.batcher.num_queued == 8)
    service.engine.gate.set()
    answers = [await task for task in tasks]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 500, 200, 200, 200, 200]
    assert answers[3].json()["code"] == "engine_failed"
    assert "secret" not in answers[3].text
    await running
    assert (await service.samples())["attention_batch_retries_total"] == 1


NONSENSE = {
    "X15-too-few": lambda answers: answers[:-1],
    "X15-none": lambda _: None,
    "X15-wrong-order": lambda answers: answers[::-1],
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
@in_service(probe_s=3600)
async def test_a_layer_that_returns_nonsense_fails_that_batch_and_mixes_no_answers(service, nonsense):
    expected = [(await service.attend({"query": X * n})).json()["output"] for n in (1, 2, 3)]
    (layer,) = service.service.catalog.get("small").loaded.variants.values()
    forward = layer.forward
    layer.forward = lambda calls: nonsense(forward(calls)) if len(calls) > 1 else forward(calls)
    running = await blocked(service)
    tasks = [asyncio.ensure_future(service.attend({"query": X * n})) for n in (1, 2, 3)]
    await service.until(lambda: service.service.batcher.num_queued == 3)
    service.engine.gate.set()
    assert [(await task).json()["output"] for task in tasks] == expected, "retried apart"
    assert (await running).status_code == 200
    assert (await service.samples())["attention_batch_retries_total"] == 1


@pytest.mark.parametrize("leaving", [range(1), range(8), [0, 3, 7]], ids=["X13-one", "X13-all", "X13-some"])
@pytest.mark.parametrize("moment", ["running", "answered"])
@in_service(probe_s=3600)
async def test_disconnects_from_a_running_batch_harm_no_other_request(service, leaving, moment):
    expected = (await service.attend({"query": X})).json()["output"]
    running = await blocked(service)
    tasks = [asyncio.ensure_future(service.attend({"query": X})) for _ in range(8)]
    await service.until(lambda: service.service.batcher.num_queued == 8)
    if moment == "answered":
        service.engine.gate.set()  # the answers are on their way while they leave
    for number in leaving:
        tasks[number].cancel()
    service.engine.gate.set()
    await asyncio.wait(tasks)
    stayed = [task for number, task in enumerate(tasks) if number not in leaving]
    assert all(task.result().json()["output"] == expected for task in stayed)
    assert (await running).status_code == 200
    assert (await service.attend({"query": X})).json()["output"] == expected
    assert service.service.batcher.num_queued == service.service.batcher.num_running == 0
    assert (await service.samples())["attention_in_flight_requests"] == 0


def test_x12_a_disconnect_at_a_random_stage_leaves_nothing_behind_and_is_counted_once(served):
    """A small form; the whole one is a figure of its own."""
    rng = np.random.default_rng(12)

    async def story(service):
        async def leave(seconds: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await service.attend({"query": X * int(rng.integers(1, 40))})

        for _ in range(10):
            leavers = [asyncio.ensure_future(leave(float(seconds))) for seconds in rng.uniform(0, 0.02, 30)]
            assert (await service.attend({"query": X})).status_code == 200
            await asyncio.wait(leavers)
        await service.until(lambda: service.service.batcher.num_queued + service.service.batcher.num_running == 0)
        samples = await service.samples()
        ended = sum(
            value
            for name, value in samples.items()
            if name.startswith(("attention_requests_total", "attention_cancelled"))
        )
        assert samples["attention_received_total"] == ended == 310
        assert samples["attention_in_flight_requests"] == samples["attention_queued_bytes"] == 0

    served(story, probe_s=3600, queue_capacity=64)


@in_service(queue_capacity=512)
async def test_thousands_of_concurrent_requests_each_get_their_own_answer(service):
    """T20."""
    expected = {}
    for n in range(20):
        constant = (await service.attend({"query": [[n / 7] * 16]})).json()["output"]
        expected[n] = constant

    async def ask(i: int) -> None:
        answer = await service.attend({"query": [[i % 20 / 7] * 16]})
        assert answer.json()["output"] == expected[i % 20]

    gate = asyncio.Semaphore(200)

    async def bounded(i: int) -> None:
        async with gate:
            await ask(i)

    await asyncio.gather(*(bounded(i) for i in range(1000)))
    samples = await service.samples()
    assert samples["attention_batch_requests_count"] < 900


@in_service()
async def test_a_dead_engine_fails_every_request_and_readiness(service):
    await asyncio.to_thread(service.engine.close)
    answer = await service.attend({"query": X})
    assert (answer.status_code, answer.json()["code"]) == (503, "engine_down")
    ready = await service.client.get("/readyz")
    assert (ready.status_code, ready.json()["code"]) == (503, "not_ready")
    assert "engine is down" in ready.json()["detail"]
    assert (await service.client.get("/healthz")).status_code == 200
    await service.until(lambda: service.refusals)
    assert service.refusals == ["the engine is down"]  # the process asks to be replaced


def test_queued_bytes_include_masks(served):
    rows = X * 64
    masks = [{"kind": "bias", "values": [[0.0] * 64] * 64}] * 4

    async def story(service):
        assert (await service.attend({"query": rows})).status_code == 200
        refused = await service.attend({"query": rows, "masks": masks})
        assert (refused.status_code, refused.json()["code"]) == (413, "cost_limit")
        assert "bytes of decoded tensors" in refused.json()["detail"]

    served(story, queue_bytes=64 * 64 * 4 * 4)


def test_light_heavy_and_lone_requests_wait_in_separate_lanes(served):
    lanes = []

    async def story(service):
        submit = service.service.batcher.submit

        async def noted(call, lane, cost, deadline, caller=None, own_deadline=None):
            lanes.append(lane)
            return await submit(call, lane, cost, deadline)

        service.service.batcher.submit = noted
        for rows in (1, 17, 18, 50, 51):
            await service.attend({"query": X * rows})

    served(story, max_batch_cells=10_000, probe_s=3600)
    assert [(name, is_float64, size) for name, _, is_float64, size in lanes] == [
        ("small", False, size) for size in (0, 0, 1, 1, 2)
    ]


@in_service(queue_capacity=2, probe_s=3600)
async def test_a_full_queue_is_reported_before_json_is_parsed(service):
    """Q1 What is refused anyway is not decoded."""
    running = await blocked(service)
    waiting = [asyncio.ensure_future(service.attend({"query": X})) for _ in range(2)]
    await service.until(lambda: service.service.batcher.num_queued == 2)
    for path in ("/v1/layers/small/attend", "/v2/models/small/infer"):
        refused = await service.client.post(path, content=b"no json", headers={"content-type": "application/json"})
        assert refused.status_code == (429 if path.startswith("/v1") else 503)
        assert int(refused.headers["retry-after"]) >= 1
    service.engine.gate.set()
    for task in (running, *waiting):
        assert (await task).status_code == 200
    assert (await service.client.post("/v1/layers/small/attend", json={})).status_code == 422


def test_the_bytes_of_bodies_in_receipt_are_bounded_over_all_requests(served):
    """Four bodies of the largest size fit and a small one beside them; all is free again after them."""
    most = 4096

    async def story(service):
        intake = service.service.shared.intake
        assert intake.max_bytes == 5 * most
        going_on = asyncio.Event()

        async def slowly():
            yield b'{"query": ' + b" " * (most - 1000)
            await going_on.wait()
            yield b"[[" + b",".join([b"0.5"] * 16) + b"]]}"

        headers = {"content-type": "application/json"}
        path = "/v1/layers/small/attend"
        large = [asyncio.ensure_future(service.client.post(path, content=slowly(), headers=headers)) for _ in range(8)]
        await service.until(lambda: sum(task.done() for task in large) + intake.num_bytes // (most - 1000) == 8)
        refused = [task.result() for task in large if task.done()]
        assert len(refused) <= 4
        assert {answer.json()["code"] for answer in refused} == {"queue_full"}
        assert (await service.attend({"query": X})).status_code == 200
        going_on.set()
        assert {(await task).status_code for task in large} == {200, 429}
        assert intake.num_bytes == 0

    served(story, max_body_bytes=most, queue_bytes=1024)


def test_the_bytes_of_expected_answers_are_bounded_over_all_requests(served):
    """Each answer has 3 KB; four of the largest would take all bytes. A small one still has room; afterwards all are free."""
    wants = {"query": X * 12, "weights": {"form": "heads"}}

    async def story(service):
        answers = service.service.shared.answers
        assert answers.max_bytes == 4 * (4096 + 16384)
        service.engine.gate.clear()
        tasks = [asyncio.ensure_future(service.attend(wants)) for _ in range(40)]
        await service.until(lambda: sum(task.done() for task in tasks) + answers.num_bytes // 3072 == 40)
        refused = [task.result() for task in tasks if task.done()]
        assert refused
        assert {(answer.status_code, answer.json()["code"]) for answer in refused} == {(429, "queue_full")}
        assert all("answers are being computed" in answer.json()["detail"] for answer in refused)
        small = asyncio.ensure_future(service.attend({"query": X}))
        await service.until(lambda: answers.num_bytes % 3072 == 64)
        service.engine.gate.set()
        assert {(await task).status_code for task in [*tasks, small]} == {200, 429}
        assert (await small).status_code == 200
        assert answers.num_bytes == 0

    served(story, max_body_bytes=16384, max_weights_bytes=4096, queue_bytes=20_000, probe_s=3600)


@in_service(probe_s=3600)
async def test_x2_x3_running_out_of_memory_is_a_cost_limit_and_the_next_request_is_served(service):
    (layer,) = service.service.catalog.get("small").loaded.variants.values()
    forward = layer.forward

    def starved(calls):
        if sum(call.query.shape[1] for call in calls) > 5:
            raise MemoryError
        return forward(calls)

    layer.forward = starved
    answer = await service.attend({"query": X * 6})
    assert (answer.status_code, answer.json()["code"]) == (413, "cost_limit")
    running = await blocked(service)
    tasks = [asyncio.ensure_future(service.attend({"query": X * 3})) for _ in range(4)]
    await service.until(lambda: service.service.batcher.num_queued == 4)
    service.engine.gate.set()
    assert [(await task).status_code for task in [running, *tasks]] == [200] * 5
    assert (await service.samples())["attention_batch_split_total"] >= 1
    with contextlib.suppress(AttributeError):
        del layer.forward


def test_bits_do_not_change_under_load(served):
    rng = np.random.default_rng(0)
    bodies = [{"query": rng.standard_normal((int(n), 16)).tolist()} for n in rng.integers(1, 40, 60)]

    async def story(service):
        alone = [(await service.attend(body)).json()["output"] for body in bodies]
        together = await asyncio.gather(*(service.attend(body) for body in bodies))
        assert [answer.json()["output"] for answer in together] == alone

    served(story)
