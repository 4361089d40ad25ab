"""The manifest for KubeRay: the schema of KubeRay accepts it, and it keeps what docs/scaling.md promises.

kuberay-1.7.0.json.gz holds the schemas (v1, without their descriptions) of RayCluster and RayJob of KubeRay 1.7.0, from
helm-chart/kuberay-operator/crds (Apache 2.0). With AGENTRL_KUBERAY_CRDS=FOLDER, which holds these files of another
release, the manifest is checked against that one too. What the manifest must not leave out is written down here.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from agentrl.cluster.connect import HEALTH_CHECKS

CRDS = Path(__file__).with_name("kuberay-1.7.0.json.gz")
FILE = Path(__file__).resolve().parents[2] / "examples" / "kuberay" / "agentrl.yaml"


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": required.split(),
    }


def many(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


TEXT, NUMBER, FLAG = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITIES = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[KMGT]i)?$"},
}
CONTAINER = closed(
    "name image resources",
    name=TEXT,
    image=TEXT,
    env=many(
        closed(
            "name",
            name=TEXT,
            value=TEXT,
            valueFrom=closed("secretKeyRef", secretKeyRef=closed("name key", name=TEXT, key=TEXT)),
        )
    ),
    ports=many(closed("containerPort", containerPort=NUMBER, name=TEXT)),
    resources=closed("requests limits", requests=QUANTITIES, limits=QUANTITIES),
    securityContext=closed(
        capabilities=closed(add=many(TEXT), drop=many(TEXT)),
        seccompProfile=closed(
            "type", type={"enum": ["RuntimeDefault", "Localhost", "Unconfined"]}, localhostProfile=TEXT
        ),
        procMount={"enum": ["Default", "Unmasked"]},
        privileged=FLAG,
        allowPrivilegeEscalation=FLAG,
        runAsNonRoot=FLAG,
        runAsUser=NUMBER,
    ),
    volumeMounts=many(closed("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)),
)
VOLUME = closed(
    "name",
    name=TEXT,
    emptyDir=closed(medium={"enum": ["", "Memory"]}, sizeLimit=TEXT),
    persistentVolumeClaim=closed("claimName", claimName=TEXT, readOnly=FLAG),
)
POD = closed(
    "spec",
    spec=closed(
        "containers",
        containers=many(CONTAINER),
        volumes=many(VOLUME),
        hostUsers=FLAG,
        automountServiceAccountToken=FLAG,
        restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    ),
)
METADATA = closed("name", name=TEXT, labels=TEXTS)
SELECTOR = closed("matchLabels", matchLabels=TEXTS)
SCHEMAS = {
    "RayCluster": closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": "ray.io/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=closed(
            "headGroupSpec",
            rayVersion=TEXT,
            authOptions=closed(mode={"enum": ["disabled", "token"]}, secretName=TEXT, enableK8sTokenAuth=FLAG),
            headGroupSpec=closed("template", rayStartParams=TEXTS, template=POD),
            workerGroupSpecs=many(
                closed(
                    "groupName template",
                    groupName=TEXT,
                    replicas=NUMBER,
                    minReplicas=NUMBER,
                    maxReplicas=NUMBER,
                    rayStartParams=TEXTS,
                    template=POD,
                )
            ),
        ),
    ),
    "RayJob": closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": "ray.io/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=closed(
            "entrypoint clusterSelector",
            entrypoint=TEXT,
            clusterSelector=TEXTS,
            backoffLimit={"const": 0},  # the operator refuses another one beside clusterSelector
            submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
            submitterPodTemplate=POD,
        ),
    ),
    "PersistentVolumeClaim": closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": "v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=closed("accessModes resources", accessModes=many(TEXT), resources=closed("requests", requests=QUANTITIES)),
    ),
    "NetworkPolicy": closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": "networking.k8s.io/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=closed(
            "podSelector",
            podSelector=SELECTOR,
            policyTypes=many({"enum": ["Ingress", "Egress"]}),
            ingress=many({"type": "object"}),
        ),
    ),
}


def documents() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(FILE.read_text(encoding="utf-8"))}


def errors(schema: dict[str, Any], document: Any) -> list[str]:
    found = Draft202012Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def test_every_field_is_one_that_is_documented() -> None:
    parts = documents()
    assert sorted(parts) == sorted(SCHEMAS)
    assert {kind: errors(SCHEMAS[kind], part) for kind, part in parts.items()} == {kind: [] for kind in SCHEMAS}


def test_a_misspelt_field_and_a_wrong_type_are_seen() -> None:
    """The check can fail."""
    wrong = copy.deepcopy(documents()["RayCluster"])
    wrong["spec"]["workerGroupSpecs"][0]["replica"] = 3
    wrong["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    assert errors(SCHEMAS["RayCluster"], wrong) == [
        "spec.headGroupSpec.rayStartParams.num-cpus: 0 is not of type 'string'",
        "spec.workerGroupSpecs.0: Additional properties are not allowed ('replica' was unexpected)",
    ]


def test_the_manifest_keeps_what_the_page_promises() -> None:
    parts = documents()
    cluster, job = parts["RayCluster"]["spec"], parts["RayJob"]["spec"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "agentrl-ray-token"}
    config = cluster["headGroupSpec"]["rayStartParams"]["system-config"]
    assert yaml.safe_load(config.strip("'")) == HEALTH_CHECKS
    assert job["clusterSelector"] == {"ray.io/cluster": parts["RayCluster"]["metadata"]["name"]}
    submit = job["submitterPodTemplate"]["spec"]["containers"][0]
    assert submit["env"][1]["valueFrom"]["secretKeyRef"]["name"] == cluster["authOptions"]["secretName"]
    claim = cluster["headGroupSpec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == parts["PersistentVolumeClaim"]["metadata"]["name"]
    players = cluster["workerGroupSpecs"][0]["template"]["spec"]
    assert players["hostUsers"] is False and players["automountServiceAccountToken"] is False
    assert players["containers"][0]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "Unconfined"},
        "procMount": "Unmasked",
    }
    assert "token" not in {env["name"].lower() for env in players["containers"][0].get("env", [])}
    assert "value: " not in FILE.read_text(encoding="utf-8").split("RAY_AUTH_TOKEN")[1].split("secretKeyRef")[0]


def released() -> dict[str, Any]:
    """Return the schemas of KubeRay's own kinds."""
    folder = os.environ.get("AGENTRL_KUBERAY_CRDS")
    if folder is None:
        schemas: dict[str, Any] = json.loads(gzip.decompress(CRDS.read_bytes()))
        return schemas
    schemas = {}
    for file, kind in (("ray.io_rayclusters.yaml", "RayCluster"), ("ray.io_rayjobs.yaml", "RayJob")):
        versions = yaml.safe_load(Path(folder, file).read_text(encoding="utf-8"))["spec"]["versions"]
        schemas[kind] = next(version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1")
    return schemas


def test_the_whole_schema_of_a_kuberay_release_accepts_it() -> None:
    """Unknown fields are refused, as the API server does with strict validation; a wrong one is found."""
    parts = documents()
    schemas = {kind: _strict(schema) for kind, schema in released().items()}
    assert {kind: errors(schema, parts[kind]) for kind, schema in schemas.items()} == {"RayCluster": [], "RayJob": []}
    wrong = copy.deepcopy(parts["RayCluster"])
    wrong["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["securityContext"]["procMounts"] = "x"
    wrong["spec"]["workerGroupSpecs"][0]["replicas"] = "two"
    assert len(errors(schemas["RayCluster"], wrong)) == 2


def _strict(schema: Any) -> Any:
    """Refuse unknown fields, as the API server does with strict validation; read Kubernetes' own keywords."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    new = {name: _strict(part) for name, part in schema.items()}
    if new.get("type") == "object" and "properties" in new:
        new.setdefault("additionalProperties", bool(new.get("x-kubernetes-preserve-unknown-fields")))
    return new
