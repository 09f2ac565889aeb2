"""A round whose sums are sent by whole blocks has the same outcome in one process, in 16 actors and on four nodes.

Each test takes about 30 s.
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
# from 1,024 asked clients on a call holds a whole block: with four actors, or with 16 if each gets one call
CLIENTS = 1100


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Run the same round in this process, where the server adds up single replies; return the results."""
    folder = tmp_path_factory.mktemp("local")
    return spread.step(make_experiment(spread.config_of(CLIENTS), make_many(CLIENTS), folder, FedPer()))


def check(result, undisturbed, actors, nodes):
    assert (result.pop("actors"), result.pop("nodes")) == (actors, nodes)
    # all clients but the one without samples and the block with the large client
    assert result.pop("summed") == 2 * (CLIENTS - 1 - BLOCK)  # in both calls
    assert result == undisturbed


@pytest.mark.soak
def test_sixteen_actors(ray_session, undisturbed, monkeypatch, tmp_path):
    # the default of four calls per actor would need 256 asked clients for each of the 16 actors
    monkeypatch.setattr(calls, "MIN_CALLS_PER_ACTOR", 1)
    check(spread.run(CLIENTS, 16, tmp_path), undisturbed, 16, 1)


@pytest.fixture
def four_nodes(monkeypatch):
    """Start a cluster of four nodes; yield its address."""
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
    # another program, because this process may have joined another session
    done = subprocess.run(
        [sys.executable, HERE / "spread.py", four_nodes, str(CLIENTS), "4", tmp_path],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout.splitlines()[-1]), json.loads(json.dumps(undisturbed)), 4, 4)
