"""Triton's own synchronous HTTP client against the service: python triton_sync.py HOST:PORT."""

import contextlib

import ml_dtypes
import numpy as np
import tritonclient.http as triton
from expected import KEYS, LAYER, MASK, WIDTH, X, attend, run, same_bits, tensor
from tritonclient.utils import InferenceServerException


def asked(name: str, array: np.ndarray, datatype: str, *, binary: bool = True) -> triton.InferInput:
    found = triton.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def connected(url: str):
    return contextlib.closing(triton.InferenceServerClient(url, concurrency=4))


def health_and_metadata(url: str) -> None:
    with connected(url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(LAYER)
        assert client.is_model_ready(LAYER, "1")
        assert not client.is_model_ready("nobody")
        assert not client.is_model_ready(LAYER, "2")
        server = client.get_server_metadata()
        assert server["name"] == "attention-service"
        assert "binary_tensor_data" in server["extensions"]
        model = client.get_model_metadata(LAYER)
        assert model["versions"] == ["1"]
        assert model["inputs"] == [{"name": "query", "datatype": "FP32", "shape": [-1, -1, WIDTH]}]
        assert [entry["name"] for entry in model["outputs"]] == ["output"]
        assert {"key", "value", "attend_mask", "bias", "lengths"} <= {x["name"] for x in model["optional_inputs"]}
        config = client.get_model_config(LAYER)
        assert config["max_batch_size"] > 0
        assert config["input"] == [{"name": "query", "data_type": "TYPE_FP32", "dims": [-1, WIDTH]}]
        index = client.get_model_repository_index()
        assert {"name": LAYER, "version": "1", "state": "READY", "reason": ""} in index


def binary_and_json_give_the_bits_of_v1(url: str) -> None:
    wanted = attend(url, query=X)["output"]
    with connected(url) as client:
        for binary_in in (True, False):
            query = [asked("query", X, "FP32", binary=binary_in)]
            assert same_bits(client.infer(LAYER, query).as_numpy("output"), wanted)
            for binary_out in (True, False):
                outputs = [triton.InferRequestedOutput("output", binary_data=binary_out)]
                result = client.infer(LAYER, query, outputs=outputs, request_id="own id")
                assert same_bits(result.as_numpy("output"), wanted)
                assert result.get_response()["id"] == "own id"
                assert result.get_response()["model_name"] == LAYER


def every_datatype_gives_the_bits_of_v1(url: str) -> None:
    with connected(url) as client:
        for datatype, dtype in (
            ("FP16", np.float16),
            ("BF16", ml_dtypes.bfloat16),
            ("FP32", np.float32),
            ("FP64", np.float64),
        ):
            query = X.astype(dtype)
            result = client.infer(LAYER, [asked("query", query, datatype)])
            assert same_bits(result.as_numpy("output"), attend(url, query=query)["output"]), datatype


def table(kind: str, values: np.ndarray) -> dict:
    return {"kind": kind, "values": tensor(values), "axes": "bls"}


def masks_weights_and_parameters_mean_what_they_say(url: str) -> None:
    bias = np.where(MASK, np.float32(0.5), np.float32(-np.inf))
    lengths = np.array([3, 5], np.int64)
    cases = [
        ([asked("attend_mask", MASK, "BOOL")], {"attend_mask_axes": "bls"}, [table("attend", MASK)]),
        ([asked("attend_mask", MASK, "BOOL", binary=False)], {"attend_mask_axes": "bls"}, [table("attend", MASK)]),
        ([asked("ignore_mask", ~MASK, "BOOL")], {"ignore_mask_axes": "bls"}, [table("ignore", ~MASK)]),
        ([asked("bias", bias, "FP32")], {"bias_axes": "bls"}, [table("bias", bias)]),
        ([asked("lengths", lengths, "INT64")], {}, [{"kind": "lengths", "values": tensor(lengths)}]),
        ([asked("lengths", lengths, "INT64", binary=False)], {}, [{"kind": "lengths", "values": tensor(lengths)}]),
        ([], {"causal": "top_left"}, [{"kind": "causal", "align": "top_left"}]),
        (
            [asked("lengths", lengths, "INT64")],
            {"causal": "bottom_right"},
            [{"kind": "lengths", "values": tensor(lengths)}, {"kind": "causal", "align": "bottom_right"}],
        ),
    ]
    with connected(url) as client:
        for inputs, parameters, masks in cases:
            for form in ("heads", "mean"):
                wanted = attend(url, query=X, masks=masks, weights={"form": form})
                query = asked("query", X, "FP32")
                result = client.infer(LAYER, [query, *inputs], parameters={**parameters, "weights": form})
                assert same_bits(result.as_numpy("output"), wanted["output"])
                assert same_bits(result.as_numpy("weights"), wanted["weights"])


def cross_attention_and_asking_for_weights_by_name(url: str) -> None:
    wanted = attend(url, query=X, key=KEYS, weights={"form": "heads"})
    with connected(url) as client:
        inputs = [asked("key", KEYS, "FP32", binary=False), asked("query", X, "FP32")]
        outputs = [triton.InferRequestedOutput(x, binary_data=x == "output") for x in ("weights", "output")]
        result = client.infer(LAYER, inputs, outputs=outputs)
        assert [x["name"] for x in result.get_response()["outputs"]] == ["weights", "output"]
        assert same_bits(result.as_numpy("output"), wanted["output"])
        assert same_bits(result.as_numpy("weights"), wanted["weights"])


def compression_both_ways(url: str) -> None:
    wanted = attend(url, query=X)["output"]
    with connected(url) as client:
        for coding in ("gzip", "deflate"):
            for binary in (True, False):
                result = client.infer(
                    LAYER,
                    [asked("query", X, "FP32", binary=binary)],
                    outputs=[triton.InferRequestedOutput("output", binary_data=binary)],
                    request_compression_algorithm=coding,
                    response_compression_algorithm=coding,
                )
                assert same_bits(result.as_numpy("output"), wanted)


def many_at_once(url: str) -> None:
    wanted = attend(url, query=X)["output"]
    with connected(url) as client:
        waiting = [client.async_infer(LAYER, [asked("query", X, "FP32")]) for _ in range(40)]
        assert all(same_bits(each.get_result().as_numpy("output"), wanted) for each in waiting)


def errors_are_read_as_errors(url: str) -> None:
    narrow = np.zeros((1, 3, WIDTH + 1), np.float32)
    with connected(url) as client:
        for model, inputs, status, words in (
            ("nobody", [asked("query", X, "FP32")], "404", "layer_not_found"),
            (LAYER, [asked("query", narrow, "FP32")], "400", f"query has {WIDTH + 1} features"),
            (
                LAYER,
                [asked("query", np.full((1, 2, WIDTH), np.nan, np.float32), "FP32")],
                "400",
                "query has NaN at index",
            ),
            (LAYER, [asked("key", X, "FP32")], "400", "query is required"),
            (
                LAYER,
                [asked("query", X, "FP32"), asked("attend_mask", MASK[:, None, :, :3], "BOOL")],
                "400",
                "attend_mask must be",
            ),
        ):
            try:
                client.infer(model, inputs)
            except InferenceServerException as error:
                assert error.status() == status, error
                assert words in error.message(), error
            else:
                raise AssertionError(f"{words}: no error came")


def statistics_count_what_was_asked(url: str) -> None:
    with connected(url) as client:
        before = client.get_inference_statistics(LAYER)["model_stats"][0]
        client.infer(LAYER, [asked("query", X, "FP32")])
        after = client.get_inference_statistics(LAYER)["model_stats"][0]
        assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 1
        assert after["inference_count"] - before["inference_count"] == len(X)
        assert after["execution_count"] - before["execution_count"] == 1
        assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
        assert len(client.get_inference_statistics()["model_stats"]) > 1


if __name__ == "__main__":
    run(
        [
            health_and_metadata,
            binary_and_json_give_the_bits_of_v1,
            every_datatype_gives_the_bits_of_v1,
            masks_weights_and_parameters_mean_what_they_say,
            cross_attention_and_asking_for_weights_by_name,
            compression_both_ways,
            many_at_once,
            errors_are_read_as_errors,
            statistics_count_what_was_asked,
        ]
    )
