"""One process's load, and the target it asks: prepared before it is open, every request settled once, hangs counted."""

import http.server
import random
import threading

import orjson
import pytest

from attention_load.load import Load
from attention_load.question import layer_questions
from attention_load.target import Target, TargetFailed
from tests.unit.loadtest.answering import AnsweringTarget, facts, flip_last_bit, spec, tensors
from tests.unit.loadtest.plans import plan

LAYER = spec()
FACTS = facts(LAYER)
KEY = "the-key"
TOLD = {
    "layers": [
        {
            **{name: getattr(FACTS, name) for name in ("name", "digest", "query_width", "key_width", "value_width")},
            "num_heads": FACTS.num_heads,
            "numerics": FACTS.numerics,
            "limits": {"body_bytes": FACTS.max_body_bytes, "tokens": FACTS.max_tokens, "cells": FACTS.max_cells},
        }
    ]
}


class Served(http.server.HTTPServer):
    """`status` is what every POST is answered with, in front of the target's answer; `listed` answers /v1/layers."""

    def __init__(self, target) -> None:
        super().__init__(("127.0.0.1", 0), Door)
        self.target, self.status = target, 200
        self.listed = orjson.dumps(TOLD)
        self.is_cut = False


class Door(http.server.BaseHTTPRequestHandler):
    """HTTP before an AnsweringTarget."""

    server: Served

    def do_GET(self):
        known = self.headers.get("X-API-Key") == KEY
        self.answer(200 if known else 401, self.server.listed if known else b"{}")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.server.target.attend("odd", body, self.headers["Content-Type"])
        self.answer(self.server.status, answer)

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) + self.server.is_cut))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    questions = layer_questions(FACTS, seed=plan().seed, long_tokens=40)
    found = Served(AnsweringTarget(LAYER, tensors(LAYER), questions))
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def url(server):
    return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def load(url):
    found = Load()
    found.prepare(plan(api_key=KEY, long_tokens=40, check_every=3, slo_p99_ms=100), url)
    return found


def settle(load, status=200, latency_ms=10.0, told="", *, was_checked=False):
    load.began()
    return load.settled("short lists", status, latency_ms, told, was_checked=was_checked)


def test_preparing_tells_what_was_taken_and_opens(url):
    load = Load()
    assert not Load().is_open
    told = load.prepare(plan(api_key=KEY, long_tokens=40, run=7), url)
    assert load.is_open
    assert (told["run"], told["references"], told["layers"][0]["name"]) == (7, 10, "odd")
    assert told["digest"] == Load().prepare(plan(api_key=KEY, long_tokens=40), url)["digest"]


def test_a_load_that_could_not_be_prepared_stays_closed(server, url):
    def damage(question, form, arrays):
        if form == "base64":
            flip_last_bit(arrays["output"])

    server.target.damage = damage
    load = Load()
    with pytest.raises(TargetFailed, match="other bits"):
        load.prepare(plan(api_key=KEY, long_tokens=40), url)
    assert (load.is_open, load.is_over) == (False, True)


@pytest.mark.parametrize("kind", ["short", "mixed", "long", "weights"])
def test_what_is_drawn_is_of_its_kind_and_follows_the_seed(load, kind):
    drawn, again = ([load.draw(kind, rng) for _ in range(20)] for rng in (random.Random(1), random.Random(1)))
    assert {reference.question.kind for reference in drawn} == {kind}
    assert [id(reference) for reference in drawn] == [id(reference) for reference in again]


def test_one_answer_in_so_many_is_compared_and_the_first_of_each_name(load):
    assert [load.is_sampled("short lists") for _ in range(7)] == [True, False, False, True, False, False, True]
    assert load.is_sampled("long lists")


def test_nothing_is_compared_where_that_is_asked_for(url):
    load = Load()
    load.prepare(plan(api_key=KEY, long_tokens=40, check_every=0), url)
    assert not load.is_sampled("short lists")


@pytest.mark.parametrize(
    ("status", "told", "outcome"),
    [
        (200, "", "right"),
        (200, "1 of 4 values of output have other bits", "wrong"),
        (429, "", "refused"),
        (503, "", "refused"),
        (500, "", "failed"),
        (504, "", "failed"),
        (401, "", "failed"),
        (0, "no answer: ConnectionResetError", "failed"),
    ],
)
def test_what_becomes_of_a_request(load, status, told, outcome):
    settled = settle(load, status, told=told)
    assert settled.outcome.value == outcome
    assert bool(settled.told) is (outcome in {"wrong", "failed"})
    assert load.in_flight == 0
    assert load.take()["statuses"] == {str(status): 1}


def test_only_a_right_answer_in_time_is_good(load):
    assert settle(load, latency_ms=100).is_good
    assert not settle(load, latency_ms=101).is_good
    assert not settle(load, latency_ms=1, told="other bits").is_good


def test_what_was_taken_is_not_told_again(load):
    settle(load)
    assert load.take()["statuses"] == {"200": 1}
    assert load.take()["statuses"] == {}


def test_a_request_without_an_answer_at_the_end_has_failed(load):
    settle(load)
    load.began()
    load.began()
    told = load.close(drain_s=0)
    assert not load.is_open
    assert told["statuses"] == {"200": 1, "0": 2}
    assert told["examples"] == ["no answer at the end"]


def test_a_user_that_left_without_an_answer_counts_as_failed_while_the_run_goes_on(load):
    load.began()
    load.abandoned()
    assert load.take()["statuses"] == {"0": 1}


def test_a_user_that_leaves_after_the_end_was_counted_there(load):
    load.began()
    assert load.close(drain_s=0)["statuses"] == {"0": 1}
    load.abandoned()
    assert load.take()["statuses"] == {}


def test_the_target_is_asked_with_its_key_and_never_tells_it(url):
    assert [layer.name for layer in Target(url, KEY).layers()] == ["odd"]
    with pytest.raises(TargetFailed, match="/v1/layers was answered with 401") as failed:
        Target(url, "another-key").layers()
    assert "another-key" not in str(failed.value)


@pytest.mark.parametrize(
    "listed",
    [
        b"<html>",
        b"[]",
        b'{"status": "success"}',
        b'{"layers": 5}',
        b'{"layers": ["odd"]}',
        b'{"layers": [{"name": "odd"}]}',
        orjson.dumps({"layers": [{**TOLD["layers"][0], "limits": None}]}),
    ],
)
def test_a_target_that_is_something_else_is_told(server, url, listed):
    server.listed = listed
    with pytest.raises(TargetFailed, match="no list of layers"):
        Target(url, KEY).layers()


def test_an_answer_that_is_cut_short_is_none(server, url):
    server.is_cut = True
    with pytest.raises(TargetFailed, match="/v1/layers got no answer"):
        Target(url, KEY).layers()
    with pytest.raises(TargetFailed, match="answered with 401"):
        Target(url, "another-key").layers()


def test_facts_of_a_layer_that_make_no_sense_are_a_fault_and_not_the_end_of_the_load(server, url):
    """Locust swallows what its listeners raise."""
    server.listed = orjson.dumps({"layers": [{**TOLD["layers"][0], "query_width": "wide"}]})
    load = Load()
    with pytest.raises(TargetFailed, match="could not be taken: TypeError"):
        load.prepare(plan(api_key=KEY), url)
    assert load.is_over


@pytest.mark.parametrize("key", ["two\nlines", "ümlaut", "tab\t"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_told(url, key):
    with pytest.raises(TargetFailed, match="no header can carry") as failed:
        Target(url, key).layers()
    assert key not in str(failed.value)


def test_a_layer_that_is_not_served_is_named(url):
    with pytest.raises(TargetFailed, match="no layer wrong, worse"):
        Target(url, KEY).layers("odd, wrong, worse")


@pytest.mark.parametrize("address", ["file:///etc/passwd", "127.0.0.1:1", ""])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(TargetFailed, match="must begin with http"):
        Target(address).layers()


def test_a_target_that_nobody_listens_at_is_told(server, url):
    server.shutdown()
    server.server_close()
    with pytest.raises(TargetFailed, match="got no answer"):
        Target(url, KEY, timeout_s=1).layers()


def test_a_refused_reference_is_no_reference(server, url):
    server.status = 429
    with pytest.raises(TargetFailed, match="attend was answered with 429"):
        Load().prepare(plan(api_key=KEY, long_tokens=40), url)
