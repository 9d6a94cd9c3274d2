"""/openapi.json as a product: what it says of itself, of every field and every header, and examples that are true."""

import gzip
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from service.api.auth.access import EXPOSED, REQUEST_HEADERS
from service.api.openapi.examples import attend_examples
from service.wire.attend_request import Weights
from service.wire.mask_kinds import MASK_KINDS
from tests.contract.test_error_table import CONTRACT
from tests.integration.running import LAYERS, in_service

ATTEND, ATTENTION = "/v1/layers/{layer}/attend", "/v1/attention"
LICENCE = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "license"
]
# OpenAPI ignores parameters of these names: they are media types and security schemes.
NO_PARAMETERS = {"Accept", "Authorization", "Content-Type", "X-API-Key"}


async def page_of(service) -> dict[str, Any]:
    page: dict[str, Any] = (await service.client.get("/openapi.json")).json()
    return page


def resolved(page: dict, node: dict) -> dict:
    """The node, or what its reference names."""
    for name in node["$ref"].split("/")[1:] if "$ref" in node else ():
        page = page[name]
    return page if "$ref" in node else node


def examples_of(page: dict, path: str) -> dict[str, Any]:
    content = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return {name: example["value"] for name, example in content["examples"].items()}


def error_documents(page: dict, path: str) -> dict[str, dict]:
    """The documents that the page shows for errors of this path, by code."""
    answers = [resolved(page, answer) for answer in page["paths"][path]["post"]["responses"].values()]
    contents = [content for answer in answers for content in answer["content"].values()]
    return {code: example["value"] for content in contents for code, example in content.get("examples", {}).items()}


@in_service(admin=True)
async def test_the_page_says_what_this_is_and_under_which_licence(service):
    page = await page_of(service)
    assert {"title", "version", "summary", "description", "license", "contact"} <= set(page["info"])
    assert page["info"]["license"]["identifier"] == LICENCE
    described = {tag["name"] for tag in page["tags"] if tag["description"]}
    operations = [operation for found in page["paths"].values() for operation in found.values()]
    assert {tag for operation in operations for tag in operation["tags"]} == described
    assert all(operation["summary"] for operation in operations)
    assert all(scheme["description"] for scheme in page["components"]["securitySchemes"].values())


OPERATION_IDS = """
    healthz readyz metrics list_layers get_layer put_layer delete_layer attend attention infer infer_version server_metadata
    list_models get_model attend_text states
    server_live server_ready repository_index all_model_stats model_metadata model_metadata_version model_ready
    model_ready_version model_config model_config_version model_stats model_stats_version
"""


@in_service()
async def test_each_operation_has_a_name_that_generated_clients_keep(service):
    page = await page_of(service)
    found = [operation["operationId"] for operations in page["paths"].values() for operation in operations.values()]
    assert sorted(found) == sorted(OPERATION_IDS.split())


_REF = "#/components/schemas/{}"
TENSORS = {
    "AttendRequest": "query key value positions key_positions past_key past_value",
    "AttentionRequest": "query key value past_key past_value sinks",
    **dict.fromkeys(("AttendMask", "IgnoreMask", "BiasMask"), "values"),
    **dict.fromkeys(("Answer", "AttentionAnswer"), "output weights scores lse entropy present_key present_value"),
    "TopK": "values indices rest",
}


def schemas_in(node: Any) -> list[dict]:
    """The node and all schemas below it."""
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [*([node] if isinstance(node, dict) else []), *(found for part in parts for found in schemas_in(part))]


@in_service()
async def test_every_tensor_is_a_tensor_and_every_mask_a_mask(service):
    schemas = (await page_of(service))["components"]["schemas"]
    for model, fields in TENSORS.items():
        for field in fields.split():
            assert _REF.format("Tensor") in [
                part.get("$ref") for part in schemas_in(schemas[model]["properties"][field])
            ]
    for model in ("AttendRequest", "AttentionRequest"):
        assert schemas[model]["properties"]["masks"]["items"] == {"$ref": _REF.format("Mask")}
    mapping = {kind: _REF.format(model.__name__) for kind, model in MASK_KINDS.items()}
    assert schemas["Mask"]["discriminator"] == {"propertyName": "kind", "mapping": mapping}
    assert sorted(one["$ref"] for one in schemas["Mask"]["oneOf"]) == sorted(mapping.values())


@in_service()
async def test_each_choice_of_several_schemas_is_among_named_ones_so_that_no_generator_makes_up_a_name(service):
    page = await page_of(service)
    for name, schema in page["components"]["schemas"].items():
        assert name.lower() not in schema.get("properties", {}), (
            "openapi-python-client would have two variables of one name"
        )
    for schema in schemas_in(page["components"]["schemas"]):
        for one in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
            assert not {"enum", "properties", "additionalProperties"} & set(one), schema


def validator(page: dict, schema: dict) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": page["components"]})


@in_service()
async def test_each_example_and_its_answer_are_what_their_schemas_say(service):
    page = await page_of(service)
    for path in (ATTEND, ATTENTION, "/v2/models/{layer}/infer"):
        operation = page["paths"][path]["post"]
        layer = next((found["example"] for found in operation["parameters"] if found.get("name") == "layer"), "")
        asked = validator(page, operation["requestBody"]["content"]["application/json"]["schema"])
        for name, body in examples_of(page, path).items():
            answer = await service.client.post(path.format(layer=layer), json=body)
            assert answer.status_code == CONTRACT.get(name, 200)
            known = resolved(page, operation["responses"][str(answer.status_code)])["content"]
            validator(page, known[answer.headers["content-type"]]["schema"]).validate(answer.json())
            if name not in CONTRACT:
                asked.validate(body)


IS_RANGE = re.compile(r"\b(from|at least|above|any|to) |> 0")


@in_service()
async def test_every_field_of_every_body_is_described_with_its_default_and_range(service):
    page = await page_of(service)
    for name, schema in page["components"]["schemas"].items():
        for field, found in schema.get("properties", {}).items():
            where, words = f"{name}.{field}", found.get("description", "")
            assert words, where
            if not name.endswith(("Request", "Weights", "Scores", "Mask", "Input", "Output", "Parameters")):
                continue
            if field not in schema.get("required", []):
                assert re.search(r"default: |ignored|only there|only with|comes with", words), where
            for part in [found, *found.get("anyOf", [])]:
                if part.get("type") in ("integer", "number"):
                    assert {"minimum", "maximum"} & set(part) or IS_RANGE.search(words), where


@in_service()
async def test_every_header_that_the_service_reads_or_shows_is_on_the_page(service):
    page = await page_of(service)
    parameters = {parameter["name"] for parameter in page["components"]["parameters"].values()}
    assert set(REQUEST_HEADERS) - NO_PARAMETERS <= parameters
    assert set(EXPOSED) <= set(page["components"]["headers"])
    for path, operations in page["paths"].items():
        for operation in operations.values():
            read = [resolved(page, parameter) for parameter in operation["parameters"]]
            assert "X-Request-ID" in {parameter["name"] for parameter in read}, path
            assert not any({"default", "example"} & {*x, *x["schema"]} for x in read if x["in"] == "header")
            for answer in operation["responses"].values():
                assert all(
                    resolved(page, header)["description"] for header in resolved(page, answer)["headers"].values()
                )


async def headers_beyond_the_page(service, page, path: str, **request: Any) -> set[str]:
    """The headers of the answer to this request that the page does not have; framing and nosniff are HTTP's."""
    answer = await service.client.post(path.format(layer="small"), **request)
    found = resolved(page, page["paths"][path]["post"]["responses"][str(answer.status_code)])
    known = {name.lower() for name in found["headers"]}
    return set(answer.headers) - known - {"content-type", "content-length", "connection", "x-content-type-options"}


@in_service()
async def test_no_answer_has_a_header_that_the_page_does_not_have(service):
    page = await page_of(service)
    body = {"query": [[0.5] * 16] * 100}
    for path in (ATTEND, ATTENTION):
        assert not await headers_beyond_the_page(service, page, path, json={"query": [0.5]})
    coding = {"accept-encoding": "gzip"}
    assert not await headers_beyond_the_page(service, page, ATTEND, json=body, headers=coding)
    tensor = {"name": "query", "datatype": "FP32", "shape": [1, 1, 16], "data": [0.5] * 16}
    wanted = [{"name": "output", "parameters": {"binary_data": True}}]
    infer = {"inputs": [tensor], "outputs": wanted}
    assert not await headers_beyond_the_page(service, page, "/v2/models/{layer}/infer", json=infer)


@in_service(admin=True)
async def test_a_refused_key_has_the_headers_of_the_page(service):
    page = await page_of(service)
    del service.client.headers["x-api-key"]
    assert not await headers_beyond_the_page(service, page, ATTEND, json={})


@in_service()
async def test_each_kind_of_mask_each_form_of_weights_and_base64_has_an_example(service):
    page = await page_of(service)
    for path in (ATTEND, ATTENTION):
        examples = examples_of(page, path)
        for kind in MASK_KINDS:
            assert [mask["kind"] for mask in examples[f"mask_{kind}"]["masks"]] == [kind]
        for form in get_args(Weights.model_fields["form"].annotation):
            assert examples[f"weights_{form}"]["weights"]["form"] == form
        assert isinstance(examples["weights_short"]["weights"], str)
        assert isinstance(examples["base64"]["query"]["data"], str)
        of_bodies = {code for code, status in CONTRACT.items() if status == 422} | {"bad_encoding", "cost_limit"}
        of_bodies -= {"positions_required", *(["layout_required"] if path == ATTEND else [])}
        assert set(examples) & set(CONTRACT) == of_bodies


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
@in_service()
async def test_each_example_is_answered_with_a_200_or_the_error_that_it_is_named_by(service, layer):
    page = await page_of(service)
    bodies = [(f"/v1/layers/{layer.name}/attend", attend_examples(layer.spec))]
    if layer is LAYERS[0]:
        whole = page["paths"][ATTENTION]["post"]["requestBody"]["content"]["application/json"]["examples"]
        bodies.append((ATTENTION, whole))
    for path, examples in bodies:
        for name, example in examples.items():
            answer = await service.client.post(path, json=example["value"])
            assert answer.status_code == CONTRACT.get(name, 200), (path, name, answer.text)
            assert name not in CONTRACT or answer.json()["code"] == name


JSON = {"content-type": "application/json"}
REQUESTS: dict[str, dict[str, Any]] = {
    "bad_json": {"content": b"{", "headers": JSON},
    "json_too_deep": {"content": b"[" * 100 + b"]" * 100, "headers": JSON},
    "duplicate_key": {"content": b'{"query":[],"query":[]}', "headers": JSON},
    "bad_binary": {"content": b"123", "headers": {"content-type": "application/vnd.safetensors"}},
    "unsupported_media_type": {"content": b"{}", "headers": {"content-type": "text/plain"}},
    "unsupported_content_encoding": {"content": b"{}", "headers": {**JSON, "content-encoding": "br"}},
    "not_acceptable": {"content": b"{}", "headers": {**JSON, "accept": "text/html"}},
    "body_too_large": {"content": b"x" * (2**24 + 1), "headers": JSON},
    "decompressed_too_large": {
        "content": gzip.compress(b"x" * (2**24 + 1), 1),
        "headers": {**JSON, "content-encoding": "gzip"},
    },
}  # fmt: skip


@in_service()
async def test_the_error_documents_of_the_page_are_what_the_service_answers(service):
    page = await page_of(service)
    documents = error_documents(page, ATTENTION)
    bodies = {code: {"json": body} for code, body in examples_of(page, ATTENTION).items() if code in CONTRACT}
    for code, request in (REQUESTS | bodies).items():
        answer = (await service.client.post(ATTENTION, **request)).json()
        assert answer | {"request_id": ""} == documents[code] | {"request_id": ""}
    for code, path in (("layer_not_found", "/v1/layers/nobody/attend"), ("not_found", "/v1/nothing")):
        answer = (await service.client.post(path, json={})).json()
        assert answer["detail"] == documents[code]["detail"]


@pytest.mark.parametrize("path", [ATTEND, ATTENTION, "/v2/models/{layer}/infer"])
@in_service()
async def test_each_code_has_a_document_under_its_status(service, path):
    documents = error_documents(await page_of(service), path)
    assert set(documents) == set(CONTRACT) - {"method_not_allowed"}
    for code, document in documents.items():
        if "code" in document:
            assert (document["code"], document["status"]) == (code, CONTRACT[code])
        else:
            assert document["error"].endswith(f"({code})")
