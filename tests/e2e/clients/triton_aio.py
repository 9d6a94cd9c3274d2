"""Triton's own asynchronous HTTP client against the service: python triton_aio.py HOST:PORT."""

import asyncio

import numpy as np
import tritonclient.http as inputs
import tritonclient.http.aio as triton
from expected import LAYER, WIDTH, X, attend, run, same_bits
from tritonclient.utils import InferenceServerException


def asked(array: np.ndarray, *, binary: bool = True) -> list:
    found = inputs.InferInput("query", list(array.shape), "FP32")
    found.set_data_from_numpy(array, binary_data=binary)
    return [found]


def health_and_metadata(url: str) -> None:
    async def story() -> None:
        async with triton.InferenceServerClient(url) as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready(LAYER)
            assert not await client.is_model_ready("nobody")
            assert (await client.get_server_metadata())["name"] == "attention-service"
            assert (await client.get_model_metadata(LAYER))["name"] == LAYER
            assert (await client.get_model_config(LAYER))["name"] == LAYER
            assert (await client.get_inference_statistics(LAYER))["model_stats"][0]["name"] == LAYER
            assert any(entry["name"] == LAYER for entry in await client.get_model_repository_index())

    asyncio.run(story())


def binary_json_and_compression_give_the_bits_of_v1(url: str) -> None:
    wanted = attend(url, query=X)["output"]

    async def story() -> None:
        async with triton.InferenceServerClient(url) as client:
            for binary in (True, False):
                for coding in (None, "gzip", "deflate"):
                    result = await client.infer(
                        LAYER,
                        asked(X, binary=binary),
                        outputs=[inputs.InferRequestedOutput("output", binary_data=binary)],
                        request_compression_algorithm=coding,
                        response_compression_algorithm=coding,
                    )
                    assert same_bits(result.as_numpy("output"), wanted)

    asyncio.run(story())


def many_at_once(url: str) -> None:
    wanted = attend(url, query=X)["output"]

    async def story() -> None:
        async with triton.InferenceServerClient(url, conn_limit=16) as client:
            results = await asyncio.gather(*(client.infer(LAYER, asked(X)) for _ in range(60)))
            assert all(same_bits(result.as_numpy("output"), wanted) for result in results)

    asyncio.run(story())


def errors_are_read_as_errors(url: str) -> None:
    async def story() -> None:
        async with triton.InferenceServerClient(url) as client:
            for model, width, status in (("nobody", WIDTH, "404"), (LAYER, WIDTH + 1, "400")):
                try:
                    await client.infer(model, asked(np.zeros((1, 2, width), np.float32)))
                except InferenceServerException as error:
                    assert error.status() == status, error
                    assert "features" in error.message() or "no layer" in error.message(), error
                else:
                    raise AssertionError("no error came")

    asyncio.run(story())


if __name__ == "__main__":
    run(
        [
            health_and_metadata,
            binary_json_and_compression_give_the_bits_of_v1,
            many_at_once,
            errors_are_read_as_errors,
        ]
    )
