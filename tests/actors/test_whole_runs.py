"""`raylt run` and `raylt resume` as processes, and what remains of them when they are killed."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray  # noqa: F401  (brings psutil)
from teachers import save_clip

psutil = pytest.importorskip("psutil")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = ["method=fedavg", "seed=3", "federation.rounds=3"]
# long enough to be killed in the middle: a round takes 0.3 s on a slow core
LONG = ["method=fedavg", "seed=3", "federation.rounds=20", "local.epochs=4"]


def environment():
    return {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | {
        "RAY_ADDRESS": "127.0.0.1:1"
    }  # a plain run must ignore this address


def start(folder, *arguments, **variables):
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        # a shell that runs the tests in the background ignores SIGINT, and its children would too
        return subprocess.Popen(
            [sys.executable, "-m", "raylt", *arguments],
            stdout=out,
            stderr=err,
            env=environment() | variables,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def run(folder, *arguments):
    """Run a command; return its exit code, its standard output and the lines of its standard error."""
    process = start(folder, *arguments)
    code = process.wait(250)
    return code, (folder / "out.txt").read_text(), (folder / "err.txt").read_text().splitlines()


def launch(folder, settings, **variables):
    return start(folder, "run", *settings, "--out", str(folder), "--name", "r", **variables)


def finish(folder, *arguments):
    code, out, err = run(folder, *arguments, "--format", "json")
    assert code == 0, err
    return json.loads(out)


def accuracies(place: Path):
    return [(line["step"], line["accuracy"]) for line in map(json.loads, (place / "metrics.jsonl").open())]


def wait_for(claim, seconds=120.0):
    end = time.monotonic() + seconds
    while not (found := claim()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found


def await_a_round(process, folder):
    file = folder / "r/metrics.jsonl"

    def committed():
        assert process.poll() is None, (folder / "err.txt").read_text()
        return file.exists() and file.read_text()

    wait_for(committed)


def family(pid):
    return psutil.Process(pid).children(recursive=True)


def all_gone(processes):
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Do the long run in one process; return the hash of its model and its accuracies."""
    folder = tmp_path_factory.mktemp("undisturbed")
    summary = finish(folder, "run", *LONG, "--fleet", "local", "--out", str(folder), "--name", "r")
    return summary["model_sha256"], accuracies(folder / "r")


def test_every_fleet_gives_the_same_model(tmp_path):
    kinds = {"local": ["--fleet", "local"], "ray": ["resources.actors=2"]}
    found = {}
    for name, more in kinds.items():
        summary = finish(tmp_path, "run", *SETTINGS, *more, "--out", str(tmp_path), "--name", name)
        found[name] = summary["model_sha256"], accuracies(tmp_path / name)
        lines = (tmp_path / "err.txt").read_text().splitlines()
        # standard error has no lines of Ray's own and no warnings
        assert re.fullmatch(r"fedavg on digits, run folder \S+", lines[0])
        assert "training images (66%) are left out" in lines[1]
        assert [re.sub(r"accuracy .*", "", line).strip() for line in lines[2:]] == [f"round {r}/3" for r in (1, 2, 3)]
    assert len(found["ray"][1]) == 3
    assert found["ray"] == found["local"]


def test_client_actors_train_on_the_features_of_a_frozen_encoder(tmp_path):
    (tmp_path / "clip").mkdir()
    save_clip(tmp_path / "clip")
    settings = [
        "method=bpfed",
        f"model=clip:local-dir:{tmp_path / 'clip'}",
        "classifier=text",
        "trainable=classifier",
        "augment=crop_flip",
        "federation.rounds=2",
        "resources.actors=1",
        f"data.root={tmp_path}",
    ]
    hashes = [
        finish(tmp_path, "run", *settings, "--fleet", fleet, "--out", str(tmp_path), "--name", fleet)["model_sha256"]
        for fleet in ("local", "ray")
    ]
    assert hashes[0] == hashes[1]


def test_a_killed_driver_leaves_nothing_behind_and_can_be_resumed(tmp_path, undisturbed):
    process = launch(tmp_path, LONG)
    await_a_round(process, tmp_path)
    time.sleep(random.Random(0).uniform(0, 0.5))
    started = family(process.pid)
    # the session's folder is closed to other users, because Ray opens its own folders inside to every user
    folder = Path(next(p for p in started if "reaper.py" in " ".join(p.cmdline())).cmdline()[-1])
    assert (folder.stat().st_mode & 0o777, (folder / "ray/session_latest").is_dir()) == (0o700, True)
    process.kill()
    process.wait()
    assert len(started) > 5
    wait_for(lambda: all_gone(started) and not folder.exists(), 10)
    assert not (tmp_path / "r/summary.json").exists()
    summary = finish(tmp_path, "resume", str(tmp_path / "r"), "resources.actors=1")
    assert (summary["model_sha256"], accuracies(tmp_path / "r")) == undisturbed


@pytest.mark.soak
def test_a_killed_server_is_started_again_with_the_same_result(tmp_path, undisturbed):
    process = launch(tmp_path, LONG)
    await_a_round(process, tmp_path)
    (server,) = [p for p in family(process.pid) if "ServerActor" in " ".join(p.cmdline())]
    server.kill()
    assert process.wait(200) == 0
    lines = (tmp_path / "err.txt").read_text().splitlines()
    assert "the server's process died (ActorDiedError); starting it again from the last checkpoint" in lines
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert (summary["model_sha256"], accuracies(tmp_path / "r")) == undisturbed


@pytest.mark.parametrize(
    ("number", "fleet", "send"),
    [  # a terminal and a scheduler send signals to the whole process group
        (signal.SIGINT, "ray", os.killpg),
        (signal.SIGHUP, "ray", os.killpg),
        (signal.SIGTERM, "ray", os.killpg),
        pytest.param(signal.SIGTERM, "ray", os.kill, marks=pytest.mark.soak),
        (signal.SIGTERM, "local", os.kill),
    ],
)
def test_an_interrupted_run_says_how_to_go_on(tmp_path, number, fleet, send):
    process = launch(tmp_path, [*LONG, "federation.rounds=200", "--fleet", fleet])
    await_a_round(process, tmp_path)
    started = family(process.pid)
    send(process.pid, number)
    assert process.wait(60) == 130
    lines = (tmp_path / "err.txt").read_text().splitlines()
    assert lines[-1] == f"stopped; continue with raylt resume {tmp_path / 'r'}"
    # Ctrl-C also reaches the server's process, whose end may be noticed first
    assert all(
        line.startswith(("fedavg on", "995 of 1,497 training images", "round ", "the server's process died"))
        for line in lines[:-1]
    )
    wait_for(lambda: all_gone(started), 10)
    assert not (tmp_path / "r/summary.json").exists()
    assert (tmp_path / "r/config.yaml").exists()


def test_a_plan_that_is_interrupted_while_it_looks_for_a_cluster_says_only_that_it_stopped(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # a server that accepts connections and does not answer
        process = start(tmp_path, "plan", "--address", f"127.0.0.1:{listener.getsockname()[1]}")
        listener.accept()[0].close()
        line, _ = listener.accept()
        process.terminate()
        assert process.wait(20) == 130
        line.close()
    assert (tmp_path / "err.txt").read_text() == "stopped\n"


@pytest.mark.parametrize(
    ("setting", "code", "last_line", "before"),
    [
        ("resources.actors=99", 2, "error [cluster.", ["fedavg on ", "995 of "]),
        ("local.lr=1e6", 1, "error [training.diverged]: ", ["fedavg on ", "995 of ", "raylt debug "]),
    ],
)
def test_what_goes_wrong_on_the_cluster_is_one_line(tmp_path, setting, code, last_line, before):
    got, out, err = run(tmp_path, "run", *SETTINGS, setting, "--out", str(tmp_path), "--name", "r")
    assert (got, out) == (code, "")
    assert all(map(str.startswith, err, [*before, last_line]))
    assert len(err) == len(before) + 1
    assert not (tmp_path / "r/summary.json").exists()


def test_a_run_asks_for_its_token_and_never_shows_it(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    process = launch(tmp_path, LONG, HOME=str(home))
    await_a_round(process, tmp_path)
    dashboards = [
        c for p in [process.pid, *(q.pid for q in family(process.pid))] for c in listening(p) if 8265 <= c.port < 8365
    ]
    process.terminate()
    process.wait(60)
    token = (home / ".ray/auth_token").read_text().strip()
    assert dashboards
    assert {c.ip for c in dashboards} == {"127.0.0.1"}
    assert token
    shown = [file for file in tmp_path.rglob("*") if file.is_file() and home not in file.parents]
    assert tmp_path / "err.txt" in shown
    assert not [file for file in shown if token.encode() in file.read_bytes()]


def listening(pid):
    try:
        return [c.laddr for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []
