"""A run as a Ray job on a real cluster with a token: submit, list, follow, stop at a checkpoint, resume."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import raylt

pytestmark = pytest.mark.slow

PATIENCE_S = 240
ROUNDS = 150
SLOWLY = '''
import time
from pathlib import Path

from raylt import Method


class Slowly(Method):
    """FedAvg that takes its time, except in a folder with a file `hurry`."""

    name = "slowly"
    paper = "none"

    def round(self, server, fleet):
        if not Path("hurry").exists():
            time.sleep(0.5)
        super().round(server, fleet)
'''
STUDY = """
name: pair
base: {data: {clients: 2}, federation: {rounds: 1}, model: small}
arms: {fedavg: fedavg, ccvr: ccvr}
seeds: 1
"""
PLUGIN = ["--plugin", "slowly.py"]
SETTINGS = ["method=slowly", "data.clients=2", "local.epochs=1", "resources.actors=1", f"federation.rounds={ROUNDS}"]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start a one-node cluster in another process.

    Yields:
        The dashboard's address, a function that runs commands, the folder of runs, and the folder that is submitted.
    """
    folder = tmp_path_factory.mktemp("cluster")
    home = folder / "home"
    project = folder / "project"
    home.mkdir()
    project.mkdir()
    (project / "slowly.py").write_text(SLOWLY)
    (folder / "token").write_text("a" * 64)
    (folder / "token").chmod(0o600)
    variables = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAYLT_ADDRESS")}
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"  # a job runs `python` from the PATH
    variables |= {"HOME": str(home), "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "RAY_USAGE_STATS_ENABLED": "0"}
    port, dashboard = free_port(), free_port()
    short = tempfile.mkdtemp(prefix="raylt-", dir="/tmp")  # the paths of Ray's sockets must be short
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    ports = [f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}"]
    storage = [f"--object-store-memory={100 * 2**20}", "--dashboard-host=127.0.0.1", f"--temp-dir={short}"]
    with (folder / "log").open("wb") as log:
        head = subprocess.Popen(
            [*command, *ports, *storage], env=variables | {"RAY_AUTH_MODE": "token"}, stdout=log, stderr=log
        )

    def call(*arguments, **more):
        done = subprocess.run(
            [sys.executable, "-m", "raylt", *map(str, arguments)],
            cwd=project,
            env={key: value for key, value in variables.items() if key != "RAY_AUTH_MODE"} | more,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return done

    try:
        deadline = time.monotonic() + PATIENCE_S
        while b"Ray runtime started" not in (folder / "log").read_bytes():
            assert head.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield f"http://127.0.0.1:{dashboard}", call, home / "raylt/runs", project
    finally:
        head.terminate()
        head.wait(60)
        shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
def hurry(cluster):
    """Return a function that submits a command whose rounds take no extra time."""
    url, call, _, project = cluster

    def submit(*arguments):
        (project / "hurry").write_text("")
        try:
            return call("submit", "--address", url, *arguments)
        finally:
            (project / "hurry").unlink()

    return submit


def test_a_run_survives_its_terminal_is_followed_stopped_at_a_checkpoint_and_resumed(cluster, hurry):
    url, call, runs, _ = cluster
    refused = call("ls", "--address", url, RAY_AUTH_TOKEN_PATH="/nowhere")
    assert "[cluster.token-missing]" in refused.stderr
    sent = call("submit", "--address", url, "run", *PLUGIN, *SETTINGS, "--name", "one")
    assert sent.returncode == 0, sent.stderr
    job = sent.stdout.split(":")[0]

    folder = runs / "one"
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "metrics.jsonl").is_file():
        assert time.monotonic() < deadline
        [listed] = json.loads(call("ls", "--address", url, "--format", "json").stdout)
        assert listed["state"] in ("PENDING", "RUNNING"), call("follow", job, "--address", url).stdout
    [listed] = json.loads(call("ls", "--address", url, "--format", "json").stdout)
    assert (listed["id"], listed["state"]) == (job, "RUNNING")
    stopped = call("stop", "one", "--address", url)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    followed = call("follow", job, "--address", url)
    assert "continue with raylt resume" in followed.stdout
    [listed] = json.loads(call("ls", "--address", url, "--format", "json").stdout)  # without the job of `stop`
    assert (listed["id"], listed["state"]) == (job, "STOPPED")
    run = raylt.Run.open(folder)
    assert run.state == "stopped"
    assert 0 < len(run.reports) < ROUNDS

    again = hurry("resume", *PLUGIN, str(folder))
    assert again.returncode == 0, again.stderr
    ended = call("follow", again.stdout.split(":")[0], "--address", url)
    assert "succeeded" in ended.stdout, ended.stdout
    assert raylt.Run.open(folder).state == "done"


@pytest.mark.soak
def test_a_search_is_interrupted_and_resumed_as_a_job(cluster, hurry):
    url, call, runs, _ = cluster
    settings = [*SETTINGS[:-1], "federation.rounds=20", "local.lr=loguniform(0.01,0.3)"]
    options = ["--scheduler", "none", "--samples", "2", "--parallel", "1", "--name", "search"]
    sent = call("submit", "--address", url, "tune", *PLUGIN, *settings, *options)
    assert sent.returncode == 0, sent.stderr
    job = sent.stdout.split(":")[0]
    folder = runs / "search"
    deadline = time.monotonic() + PATIENCE_S
    while not list(folder.glob("**/metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert "was interrupted" in call("stop", job, "--address", url).stdout
    assert "stopped" in call("follow", job, "--address", url).stdout
    assert not (folder / "best.yaml").exists()

    again = hurry("tune", *PLUGIN, "--resume", folder)
    assert again.returncode == 0, again.stderr
    ended = call("follow", again.stdout.split(":")[0], "--address", url)
    assert "succeeded" in ended.stdout, ended.stdout
    assert (folder / "best.yaml").is_file()


def test_a_study_runs_as_a_job(cluster):
    url, call, runs, _ = cluster
    (runs.parents[2] / "project" / "pair.yaml").write_text(STUDY)
    sent = call("submit", "--address", url, "study", "pair.yaml", "--parallel", "2")
    assert sent.returncode == 0, sent.stderr
    ended = call("follow", sent.stdout.split(":")[0], "--address", url)
    assert "succeeded" in ended.stdout, ended.stdout
    assert {record.state for record in raylt.Study.open(runs / "pair").read()} == {"done"}
