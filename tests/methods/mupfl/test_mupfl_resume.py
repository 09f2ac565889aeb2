import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mupfl_runs import QUICK, run
from tiny import configure, fingerprint, make_experiment, private_states

from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.client_states import SavedStates
from raylt.methods.mupfl.method import MuPFL

# killed and resumed
KILLED_IN_CLUSTERING = """
import os, signal, sys
from raylt.cli.main import main
from raylt.methods.mupfl import clustering as mupfl
inner, calls = mupfl.update_gram, []
def update_gram(*parts):
    calls.append(None)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(*parts)
mupfl.update_gram = update_gram
main()
"""


@pytest.mark.slow
def test_killed_between_upload_and_clustering_and_resumed_it_ends_the_same(tmp_path):
    settings = [
        "method=mupfl",
        "method.m=10",
        "method.tau=5",
        "federation.rounds=3",
        "local.epochs=1",
        "data.clients=6",
        "--out",
        str(tmp_path),
        "--fleet",
        "local",
        "--name",
    ]

    def figures(folder: Path) -> list:
        return [json.loads(line)["figures"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def clients(folder: Path) -> dict[str | int, str]:
        saved, _ = checkpoint.latest(folder / "checkpoints")
        assert saved is not None
        kept = SavedStates(saved)
        return {"server": fingerprint(saved.read("server"))} | {id: fingerprint(kept.read(id)) for id in kept.part_of}

    plain = [sys.executable, "-m", "raylt"]
    subprocess.run([*plain, "run", *settings, "straight"], check=True, env=os.environ, capture_output=True)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_CLUSTERING, "run", *settings, "killed"], env=os.environ, capture_output=True
    )
    assert killed.returncode == -9
    assert len(figures(tmp_path / "killed")) == 1  # killed in round 2, after its uploads
    subprocess.run(
        [*plain, "resume", str(tmp_path / "killed"), "--fleet", "local"],
        check=True,
        env=os.environ,
        capture_output=True,
    )
    straight, resumed = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("straight", "killed"))
    assert straight["model_sha256"] == resumed["model_sha256"]
    assert straight["clients"] == resumed["clients"]
    assert figures(tmp_path / "straight") == figures(tmp_path / "killed")
    assert clients(tmp_path / "straight") == clients(tmp_path / "killed")


def test_resumed_run_knows_its_clusters_and_features(finished, tiny_task, tmp_path):
    experiment, (first,) = run(tiny_task, tmp_path, until=1)
    experiment.save(first)
    saved, _ = checkpoint.latest(tmp_path / "checkpoints")
    assert saved is not None
    again = make_experiment(configure(), tiny_task, tmp_path, MuPFL(**QUICK))
    again.load(saved)
    again.step()
    assert fingerprint(again.server.state) == fingerprint(finished[0].server.state)
    assert {i: fingerprint(s) for i, s in private_states(again).items()} == {
        i: fingerprint(s) for i, s in private_states(finished[0]).items()
    }
