"""The commands `raylt submit`, `raylt stop`, `raylt ls --address` and `raylt follow --address`."""

import socket
from contextlib import contextmanager
from threading import Thread
from types import SimpleNamespace

import pytest

from actors.cluster.jobs import JobClient, _on_cluster
from raylt.cli.jobs import TRACKERS, complete


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("method=sfd", "method=sfd"),
        ("local.lr=loguniform(0.01,0.3)", "'local.lr=loguniform(0.01,0.3)'"),
        ("~/raylt/runs", '"$HOME"/raylt/runs'),
        ("data.root=~/my data", "data.root="),
        ("; rm -rf ~", "'; rm -rf ~'"),
        ("$(id)", "'$(id)'"),
        ("~/$(id)", "\"$HOME\"/'$(id)'"),
    ],
)
def test_words_reach_the_cluster_as_they_are_but_for_the_home_folder(word, shown):
    assert _on_cluster(word).startswith(shown)


def test_a_run_gets_the_folders_on_the_cluster_that_it_lacks():
    words = ["method=sfd"]
    folder = complete("run", words)
    assert folder == f"~/raylt/runs/{words[words.index('--name') + 1]}"
    assert words[words.index("--out") + 1] == "~/raylt/runs"
    assert "data.root=~/raylt/data" in words
    words = ["method=sfd", "--out=/nfs", "--name", "one", "data.root=/nfs/data"]
    assert complete("run", words) == "/nfs/one"
    assert words == ["method=sfd", "--out=/nfs", "--name", "one", "data.root=/nfs/data"]


def test_other_commands_get_what_they_know():
    words = ["study.yaml"]
    assert complete("study", words) is None
    assert words == ["study.yaml", "--out", "~/raylt/runs"]
    words = ["--resume", "/nfs/search"]
    assert complete("tune", words) is None
    assert words == ["--resume", "/nfs/search"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["submit", "run", "method=fedavg"], "config.missing"),
        (["submit", "run", "method=fedavgg", "--address", "http://127.0.0.1:1"], "config.unknown-name"),
        (["submit", "run", "/etc/hosts.yaml", "--address", "http://127.0.0.1:1"], "job.file-elsewhere"),
        (["submit", "data", "--address", "http://127.0.0.1:1"], "command.usage"),
        (["submit", "run", "method=fedavg", "--nam", "x"], "command.usage"),
        (["submit", "resume"], "command.usage"),
        (["submit", "tune", "method=la", "--metric", "nonsense"], "command.usage"),
        (["submit", "run", "method=fedavg", "--address", "http://127.0.0.1:1"], "cluster.no-answer"),
        (["ls", "--address", "head:6379"], "cluster.bad-address"),
        (["follow", "job", "--address", "http://127.0.0.1:1"], "cluster.no-answer"),
        (["stop", "job", "--address", "http://127.0.0.1:1"], "cluster.no-answer"),
    ],
)
def test_what_cannot_work_is_refused(raylt, monkeypatch, arguments, code):
    monkeypatch.delenv("RAYLT_DASHBOARD", raising=False)
    ended = raylt(*arguments)
    assert f"[{code}]" in ended.err
    assert ended.code == 2


@pytest.fixture
def submitted(monkeypatch):
    """Return the list of jobs that a cluster was sent, as their words, their run folder and their variables."""
    jobs = []

    @contextmanager
    def connect(url):
        yield SimpleNamespace(submit=lambda words, folder, _, given: jobs.append((words, folder, given)) or "job")

    monkeypatch.setattr("actors.cluster.jobs.connect", connect)
    return jobs


def test_a_recipe_is_checked_with_its_settings(raylt, submitted):
    cluster = ("--address", "http://127.0.0.1:8265")
    assert raylt("submit", "run", *cluster, "recipe:demo", "method.gamma=0.1").code == 0
    assert submitted[0][0][:3] == ["run", "recipe:demo", "method.gamma=0.1"]
    refused = raylt("submit", "run", *cluster, "recipe:nosuch", "method.gamma=0.1")
    assert (refused.code, len(submitted)) == (2, 1)
    assert "nosuch" in refused.err


def test_a_job_has_the_trackers_and_the_plugins_of_its_command(raylt, submitted, monkeypatch, tmp_path, no_guests):
    for name in TRACKERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    (tmp_path / "own.py").write_text(
        "from typing import ClassVar\nimport raylt\n\n\nclass Own(raylt.Method):\n"
        "    name: ClassVar[str] = 'own'\n    paper: ClassVar[str] = 'for tests'\n"
    )
    ended = raylt("--plugin", "own.py", "submit", "run", "--address", "http://127.0.0.1:8265", "method=own")
    assert ended.code == 0, ended.err
    [(words, _, variables)] = submitted
    assert words[words.index("own.py") - 1] == "--plugin"
    assert variables == {"WANDB_API_KEY": "key"}


@pytest.mark.parametrize(
    ("state", "folder", "ended", "code", "asked"),
    [
        ("RUNNING", "runs/one", "SUCCEEDED", 0, [["stop", "runs/one"]]),
        ("RUNNING", "runs/one", "FAILED", 1, [["stop", "runs/one"]]),
        ("RUNNING", None, "SUCCEEDED", 0, ["interrupt"]),
        ("FAILED", "runs/one", "SUCCEEDED", 2, []),
    ],
)
def test_stop_says_what_became_of_the_job(raylt, monkeypatch, state, folder, ended, code, asked):
    calls = []

    @contextmanager
    def connect(url):
        yield SimpleNamespace(
            find=lambda name: SimpleNamespace(id=name, state=state, folder=folder),
            interrupt=lambda job: calls.append("interrupt"),
            submit=lambda words, *_: calls.append(words) or "helper",
            wait=lambda id: SimpleNamespace(id=id, state=ended),
            output=lambda id: "the run is not there\n",
        )

    monkeypatch.setattr("actors.cluster.jobs.connect", connect)
    stopped = raylt("stop", "job", "--address", "http://127.0.0.1:8265")
    assert (stopped.code, calls) == (code, asked)
    assert ("ends after its next checkpoint" in stopped.out) == (ended == "SUCCEEDED" and bool(asked) and bool(folder))


def test_the_run_of_a_resumed_job_is_its_argument(raylt, submitted):
    cluster = ("--address", "http://127.0.0.1:8265")
    assert raylt("submit", "resume", *cluster, "--fleet", "local", "runs/one", "federation.rounds=9").code == 0
    assert submitted[0][1] == "runs/one"


def test_a_port_of_another_protocol_is_no_dashboard(raylt):
    """Ray's own port, which users give by mistake, answers with bytes that are no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\x00\x00\x12\x04 no HTTP\n")

        Thread(target=answer, daemon=True).start()
        ended = raylt("ls", "--address", f"http://127.0.0.1:{server.getsockname()[1]}")
    assert ended.code == 2
    assert "[cluster.no-answer]" in ended.err


def test_stopping_a_run_that_is_not_running_says_so(raylt, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{method: {name: fedavg}}")
    ended = raylt("stop", run)
    assert ended.code == 2
    assert "[run.not-running]" in ended.err


@pytest.mark.parametrize(("code", "state"), [(130, "STOPPED"), (2, "FAILED"), (None, "FAILED")])
def test_a_run_that_was_stopped_has_not_failed(code, state):
    details = SimpleNamespace(
        submission_id="job", status=SimpleNamespace(value="FAILED"), driver_exit_code=code, metadata={"raylt": "run"},
        start_time=None,
    )  # fmt: skip
    [job] = JobClient(SimpleNamespace(list_jobs=lambda: [details])).list()
    assert job.state == state
