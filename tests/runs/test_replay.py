"""`raylt debug`: a call of a finished run is made again, with the reply that it had."""

import pytest
import torch
from tiny import Recorder, configure, make_experiment

from raylt import Run
from raylt.data.hashes import hash_data
from raylt.errors import CheckpointError, ConfigError
from raylt.methods.fedprox import FedProx
from raylt.runs.journal import Journal
from raylt.runs.replay import replay


@pytest.fixture
def recorded(tmp_path, tiny_task, monkeypatch):
    """Three rounds of fedprox: the run folder, and what was replied, by round and client."""
    threads = torch.get_num_threads()
    config = configure(federation={"rounds": 3}, method={"name": "fedprox", "mu": 0.1})
    folder = tmp_path / "r"
    with Journal.create(folder, config, tiny_task.split, hash_data(tiny_task)) as journal:
        experiment = make_experiment(config, tiny_task, folder, host=Recorder)
        while not experiment.done:
            journal.append(experiment.advance(journal.seal))
    monkeypatch.setattr("raylt.runs.run.build_task", lambda data, split: tiny_task)
    run = Run.open(folder)
    host = experiment.fleet._host
    yield run, {(round, id): tree for name, round, id, tree in host.replies if name == "train"}
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("round", "client"), [(1, 0), (3, 5)])
def test_the_reply_is_the_one_of_the_run(recorded, round, client):
    run, replies = recorded
    found = replay(run, round, client, None)
    assert found.function == "train"
    before = replies[round, client]["model"]
    assert all(torch.equal(value, before[name]) for name, value in found.reply.tree["model"].items())
    assert ("loss", "float") in {(path, kind) for path, kind, _ in found.entries()}


def test_how_clients_join_is_round_0(recorded, monkeypatch):
    def join(self, client, message):
        return client.reply()

    monkeypatch.setattr(FedProx, "join", join)      # the empty one is not sent
    assert replay(recorded[0], 0, 3, None).function == "join"


def test_a_round_whose_checkpoint_is_gone_is_refused_with_those_that_are_there(recorded):
    with pytest.raises(CheckpointError, match=(
            r"the checkpoint after round 1 is not kept; rounds that can be replayed: 1, 3, 4; output.keep=3")):
        replay(recorded[0], 2, 0, None)


def test_a_call_that_was_not_made_is_named(recorded):
    with pytest.raises(ConfigError, match="--client 4: not asked in round 3"):          # it holds no samples
        replay(recorded[0], 3, 4, None)
    with pytest.raises(ConfigError, match="not called with prototypes in round 3"):
        replay(recorded[0], 3, 0, "prototypes")


def test_what_it_raises_is_raised_here(recorded, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError
    monkeypatch.setattr("raylt.methods.fedprox.FedProx.objective", fail)
    with pytest.raises(ZeroDivisionError):
        replay(recorded[0], 3, 0, None)
