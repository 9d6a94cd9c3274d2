"""deploy/kubernetes as the real kustomize renders it, and the schemas of what is in it, which refuse unknown fields.

Kubernetes' own kinds are validated by kubernetes-validate. KEDA's and prometheus-operator's schemas are those of models that are
generated from their CRDs (.venv-kube). KServe's is read from its SDK, which is generated from its API (.venv-clients).
"""

import ast
import functools
import itertools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
TOOLS = ROOT / ".venv-kube" / "bin"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
COMPONENTS = sorted(path.parent.name for path in KUBERNETES.glob("components/*/kustomization.yaml"))
ON_BASE = [name for name in OVERLAYS if "../" in (KUBERNETES / f"overlays/{name}/kustomization.yaml").read_text()]
COMBINATIONS = [
    *((name,) for name in OVERLAYS),
    *(
        pair for pair in itertools.product(ON_BASE, COMPONENTS) if pair != ("keda", "monitoring")
    ),  # it has that one already
]
OLDEST, NEWEST = "1.33", "1.37"  # the oldest knows the subPath of an image volume

EXPORT = """
import json
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor
print(json.dumps({kind.__name__: kind.model_json_schema(by_alias=True) for kind in (ScaledObject, ServiceMonitor)}))
"""
CORE = ("io.k8s.api.core.v1.", "io.k8s.api.apps.v1.", "io.k8s.apimachinery.pkg.apis.meta.v1.")
PLAIN = {"str": "string", "int": "integer", "bool": "boolean", "float": "number"}


@functools.cache
def render(overlay: str, *components: str) -> list[dict]:
    """The resources of an overlay with components, as a user's own kustomization joins them."""
    if not (TOOLS / "kubectl").exists():
        pytest.skip("kubectl is not installed: make install-kube")
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.relpath(KUBERNETES, os.path.realpath(directory))  # kustomize takes no absolute path
        parts = [f"{path}/components/{name}" for name in components]
        text = yaml.safe_dump({"resources": [f"{path}/overlays/{overlay}"], "components": parts})
        Path(directory, "kustomization.yaml").write_text(text)
        done = subprocess.run([TOOLS / "kubectl", "kustomize", directory], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")  # it warns of what is deprecated
    return list(yaml.safe_load_all(done.stdout))


def validate(resource: dict) -> None:
    """Raise if a field is unknown or of a wrong type."""
    _validate(json.dumps(resource, sort_keys=True))


@functools.cache  # most combinations differ in one resource
def _validate(text: str) -> None:
    resource = json.loads(text)
    if resource["kind"] in _foreign():
        jsonschema.Draft202012Validator(_foreign()[resource["kind"]]).validate(resource)
    else:
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(resource, version, strict=True)


@functools.cache
def _foreign() -> dict[str, Any]:
    exported = subprocess.run([TOOLS / "python", "-c", EXPORT], capture_output=True, text=True, check=True).stdout
    schemas: dict[str, Any] = json.loads(exported)
    kserve = _of_kserve()
    schemas["ServingRuntime"] = {"$ref": "#/$defs/V1alpha1ServingRuntime", "$defs": kserve}
    schemas["InferenceService"] = {"$ref": "#/$defs/V1beta1InferenceService", "$defs": kserve}
    for one in (one for schema in schemas.values() for one in (schema, *schema["$defs"].values())):
        if one.get("properties"):
            one.setdefault("additionalProperties", False)
    return schemas


def _of_kserve() -> dict[str, Any]:
    """The SDK's classes over Kubernetes' own: each has two literals, its attributes' types and their names in JSON."""
    name = f"kubernetes-json-schema/v{NEWEST}.0-local-strict/_definitions.json"
    defs: dict[str, Any] = json.loads((Path(kubernetes_validate.__file__).parent / name).read_text())["$defs"]
    (models,) = (ROOT / ".venv-clients").glob("lib/python3*/site-packages/kserve/models")
    texts = [path.read_text() for path in models.glob("v1*.py")]
    classes = {re.findall(r"^class (\w+)\(object\)", text, re.MULTILINE)[0]: text for text in texts}
    for kind, text in classes.items():
        types, names = map(
            ast.literal_eval, re.findall(r"(?:openapi_types|attribute_map) = (\{.*?\})", text, re.DOTALL)
        )
        fields = {names[attribute]: _typed(of, {*classes, *defs}) for attribute, of in types.items()}
        required = re.findall(r"Invalid value for `(\w+)`, must not be `None`", text)
        defs[kind] = {"type": "object", "properties": fields, "required": [names[each] for each in required]}
    return defs


def _typed(kind: str, known: set[str]) -> dict:
    if each := re.fullmatch(r"list\[(.+)\]", kind):
        return {"type": "array", "items": _typed(each[1], known)}
    if each := re.fullmatch(r"dict\(str, (.+)\)", kind):
        return {"type": "object", "additionalProperties": _typed(each[1], known)}
    names = (kind, *(prefix + re.sub("^(K8sIoApiAppsV1|V1)", "", kind) for prefix in CORE))
    found: list[dict] = [{"$ref": f"#/$defs/{name}"} for name in names if name in known]
    return {"type": PLAIN[kind]} if kind in PLAIN else (*found, {})[0]


def pods(resources: list[dict]) -> list[dict]:
    """The specs of the pods that a workload starts; KServe's runtime is one."""
    specs = [one["spec"] for one in resources if "spec" in one]
    return [spec.get("template", {}).get("spec", spec) for spec in specs if "template" in spec or "containers" in spec]


def one(resources: list[dict], kind: str) -> dict:
    (found,) = (each for each in resources if each["kind"] == kind and each["metadata"]["name"] == "attention")
    return found
