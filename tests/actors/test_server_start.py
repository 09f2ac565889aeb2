"""A server process that dies as it starts, before it reports that it is ready, is started again. Takes about 60 s."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import raylt
from raylt.config import load
from raylt.runs.runner import MAX_SERVER_DEATHS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
SETTINGS = ["method=fedavg", "federation.rounds=1", "local.epochs=1", "data.clients=2", "resources.actors=1"]
DIED = "the server's process died (ActorDiedError); "


def run_doomed(folder, times):
    """Run with a server that dies `times` times; return the exit code and the lines of standard error."""
    deaths = folder / "deaths"
    deaths.mkdir()
    known = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    known["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    known |= {"RAY_RUNTIME_ENV_HOOK": "doomed.hook", "DOOMED_FOLDER": str(deaths), "DOOMED_TIMES": str(times)}
    done = subprocess.run(
        [sys.executable, "-m", "raylt", "run", *SETTINGS, "--out", folder, "--name", "doomed"],
        env=known,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert len(list(deaths.iterdir())) == min(times, MAX_SERVER_DEATHS)
    return done.returncode, done.stderr.splitlines()


def test_a_server_that_dies_as_it_starts_is_started_again_to_the_same_model(tmp_path):
    undisturbed = raylt.run(load(None, SETTINGS), out=tmp_path, name="undisturbed", fleet="local", quiet=True)
    code, lines = run_doomed(tmp_path, 1)
    assert code == 0, lines
    assert lines.count(f"{DIED}starting it again from the last checkpoint") == 1
    assert raylt.Run(tmp_path / "doomed").summary["model_sha256"] == undisturbed.summary["model_sha256"]


def test_one_that_always_does_is_given_up_in_one_line(tmp_path):
    code, lines = run_doomed(tmp_path, 99)
    assert code == 1
    assert lines[-1] == f"error [server.lost]: {DIED}continue with raylt resume"
    assert [line.startswith(DIED) for line in lines].count(True) == MAX_SERVER_DEATHS - 1
    assert not any("Traceback" in line for line in lines)
    assert not (tmp_path / "doomed/summary.json").exists()
