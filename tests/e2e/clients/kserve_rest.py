"""KServe's own REST inference client against the service: python kserve_rest.py HOST:PORT."""

import asyncio

import httpx
import numpy as np
from expected import LAYER, MASK, WIDTH, X, attend, run, same_bits
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput


def asked(array: np.ndarray, *, binary: bool, **options) -> InferRequest:
    query = InferInput("query", list(array.shape), "FP32")
    query.set_data_from_numpy(array, binary_data=binary)
    mask = InferInput("attend_mask", list(MASK.shape), "BOOL")
    mask.set_data_from_numpy(MASK, binary_data=binary)
    parameters = {"attend_mask_axes": "bls", **options.pop("parameters", {})}
    return InferRequest(LAYER, [query, mask], request_id="own id", parameters=parameters, **options)


def health(url: str) -> None:
    async def story() -> None:
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
            assert await client.is_server_live(f"http://{url}")
            assert await client.is_server_ready(f"http://{url}")
            assert await client.is_model_ready(f"http://{url}", LAYER)
            assert not await client.is_model_ready(f"http://{url}", "nobody")

    asyncio.run(story())


def binary_and_json_give_the_bits_of_v1(url: str) -> None:
    values = {"dtype": "bool", "shape": list(MASK.shape), "data": MASK.ravel().tolist()}
    masks = [{"kind": "attend", "values": values, "axes": "bls"}]
    wanted = attend(url, query=X, masks=masks)["output"]

    async def story() -> None:
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
            for binary_in in (True, False):
                for binary_out in (True, False):
                    outputs = [RequestedOutput("output", {"binary_data": binary_out})]
                    request = asked(X, binary=binary_in, request_outputs=outputs)
                    answer = await client.infer(f"http://{url}", request, model_name=LAYER)
                    assert same_bits(answer.outputs[0].as_numpy(), wanted)
                    assert answer.id == "own id"
                    assert answer.model_name == LAYER
                everything = asked(X, binary=binary_in, parameters={"binary_data_output": True})
                answer = await client.infer(f"http://{url}", everything, model_name=LAYER)
                assert same_bits(answer.outputs[0].as_numpy(), wanted)

    asyncio.run(story())


def errors_are_read_as_errors(url: str) -> None:
    async def story() -> None:
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
            query = InferInput("query", [1, 2, WIDTH + 1], "FP32")
            query.set_data_from_numpy(np.zeros((1, 2, WIDTH + 1), np.float32), binary_data=True)
            try:
                await client.infer(f"http://{url}", InferRequest(LAYER, [query]), model_name=LAYER)
            except httpx.HTTPStatusError as error:
                assert error.response.status_code == 400, error
                assert f"query has {WIDTH + 1} features" in str(error), error
            else:
                raise AssertionError("no error came")

    asyncio.run(story())


if __name__ == "__main__":
    run(
        [
            health,
            binary_and_json_give_the_bits_of_v1,
            errors_are_read_as_errors,
        ]
    )
