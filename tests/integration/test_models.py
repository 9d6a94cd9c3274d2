"""Models: a text in, attention and hidden states out, through a whole service."""

import asyncio
import base64
import io
import json
import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors

from service.layers.store import Store
from service.models.encoder import Encoder
from service.models.stored_model import ModelStore
from service.models.tokenizer import Tokenizer
from service.observability.logs import configure_logs, finish_logs
from tests.integration.models import LAYERS, MAX_TOKENS, small_model, store
from tests.integration.running import HeldEngine, in_service, small_layer
from tests.integration.test_openapi import validator
from tests.spans import Spans

TEXT = "The animals"  # five tokens
SAFETENSORS = {"accept": "application/vnd.safetensors"}
ATTEND, STATES = "/v1/models/tiny/attend", "/v1/models/tiny/states"


@pytest.fixture(autouse=True)
def _model(tmp_path):
    store(tmp_path)


def attend(service, model: str = "tiny", headers: dict[str, str] | None = None, **body):
    body = {"text": TEXT, "layer": 1} | body
    return service.client.post(f"/v1/models/{model}/attend", json=body, headers=headers)


def states(service, **body):
    return service.client.post(STATES, json={"text": TEXT, "layers": [0, 1, 2]} | body)


ASKED: list[dict[str, Any]] = [
    {},
    {"weights": "heads", "masks": [{"kind": "causal"}]},
    {"weights": {"form": "top_k", "k": 2, "heads": [3, 0]}, "masks": [{"kind": "window", "left": 1, "right": 0}]},
    {
        "weights": "contributions",
        "entropy": True,
        "masks": [{"kind": "ignore", "values": [True, False, False, False, True]}],
    },
    {"scores": {"stage": "masked"}, "lse": True, "masks": [{"kind": "bias", "values": [0.5, -1, "-inf", 0, 2]}]},
    {"weights": "mean", "masks": [{"kind": "lengths", "values": [0, 1, 2, 3, 5]}]},
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_states_sent_to_the_layers_own_route_give_the_bits_of_the_model_whatever_else_is_computed(served, dtype):
    async def story(service):
        found = (await states(service, encoding="base64")).json()["states"]
        rows = np.frombuffer(base64.b64decode(found["data"]), np.float32).reshape(found["shape"])[1].tolist()
        for asked in ASKED:
            body = {**asked, "encoding": "base64"}
            others = [service.attend({"query": rows[:3]}, "tiny-l1"), attend(service, text="it", layer=0)]
            answers = await asyncio.gather(
                service.attend({"query": rows, **body}, "tiny-l1"), attend(service, **body), *others
            )
            own, ours = (answer.json() for answer in answers[:2])
            for one in (own, ours):
                del one["batch"], one["timing_ms"]
            assert {name: ours[name] for name in own} == own
            assert set(ours) == {*own, "tokens", "model"}

    served(story, layers=LAYERS, dtype=dtype)


@in_service(layers=LAYERS)
async def test_both_forms_of_an_answer_have_the_same_bits_and_facts(service):
    for ask, name in ((attend, "output"), (states, "states")):
        answer, binary = (await ask(service)).json(), None
        path, body = (ATTEND, {"layer": 1}) if ask is attend else (STATES, {"layers": [0, 1, 2]})
        binary = await service.client.post(path, json={"text": TEXT, **body}, headers=SAFETENSORS)
        length = int.from_bytes(binary.content[:8], "little")
        facts = json.loads(json.loads(binary.content[8 : 8 + length])["__metadata__"]["response"])
        assert torch.equal(torch.tensor(answer.pop(name)), load_safetensors(binary.content)[name])
        for one in (answer, facts):
            assert set(one.pop("timing_ms")) == {"decode", "queue", "compute", "total"}
        answer.pop("weights", None)
        assert answer == facts
        assert facts["model"] == {"name": "tiny", "digest": small_model().digest}


@in_service(layers=LAYERS)
async def test_tokens_have_their_place_in_code_points_and_can_be_sent_back(service):
    text, pair = "😀 E\u0301 the animals", "it"
    tokens = (await attend(service, text=text, text_pair=pair)).json()["tokens"]
    shown = [(one["text"], (text, pair)[one["sequence"]][slice(*one["offsets"])]) for one in tokens if one["offsets"]]
    assert shown == [
        ("😀", "😀"),
        ("[UNK]", "E"),
        ("the", "the"),
        ("animal", "animal"),
        ("##s", "s"),
        ("it", "it"),
    ]
    assert [one["text"] for one in tokens if one["offsets"] is None] == ["[CLS]", "[SEP]", "[SEP]"]
    texts = [one["text"] for one in tokens][:7]
    again = (await attend(service, text=None, tokens=texts)).json()
    assert [(one["text"], one["id"]) for one in again["tokens"]] == [(one["text"], one["id"]) for one in tokens][:7]
    assert all(one["offsets"] is one["sequence"] is None for one in again["tokens"])
    assert again["output"] == (await attend(service, text="😀 E\u0301 the animals")).json()["output"]


WORD = "zebrafish"
UNFIT = WORD * 9
REFUSED: dict[str, tuple[dict[str, Any], int, str, str | None]] = {
    "neither": ({"text": None}, 422, "invalid", "/text"),
    "both": ({"tokens": [WORD]}, 422, "invalid", "/tokens"),
    "a pair alone": ({"text": None, "text_pair": WORD}, 422, "invalid", "/text_pair"),
    "empty": ({"text": ""}, 422, "invalid", "/text"),
    "white space": ({"text": " \n\t\u3000"}, 422, "invalid", "/text"),
    "control characters": ({"text": "\x00\x01\x7f"}, 422, "invalid", "/text"),
    "an empty pair": ({"text_pair": ""}, 422, "invalid", "/text_pair"),
    "a lone surrogate": ({"text": f"{WORD} \ud800"}, 422, "invalid", "/text"),
    "a lone surrogate in the pair": ({"text_pair": f"\udfff{WORD}"}, 422, "invalid", "/text_pair"),
    "a lone surrogate in tokens": ({"text": None, "tokens": ["the", "\ud800"]}, 422, "invalid", "/tokens/1"),
    "100,000 characters": ({"text": f"{WORD} " * 10_000}, 422, "invalid", "/text"),
    "emoji": ({"text": "😀 " * 100}, 422, "invalid", "/text"),
    "too long": ({"text": WORD * 30_000}, 413, "cost_limit", None),
    "too long a pair": ({"text_pair": WORD * 30_000}, 413, "cost_limit", None),
    "an unknown token": ({"text": None, "tokens": ["the", WORD]}, 422, "invalid", "/tokens/1"),
    "no tokens": ({"text": None, "tokens": []}, 422, "invalid", "/tokens"),
    "many tokens": ({"text": None, "tokens": ["the"] * 70}, 422, "invalid", "/tokens"),
    "tokens of another kind": ({"text": None, "tokens": [WORD, 7]}, 422, "invalid", "/tokens/1"),
    "many tokens of another kind": ({"text": None, "tokens": [7] * 70}, 422, "invalid", "/tokens"),
    "nested tokens": ({"text": None, "tokens": [[WORD]]}, 422, "invalid", "/tokens"),
    "a text of another kind": ({"text": [WORD]}, 422, "invalid", "/text"),
    "no layer": ({"layer": None}, 422, "invalid", "/layer"),
    "a layer that is not there": ({"layer": 2}, 422, "invalid", "/layer"),
    "a layer before the first": ({"layer": -1}, 422, "invalid", "/layer"),
    "a layer by name": ({"layer": "tiny-l0"}, 422, "invalid", "/layer"),
    "half a layer": ({"layer": 0.5}, 422, "invalid", "/layer"),
    "an unknown field": ({"layr": 1}, 422, "unknown_field", "/layr"),
    "a query": ({"query": [[0.5]]}, 422, "unknown_field", "/query"),
    "a mask without kind": ({"masks": [[[True]]]}, 422, "mask_kind_required", "/masks/0"),
    "a mask of another length": (
        {"masks": [{"kind": "ignore", "values": [True]}, {"kind": "ignore", "values": [True] * 4}]}, 422, "bad_mask",
        "/masks/1/values",
    ),
    "masked rows": ({"masks": [{"kind": "lengths", "values": 0}], "masked_rows": "error"}, 422, "masked_row", "/masks"),
    "a head that is not there": ({"weights": {"form": "heads", "heads": [4]}}, 422, "invalid", "/weights/heads"),
    "another encoding": ({"encoding": WORD * 4}, 422, "invalid", "/encoding"),
}  # fmt: skip
STATES_REFUSED: dict[str, tuple[dict[str, Any], int, str, str | None]] = {
    "no layers": ({"layers": []}, 422, "invalid", "/layers"),
    "a layer twice": ({"layers": [0, 0]}, 422, "invalid", "/layers"),
    "a layer behind the last": ({"layers": [3]}, 422, "invalid", "/layers"),
    "layers of another kind": ({"layers": [WORD]}, 422, "bad_dtype", "/layers"),
    "one layer": ({"layer": 1}, 422, "unknown_field", "/layer"),
    "empty": ({"text": ""}, 422, "invalid", "/text"),
}
UNPARSED = {
    "text that does not end": f'{{"text": "{WORD}',
    "text without quotation marks": f'{{"layer": 1, "text": {WORD}}}',
    "a name twice": f'{{"text": {{"{WORD}": 1, "{WORD}": 2}}}}',
    "figures": '{"text": "a", "layer": 1, 4111 2222}',
    "no number": f'{{"text": {{"{WORD}": NaN}}}}',
    "a number beyond float64": f'{{"text": {{"{WORD}": 1e999}}}}',
    "no object": f'["{WORD}"]',
}


def logged(test):
    """Run a story of a service, and return what it logged, whatever the level."""
    lines = io.BytesIO()
    configure_logs("debug", lines)
    try:
        test()
        finish_logs()
    finally:
        configure_logs("info", io.BytesIO())
    return lines.getvalue().decode()


def test_what_is_wrong_with_a_request_is_said_without_its_text_and_nothing_logs_the_text(served, caplog):
    caplog.set_level(logging.DEBUG)
    exported = Spans()

    async def story(service):
        for path, table in ((ATTEND, REFUSED), (STATES, STATES_REFUSED)):
            for name, (changed, status, code, param) in table.items():
                body = {"text": WORD, "layer": 1} if path == ATTEND else {"text": WORD, "layers": [0]}
                content = json.dumps(body | changed).encode()
                headers = {"content-type": "application/json"}
                answer = await service.client.post(path, content=content, headers=headers)
                problem = answer.json()
                assert (answer.status_code, problem.get("param")) == (status, param), (name, problem)
                assert problem["code"] == code, name
                assert WORD not in answer.text, name
        for name, text in UNPARSED.items():
            answer = await service.client.post(ATTEND, content=text, headers={"content-type": "application/json"})
            assert answer.status_code in (400, 422), name
            assert WORD not in answer.text, name
            assert "4111" not in answer.text, name
        assert (await attend(service, text=UNFIT)).status_code == 200

    lines = logged(lambda: served(story, layers=LAYERS, tracer=exported.tracer))
    assert '"route":"/v1/models/{model}/attend"' in lines
    assert WORD not in lines
    assert WORD not in caplog.text
    assert exported.all
    assert WORD not in "".join(span.to_json() for span in exported.all)


def test_no_fault_of_the_service_shows_the_text(served, monkeypatch):
    async def story(service):
        assert (await attend(service)).status_code == 200
        service.engine.wrong = lambda call: True
        failed = [await attend(service, text=WORD), await states(service, text=WORD)]
        service.engine.wrong = lambda call: False

        def fail(_: Tokenizer, *texts: object) -> None:
            raise RuntimeError(f"cannot tokenize {texts}")

        monkeypatch.setattr(Tokenizer, "of_text", fail)
        failed.append(await attend(service, text=WORD))
        for answer in failed:
            assert (answer.status_code, answer.json()["code"]) == (500, "engine_failed")
            assert WORD not in answer.text

    lines = logged(lambda: served(story, layers=LAYERS))
    assert lines.count('"event":"fault"') == 3
    assert "model_request.py" in lines, "the place of the fault"
    assert WORD not in lines


@in_service(layers=LAYERS)
async def test_a_model_that_is_not_there_is_not_found(service, tmp_path):
    (tmp_path / "layers" / "gone.model").symlink_to("nowhere")
    for path, hint in (
        ("tini", '"tiny"'),
        ("nothing-alike", "GET /v1/models"),
        ("T I", "GET /v1/models"),
        ("sdpa", "GET /v1/models"),
        ("x" * 65, "GET /v1/models"),
        ("gone", "GET /v1/models"),  # a link to nothing
    ):
        for answer in (await service.client.get(f"/v1/models/{path}"), await attend(service, model=path)):
            assert (answer.status_code, answer.json()["code"]) == (404, "model_not_found")
            assert hint in answer.json()["detail"]
            assert path not in answer.json()["detail"]
    assert (await service.client.get("/v2/models/tiny")).status_code == 404
    index = (await service.client.post("/v2/repository/index")).json()
    assert "tiny" not in [one["name"] for one in index]


def test_the_examples_of_the_api_page_run_and_the_answers_are_what_their_schemas_say(served, tmp_path):
    layers = [small_layer(f"minilm-l{n}") for n in range(4)]
    store(tmp_path, small_model("minilm", layers, max_tokens=64))

    async def story(service):
        page = (await service.client.get("/openapi.json")).json()
        for path in ("/v1/models/{model}/attend", "/v1/models/{model}/states"):
            operation = page["paths"][path]["post"]
            (name,) = [one["example"] for one in operation["parameters"] if one.get("name") == "model"]
            asked = operation["requestBody"]["content"]["application/json"]
            for example in asked["examples"].values():
                validator(page, asked["schema"]).validate(example["value"])
                answer = await service.client.post(path.format(model=name), json=example["value"])
                known = operation["responses"]["200"]["content"]["application/json"]["schema"]
                validator(page, known).validate(answer.json())
        listed = page["paths"]["/v1/models"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        validator(page, listed).validate((await service.client.get("/v1/models")).json())

    served(story, layers=[*LAYERS, *layers])


@in_service(layers=LAYERS)
async def test_a_model_is_described_by_its_header_and_other_files_are_none(service, tmp_path):
    (tmp_path / "layers" / "gone.model").symlink_to("nowhere")
    for name in ("sdpa", "Tiny", "..model", "x" * 65):
        (tmp_path / "layers" / f"{name}.model").write_bytes(b"")
    listed = (await service.client.get("/v1/models")).json()["models"]
    assert listed == [(await service.client.get("/v1/models/tiny")).json()]
    assert listed[0] == {
        "name": "tiny", "family": "bert", "source": "made for a test", "digest": small_model().digest,
        "layers": ["tiny-l0", "tiny-l1"], "width": 16, "heads": [4, 4], "max_tokens": MAX_TOKENS, "vocabulary": 14,
        "fault": None,
    }  # fmt: skip


@in_service(layers=LAYERS)
async def test_the_routes_of_models_take_the_methods_and_types_that_they_announce(service):
    for path in (ATTEND, STATES):
        options = await service.client.options(path)
        assert (options.status_code, options.headers["allow"]) == (204, "OPTIONS, POST")
        assert (await service.client.get(path)).status_code == 405
        assert (await service.client.post(path, content=b"")).status_code == 415
        sent = {"content-type": "application/vnd.safetensors"}
        assert (await service.client.post(path, content=b"x", headers=sent)).status_code == 415
    assert (await service.client.head("/v1/models")).status_code == 200
    assert (await attend(service, headers={"accept": "image/png"})).status_code == 406
    assert "/v1/models/{model}/attend" in (await service.client.post("/v1/model/tiny/attend")).json()["detail"]


@in_service(admin=True, layers=LAYERS)
async def test_the_routes_of_models_need_a_key(service):
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("POST", ATTEND), ("POST", STATES)):
        answer = await service.client.request(method, path, headers={"x-api-key": "none"})
        assert answer.status_code == 401


def test_neither_a_text_nor_a_pass_is_computed_on_the_event_loop(served, monkeypatch):
    threads: list[str] = []

    def noted(function):
        def call(*args):
            threads.append(threading.current_thread().name.split("_")[0])
            return function(*args)

        return call

    monkeypatch.setattr(Tokenizer, "of_text", noted(Tokenizer.of_text))
    monkeypatch.setattr(Encoder, "forward", noted(Encoder.forward))

    async def story(service):
        for _ in range(3):
            assert (await attend(service)).status_code == 200
        assert threads.count("checking") == 3
        assert set(threads) <= {"checking", "compute", "compute-long"}

    served(story, layers=LAYERS)


@in_service(layers=LAYERS)
async def test_a_model_has_metrics_once_it_is_used(service):
    assert 'layer="models/tiny"' not in (await service.client.get("/metrics")).text
    await attend(service)
    await states(service, layers=[0])
    samples = await service.samples()
    assert samples['attention_queue_seconds_count{layer="models/tiny"}'] == 2
    assert samples['attention_layer_requests_total{layer="models/tiny",outcome="success"}'] == 2


class Reads:
    """Counts the whole reads of models, and holds them while the gate is closed."""

    def __init__(self, monkeypatch) -> None:
        self.num, self.gate, self._load = 0, threading.Event(), ModelStore.load
        self.gate.set()
        monkeypatch.setattr(ModelStore, "load", lambda store, name: self.read(store, name))

    def read(self, store: ModelStore, name: str):
        self.num += 1
        assert self.gate.wait(20)
        return self._load(store, name)


@pytest.fixture
def reads(monkeypatch):
    return Reads(monkeypatch)


def test_a_model_is_read_at_its_first_use_once_for_all_who_wait_and_goes_on_after_a_deadline(served, reads):
    async def story(service):
        await service.client.get("/v1/models")
        assert reads.num == 0
        reads.gate.clear()
        late = await attend(service, headers={"x-request-timeout-ms": "50"})
        assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
        waiting = [asyncio.create_task(attend(service)) for _ in range(3)]
        assert (await service.client.get("/v1/models/tiny")).status_code == 200, "headers do not wait for a load"
        assert (await service.attend({"query": [[0.5] * 16]}, "tiny-l0")).status_code == 200
        reads.gate.set()
        assert [one.status_code for one in await asyncio.gather(*waiting)] == [200] * 3
        assert (await attend(service)).status_code == 200
        assert reads.num == 1
        assert (await service.client.get("/readyz")).status_code == 200

    served(story, layers=LAYERS)


def test_a_shutdown_does_not_wait_for_a_first_load(served, reads):
    async def story(service):
        reads.gate.clear()
        waiting = asyncio.create_task(attend(service))
        await service.until(lambda: reads.num)
        service.service.stop_admitting()
        service.service.settle()
        assert (await waiting).json()["code"] == "draining"
        reads.gate.set()

    served(story, layers=LAYERS)


def test_a_damaged_file_harms_its_model_alone_until_it_is_replaced(served, tmp_path):
    file = tmp_path / "layers" / "bad.model"
    store(tmp_path, small_model("bad"))
    whole = file.read_bytes()

    async def story(service):
        changed = bytearray(whole)
        changed[-1] ^= 1
        for raw, in_list in ((bytes(changed), False), (whole[:-20], True), (b"x" * 40, True), (b"", True)):
            await asyncio.to_thread(file.write_bytes, raw)
            answers = [await attend(service, "bad"), await service.client.get("/v1/models/bad")]
            for answer in answers:
                assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
                assert 'model "bad": ' in answer.json()["detail"]
                assert answer.headers["retry-after"] == "5"
            listed = {one["name"]: one for one in (await service.client.get("/v1/models")).json()["models"]}
            assert listed["bad"]["fault"] == answers[1].json()["detail"]
            assert (listed["bad"]["width"] is None) is in_list
            assert listed["tiny"]["fault"] is None
            assert (await attend(service)).status_code == 200
            assert (await service.client.get("/readyz")).status_code == 200
        await asyncio.to_thread(file.write_bytes, whole)
        assert (await service.client.get("/v1/models/bad")).status_code == 200
        assert (await attend(service, "bad")).status_code == 200

    served(story, layers=LAYERS)


def test_a_directory_that_is_gone_is_told_and_a_model_in_use_goes_on(served, tmp_path):
    async def story(service):
        assert (await attend(service)).status_code == 200
        await asyncio.to_thread((tmp_path / "layers").rename, tmp_path / "elsewhere")
        for answer in (await service.client.get("/v1/models"), await attend(service, "other")):
            assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
            assert answer.json()["detail"] == "the layer directory does not exist"
        assert (await attend(service)).status_code == 200
        assert (await service.client.get("/v1/models/tiny")).json()["fault"] is None

    served(story, layers=LAYERS)


def test_a_model_lasts_as_long_as_its_layers_and_returns_with_them(served, reads, tmp_path):
    async def story(service):
        assert (await attend(service)).status_code == 200
        assert (await service.client.delete("/v1/layers/tiny-l1")).status_code == 204
        for answer in (await attend(service), await service.client.get("/v1/models/tiny")):
            assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
            assert '"tiny-l1" is not served' in answer.json()["detail"]
        await service.until(lambda: not service.service.models.in_use())
        assert (await service.client.put("/v1/layers/tiny-l1")).status_code == 201
        assert (await attend(service)).status_code == 200
        other = small_layer("tiny-l1", scale=0.25)
        await asyncio.to_thread(Store(tmp_path / "layers").save, other)
        assert (await service.client.put("/v1/layers/tiny-l1")).status_code == 200
        assert '"tiny-l1" is served in another version' in (await attend(service)).json()["detail"]
        listed = (await service.client.get("/v1/models")).json()["models"][0]
        assert (listed["heads"], listed["layers"]) == ([], ["tiny-l0", "tiny-l1"])
        assert '"tiny-l1" is served in another version' in listed["fault"]
        await asyncio.to_thread(store, tmp_path, small_model(layers=[LAYERS[0], other]))
        assert (await attend(service)).status_code == 200
        assert reads.num == 3

    served(story, layers=LAYERS, admin=True)


def test_a_model_that_is_out_of_memory_is_refused_and_tried_again(served, monkeypatch):
    load = HeldEngine.load

    async def story(service):
        def fail(engine, build, **options):
            raise MemoryError

        monkeypatch.setattr(HeldEngine, "load", fail)
        answer = await attend(service)
        assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
        monkeypatch.setattr(HeldEngine, "load", load)
        assert (await attend(service)).status_code == 200

    served(story, layers=LAYERS)
