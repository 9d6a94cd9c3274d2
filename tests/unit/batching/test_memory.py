"""Nothing of a finished job is kept, by reference counts alone: a cycle would hold its tensors until some later gc."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.doubles import run, turns
from tests.unit.batching.room import Room, error_of, result_of


class Tensor:
    """A payload that can be watched."""


def test_an_idle_batcher_keeps_no_reference_to_the_last_batch():
    async def main():
        async with Room() as room:
            room.engine.answer = lambda batch: [Tensor() for _ in batch]
            client = room.send(Tensor())
            await turns()
            payload = weakref.ref(room.engine.batches[-1][0])
            room.engine.release()
            await turns()
            result = weakref.ref(result_of(client))
            room.engine.batches.clear()
            del client
            await turns()
            assert payload() is None
            assert result() is None

    gc.disable()  # by reference counts alone: a cycle would keep tensors until some later collection
    try:
        run(main)
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["expires", "fails", "is cancelled", "is drained"])
def test_a_failed_job_releases_its_payload(how):
    async def main():
        async with Room() as room:
            await room.send_running("x")
            payload = Tensor()
            watched = weakref.ref(payload)
            client = room.send(payload)
            del payload
            await turns()
            if how == "expires":
                room.clock.advance(61)
            elif how == "is cancelled":
                client.cancel()
            elif how == "is drained":
                assert await room.batcher.drain(0) == 2
            else:
                room.engine.release()
                await turns()
                room.engine.fail(ValueError("x"))
                room.engine.batches.clear()
            await turns()
            assert error_of(client) is not None
            await turns()
            assert watched() is None

    gc.disable()
    try:
        run(main)
    finally:
        gc.enable()


def test_a_failed_batch_is_released_before_its_members_are_retried():
    """The traceback of an out-of-memory error has the tensors whose room the retry needs."""

    class OutOfMemoryError(Exception):
        pass

    async def main():
        async with Room() as room:
            clients = await room.send_running("x", "y")
            error = OutOfMemoryError()
            watched = weakref.ref(error)
            room.engine.fail(error)
            del error
            await turns()
            assert room.engine.batches == [["x", "y"], ["x"]]
            assert watched() is None
            room.engine.open()
            await turns()
            assert [error_of(client) for client in clients] == [None, None]

    gc.disable()
    try:
        run(main)
    finally:
        gc.enable()
