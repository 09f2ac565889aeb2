"""The KubeRay manifest in docs/deployment.md: the schema of its pods, versions, and exposed ports."""

import copy
import re
from importlib.metadata import version
from pathlib import Path

import jsonschema
import pytest
import yaml
from packaging.version import Version

from actors.cluster.doctor import MIN_VERSIONS

PAGE = Path(__file__).parents[1] / "docs/deployment.md"
HEAD, WORKER = "head", "worker"

# KubeRay v1.5, ray-operator/apis/ray/v1/raycluster_types.go: the fields of each type. The operator's own schema is no
# package; Kubernetes drops a field that is not among these, without an error.
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
POD_TEMPLATE = {
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
    "required": ["spec"],
    "additionalProperties": False,
}
GROUP = {"labels": STRINGS, "resources": STRINGS, "rayStartParams": STRINGS, "template": POD_TEMPLATE}
COUNT = {"type": "integer", "minimum": 0}
HEAD_GROUP = {
    "type": "object",
    "properties": GROUP
    | {
        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        "headService": {"type": "object"},
        "enableIngress": {"type": "boolean"},
    },
    "required": ["template"],
    "additionalProperties": False,
}
WORKER_GROUP = {
    "type": "object",
    "properties": GROUP
    | {
        "groupName": {"type": "string"},
        "suspend": {"type": "boolean"},
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "numOfHosts": COUNT,
        "idleTimeoutSeconds": COUNT,
        "scaleStrategy": {"type": "object"},
    },
    "required": ["groupName", "minReplicas", "maxReplicas", "template"],
    "additionalProperties": False,
}
RAY_CLUSTER = {
    "type": "object",
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "properties": {
                "rayVersion": {"type": "string"},
                "authOptions": {
                    "type": "object",
                    "properties": {"mode": {"enum": ["disabled", "token"]}},
                    "additionalProperties": False,
                },
                "suspend": {"type": "boolean"},
                "managedBy": {"type": "string"},
                "enableInTreeAutoscaling": {"type": "boolean"},
                "autoscalerOptions": {"type": "object"},
                "gcsFaultToleranceOptions": {"type": "object"},
                "headServiceAnnotations": STRINGS,
                "headGroupSpec": HEAD_GROUP,
                "workerGroupSpecs": {"type": "array", "items": WORKER_GROUP},
            },
            "required": ["headGroupSpec"],
            "additionalProperties": False,
        },
    },
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def cluster():
    [text] = re.findall(r"```yaml\n(apiVersion: ray.io.*?)```", PAGE.read_text(), re.DOTALL)
    return yaml.safe_load(text)


@pytest.fixture(scope="module")
def pods(cluster):
    """Return the pods' specifications by group."""
    [group] = cluster["spec"]["workerGroupSpecs"]
    return {HEAD: cluster["spec"]["headGroupSpec"]["template"]["spec"], WORKER: group["template"]["spec"]}


def test_kubernetes_accepts_the_pods(pods):
    schemas = pytest.importorskip("kubernetes_validate", reason="Kubernetes' schemas are not installed")
    for group, spec in pods.items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": group}, "spec": spec}
        schemas.validate(pod, schemas.latest_version(), strict=True)
        misspelt = {**pod, "spec": {**spec, "volume": []}}
        with pytest.raises(schemas.ValidationError):
            schemas.validate(misspelt, schemas.latest_version(), strict=True)


def test_the_operator_knows_all_fields_of_the_cluster(cluster):
    jsonschema.validate(cluster, RAY_CLUSTER)


@pytest.mark.parametrize("group", [HEAD, WORKER])
def test_a_field_that_the_operator_would_drop_is_noticed(cluster, group):
    wrong = copy.deepcopy(cluster)
    spec = wrong["spec"]
    groups = {HEAD: spec["headGroupSpec"], WORKER: spec["workerGroupSpecs"][0]}
    groups[group]["rayStartParam"] = {}
    with pytest.raises(jsonschema.ValidationError, match="rayStartParam"):
        jsonschema.validate(wrong, RAY_CLUSTER)


def test_groups_have_labels_where_the_operator_accepts_them(cluster):
    spec = cluster["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert [group["labels"] for group in groups] == [{"role": "server"}, {"role": "client"}]
    assert not any("labels" in group["rayStartParams"] for group in groups)  # KubeRay refuses them there


def test_ray_s_version_is_one_that_doctor_accepts_and_that_is_tested(cluster):
    wanted = Version(cluster["spec"]["rayVersion"])
    assert Version(MIN_VERSIONS["ray"]) <= wanted <= Version(version("ray"))
    images = re.findall(r"rayproject/ray:([0-9.]+)-", PAGE.read_text())
    assert set(images) == {str(wanted)}


def test_nobody_gets_in_without_the_token_or_from_outside(cluster):
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    head = cluster["spec"]["headGroupSpec"]
    assert head["serviceType"] == "ClusterIP"
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"


def test_pods_reserve_what_they_may_use_and_mount_what_they_declare(pods, cluster):
    for spec in pods.values():
        [container] = spec["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}
        assert mounts["shm"] == "/dev/shm"  # for Ray's object store; the default of 64 MB is too small
        assert re.search(r":\d", container["image"])
