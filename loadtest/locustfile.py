"""The load test: `locust -f loadtest/locustfile.py --headless --host http://127.0.0.1:8000`; README.md has the rest.

The master, or the only process, fetches the references and judges the run. Workers get the references as an option, with
the message by which Locust spawns their users.
"""

from __future__ import annotations

import argparse
import functools
import logging
import random
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar

import orjson
from locust import FastHttpUser, LoadTestShape, __version__, constant, constant_throughput, events, runners, tag
from locust.exception import StopUser
from locust.runners import WorkerRunner

from attention_load.attend_requests import FORMS, KINDS, AttendRequest, attention_requests, layer_requests
from attention_load.objectives import REFUSED, RETRIED, Counts, StageResult, is_within, judge, lines
from attention_load.options import OPTIONS, add_options, address, validate
from attention_load.progress import Progress
from attention_load.references import difference, fetch_digests, fetch_layers
from attention_load.schedule import Stage, position, stages

log = logging.getLogger(__name__)
runners.WORKER_REPORT_INTERVAL = 0.5  # instead of 3 s, which blur the ends of a stage of 10 s
SPAWN_RATE = 100.0
REFUSALS = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
# What a balancer answers in the place of a replica that it lost. An answer of the service itself is JSON.
LOST = (500, 502, 503, 504)
RETRY_S = 0.1  # before the first retry, doubled before each further one
bits: Counter[str] = Counter()
"""Answers `compared` with their references and `wrong` ones: of this process, on a master of all workers."""


def attend_task(kind: str, form: str) -> Callable[[AttentionUser], None]:
    """A task with its kind and its form as tags (`--tags short`, `--exclude-tags lists`)."""

    def attend(user: AttentionUser) -> None:
        user.attend(kind, form)

    attend.__name__ = f"{kind}_{form}"
    tagged: Callable[[AttentionUser], None] = tag(kind, form)(attend)
    return tagged


def headers(options: argparse.Namespace, content_type: str = "") -> dict[str, str]:
    """Answers come without compression: that is not what is measured."""
    found = {"Accept-Encoding": "identity", "Content-Type": content_type, "X-API-Key": options.api_key}
    return {name: value for name, value in found.items() if value}


def is_refused(response: Any) -> bool:
    return response.status_code in REFUSALS and "Retry-After" in response.headers


def is_lost(response: Any) -> bool:
    """No answer, not all of an answer, or a balancer's own instead of a replica's: what our client sends again too."""
    if response.status_code in (0, HTTPStatus.OK):
        return response.request_meta["exception"] is not None
    is_json = "json" in response.headers.get("Content-Type", "")
    return response.status_code in LOST and not is_json and not is_refused(response)


class AttentionUser(FastHttpUser):
    insecure = False
    tasks: ClassVar[dict[Any, int]] = {attend_task(kind, form): KINDS[kind] for kind in KINDS for form in FORMS}
    requests: ClassVar[list[AttendRequest]] = []
    answered: ClassVar[Counter[str]] = Counter()

    @classmethod
    def prepare(cls, options: argparse.Namespace) -> None:
        """Makes the requests to the layers of the references, and those without a layer, before the first user starts."""
        sizes = {"seed": options.seed, "long_tokens": options.long_tokens}
        cls.requests = [request for layer in options.references["layers"] for request in layer_requests(layer, **sizes)]
        cls.requests += attention_requests(options.seed)
        cls.answered.clear()
        cls.network_timeout = cls.connection_timeout = options.request_timeout_s
        cls.wait_time = constant_throughput(options.pace) if options.pace else constant(0)

    def attend(self, kind: str, form: str) -> None:
        options, name = self.environment.parsed_options, f"{kind} {form}"
        requests = [request for request in self.requests if request.kind == kind]
        if not requests:
            raise StopUser
        request = random.choice(requests)
        settings = {"data": request.bodies[form], "headers": headers(options, FORMS[form]), "name": name}
        began = time.perf_counter()
        for attempt in range(options.retries + 1):
            late_ms = (time.perf_counter() - began) * 1e3
            with self.client.post(request.path, catch_response=True, **settings) as response:
                if attempt == options.retries or not is_lost(response):
                    response.request_meta["response_time"] += late_ms
                    self.judge(response, options.references["digests"][request.id], name, form)
                    return
                response.request_meta["request_type"] = RETRIED
                response.success()
            time.sleep(RETRY_S * 2**attempt)

    def judge(self, response: Any, digest: str, name: str, form: str) -> None:
        check_every = self.environment.parsed_options.check_every
        if is_refused(response):
            response.request_meta["request_type"] = REFUSED
            response.success()
        elif response.request_meta["exception"] and response.status_code == HTTPStatus.OK:
            response.failure(response.request_meta["exception"])
        elif response.status_code == HTTPStatus.OK:
            self.answered[name] += 1
            if check_every and (self.answered[name] - 1) % check_every == 0:
                why = difference(digest, response.content, FORMS[form])
                bits.update(compared=1, wrong=bool(why))
                response.failure(why) if why else response.success()
        elif response.status_code:
            response.failure(f"status {response.status_code}")


class Scenario(LoadTestShape):
    """Plays the stages of `--scenario`, measures each, and lets the users finish before it ends the run."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.stages: tuple[Stage, ...] = ()
        self.results: list[StageResult] = []
        self.measuring: tuple[int, Counts] | None = None
        self.idle_since = 0.0
        self.fault = "stopped before its end"
        self.is_over = False
        self.progress = Progress(sys.stderr)

    def begin(self, options: argparse.Namespace) -> None:
        self.options, self.num_workers = options, self.runner.worker_count
        # Until the users have started and the workers have reported, the figures still show the stage before.
        self.settle_s = 1.0 + runners.WORKER_REPORT_INTERVAL + options.peak_users / SPAWN_RATE
        users = {"peak": options.peak_users, "base": options.base_users, "steps": options.steps}
        self.stages = stages(options.scenario, hold_s=options.hold_s, settle_s=self.settle_s, **users)
        self.reset_time()

    def tick(self) -> tuple[int, float] | None:
        """Once a second: how many users there should be; None ends the run."""
        if self.is_over:
            return None
        if not self.stages:  # before `test_start`, and while references are fetched
            return 1, SPAWN_RATE
        now = position(self.stages, self.get_run_time())
        number, elapsed_s = now or (len(self.stages), 0.0)
        if self.measuring and self.measuring[0] < number:
            measured, before = self.measuring
            self.results.append(StageResult(self.stages[measured], self.counts() - before))
            self.measuring = None
            if self.options.scenario == "ramp" and not is_within(self.options, self.results[-1].counts):
                self.stages = self.stages[:number]
        if number >= len(self.stages):
            return self.finish()
        stage = self.stages[number]
        if not self.measuring and elapsed_s >= stage.settle_s and self.runner.user_count == stage.users:
            self.measuring = number, self.counts()
        so_far, stage_s = self.counts(), stage.settle_s + stage.hold_s
        figures = f"{so_far.requests} requests, {so_far.failures} failed"
        self.progress.show(
            f"{stage.name}, {number + 1} of {len(self.stages)}: {elapsed_s:.0f} of {stage_s:.0f} s, {figures}"
        )
        return stage.users, SPAWN_RATE

    def finish(self) -> tuple[int, float] | None:
        """No more users; the run ends when each has its last answer and the workers have reported it."""
        if self.runner.user_count == 0:
            self.idle_since = self.idle_since or time.perf_counter()
            if time.perf_counter() > self.idle_since + self.settle_s:
                lost = self.num_workers - self.runner.worker_count
                self.fault, self.is_over = f"{lost} workers were lost" if lost > 0 else "", True
                return None
        return 0, SPAWN_RATE

    def why_silent(self) -> str:
        """Why a run that no fault ended made no request; empty if it made one."""
        if self.fault or self.counts().requests:
            return ""
        raised = [str(found["msg"]) for found in self.runner.exceptions.values()]
        why = raised[-1] if raised and "No tasks" not in raised[-1] else "--tags and --exclude-tags leave no task"
        return f"no request was made: {why}"

    def counts(self) -> Counts:
        return Counts.read(self.get_run_time(), self.runner.stats.entries.values())


events.init_command_line_parser.add_listener(add_options)


@events.init.add_listener
def on_init(environment: Any, runner: Any, **_: Any) -> None:
    if not isinstance(runner, WorkerRunner):
        environment.process_exit_code = 1  # until a run keeps its objectives


@events.test_start.add_listener
def on_test_start(environment: Any, **_: Any) -> None:
    options, scenario = environment.parsed_options, environment.shape_class
    bits.clear()
    if isinstance(environment.runner, WorkerRunner):
        AttentionUser.prepare(options)
        return
    environment.process_exit_code = 1
    options.references = {"layers": [], "digests": {}}
    log.info("fetching references, one request at a time")
    try:
        environment.host = address(environment.host)
        validate(options)
        # A user finishes its last request, or the request fails for want of an answer.
        environment.stop_timeout = max(environment.stop_timeout or 0.0, options.request_timeout_s + 1)
        send = functools.partial(send_alone, environment.host, options)
        options.references["layers"] = fetch_layers(send, options.layer)
        AttentionUser.prepare(options)
        options.references["digests"] = fetch_digests(send, AttentionUser.requests, scenario.progress.show)
        scenario.begin(options)
    except Exception as error:  # noqa: BLE001 (Locust goes on after an exception of a listener, of any kind)
        options.references, AttentionUser.requests = {"layers": [], "digests": {}}, []
        scenario.fault, scenario.is_over = f"{type(error).__name__}: {error}", True


def send_alone(
    host: str, options: argparse.Namespace, path: str, body: bytes | None = None, content_type: str = ""
) -> bytes:
    request = urllib.request.Request(host + path, body, headers(options, content_type))  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=options.request_timeout_s) as answer:  # noqa: S310 (the user's --host)
            return bytes(answer.read())
    except OSError as error:
        raise ConnectionError(f"{path}: {error}") from None


@events.test_stop.add_listener
def on_test_stop(environment: Any, **_: Any) -> None:
    options, scenario, runner = environment.parsed_options, environment.shape_class, environment.runner
    if isinstance(runner, WorkerRunner):
        return
    scenario.progress.show("")
    report = judge(options, scenario.results, scenario.counts(), bits, scenario.fault or scenario.why_silent()) | {
        "target": {"url": environment.host, "layers": options.references["layers"]},
        "references": len(options.references["digests"]),
        "options": {name: getattr(options, name) for name, *_ in OPTIONS if name != "api_key"},
        "locust": __version__,
        "workers": runner.worker_count,
        "is_generator_busy": runner.cpu_warning_emitted or runner.worker_cpu_warning_emitted,
    }
    scenario.reset()
    try:
        if options.json_report:
            Path(options.json_report).write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
        environment.process_exit_code = 1 if report["missed"] else 0
    except OSError:
        log.exception("the JSON report cannot be written")
    log.info("%s", report["verdict"])
    text = "\n".join([*lines(report), ""])
    environment.events.quit.add_listener(lambda **_: sys.stdout.write(text))  # below Locust's own tables


@events.report_to_master.add_listener
def on_report_to_master(data: dict[str, Any], **_: Any) -> None:
    data["bits"] = dict(bits)
    bits.clear()


@events.worker_report.add_listener
def on_worker_report(data: dict[str, Any], **_: Any) -> None:
    bits.update(data.get("bits", {}))
