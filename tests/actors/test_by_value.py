"""A user's own method, model, source and augmentation that Ray's workers cannot import. Takes about 90 s."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from started import RAYLT, bare, call, nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
GUESTS = Path(__file__).parents[1] / "guests"
SETTINGS = [
    "method=smoothed",
    "model=tinynet",
    "augment=dim",
    "data.source=stripes",
    "data.clients=3",
    "data.imbalance=1",
    "local.epochs=1",
]


def test_on_two_nodes_killed_and_resumed_and_through_a_search(tmp_path):
    shutil.copytree(GUESTS, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__"))
    env = bare(tmp_path / "home", RAY_AUTH_MODE="disabled")
    runs, how = tmp_path / "runs", ["--plugin", tmp_path / "own" / "shops.py", "--format", "json"]

    def raylt(*arguments):
        done = call(*RAYLT, *arguments, *how, env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    options = ["--num-cpus=2", "--num-gpus=0"]
    with nodes(tmp_path.parent / "g", env, [*options, "--include-dashboard=false"], options) as address:
        on_cluster = ["--out", runs, "--address", address]
        alone = raylt("run", *SETTINGS, "federation.rounds=6", "--out", runs, "--name", "alone", "--fleet", "local")
        assert (
            raylt("run", *SETTINGS, "federation.rounds=6", "--name", "there", *on_cluster)["model_sha256"]
            == alone["model_sha256"]
        )

        command = [*RAYLT, "run", *SETTINGS, "federation.rounds=6", "--name", "killed", *on_cluster, *how]
        with (tmp_path / "killed.txt").open("w") as out:
            driver = subprocess.Popen([str(part) for part in command], env=env, stdout=out, stderr=out)
            lines, end = runs / "killed" / "metrics.jsonl", time.monotonic() + 90
            while time.monotonic() < end and not (lines.exists() and lines.read_text()):
                time.sleep(0.02)
            os.kill(driver.pid, signal.SIGKILL)
            driver.wait()
        refused = call(*RAYLT, "resume", runs / "killed", "--address", address, env=env)
        assert refused.returncode == 2
        assert "--plugin shops.py" in refused.stderr
        assert raylt("resume", runs / "killed", "--address", address)["model_sha256"] == alone["model_sha256"]

        search = raylt(
            "tune",
            *SETTINGS,
            "federation.rounds=2",
            "data.validation=0.2",
            "resources.actors=1",
            "--samples",
            "2",
            "--scheduler",
            "none",
            "--name",
            "search",
            *on_cluster,
        )
        assert len(search["trials"]) == 2
    best = raylt("run", runs / "search" / "best.yaml", "--out", runs, "--name", "best", "--fleet", "local")
    assert best["method"] == "smoothed"
