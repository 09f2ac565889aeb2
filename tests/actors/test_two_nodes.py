"""Two nodes as `ray start` makes them, with a token and logical GPUs: what joins them, and what does not."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
BIN = Path(sys.executable).parent
RUN = ["run", "method=fedavg", "federation.rounds=2", "local.epochs=1", "--format", "json"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def call(*command, env, **more):
    return subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, timeout=120, **more)


@pytest.fixture(scope="module")
def clean():
    """The environment of a user who knows no token."""
    env = {key: value for key, value in os.environ.items()
           if not key.startswith("RAY_") and key not in ("RAYLT_ADDRESS", "PYTHONDONTWRITEBYTECODE")}
    return env | {"RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def nodes(clean, tmp_path_factory):
    """Address, dashboard, and the environment of those who know the token."""
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "token").write_text(secrets.token_hex(32))
    env = clean | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    ip, port, board = ray.util.get_node_ip_address(), free_port(), free_port()
    address = f"{ip}:{port}"
    commands = [["--head", f"--port={port}", "--num-cpus=2", "--num-gpus=0", "--dashboard-host=127.0.0.1",
                 f"--dashboard-port={board}", "--labels=role=server", f"--temp-dir={folder.parent / 'ray'}",
                 f"--dashboard-agent-listen-port={free_port()}", "--metrics-export-port=0"],
                [f"--address={address}", "--num-cpus=2", "--num-gpus=2", "--labels=role=client",
                 f"--dashboard-agent-listen-port={free_port()}", "--metrics-export-port=0"]]
    started = []
    try:
        for command in commands:
            with (folder / f"{len(started)}.txt").open("w") as out:
                started.append(subprocess.Popen(
                    [BIN / "ray", "start", "--block", "--object-store-memory=100000000", *command], env=env,
                    stdout=out, stderr=out))
            if len(started) == 1:
                wait_for_port(ip, port)
        wait_for_nodes(address, env)
        yield address, f"http://127.0.0.1:{board}", env
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def wait_for_port(ip, port):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as line:
            if line.connect_ex((ip, port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("no head")


def wait_for_nodes(address, env):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        said = call(BIN / "ray", "status", "--address", address, env=env).stdout
        if said.count("1 node_") == 2 or "/2.0 GPU" in said:
            return
        time.sleep(0.5)
    raise AssertionError(said)


def test_a_run_joins_them_and_goes_where_the_labels_say(nodes, clean, tmp_path):
    address, _, env = nodes
    planned = call(sys.executable, "-m", "raylt", "plan", "--address", address, "--format", "json", env=env)
    plan = json.loads(planned.stdout)
    assert (plan["placement"]["actors"], plan["placement"]["gpus"]) == (2, 0.95)
    assert (plan["placement"]["labels"], plan["server_labels"]) == ({"role": "client"}, {"role": "server"})
    done = call(sys.executable, "-m", "raylt", *RUN, "--address", address, "--out", tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert f"joined the Ray cluster at {address} (--address), 2: 4 CPUs and 2 GPUs; dashboard" in done.stderr
    alone = call(sys.executable, "-m", "raylt", *RUN, "--fleet", "local", "--out", tmp_path / "alone", env=clean)
    assert json.loads(done.stdout)["model_sha256"] == json.loads(alone.stdout)["model_sha256"]


def test_a_job_joins_the_cluster_that_it_was_submitted_to(nodes, tmp_path):
    _, board, env = nodes
    done = call(BIN / "ray", "job", "submit", "--address", board, "--", sys.executable, "-m", "raylt", *RUN,
                "--out", tmp_path, "--name", "job", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(this is a Ray job)" in done.stdout + done.stderr
    assert (tmp_path / "job/summary.json").exists()


def test_without_the_token_nobody_gets_in(nodes, clean, tmp_path):
    address, board, _ = nodes
    stranger = clean | {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong" * 8}
    start = time.monotonic()
    refused = call(sys.executable, "-m", "raylt", *RUN, "--address", address, "--out", tmp_path, env=stranger)
    assert refused.returncode == 2
    assert f"error: --address {address}: no Ray cluster could be joined there" in refused.stderr
    assert time.monotonic() - start < 60
    assert not list(tmp_path.glob("fedavg-*"))
    job = call(BIN / "ray", "job", "submit", "--address", board, "--", "true", env=clean | {"HOME": str(tmp_path)})
    assert job.returncode != 0
