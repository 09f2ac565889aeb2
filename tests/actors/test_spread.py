"""A round whose sums travel as those of whole blocks has one outcome in one process, in 16 actors and on four nodes.

About 30 s each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import spread
from many import make_many
from ray.cluster_utils import Cluster
from tiny import make_experiment

from actors import calls
from raylt.core.fleet.block_sums import BLOCK
from raylt.methods.fedper import FedPer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
HERE = Path(__file__).parent
CLIENTS = 1100  # a call's block is whole for 1,024 asked: of four actors; of 16 where each gets one call


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same in this process, where the server adds up single replies."""
    folder = tmp_path_factory.mktemp("local")
    return spread.step(make_experiment(spread.config_of(CLIENTS), make_many(CLIENTS), folder, FedPer()))


def check(result, undisturbed, actors, nodes):
    assert (result.pop("actors"), result.pop("nodes")) == (actors, nodes)
    # of all clients but one, which has no samples, and the block that has a large one
    assert result.pop("summed") == 2 * (CLIENTS - 1 - BLOCK)  # in both calls
    assert result == undisturbed


def test_sixteen_actors(ray_session, undisturbed, monkeypatch, tmp_path):
    # by itself it takes 256 asked clients for an actor, so that there are four calls for each
    monkeypatch.setattr(calls, "SPREAD", 1)
    check(spread.run(CLIENTS, 16, tmp_path), undisturbed, 16, 1)


@pytest.fixture
def four_nodes(monkeypatch):
    """The address of a cluster of four nodes."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])]))
    options = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
    for _ in range(3):
        cluster.add_node(**options)
    yield cluster.address
    cluster.shutdown()


def test_four_nodes(four_nodes, undisturbed, tmp_path):
    # a program of its own: this one may be in another session
    done = subprocess.run(
        [sys.executable, HERE / "spread.py", four_nodes, str(CLIENTS), "4", tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout.splitlines()[-1]), json.loads(json.dumps(undisturbed)), 4, 4)
