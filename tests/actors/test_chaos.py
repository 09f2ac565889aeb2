"""SIGKILLs at random moments to random processes of runs on a two-node cluster.

Runs of several methods are at work, two at a time. Each must end with the model of an undisturbed run. A seed draws the
moments and victims; what a kill interrupts depends on the machine.
"""

import json
import random
import time

import psutil
import pytest
from chaos import SETTINGS, Runs, workers

import raylt
from raylt.config import load
from raylt.runs.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]
LIMIT_S = 840  # for a machine with other work; an idle one takes about two minutes
# these methods have control variates, a last phase at the server, private states and none of these
METHODS = ("scaffold", "ccvr", "fedper", "fedavg")
KILLS = {"driver": 5, "ServerActor": 5, "ClientActor": 10}


def kill(kind, chance, runs, cluster):
    """Kill one process of the given kind (driver, server or client); return False if there is none now."""
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


def test_kills_change_no_model(cluster, tmp_path, capsys):
    chance, runs = random.Random(16), Runs(tmp_path, cluster.address, METHODS)
    doomed = [kind for kind, count in KILLS.items() for _ in range(count)]
    chance.shuffle(doomed)
    began, pause, goal = time.monotonic(), 0.0, 1
    try:
        while doomed or runs.drivers or runs.begun < len(METHODS):
            runs.look(more=doomed or runs.begun < len(METHODS))
            if goal and runs.steps() >= goal:  # a step was committed since the last kill, which most kills wait for
                goal, pause = 0, max(pause, time.monotonic() + chance.uniform(0.0, 0.5))
            if doomed and not goal and time.monotonic() >= pause and kill(doomed[-1], chance, runs, cluster):
                doomed.pop()
                goal = runs.steps() + 1 if chance.random() < 0.7 else 0
                pause = time.monotonic() + chance.uniform(0.1, 2.0)
            time.sleep(0.05)
            assert time.monotonic() - began < LIMIT_S, {name: runs.output(name) for name in runs.drivers}
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
        print(f"\n{sum(KILLS.values())} kills over {len(runs.done)} runs in {time.monotonic() - began:.0f} s")
