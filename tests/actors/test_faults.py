"""Kill each process of a run at one stage, on a cluster with replaceable workers; the soak tests do so at every stage.

Run alone, the tests print a table at the end: seconds until the kill is noticed, seconds until the next committed
round, and the number of repeated rounds.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from faulty import ROUNDS, STAGES
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
SETTINGS = ["method=faulty", f"federation.rounds={ROUNDS}", "local.epochs=1", "resources.actors=2"]
# the stage at which each is killed outside the soak tests
STAGE_OF = {"client": "upload", "node": "train", "server": "train", "driver": "checkpoint"}
LIMIT_S = 90.0  # limit from any fault to the next committed round
FAST = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="module")
def settings_of_ray():
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_RUNTIME_ENV_HOOK", "faulty.hook")
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


class Machines:
    """A cluster with a head for the server and two nodes with one client actor each."""

    def __init__(self):
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": False,
                "object_store_memory": 100 * 2**20,
                "labels": {"role": "server"},
                "_system_config": FAST,
            },
        )
        self.workers = [self.add(), self.add()]

    def add(self):
        return self.cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, labels={"role": "client"})

    def lose(self, pid):
        """Kill the node of a process, and start a replacement."""
        raylet = next(p for p in psutil.Process(pid).parents() if "raylet" in p.name())
        lost = next(node for node in self.workers if node.all_processes["raylet"][0].process.pid == raylet.pid)
        self.workers.remove(lost)
        self.cluster.remove_node(lost, allow_graceful=False)
        self.workers.append(self.add())


@pytest.fixture(scope="module")
def machines(settings_of_ray):
    made = Machines()
    yield made
    made.cluster.shutdown()


def start(folder, *arguments, **variables):
    with (folder / "out.txt").open("a") as out, (folder / "err.txt").open("a") as err:
        return subprocess.Popen(
            [sys.executable, HERE / "faulty.py", *arguments, "--format", "json"],
            stdout=out,
            stderr=err,
            env=os.environ | variables,
        )


def wait_for(claim, process, folder, seconds=LIMIT_S):
    end = time.monotonic() + seconds
    while not (found := claim()):
        assert process.poll() in (None, 0), (folder / "err.txt").read_text()
        assert time.monotonic() < end, f"waited in vain: {(folder / 'err.txt').read_text()}"
        time.sleep(0.02)
    return found


def committed(folder):
    file = folder / "r/metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def summary(folder):
    return json.loads((folder / "r/summary.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(settings_of_ray, tmp_path_factory):
    """Run without faults in one process; return the hash of the model."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = start(folder, "run", *SETTINGS, "--fleet", "local", "--out", str(folder), "--name", "r")
    assert process.wait(120) == 0, (folder / "err.txt").read_text()
    return summary(folder)["model_sha256"]


@pytest.fixture(scope="module")
def matrix(request):
    found = {}
    yield found
    lines = [
        "",
        "seconds from SIGKILL until it is noticed / to the next committed round / rounds run again",
        "".join(f"{name:>18}" for name in ("", *STAGES)),
    ]
    for victim in dict.fromkeys(victim for victim, _ in found):
        cells = [found.get((victim, stage)) for stage in STAGES]
        lines.append(
            f"{victim:>18}"
            + "".join(
                f"{'-' if cell[0] is None else f'{cell[0]:.1f}':>9} / {cell[1]:.1f} / {cell[2]}" if cell else " " * 18
                for cell in cells
            )
        )
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n".join(lines))


@pytest.mark.parametrize(
    ("victim", "stages"),
    [
        *(pytest.param(victim, (stage,), id=f"{victim}-{stage}") for victim, stage in STAGE_OF.items()),
        *(pytest.param(victim, tuple(STAGES), marks=pytest.mark.soak, id=f"{victim}-all") for victim in STAGE_OF),
    ],
)
def test_a_run_survives_kills(machines, undisturbed, matrix, tmp_path, victim, stages):
    address = machines.cluster.address
    go_on = ["resume", str(tmp_path / "r"), "--address", address]
    for stage in STAGES.keys() - set(stages):
        (tmp_path / f"{stage}-reached").touch()  # the run does not pause there
    process = start(
        tmp_path,
        "run",
        *SETTINGS,
        f"method.folder={tmp_path}",
        "--address",
        address,
        "--out",
        str(tmp_path),
        "--name",
        "r",
    )
    moments = {}
    for stage in stages:
        round = STAGES[stage]
        wait_for((tmp_path / f"{stage}-reached").exists, process, tmp_path)
        assert len(committed(tmp_path)) == round - 1
        client = int((tmp_path / "client.pid").read_text())
        progress, killed = progress_of(tmp_path, victim), time.monotonic()
        if victim == "client":
            os.kill(client, signal.SIGKILL)
        elif victim == "server":
            kill_server(process)
        elif victim == "node":
            machines.lose(client)
        elif victim == "driver":
            process.kill()
            process.wait()
            process = start(tmp_path, *go_on)
        (tmp_path / f"{stage}-go").touch()
        # a fault while the server does work of its own is noticed in the next call to clients
        meets = round if stage in ("train", "upload") or victim in ("server", "driver") else round + 1
        noticed = None  # the death of a driver is noticed by its user alone
        if victim != "driver":
            wait_for(lambda progress=progress: progress_of(tmp_path, victim) > progress, process, tmp_path)
            noticed = time.monotonic() - killed
        wait_for(lambda meets=meets: len(committed(tmp_path)) >= meets, process, tmp_path)
        moments[stage] = noticed, time.monotonic() - killed
    assert process.wait(LIMIT_S) == 0, (tmp_path / "err.txt").read_text()
    runs = [int(line) for line in (tmp_path / "rounds").read_text().splitlines()]
    for stage in stages:
        matrix[victim, stage] = *moments[stage], runs.count(STAGES[stage]) - 1
    assert summary(tmp_path)["model_sha256"] == undisturbed
    assert [line["step"] for line in committed(tmp_path)] == list(range(1, ROUNDS + 1))
    assert not [line for line in committed(tmp_path) if line["lost"]]


def progress_of(folder, victim):
    """Count the lost processes that the run reported: the driver reports the server, the server reports clients."""
    file = folder / ("err.txt" if victim == "server" else "r/notes.log")
    return file.read_text().count("process died") if file.exists() else 0


def kill_server(driver):
    """Kill the server actor of a run on a cluster that the driver did not start."""
    servers = [p for p in psutil.process_iter(["cmdline"]) if "ray::ServerActor" in " ".join(p.info["cmdline"] or [])]
    (server,) = [p for p in servers if environment(p).get("RAY_RUNTIME_ENV_HOOK") == "faulty.hook"]
    server.kill()


def environment(process):
    """Return the environment of a process of any test; an empty one if the process has ended."""
    try:
        return process.environ()
    except psutil.NoSuchProcess:
        return {}


def test_clients_that_misbehave_are_left_out_and_named(machines, tmp_path):
    ill = [*SETTINGS, "method.ill=true", f"method.folder={tmp_path}"]
    for stage in STAGES:
        (tmp_path / f"{stage}-reached").touch()
    process = start(
        tmp_path,
        "run",
        *ill,
        "federation.deadline_s=5",
        "--address",
        machines.cluster.address,
        "--out",
        str(tmp_path),
        "--name",
        "r",
    )
    wait_for((tmp_path / "hangs").exists, process, tmp_path)
    os.kill(int((tmp_path / "hangs").read_text()), signal.SIGSTOP)
    stopped = time.monotonic()
    assert process.wait(120) == 0, (tmp_path / "err.txt").read_text()
    assert time.monotonic() - stopped < LIMIT_S
    lines = committed(tmp_path)
    assert [line["lost"] for line in lines] == [[], [1], [], [], [0], *[[]] * 6]
    assert [line["retried"] for line in lines][1] == [1, 1]
    (first,) = lines[2]["rejected"].items()
    assert first[0] == "1"
    assert first[1].endswith("is not finite")
    assert ", most replies have " in lines[3]["rejected"]["1"]
    errors = (tmp_path / "err.txt").read_text()
    assert "round 5, client 0: no reply" in errors

    # a run in one process that leaves out the same clients has the same model
    other = tmp_path / "local"
    other.mkdir()
    for stage in STAGES:
        (other / f"{stage}-reached").touch()
    local = start(
        other,
        "run",
        *SETTINGS,
        "method.ill=true",
        f"method.folder={other}",
        "--fleet",
        "local",
        "--out",
        str(other),
        "--name",
        "r",
        FAULTY_LOCAL="1",
    )
    assert local.wait(60) == 0, (other / "err.txt").read_text()
    assert summary(other)["model_sha256"] == summary(tmp_path)["model_sha256"]
