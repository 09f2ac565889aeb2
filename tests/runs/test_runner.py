"""The death of a server process is noted and counted; threads that a process cannot use are refused."""

from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import pytest
from refusals import refused

import raylt
from raylt.core.checkpoint import checkpoint
from raylt.errors import ConfigError, DiskFull, Diverged, ServerLost
from raylt.methods.fedavg import FedAvg
from raylt.runs import runner
from raylt.runs.callbacks.base import Callback
from raylt.runs.folder import provenance, summary
from raylt.runs.folder.notes import NOTES, SERVER_DIED
from raylt.runs.in_process import check_threads
from raylt.runs.run import Run
from raylt.studies.records.record import read_run
from raylt.studies.report.listing import listing

SETTINGS = ["federation.rounds=2", "local.steps=1", "data.clients=3", "data.imbalance=100"]


@pytest.fixture
def dying(monkeypatch):
    """Return a function that lets the server die `deaths` times before its first step."""

    def set_deaths(deaths):
        real = runner._in_this_process
        left = [deaths]

        @contextmanager
        def experiment(*arguments):
            if left[0]:
                left[0] -= 1
                raise ServerLost(f"{SERVER_DIED} (ActorDiedError)")
            with real(*arguments) as made:
                yield made

        monkeypatch.setattr(runner, "_in_this_process", experiment)

    return set_deaths


def test_a_server_that_died_is_in_the_notes_and_in_the_summary(tmp_path, dying):
    dying(2)
    run = raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=SETTINGS)
    note = f"{SERVER_DIED} (ActorDiedError); starting it again from the last checkpoint\n"
    assert (run.folder / NOTES).read_text() == 2 * note
    assert run.summary["troubles"]["server_deaths"] == 2


def test_the_third_death_in_a_step_ends_the_run_and_is_noted(tmp_path, dying):
    dying(3)
    with refused("server.lost", ServerLost):
        raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=SETTINGS)
    assert (tmp_path / "r" / NOTES).read_text().splitlines()[-2].endswith("; the run ends")


def test_deaths_in_different_steps_do_not_end_a_run(tmp_path, monkeypatch):
    class DiesInItsSecondStep:
        def __init__(self, experiment):
            self.experiment = experiment
            self.steps = 0

        def __getattr__(self, name):
            return getattr(self.experiment, name)

        def advance(self, seal):
            self.steps += 1
            if self.steps == 2:
                raise ServerLost(f"{SERVER_DIED} (ActorDiedError)")
            return self.experiment.advance(seal)

    real = runner._in_this_process

    @contextmanager
    def experiment(*arguments):
        with real(*arguments) as made:
            yield DiesInItsSecondStep(made)

    monkeypatch.setattr(runner, "_in_this_process", experiment)
    settings = [*SETTINGS, "federation.rounds=4"]
    run = raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=settings)
    assert run.summary["troubles"]["server_deaths"] == runner.MAX_SERVER_DEATHS == 3
    assert len(run.reports) == 4


def test_an_error_that_ends_a_run_is_in_its_notes_and_its_state(tmp_path):
    with refused("training.diverged", Diverged) as caught:
        raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=[*SETTINGS, "local.lr=1e6"])
    note = (tmp_path / "r" / NOTES).read_text().splitlines()[-1]
    assert note == f"failed (training.diverged): {caught.value}"
    record = read_run(tmp_path / "r")
    assert (record.state, record.error, record.problem) == ("failed", "training.diverged", str(caught.value))
    assert [(entry.state, entry.error) for entry in listing(tmp_path)] == [("failed", "training.diverged")]


class Ending(Callback):
    def __init__(self, error):
        self.error = error

    def on_step(self, report):
        raise self.error


class EndingAtOnce(Callback):
    """Ends a run with the first notice after its start, before there is a checkpoint."""

    started = False

    def on_start(self, folder, config, reports):
        self.started = True

    def on_message(self, text, minor=False):
        if self.started:
            raise KeyboardInterrupt


@pytest.mark.parametrize("ending", [Ending(KeyboardInterrupt()), EndingAtOnce()], ids=["a round", "no round"])
def test_notices_about_the_images_begin_the_notes_once(tmp_path, ending):
    x = np.random.default_rng(0).integers(0, 256, (24, 4, 4, 1), dtype=np.uint8)
    y = np.arange(24) % 2
    np.savez(tmp_path / "it.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4], class_names=np.array(["a", "b"]))
    settings = [f"data.source=npz:{tmp_path / 'it.npz'}", "data.clients=2", "model=small", "federation.rounds=2"]
    interrupted = {"fleet": "local", "quiet": True, "callbacks": [ending]}
    with pytest.raises(KeyboardInterrupt):
        raylt.run("fedavg", out=tmp_path, name="r", overrides=settings, **interrupted)
    Run.open(tmp_path / "r").resume(fleet="local", quiet=True)
    (line,) = (tmp_path / "r" / NOTES).read_text().splitlines()
    assert line.partition(",")[0] == "4 of 4 test images are also training images"


def test_a_run_that_is_stopped_after_an_error_is_stopped(tmp_path):
    failing = {"fleet": "local", "quiet": True, "callbacks": [Ending(OSError("no\nnet"))]}
    with pytest.raises(OSError, match="no\nnet"):
        raylt.run("fedavg", out=tmp_path, name="r", overrides=[*SETTINGS, "federation.rounds=3"], **failing)
    assert read_run(tmp_path / "r").state == "failed"
    with pytest.raises(KeyboardInterrupt):
        Run.open(tmp_path / "r").resume(fleet="local", quiet=True, callbacks=[Ending(KeyboardInterrupt())])
    assert read_run(tmp_path / "r").state == "stopped"
    assert (tmp_path / "r" / NOTES).read_text().splitlines()[-1] == "started again after step 1"


class FailsAtOne(FedAvg):
    name: ClassVar[str] = "fails_at_one"

    def train(self, client, message):
        if client.id == 1:
            raise ValueError("disk on fire")
        return super().train(client, message)


def test_why_a_client_failed_is_in_the_notes(tmp_path):
    settings = [*SETTINGS, "federation.quorum=0.5"]
    run = raylt.run(FailsAtOne(), out=tmp_path, name="r", fleet="local", quiet=True, overrides=settings)
    assert [report["lost"] for report in run.reports] == [[1], [1]]
    notes = (run.folder / NOTES).read_text().splitlines()
    lines = [line for line in notes if not line.startswith("raylt debug ")]
    assert (len(notes), len(lines)) == (3, 2)
    for round, line in enumerate(lines, 1):
        assert line.startswith(f"client 1, round {round}, train: ValueError: disk on fire (test_runner.py:")


@pytest.mark.usefixtures("stacks_on_any_processor")
@pytest.mark.parametrize(("method", "reason"), [("fedavg", None), ("scaffold", "method = scaffold is not stackable")])
def test_a_run_says_once_that_stacks_do_not_suit_it(tmp_path, method, reason):
    lines = []

    class Listener(raylt.Callback):
        def on_message(self, text, minor=False):
            lines.append(text)

    settings = [*SETTINGS, "local.stacked=auto", "local.batch=8"]
    run = raylt.run(
        method, out=tmp_path, name="r", fleet="local", quiet=True, overrides=settings, callbacks=[Listener()]
    )
    expected = "small clients" if reason is None else f"no client, because {reason}"
    assert [line for line in lines if "stacked" in line] == (
        [] if reason is None else [f"local.stacked=auto stacks {expected}"]
    )
    assert [line["stacked"] for line in provenance.read(run.folder)] == [expected]


@pytest.mark.usefixtures("stacks_on_any_processor")
@pytest.mark.parametrize("most", [1, 128])
def test_a_run_says_that_none_of_its_clients_is_small(tmp_path, monkeypatch, most):
    lines = []

    class Listener(raylt.Callback):
        def on_message(self, text, minor=False):
            lines.append(text)

    monkeypatch.setattr("raylt.runs.runner.MAX_STACKED_SAMPLES", most)
    settings = [*SETTINGS, "local.stacked=auto", "local.batch=8"]
    raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=settings, callbacks=[Listener()])
    is_noticed = "local.stacked=auto stacks no client, because each has more than 1 samples" in lines
    assert is_noticed == (most == 1)


def test_more_threads_than_the_cores_bear_are_refused_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr("raylt.runs.in_process.cores", lambda: [0, 3])
    settings = [*SETTINGS, "resources.cpus_per_client=32.5"]
    with refused("config.out-of-range", key="resources.cpus_per_client", value=32.5, cores=2, most=32):
        raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=settings)
    assert not (tmp_path / "r").exists()
    check_threads(raylt.Config.model_validate({"method": "fedavg", "resources": {"cpus_per_client": 32}}))


@pytest.mark.parametrize("fleet", ["local", "processes"])
def test_an_address_is_refused_where_no_cluster_is_used(tmp_path, fleet):
    with refused("config.conflict", ConfigError, key="address", value="auto"):
        raylt.run("fedavg", out=tmp_path, name="r", fleet=fleet, address="auto", quiet=True, overrides=SETTINGS)
    assert not (tmp_path / "r").exists()


def test_a_fleet_that_does_not_exist_is_refused(tmp_path):
    with refused("config.unknown-name", ConfigError, key="fleet", value="threads"):
        raylt.run("fedavg", out=tmp_path, name="r", fleet="threads", quiet=True, overrides=SETTINGS)


class Ends(raylt.Callback):
    def __init__(self):
        self.summaries = []

    def on_end(self, summary):
        self.summaries.append(summary)


def test_a_run_whose_summary_cannot_be_written_has_failed(tmp_path, monkeypatch):
    def write(folder, content):
        raise DiskFull(folder.path / "summary.json")

    monkeypatch.setattr(summary, "write", write)
    ends = Ends()
    with refused("disk.full", DiskFull):
        raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=SETTINGS, callbacks=[ends])
    assert ends.summaries == [None]


class Interrupts(raylt.Callback):
    def on_step(self, report):
        raise KeyboardInterrupt


def test_a_resumed_run_hashes_its_checkpoint_once_before_its_next_step(tmp_path, monkeypatch):
    arguments = {"out": tmp_path, "name": "r", "fleet": "local", "quiet": True, "overrides": SETTINGS}
    with pytest.raises(KeyboardInterrupt):
        raylt.run("fedavg", **arguments, callbacks=[Interrupts()])
    opened = []
    at = checkpoint.at
    monkeypatch.setattr(checkpoint, "at", lambda parent, step: opened.append(step) or at(parent, step))
    with pytest.raises(KeyboardInterrupt):
        raylt.resume(tmp_path / "r", fleet="local", quiet=True, callbacks=[Interrupts()])
    assert opened == [1]
