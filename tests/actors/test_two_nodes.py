"""Two nodes made by `ray start`, with a token, logical GPUs and no dashboard: which runs join them, and which do not.

Takes about 40 s.
"""

import json
import time

import pytest
from started import RAYLT, bare, call, nodes, save_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RUN = ["run", "method=fedavg", "federation.rounds=2", "local.epochs=1", "--format", "json"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Yield the cluster's address, and an environment that holds the token."""
    folder = tmp_path_factory.mktemp("two")
    known = bare(folder / "home")
    save_token(folder / "home")
    # a node that joins with `ray start` sends the token only with this variable
    with nodes(
        folder.parent / "2",
        known | {"RAY_AUTH_MODE": "token"},
        ["--num-cpus=2", "--num-gpus=0", "--include-dashboard=false", "--labels=role=server"],
        ["--num-cpus=2", "--num-gpus=2", "--labels=role=client"],
    ) as address:
        yield address, known


def test_a_run_joins_them_and_goes_where_the_labels_say(cluster, tmp_path):
    address, known = cluster
    plan = json.loads(call(*RAYLT, "plan", "--address", address, "--format", "json", env=known).stdout)
    assert (plan["placement"]["actors"], plan["placement"]["gpus"]) == (2, 0.95)
    assert (plan["placement"]["labels"], plan["server_labels"]) == ({"role": "client"}, {"role": "server"})
    # no real GPU stands behind these, so the run computes on the CPU (test_leases.py has the refusal otherwise)
    done = call(*RAYLT, *RUN, "resources.device=cpu", "--address", address, "--out", tmp_path, env=known)
    assert done.returncode == 0, done.stderr
    assert f"joined the Ray cluster at {address} (--address), 2: 4 CPUs and 2 GPUs; dashboard" in done.stderr
    alone = call(*RAYLT, *RUN, "--fleet", "local", "--out", tmp_path / "alone", env=known)
    assert json.loads(done.stdout)["model_sha256"] == json.loads(alone.stdout)["model_sha256"]


def test_doctor_looks_at_every_node_and_needs_no_dashboard(cluster):
    address, known = cluster
    done = call(*RAYLT, "doctor", "--address", address, "--format", "json", env=known)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(done.stdout)
    assert (findings["nodes"], findings["GPUs (Ray)"], findings["dashboard"]) == (2, 2, "off")
    assert (findings["authentication"], findings["problems"]) == ("token", [])


def test_without_the_token_no_process_gets_in(cluster, tmp_path):
    address, _ = cluster
    stranger, start = bare(tmp_path, RAY_AUTH_TOKEN="wrong" * 8), time.monotonic()
    refused = call(*RAYLT, *RUN, "--address", address, "--out", tmp_path, env=stranger)
    assert refused.returncode == 2
    assert "[cluster.token-refused]" in refused.stderr
    assert f"--address {address}" in refused.stderr
    assert time.monotonic() - start < 60
    assert not list(tmp_path.glob("fedavg-*"))
