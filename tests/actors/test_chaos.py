"""Twenty SIGKILLs at random moments of random processes: runs of several methods, two at a time, on a cluster of two
nodes; each ends with the model of a run that nobody disturbed.

The moments and the victims are drawn from a seed; what they meet is up to the machine.
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
from ray.cluster_utils import Cluster

import raylt
from raylt.config import load
from raylt.runs.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
VICTIMS = {"driver": 5, "ServerActor": 5, "ClientActor": 10}
AT_ONCE = 2
LIMIT_S = 840  # on a machine where others are at work; about two minutes where nobody is
# private states, control variates, statistics and a last phase at the server
METHODS = ("scaffold", "fedper", "ccvr", "fedavg")
# a call is made again however often its process dies, so that nobody is left out
SETTINGS = [
    "federation.rounds=8",
    "local.epochs=1",
    "data.clients=4",
    "federation.participation=0.75",
    "federation.retries=50",
    "resources.actors=2",
    "resources.cpus_per_client=0.5",
]


class Runs:
    """Command lines that do one run each, begun again with `raylt resume` where they were killed."""

    def __init__(self, folder, address):
        self.folder, self.address = folder, address
        self.begun, self.done, self.drivers = 0, [], {}

    def look(self, more):
        """Takes note of those that ended; begins others while `more`, and goes on with those that were killed."""
        for name, process in list(self.drivers.items()):
            code = process.poll()
            if code == 0:
                self.done.append(name)
                del self.drivers[name]
            elif code is not None:
                # killed; or its server was three times in a step, or a client actor while it started
                assert code == -9 or (code == 1 and " died" in self.said(name).splitlines()[-1]), self.said(name)
                begun = (self.folder / name / "config.yaml").is_file()
                self.drivers[name] = self.start(name, "resume", self.folder / name) if begun else self.run(name)
        while more and len(self.drivers) < AT_ONCE:
            name = f"{METHODS[self.begun % len(METHODS)]}-{self.begun}"
            self.begun += 1
            self.drivers[name] = self.run(name)

    def run(self, name):
        return self.start(
            name, "run", f"method={name.partition('-')[0]}", *SETTINGS, "--out", self.folder, "--name", name
        )

    def start(self, name, *arguments):
        with (self.folder / f"{name}.txt").open("a") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "raylt", *map(str, arguments), "--address", self.address, "--format", "json"],
                stdout=out,
                stderr=out,
            )

    def said(self, name):
        return (self.folder / f"{name}.txt").read_text()

    def steps(self):
        """Lines of all runs together; a line that is taken back by a resumed run leaves fewer."""
        return sum(file.read_bytes().count(b"\n") for file in self.folder.glob("*/metrics.jsonl"))

    def under_way(self):
        """Those that have taken a step, so that there is something to lose."""
        return [name for name in self.drivers if (self.folder / name / "metrics.jsonl").exists()]


def workers(kind, cluster):
    """Processes of actors of a kind in this cluster."""
    raylets = {node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()}
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if f"ray::{kind}" in " ".join(process.info["cmdline"] or []):
            try:
                parents = {parent.pid for parent in process.parents()}
            except psutil.NoSuchProcess:
                continue
            if parents & raylets:
                found.append(process)
    return found


def kill(kind, chance, runs, cluster):
    """Kills a driver, a server or a client, whichever of this kind; False where there is none now."""
    if kind == "driver":
        names = runs.under_way()
        victims = [psutil.Process(runs.drivers[name].pid) for name in names if runs.drivers[name].poll() is None]
    else:
        victims = sorted(workers(kind, cluster), key=lambda process: process.pid)
    if not victims or not runs.under_way():
        return False
    try:
        chance.choice(victims).kill()
    except psutil.NoSuchProcess:
        return False
    return True


@pytest.fixture
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20},
        )
        made.add_node(num_cpus=2, object_store_memory=100 * 2**20)
        yield made
        made.shutdown()


def test_twenty_kills_change_no_model(cluster, tmp_path, capsys):
    chance, runs = random.Random(16), Runs(tmp_path, cluster.address)
    doomed = [kind for kind, count in VICTIMS.items() for _ in range(count)]
    chance.shuffle(doomed)
    began, pause, goal = time.monotonic(), 0.0, 1
    try:
        while doomed or runs.drivers or runs.begun < len(METHODS):
            runs.look(more=doomed or runs.begun < len(METHODS))
            if goal and runs.steps() >= goal:  # something came of the last one; most kills wait for that
                goal, pause = 0, max(pause, time.monotonic() + chance.uniform(0.0, 0.5))
            if doomed and not goal and time.monotonic() >= pause and kill(doomed[-1], chance, runs, cluster):
                doomed.pop()
                goal = runs.steps() + 1 if chance.random() < 0.7 else 0
                pause = time.monotonic() + chance.uniform(0.1, 2.0)
            time.sleep(0.05)
            assert time.monotonic() - began < LIMIT_S, {name: runs.said(name) for name in runs.drivers}
    finally:
        for process in runs.drivers.values():
            process.kill()
    expected = {}
    for name in runs.done:
        method = name.partition("-")[0]
        if method not in expected:
            config = load(None, [f"method={method}", *SETTINGS])
            expected[method] = raylt.run(config, out=tmp_path / "alone", name=method, fleet="local", quiet=True).summary
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["model_sha256"] == expected[method]["model_sha256"], name
        assert summary["accuracy"] == expected[method]["accuracy"], name
        assert all(finding.whole for finding in verify(tmp_path / name)), name
    with capsys.disabled():
        print(f"\n{sum(VICTIMS.values())} kills over {len(runs.done)} runs in {time.monotonic() - began:.0f} s")
