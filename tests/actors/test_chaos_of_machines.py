"""Random kills of studies and searches, lost machines, short memory and jumping clocks change no result.

Seeds draw the moments and victims; what a kill interrupts depends on the machine.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from chaos import SETTINGS, Runs
from ray.cluster_utils import Cluster

import raylt
from raylt.config import load
from raylt.runs.verify import verify
from raylt.studies.definition import define
from raylt.studies.report import comparison_tables
from raylt.studies.study import Study
from tune import search, space

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
RAYLT = [sys.executable, "-m", "raylt"]
LIMIT_S = 400


def lines_below(folder: Path) -> int:
    """Count the committed steps of all runs below a folder."""
    total = 0
    for file in folder.glob("**/metrics.jsonl"):
        try:
            total += file.read_bytes().count(b"\n")
        except FileNotFoundError:  # the run is being started again
            continue
    return total


def kill_at_random(command, folder: Path, kills: int, seed: int, log: Path, longest: float = 3.0) -> None:
    """Start a command again and again, kill it at random moments, and let it end the last time.

    Args:
        command: returns the arguments of a process, from the number of earlier starts.
        folder: holds the runs. Most kills wait until one more step is committed, so that the command gets ahead.
        kills: number of kills.
        seed: draws the moments.
        log: receives the output of the processes.
        longest: most seconds that a kill waits after that step.
    """
    chance = random.Random(seed)
    end = time.monotonic() + LIMIT_S
    for start in range(kills + 1):
        before, patient = lines_below(folder), chance.random() < 0.75
        with log.open("a") as out:
            process = subprocess.Popen([str(part) for part in command(start)], stdout=out, stderr=out)
        try:
            while start < kills and patient and lines_below(folder) <= before and process.poll() is None:
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.02)
            if start < kills:
                time.sleep(chance.uniform(0.0, longest))
                process.kill()
            process.wait(end - time.monotonic())
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, log.read_text()


def tables(study: Study) -> list[str]:
    made = study.compare()
    return [comparison_tables.comparison_table(made).markdown(), json.dumps(made.to_json())]


@pytest.mark.soak
def test_a_study_killed_at_random_moments_ends_with_the_same_tables(cluster, tmp_path):
    tree = {
        "name": "tiny",
        "arms": {"scaffold": "scaffold", "ccvr": "ccvr"},
        "seeds": 2,
        "base": {"data": {"clients": 4}, "federation": {"rounds": 12}, "resources": {"actors": 2}},
        "claims": ["scaffold > ccvr on few"],
    }
    file, out = tmp_path / "tiny.yaml", tmp_path / "killed"
    file.write_text(json.dumps(tree))
    command = [*RAYLT, "study", file, "--out", out, "--fleet", "ray", "--address", cluster.address]
    kill_at_random(lambda _: command, out, kills=3, seed=471, log=tmp_path / "log", longest=0.3)
    straight = Study.create(define(tree), tmp_path / "straight")
    assert straight.run() == []
    killed = Study.open(out / "tiny")
    assert tables(killed) == tables(straight)
    models = [[record.summary["model_sha256"] for record in study.records] for study in (straight, killed)]
    assert models[0] == models[1]
    assert any(record.summary["made"]["sessions"] > 1 for record in killed.records)


@pytest.mark.soak
def test_a_search_killed_at_random_moments_ends_with_the_same_trials(cluster, tmp_path):
    settings = ["method=fedprox", "data.clients=4", "data.imbalance=5", "federation.rounds=6", "resources.actors=1"]
    ranges = {"local.lr": "loguniform(0.01, 0.3)"}
    asked = [*settings, *(f"{key}={text}" for key, text in ranges.items()), "--samples", "5", "--parallel", "2"]
    folder = tmp_path / "out/s"

    def command(_):
        arguments = (
            ["--resume", folder]
            if (folder / "search.json").exists()
            else [*asked, "--out", folder.parent, "--name", "s"]
        )
        return [*RAYLT, "tune", *arguments, "--address", cluster.address]

    kill_at_random(command, folder, kills=2, seed=472, log=tmp_path / "log")
    config = load(None, settings)
    straight = search(config, space(config, ranges), 5, out=tmp_path, name="straight", fleet="local", parallel=2)
    rows = [json.loads((made / "trials.json").read_text()) for made in (folder, straight.folder)]
    assert rows[0] == rows[1]


@pytest.mark.soak
def test_nodes_lost_at_random_moments_change_no_model(cluster, tmp_path):
    methods = ("scaffold", "fedper")
    chance, runs = random.Random(473), Runs(tmp_path, cluster.address, methods)
    losses, seen, pause = 1, 0, 0.0
    end = time.monotonic() + LIMIT_S
    try:
        while losses or runs.drivers or runs.begun < len(methods):
            runs.look(more=losses or runs.begun < len(methods))
            if losses and runs.steps() > seen and pause == 0.0:
                pause = time.monotonic() + chance.uniform(0.0, 1.0)
            if losses and 0.0 < pause <= time.monotonic() and runs.under_way():
                (node,) = cluster.worker_nodes
                cluster.remove_node(node, allow_graceful=False)
                cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
                losses, seen, pause = losses - 1, runs.steps() + 1, 0.0
            time.sleep(0.05)
            assert time.monotonic() < end, {name: runs.output(name) for name in runs.drivers}
    finally:
        for process in runs.drivers.values():
            process.kill()
    for name in runs.done:
        same_as_alone(tmp_path / name, tmp_path, [f"method={name.partition('-')[0]}", *SETTINGS])


def same_as_alone(folder: Path, tmp_path: Path, settings: list[str]) -> None:
    """Assert that a run is complete and has the same model as a run in this process."""
    alone = raylt.run(load(None, settings), out=tmp_path / "alone", name=folder.name, fleet="local", quiet=True).summary
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["model_sha256"] == alone["model_sha256"]
    assert summary["accuracy"] == alone["accuracy"]
    assert all(finding.whole for finding in verify(folder))


# memory and clocks


@pytest.fixture
def bare(monkeypatch):
    """Remove Ray's settings from the environment, and put this folder on the path of its processes."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{HERE.parents[1]}")
    return monkeypatch


def run_on(cluster: Cluster, folder: Path, *settings: object) -> str:
    """Do a run on a cluster; return its standard error."""
    done = subprocess.run(
        [*RAYLT, "run", *map(str, settings), "--address", cluster.address, "--out", folder, "--name", "r"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_an_actor_that_ray_kills_for_its_memory_is_replaced(bare, tmp_path):
    memory = psutil.virtual_memory()
    if memory.available < 8 * 2**30:
        pytest.skip("not enough memory for one greedy client and its neighbours on this machine")
    # the upper half of the free memory is the greedy client's; what other processes take stays in the lower half
    bare.setenv("RAY_memory_usage_threshold", f"{1 - memory.available / 2 / memory.total:.3f}")
    bare.setenv("RAY_memory_monitor_refresh_ms", "50")
    bare.setenv("GREED", str(int(0.7 * memory.available)))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    settings = ["--plugin", HERE / "greedy.py", "method=greedy", *SETTINGS]
    try:
        output = run_on(made, tmp_path, *settings, f"method.folder={tmp_path}")
    finally:
        made.shutdown()
    assert not psutil.pid_exists(int((tmp_path / "greedy").read_text()))
    reports = raylt.Run.open(tmp_path / "r").reports
    assert any(report["retried"] for report in reports) or "died" in output
    assert not any(report["lost"] for report in reports)
    straight = subprocess.run(
        [*RAYLT, "run", *map(str, settings), "--fleet", "local", "--out", tmp_path, "--name", "alone"], check=False
    )
    assert straight.returncode == 0
    one, other = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("r", "alone"))
    assert one["model_sha256"] == other["model_sha256"]


def test_models_larger_than_the_object_store_go_over_the_disk(bare, tmp_path):
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 76 * 2**20},
    )
    # each message, reply and private state has 45 MB
    settings = ["method=scaffold", "model=resnet18", "data.clients=3", "federation.rounds=2", "local.steps=1"]
    settings += ["local.batch=4", "resources.actors=2", "resources.cpus_per_client=0.5"]
    try:
        run_on(made, tmp_path, *settings)
    finally:
        made.shutdown()
    same_as_alone(tmp_path / "r", tmp_path, settings)


def test_a_clock_that_jumps_changes_no_result_and_no_duration(bare, tmp_path):
    chance, began = random.Random(474), time.monotonic()
    bare.setenv("JUMP", str(tmp_path / "jump"))
    bare.setenv("RAY_RUNTIME_ENV_HOOK", "jumping.hook")
    settings = ["method=scaffold", *SETTINGS, "federation.deadline_s=120"]
    arguments = [*settings, "--out", str(tmp_path), "--name", "r"]
    jumps = [chance.choice([-1, 1]) * chance.choice([30.0, 3600.0, 86400.0 * 400]) for _ in range(6)]
    with (tmp_path / "log").open("w") as out:
        process = subprocess.Popen([sys.executable, HERE / "jumping.py", "run", *arguments], stdout=out, stderr=out)
    try:
        for step, jump in enumerate(jumps):
            while lines_below(tmp_path) <= step and process.poll() is None:
                assert time.monotonic() - began < LIMIT_S
                time.sleep(0.02)
            (tmp_path / "jump").write_text(str(jump))
        assert process.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
    took = time.monotonic() - began
    bare.delenv("JUMP")
    bare.delenv("RAY_RUNTIME_ENV_HOOK")
    reports = raylt.Run.open(tmp_path / "r").reports
    assert all(0 <= report["seconds"] + report["evaluation_seconds"] <= took for report in reports)
    assert not any(report["lost"] or report["retried"] for report in reports)
    same_as_alone(tmp_path / "r", tmp_path, settings)
