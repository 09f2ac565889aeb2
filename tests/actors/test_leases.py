"""GPUs leased by Ray: which process gets which GPU, and the refusal of a GPU that cannot be used.

The cluster claims two GPUs and the machine has none, so every leased one must be refused.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the lines that leased.py wrote, by name."""
    program = Path(__file__).with_name("leased.py")
    folder = tmp_path_factory.mktemp("leased")
    done = subprocess.run(
        [sys.executable, str(program), str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = {}
    for line in (folder / "results.jsonl").read_text().splitlines():
        results |= json.loads(line)
    return results


def test_two_client_actors_share_each_gpu_and_the_server_finds_room(results):
    clients = [gpu for lease in results["places"]["clients"] for gpu in lease]
    assert sorted(clients) == [0, 0, 1, 1]
    assert len(results["places"]["server"]) == 1
    assert results["places"]["share"] == 0.475


def test_a_leased_gpu_that_torch_cannot_use_is_refused_in_one_line_and_leaves_nothing(results):
    assert results["clients"]["exit_code"] == 2
    assert not results["clients"]["left"]
    error = results["clients"]["refused"]
    assert error.startswith("resources.device = cuda: Ray leased a GPU to this process, and torch cannot use it")
    assert f"torch {torch.__version__}" in error
    assert "driver none" in error
    assert "\n" not in error


@pytest.mark.parametrize("name", ["none", "cpu"])
def test_what_is_kept_off_the_gpus_leases_none_and_runs(results, name):
    assert results[name] == {"device": "cpu", "server_device": "cpu", "gpus": 2.0}


def test_processes_that_lose_their_gpu_are_replaced_on_it_and_the_run_comes_to_the_same(results):
    lost = results["lost"]
    assert lost["same"]
    assert lost["retried"] == [1]
    clients, servers = lost["leases"]["client"], lost["leases"]["server"]
    assert len(servers) == 2  # the first server took two and a half rounds
    assert all(len(lease) == 1 for lease in [*clients, *servers])
    # two clients, a third that replaces one of them, and two under the second server; each time one client per GPU
    assert sorted(gpu for lease in clients for gpu in lease) in ([0, 0, 1, 1, 1], [0, 0, 0, 1, 1])
    assert lost["gpus"] == 2.0
