"""cluster.yaml and cluster-local.yaml pass the checks of `ray up`; tests/actors/test_ray_up.py starts the latter."""

import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[1]
FILE = ROOT / "cluster.yaml"


def aws():
    return yaml.safe_load(FILE.read_text())


def local():
    return yaml.safe_load((ROOT / "cluster-local.yaml").read_text())


@pytest.mark.parametrize("form", [aws, local])
def test_ray_accepts_it(form):
    validate_config(prepare_config(form()))


def test_ray_refuses_a_misspelt_one():
    with pytest.raises(Exception, match="head_node_typ"):
        validate_config(prepare_config(aws() | {"head_node_typ": "server"}))


@pytest.mark.parametrize("form", [aws, local])
def test_every_node_asks_for_the_token_and_nothing_is_public(form):
    config = form()
    starts = [config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]]
    assert all("RAY_AUTH_MODE=token " in command for command in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert ["role=server" in starts[0], "role=client" in starts[1]] == [True, True]
    assert "ray-client-server-port" not in " ".join(starts)
    assert config["provider"].get("use_internal_ips", config["provider"]["type"] == "local")
    assert "security_group" not in config["provider"]
    assert "docker" not in config or config["docker"]["image"].count(":2.") == 1  # the version is pinned
    assert not any("curl" in command for command in config["setup_commands"])


@pytest.mark.parametrize("form", [aws, local])
def test_the_token_comes_from_a_file(form):
    config = form()
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("chmod 600 ~/.ray/auth_token" in command for command in config["setup_commands"])
    assert "AUTH_TOKEN" not in yaml.safe_dump(config)


@pytest.mark.parametrize("form", [aws, local])
def test_nodes_get_what_is_installed_and_nothing_large(form):
    """Ray reads everything that is mounted at each `ray up`, including a checkout's .venv and data that rsync
    excludes."""
    config = form()
    mounts = {target: source for target, source in config["file_mounts"].items() if target.startswith("~/raylt")}
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = built["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(mounts.values()) == {*packages, "pyproject.toml", built["project"]["readme"]}
    assert all((ROOT / source).exists() and target == f"~/raylt/{source}" for target, source in mounts.items())
    excluded = config["rsync_exclude"]
    assert excluded == ["**/__pycache__"]  # the pattern "**/data" once left out raylt/data


def test_node_types_have_bounds_and_roles():
    kinds = aws()["available_node_types"]
    assert {name: kind["labels"] for name, kind in kinds.items()} == {
        "server": {"role": "server"},
        "client": {"role": "client"},
    }
    assert 0 < kinds["client"]["min_workers"] <= kinds["client"]["max_workers"] <= aws()["max_workers"]


def test_the_manifest_of_the_deployment_page_asks_for_the_token():
    page = (ROOT / "docs/deployment.md").read_text()
    spec = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    image = aws()["docker"]["image"]
    assert f"ray:{spec['rayVersion']}-" in image
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]


# the fields of KubeRay's RayCluster (ray.io/v1) and its pods that the page uses, by type
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGT]i?|m)?$"}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
PARAMETERS = {**STRINGS, "not": {"required": ["labels"]}}  # the operator refuses labels here
RESOURCES = {"type": "object", "additionalProperties": QUANTITY}


def of(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def lists(item):
    return {"type": "array", "items": item, "minItems": 1}


TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
VOLUME = of(
    ["name"],
    name=TEXT,
    persistentVolumeClaim=of(["claimName"], claimName=TEXT),
    emptyDir=of(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
CONTAINER = of(
    ["name", "image"],
    name=TEXT,
    image=TEXT,
    env=lists(of(["name"], name=TEXT, value={"type": "string"})),
    resources=of(limits=RESOURCES, requests=RESOURCES),
    volumeMounts=lists(of(["name", "mountPath"], name=TEXT, mountPath=TEXT)),
)
POD = of(["spec"], spec=of(["containers"], containers=lists(CONTAINER), volumes=lists(VOLUME)))
RAY_CLUSTER = of(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=of(["name"], name=TEXT),
    spec=of(
        ["headGroupSpec"],
        rayVersion=TEXT,
        authOptions=of(mode={"enum": ["disabled", "token"]}),
        headGroupSpec=of(
            ["template"],
            serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
            labels=STRINGS,
            rayStartParams=PARAMETERS,
            template=POD,
        ),
        workerGroupSpecs=lists(
            of(
                ["groupName", "minReplicas", "maxReplicas", "template"],
                groupName=TEXT,
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas=COUNT,
                labels=STRINGS,
                rayStartParams=PARAMETERS,
                template=POD,
            )
        ),
    ),
)


def test_the_manifest_has_the_fields_of_a_ray_cluster_and_of_pods():
    page = (ROOT / "docs/deployment.md").read_text()
    manifest = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    jsonschema.validate(manifest, RAY_CLUSTER)
    for group in (manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    for group in manifest["spec"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
