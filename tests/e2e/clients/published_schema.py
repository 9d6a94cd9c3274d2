"""Answers of the service against the published OpenAPI file of the protocol: python published_schema.py HOST:PORT.

`open_inference_rest.yaml` is the file of github.com/kserve/open-inference-protocol (Apache-2.0), unchanged.
"""

import json
import urllib.error
import urllib.request
from pathlib import Path

import jsonschema
import yaml
from expected import LAYER, WIDTH, run

PAGE = yaml.safe_load((Path(__file__).parent / "open_inference_rest.yaml").read_text(encoding="utf-8"))


def check(schema: str, value: object) -> None:
    """Also refuses what the schema leaves out because it names no key as forbidden: an answer that is no object."""
    assert isinstance(value, dict)
    whole = {"$ref": f"#/components/schemas/{schema}", "components": PAGE["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def ask(url: str, path: str, body: object = None, method: str | None = None) -> tuple[int, object]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{url}{path}", data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def query(**changes: object) -> dict:
    given = {"name": "query", "datatype": "FP32", "shape": [1, 2, WIDTH], "data": [0.5] * (2 * WIDTH)}
    return {"inputs": [{**given, **changes}]}


def every_published_path_is_served(url: str) -> None:
    for path, operations in PAGE["paths"].items():
        served = path.replace("${MODEL_NAME}", LAYER).replace("${MODEL_VERSION}", "1")
        body = query() if "post" in operations else None
        status, found = ask(url, served, body)
        assert status == 200, (path, status, found)
        content = operations.get("get", operations.get("post"))["responses"]["200"].get("content")
        if content:
            check(content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1], found)
        status, found = ask(url, served, method="DELETE")
        assert status == 405
        check("inference_error_response", found)


def requests_and_answers_are_those_of_the_page(url: str) -> None:
    request = {
        **query(),
        "id": "42",
        "parameters": {"causal": "top_left", "weights": "heads"},
        "model_name": "whatever",
    }
    check("inference_request", request)
    status, found = ask(url, f"/v2/models/{LAYER}/infer", request)
    assert status == 200
    check("inference_response", found)
    assert found["id"] == "42"
    assert [output["name"] for output in found["outputs"]] == ["output", "weights"]


def every_error_is_the_published_one(url: str) -> None:
    infer = f"/v2/models/{LAYER}/infer"
    for wanted, path, body in (
        (404, "/v2/models/nobody", None),
        (404, "/v2/models/nobody/infer", query()),
        (404, "/v2/nowhere", None),
        (404, f"/v2/models/{LAYER}/versions/9/ready", None),
        (400, infer, query(datatype="FP16")),
        (400, infer, query(shape=[1, -2, WIDTH])),
        (413, infer, query(shape=[2**32, 2**32, WIDTH])),
        (400, infer, query(data=None)),
        (400, infer, query(name="unknown")),
        (400, infer, {"inputs": []}),
        (400, infer, {"inputs": [{"name": "query"}]}),
        (400, infer, [1, 2]),
        (400, infer, {**query(), "outputs": [{"name": "nothing"}]}),
        (400, infer, {**query(), "outputs": [{"name": "output", "parameters": {"classification": 3}}]}),
        (400, infer, {**query(), "parameters": {"triton_flag": True}}),
    ):
        status, found = ask(url, path, body)
        assert status == wanted, (path, body, status, found)
        check("inference_error_response", found)
        # The published schema requires nothing of an error, not even the error.
        assert list(found) == ["error"], found
        assert found["error"], (path, body)


if __name__ == "__main__":
    run(
        [
            every_published_path_is_served,
            requests_and_answers_are_those_of_the_page,
            every_error_is_the_published_one,
        ]
    )
