"""Figure 1: structured inputs, raw bytes on sockets, and schemathesis with our OpenAPI page.

Invariants: an input is known by seed and number, and what broke a rule is kept as a file; no input may get a 5xx other than 503
and 504 with their meaning, silence over five seconds, or an answer that breaks `answer_rules.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from tests.torture import answer_rules, at_rest
from tests.torture.canary import Song, singing
from tests.torture.figure import Form
from tests.torture.figures import schema
from tests.torture.inputs import mutations, streams
from tests.torture.raw_connection import (
    HANG_S,
    HOST,
    Cut,
    RawConnection,
    Reply,
    read_reply,
    share_connections,
    share_out,
)
from tests.torture.report import Row, none_of
from tests.torture.subject import Subject

STRUCTURED, RAW, WARM_UP = 200_000, 20_000, 1000
NUM_CONNECTIONS, NUM_SOCKETS = 16, 64
QUIET_S = 0.15
MAX_GROWTH_MIB = 32
SETTINGS: dict[str, Any] = dict(workers=1, body_timeout_s=2, header_timeout_s=2, write_timeout_s=5)


def measure(form: Form) -> Iterator[Row]:
    songs: list[Song] = []
    with Subject(form.room("fuzz"), **SETTINGS) as subject:
        asyncio.run(_structured(subject, form, -WARM_UP, 0))
        before = subject.baseline()
        with singing(subject.port, songs, per_second=20):
            num = form.count(STRUCTURED, 500)
            found = asyncio.run(_structured(subject, form, 0, num))
            yield none_of(1, f"{num:,} structured inputs: wrong answers, hangs, deaths", found)
            num = form.count(RAW, 100)
            found = asyncio.run(_raw(subject, form, num))
            yield none_of(1, f"{num:,} raw-socket inputs: wrong answers, hangs, deaths", found)
        yield from schema.rows(subject, form)
        yield songs[0].row(1)
        yield from at_rest.rows(1, subject, before, MAX_GROWTH_MIB)


async def _structured(subject: Subject, form: Form, first: int, end: int) -> list[str]:
    async def attempt(connection: RawConnection, number: int) -> str | None:
        given = mutations.draw(form.random(f"structured {number}"))
        wire = given.wire()
        reply = await connection.outcome(wire)
        if isinstance(reply, Reply):
            why = answer_rules.violation(reply, is_inference=given.is_inference, is_head=given.method == "HEAD")
        else:
            why = reply
        return _kept(subject, f"structured-{number}", wire, why)

    return await share_connections(subject.port, range(first, end), NUM_CONNECTIONS, attempt)


async def _raw(subject: Subject, form: Form, num: int) -> list[str]:
    async def attempt(number: int) -> str | None:
        wire = streams.draw(form.random(f"raw {number}"))
        return _kept(subject, f"raw-{number}", wire, await converse(subject.port, wire))

    return await share_out(range(num), NUM_SOCKETS, attempt)


def _kept(subject: Subject, name: str, wire: bytes, why: str | None) -> str | None:
    """What was wrong, with the name of the file that keeps the input."""
    if why is None:
        return None
    (subject.directory / f"{name}.bin").write_bytes(wire)
    return f"{name} {why}"


async def converse(port: int, data: bytes) -> str | None:
    """Says it all, hears what comes until it is quiet, ends its side, and waits for the other end; what was wrong."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
    try:
        with contextlib.suppress(OSError):
            writer.write(data)
            await asyncio.wait_for(writer.drain(), HANG_S)
        wrong = await _heard(reader, is_head=data.startswith(b"HEAD"))
        with contextlib.suppress(OSError):
            writer.write_eof()
        try:
            async with asyncio.timeout(HANG_S):
                while await reader.read(2**16):
                    pass
        except TimeoutError:
            return "a hang: neither an answer nor an end after the caller's end"
        except OSError:
            pass
        return wrong
    finally:
        writer.transport.abort()


async def _heard(reader: asyncio.StreamReader, *, is_head: bool) -> str | None:
    while True:
        try:
            async with asyncio.timeout(QUIET_S):
                reply = await read_reply(reader, is_head=is_head)
        except (TimeoutError, Cut):
            return None
        except (ValueError, AssertionError) as error:
            return f"an answer that is no HTTP: {error}"
        # Broken bytes do not show which protocol the client meant, so either form of an error is right.
        wrong = answer_rules.violation(reply)
        if wrong is not None and answer_rules.violation(reply, is_inference=True) is not None:
            return wrong
