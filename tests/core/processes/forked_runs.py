"""Runs with clients in forked processes: the bits of one process, and what happens when a process ends or hangs.

test_process_fleet.py starts them in a process of their own.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import pytest
from refusals import refused
from small_runs import QUICK
from tiny import configure, make_experiment

from raylt.contract.trace import finish
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.fleet.reductions import mean
from raylt.core.method import Method
from raylt.core.processes import process_fleet
from raylt.core.processes.process_fleet import ProcessFleet
from raylt.errors import ConfigError, RayltError
from raylt.methods import METHODS
from raylt.runs.in_process import forked_fleet

IDS = [0, 1, 2, 3, 5]


@pytest.fixture
def run(tiny_task, tmp_path):
    """Return `run(config, method=None)`, which does a run in two forked processes."""
    made = []

    def do(config, method=None):
        experiment = make_experiment(config, tiny_task, tmp_path, method, fleet=ProcessFleet)
        made.append(experiment)
        return finish(experiment)

    yield do
    for experiment in made:
        experiment.fleet.close()


def forked(**parts):
    return configure(resources={"actors": 2}, **parts)


@pytest.mark.usefixtures("stacks_on_any_processor")
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fedavg", {"federation": {"participation": 0.5, "over_select": 0.5}}),
        ("fedavg", {"local": {"stacked": "auto"}}),
        ("scaffold", {}),
        ("mupfl", {"evaluation": {"personal": 1}}),
        ("sfd", {}),  # its last phase maps items
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_forked_processes_give_the_bits_of_one_process(run, tiny_task, tmp_path, name, parts):
    method = METHODS[name](**QUICK.get(name, {}))
    alone = finish(make_experiment(configure(**parts), tiny_task, tmp_path, method))
    beside = run(forked(**parts), method)
    assert beside.bits == alone.bits
    assert [report.retried for report in beside.reports] == [report.retried for report in alone.reports]
    assert len(beside.experiment.fleet._workers) == 2


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedper", "mupfl"])
def test_clients_of_one_task_send_replies_of_their_own(run, tiny_task, tmp_path, monkeypatch, name):
    """Several clients of a task train in one model, one after the other."""
    monkeypatch.setattr(process_fleet, "TASKS_PER_PROCESS", 1)
    method = METHODS[name](**QUICK.get(name, {}))
    alone = finish(make_experiment(configure(), tiny_task, tmp_path, method))
    beside = run(forked(), method)
    assert beside.experiment.fleet._task_size(method.train, len(IDS)) > 1
    assert beside.bits == alone.bits


class Base(Method):
    """FedAvg, with trouble in the first round."""

    name: ClassVar[str] = "base"
    paper: ClassVar[str] = "for tests"
    where: str = ""

    def trouble(self, client):
        raise NotImplementedError

    def train(self, client, message):
        if client.id == 2 and client.round == 1:
            self.trouble(client)
        return super().train(client, message)


class Killed(Base):
    """Method whose client 2 loses its process in the first call."""

    def trouble(self, client):
        mark = Path(self.where) / "seen"
        if not mark.exists():
            mark.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)


class Doomed(Base):
    """Method whose client 2 loses its process in each call."""

    def trouble(self, client):
        os.kill(os.getpid(), signal.SIGKILL)


class Failing(Base):
    """Method whose client 2 raises an error."""

    def trouble(self, client):
        raise ValueError("no such luck")


class Leaving(Base):
    """Method whose client 2 ends its process."""

    def trouble(self, client):
        sys.exit(3)


class Sleeping(Base):
    """Method whose client 2 does not come back in time."""

    def trouble(self, client):
        time.sleep(60)


def test_a_client_whose_process_is_killed_is_asked_again_with_the_same_result(run, tiny_task, tmp_path):
    undisturbed = finish(make_experiment(configure(), tiny_task, tmp_path))
    trace = run(forked(), Killed(where=str(tmp_path)))
    assert trace.reports[0].retried == [2]
    assert trace.reports[0].lost == []
    model = undisturbed.experiment.export_model()
    assert trace.experiment.export_model() == model


@pytest.mark.parametrize(
    ("method", "code", "cause"),
    [
        (Doomed, "client.lost", "its process ended before it answered"),
        (Failing, "client.failed", "ValueError: no such luck"),
        (Leaving, "client.failed", "SystemExit: 3"),
    ],
)
def test_a_client_that_fails_again_and_again_is_left_out_and_named(run, method, code, cause):
    with pytest.warns(RuntimeWarning, match=f"client 2, round 1, train: {cause}"):  # the note about the client
        trace = run(forked(federation={"quorum": 0.5, "retries": 1}), method())
    assert [(report.lost, report.retried) for report in trace.reports] == [([2], [2]), ([], [])]
    with pytest.raises(RayltError) as caught:
        run(forked(federation={"quorum": 1.0, "retries": 0}), method())
    assert caught.value.details["cause"] == code
    assert "client 2, round 1, train: " in str(caught.value)
    assert cause in str(caught.value)


def test_clients_that_share_a_task_with_a_client_that_ends_its_process_lose_nothing(run, monkeypatch):
    monkeypatch.setattr(process_fleet, "TASKS_PER_PROCESS", 1)  # tasks of two clients
    trace = run(forked(federation={"quorum": 0.5, "retries": 0}), Doomed())
    assert [(report.lost, report.retried) for report in trace.reports] == [([2], []), ([], [])]


@pytest.mark.usefixtures("stacks_on_any_processor")
@pytest.mark.parametrize(("stacked", "sizes"), [("off", {5: 1, 40: 5, 2000: 64}), ("auto", {5: 2, 40: 8, 2000: 64})])
def test_a_task_has_eight_clients_that_train_in_stacks_if_each_process_gets_that_many(
    tiny_task, tmp_path, stacked, sizes
):
    config = forked(local={"stacked": stacked})
    with closing(make_experiment(config, tiny_task, tmp_path, fleet=ProcessFleet).fleet) as fleet:
        train = METHODS["fedavg"]().train
        assert {asked: fleet._task_size(train, asked) for asked in sizes} == sizes


class Unpickled:
    """Client function that records in a file how often it was unpickled."""

    __name__ = "unpickled"

    def __init__(self, path):
        self.path = path

    def __setstate__(self, state):
        self.__dict__.update(state)
        with Path(self.path).open("a") as stream:
            stream.write(".")

    def __call__(self, client, message):
        return client.reply(x=1.0)


@pytest.mark.parametrize("kind", [ProcessFleet, LocalFleet])
def test_without_stacks_function_and_message_are_unpickled_once_for_each_client(tiny_task, tmp_path, kind):
    with closing(make_experiment(forked(), tiny_task, tmp_path, fleet=kind).fleet) as fleet:
        fleet.begin(1)
        fleet.ask(Unpickled(tmp_path / "count"), IDS, {}, x=mean)
    assert (tmp_path / "count").read_text() == "." * len(IDS)


def test_a_client_that_misses_the_deadline_is_left_out_and_its_process_replaced(run):
    start = time.monotonic()
    trace = run(forked(federation={"quorum": 0.5, "deadline_s": 5, "rounds": 2}), Sleeping())
    assert time.monotonic() - start < 40
    assert trace.reports[0].lost == [2]
    assert trace.reports[1].lost == []


class SlowestFirst(Base):
    """Method whose client 0, with the lowest id, answers when the file `released` exists."""

    released: str

    def train(self, client, message):
        end = time.monotonic() + 60
        while client.id == 0 and not Path(self.released).exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        return super().train(client, message)


def test_progress_counts_answers_that_wait_for_one_of_a_lower_id(tiny_task, tmp_path):
    released, shown = tmp_path / "released", []

    def show(stage, done, total):
        if stage == "train" and total == len(IDS):
            shown.append(done)
            if done == len(IDS) - 1:
                released.touch()

    method = SlowestFirst(released=str(released))
    experiment = make_experiment(forked(), tiny_task, tmp_path, method, fleet=ProcessFleet)
    with closing(experiment.fleet):
        experiment.fleet.on_progress = show
        experiment.step()
    assert shown == [0, 1, 2, 3, 4, 5]


def halve(item):
    if item["value"] == 6:
        raise ValueError("not this one")
    return {"value": item["value"] / 2}


def kill_once(item):
    mark = Path(item["where"])
    if not mark.exists():
        mark.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return {"value": item["value"] + 1}


def kill_always(item):
    if item["value"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_items_are_mapped_in_order_and_a_failure_names_its_item(run, tmp_path):
    fleet = run(forked(federation={"rounds": 1})).experiment.fleet
    assert fleet.map(halve, [{"value": value} for value in range(5)]) == [{"value": value / 2} for value in range(5)]
    with refused("server.map-failed", RayltError, item=3):
        fleet.map(halve, [{"value": value} for value in (1, 2, 4, 6, 6)])
    items = [{"value": value, "where": str(tmp_path / "killed")} for value in range(4)]
    assert fleet.map(kill_once, items) == [{"value": value + 1} for value in range(4)]
    with refused("server.map-failed", RayltError, item=2) as caught:
        fleet.map(kill_always, items)
    assert "its process ended" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "resources", "platform"),
    [
        ("fleet", {}, "darwin"),
        ("resources.cpus_per_client", {"cpus_per_client": 2}, "linux"),
    ],
)
def test_what_a_fork_cannot_do_is_refused(tiny_task, tmp_path, monkeypatch, key, resources, platform):
    host = make_experiment(configure(), tiny_task, tmp_path).fleet._host
    monkeypatch.setattr(sys, "platform", platform)
    with refused("config.conflict", ConfigError, key=key):
        forked_fleet(configure(resources=resources), tiny_task, host)


SCRIPT = """
import os, signal, sys, time
import raylt

class Waits(raylt.Method):
    name = "waits"
    paper = "for tests"

    def train(self, client, message):
        open(f"pid{os.getpid()}", "w").close()
        time.sleep(120)

raylt.register(Waits)
raylt.run("waits", data="digits", fleet="processes", out=".", name="run", quiet=True)
"""


def test_no_process_outlives_a_killed_run(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    end = time.monotonic() + 100
    while not (marks := list(tmp_path.glob("pid*"))):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    end = time.monotonic() + 30
    while any(alive(int(mark.name.removeprefix("pid"))) for mark in marks):
        assert time.monotonic() < end
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
