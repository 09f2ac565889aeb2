"""cluster.yaml, as `ray up` checks it; nothing is started."""

from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

FILE = Path(__file__).parents[1] / "cluster.yaml"
REPLACED = ("provider", "auth", "head_node_type", "available_node_types")


def aws():
    return yaml.safe_load(FILE.read_text())


def local():
    """The commented form in the place of the other."""
    marked = FILE.read_text().split("come from the start commands above.\n#\n")[1]
    form = yaml.safe_load("".join(line.removeprefix("# ") for line in marked.splitlines(keepends=True)))
    return {key: value for key, value in aws().items() if key not in REPLACED} | form


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
    assert config["docker"]["image"].count(":2.") == 1              # pinned
    assert not any("curl" in command for command in config["setup_commands"])


def test_the_token_comes_from_a_file():
    config = aws()
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "chmod 600 ~/.ray/auth_token" in config["setup_commands"]
    assert "AUTH_TOKEN" not in FILE.read_text()


def test_node_types_have_bounds_and_roles():
    kinds = aws()["available_node_types"]
    assert {name: kind["labels"] for name, kind in kinds.items()} == {
        "server": {"role": "server"}, "client": {"role": "client"}}
    assert 0 < kinds["client"]["min_workers"] <= kinds["client"]["max_workers"] <= aws()["max_workers"]


def test_the_manifest_of_the_deployment_page_asks_for_the_token():
    page = (FILE.parent / "docs/deployment.md").read_text()
    spec = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    image = aws()["docker"]["image"]
    assert f"ray:{spec['rayVersion']}-" in image
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        container, = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
