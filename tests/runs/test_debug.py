"""`raylt debug` repeats a call of a finished run and gets the same reply."""

import pytest
import torch
from refusals import refused
from small_runs import make_run
from tiny import Recorder, configure, make_experiment

from raylt import Run
from raylt.data.fingerprint import hash_data
from raylt.errors import CheckpointError, ConfigError, TooFewReplies
from raylt.methods.fedprox import FedProx
from raylt.runs.debug import _describe, replay
from raylt.runs.folder import provenance
from raylt.runs.folder.notes import NOTES
from raylt.runs.folder.writer import Journal


@pytest.fixture
def recorded(request, tmp_path, tiny_task, monkeypatch):
    """Do three rounds of a method, by default fedprox; return the run and the replies by round and client."""
    threads = torch.get_num_threads()
    config = configure(federation={"rounds": 3}, method=getattr(request, "param", {"name": "fedprox", "mu": 0.1}))
    folder = tmp_path / "r"
    with Journal.create(folder, config, tiny_task.split, hash_data(tiny_task)) as journal:
        experiment = make_experiment(config, tiny_task, folder, host=Recorder)
        provenance.note(folder, "local", 0, config, experiment.describe())
        while not experiment.done:
            journal.append(experiment.advance(journal.seal))
    monkeypatch.setattr("raylt.runs.run.build_task", lambda data, split, start: tiny_task)
    run = Run.open(folder)
    host = experiment.fleet._host
    yield run, {(round, id): tree for name, round, id, tree in host.replies if name == "train"}
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("round", "client"), [(1, 0), (3, 5), (3, "5")])
def test_the_reply_is_the_one_of_the_run(recorded, round, client):
    run, replies = recorded
    call = replay(run, round, client, None)
    assert call.function == "train"
    before = replies[round, int(client)]["model"]
    assert all(torch.equal(value, before[name]) for name, value in call.reply.tree["model"].items())
    assert ("loss", "float") in {(path, kind) for path, kind, _ in call.entries()}


@pytest.mark.parametrize("recorded", [{"name": "fedper"}], indirect=True)
def test_a_call_starts_from_what_the_client_keeps(recorded):
    run, replies = recorded
    before = replies[3, 5]["model"]
    after = replay(run, 3, 5, None).reply.tree["model"]
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


def test_how_clients_join_is_round_0(recorded, monkeypatch):
    def join(self, client, message):
        return client.reply()

    monkeypatch.setattr(FedProx, "join", join)  # the default `join` is empty and is not sent to clients
    assert replay(recorded[0], 0, 3, None).function == "join"


def test_a_round_whose_checkpoint_is_gone_is_refused_with_those_that_are_there(recorded):
    with refused("checkpoint.not-kept", CheckpointError, step=1, rounds=[1, 3]):
        replay(recorded[0], 2, 0, None)


@pytest.mark.parametrize("round", [4, 9])
def test_a_round_that_the_run_does_not_have_is_refused_with_those_that_it_has(recorded, round):
    with refused("config.out-of-range", ConfigError, key="--round", value=round, rounds=[1, 3]):
        replay(recorded[0], round, 0, None)


def test_a_client_that_does_not_exist_is_named_with_those_that_do(recorded):
    with refused("client.unknown", ConfigError, client="linz") as caught:
        replay(recorded[0], 3, "linz", None)
    assert "0, 1, 2, 3, 5" in str(caught.value)


def test_a_call_that_was_not_made_is_named(recorded):
    with refused("client.not-asked", ConfigError, client=4, round=3) as caught:  # the client holds no samples
        replay(recorded[0], 3, 4, None)
    assert str(caught.value).endswith("Choose one of 0, 1, 2, 3, 5.")
    with refused("client.not-asked", ConfigError, key="--function", value="trian", client=0, round=3) as caught:
        replay(recorded[0], 3, 0, "trian")
    assert str(caught.value).endswith("Did you mean train? Choose one of train.")


def test_what_it_raises_is_raised_here(recorded, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("raylt.methods.fedprox.FedProx.objective", fail)
    with pytest.raises(ZeroDivisionError):
        replay(recorded[0], 3, 0, None)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "every", "round"), [(1, 1, 1), (2, 1, 2), (2, 2, 3)])
def test_a_run_notes_once_the_command_that_repeats_a_failed_call(tmp_path, monkeypatch, first, every, round):
    objective = FedProx.objective

    def fail(self, client, message):
        if client.round >= first and client.id < 2:
            raise ZeroDivisionError
        return objective(self, client, message)

    monkeypatch.setattr(FedProx, "objective", fail)
    settings = "federation.rounds=4", "federation.quorum=0.3", f"output.checkpoint_every={every}", "output.keep=9"
    run = make_run(tmp_path, "a run", "method=fedprox", *settings)
    (line,) = [line for line in (run.folder / NOTES).read_text().splitlines() if "raylt debug" in line]
    command = f"raylt debug '{run.folder}' --round {round} --client 0 --function train repeats"
    assert line.startswith(command)
    with pytest.raises(ZeroDivisionError):
        replay(run, round, 0, "train")


def test_the_command_that_repeats_a_call_loads_the_plugin(tmp_path, monkeypatch):
    monkeypatch.setattr("raylt.own_code.commands.plugin_files", lambda: ["/own.py"])
    monkeypatch.setattr(FedProx, "objective", lambda *_: 1 / 0)
    with pytest.raises(TooFewReplies):
        make_run(tmp_path, "run", "method=fedprox")
    assert f"raylt debug --plugin /own.py {tmp_path / 'run'} --round 1" in (tmp_path / "run" / NOTES).read_text()


def test_a_leaf_of_a_reply_is_described_by_its_type_and_range():
    assert _describe(torch.tensor([1.0, 2.0, 6.0])) == ("float32 [3]", "1 .. 6")
    assert _describe(torch.tensor([[1, -3]])) == ("int64 [1, 2]", "-3 .. 1")
    assert _describe(torch.tensor([1.0, torch.inf]))[1].endswith("1 not finite")
    assert _describe(torch.zeros(0, 4)) == ("float32 [0, 4]", "empty")
    assert _describe(0.5) == ("float", "0.5")
