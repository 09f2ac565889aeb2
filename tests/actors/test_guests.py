"""A method, a model, a source and an augmentation of one's own where Ray's workers cannot import them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_two_nodes import call, clean, nodes

__all__ = ["clean", "nodes"]            # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
GUESTS = Path(__file__).parents[1] / "guests"
SETTINGS = ["method=smoothed", "model=tinynet", "augment=dim", "data.source=stripes", "data.clients=3",
            "data.imbalance=1", "local.epochs=1"]


@pytest.fixture
def plugin(tmp_path):
    shutil.copytree(GUESTS, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "own" / "shops.py"


def raylt(*arguments, env, cwd):
    done = call(sys.executable, "-m", "raylt", *arguments, env=env, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_on_two_nodes_killed_and_resumed_and_through_a_search(nodes, clean, plugin, tmp_path):
    address, _, env = nodes
    here = {"env": clean, "cwd": tmp_path}
    run = ["run", *SETTINGS, "federation.rounds=6", "--plugin", plugin, "--format", "json"]
    alone = raylt(*run, "--fleet", "local", "--name", "alone", **here)
    there = raylt(*run, "--address", address, "--name", "there", env=env, cwd=tmp_path)
    assert there["model_sha256"] == alone["model_sha256"]

    with (tmp_path / "killed.txt").open("w") as out:
        command = [sys.executable, "-m", "raylt", *map(str, run), "--address", address, "--name", "killed"]
        driver = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=out, stderr=out)
        lines = tmp_path / "runs" / "killed" / "metrics.jsonl"
        end = time.monotonic() + 90
        while time.monotonic() < end and not (lines.exists() and lines.read_text()):
            time.sleep(0.05)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    refused = call(sys.executable, "-m", "raylt", "resume", "runs/killed", env=env, cwd=tmp_path)
    assert refused.returncode == 2
    assert "give --plugin shops.py again" in refused.stderr
    resumed = raylt("resume", "runs/killed", "--plugin", plugin, "--address", address, "--format", "json", env=env,
                    cwd=tmp_path)
    assert resumed["model_sha256"] == alone["model_sha256"]

    search = raylt("tune", *SETTINGS, "federation.rounds=2", "data.validation=0.2", "--plugin", plugin, "--samples", 2,
                   "--scheduler", "none", "--name", "search", "--address", address, "--format", "json", env=env,
                   cwd=tmp_path)
    assert len(search["trials"]) == 2
    best = raylt("run", "runs/search/best.yaml", "--plugin", plugin, "--fleet", "local", "--format", "json", **here)
    assert best["method"] == "smoothed"
