"""Evaluation of clients' own models after one more round with every client."""

from dataclasses import replace

import pytest
from refusals import refused
from small_runs import make_tiny_run
from tiny import configure, make_experiment, make_setup, private_states

from raylt.core.fleet.local_fleet import LocalFleet
from raylt.errors import ConfigError
from raylt.methods import METHODS
from raylt.methods.apfl import APFL
from raylt.methods.ditto import Ditto
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedper import FedPer
from raylt.methods.fedrep import FedRep
from raylt.methods.mupfl.method import MuPFL
from raylt.methods.pfedme import PFedMe
from raylt.studies.analysis.measures import measure_of


class Recorder(LocalFleet):
    """A fleet that keeps the round and the clients of each call of `train`."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = []

    def _answers(self, fn, ids, *rest):
        if fn.__name__ == "train":
            self.calls.append((self.round, len(ids)))
        return super()._answers(fn, ids, *rest)


def run(task, folder, method, rounds=2, **settings):
    """Take all steps of a run, and return the experiment and its last report."""
    config = configure(federation={"rounds": rounds, **settings.pop("federation", {})}, **settings)
    experiment = make_experiment(config, task, folder, method, Recorder)
    while not experiment.done:
        report = experiment.step()
    return experiment, report


@pytest.mark.slow
@pytest.mark.parametrize("method", [Ditto(), PFedMe(), MuPFL(judged="post_local", last_update=False)])
def test_fresh_models_are_those_after_a_further_round(tiny_task, tmp_path, method):
    # the models of these methods do not depend on the global model with which they are evaluated
    _, fresh = run(tiny_task, tmp_path / "a", method, 2, evaluation={"fresh": True})
    _, further = run(tiny_task, tmp_path / "b", method, 3)
    trained = [len(shard) > 1 for shard in tiny_task.shards]  # a client with one sample has the global model
    for kind, values in fresh.others["fresh"]["by_client"].items():
        pairs = zip(values, further.by_client[kind], strict=True)
        assert all(a == b for (a, b), steps in zip(pairs, trained, strict=True) if steps)
    assert fresh.others["fresh"]["by_client"] != fresh.by_client


@pytest.mark.slow
@pytest.mark.parametrize("method", [Ditto(), APFL(), FedPer()])
def test_the_further_round_asks_every_client_and_is_undone(tiny_task, tmp_path, method):
    federation, task = {"participation": 0.5}, replace(tiny_task, new_clients=(5,))
    plain, expected = run(task, tmp_path / "a", method, federation=federation)
    made, report = run(task, tmp_path / "b", method, federation=federation, evaluation={"fresh": True})
    assert made.fleet.calls == [(1, 3), (2, 3), (3, len(made.fleet.ids))]
    assert report.by_client == expected.by_client
    assert report.traffic == expected.traffic
    assert report.figures == expected.figures
    assert report.participants == expected.participants
    assert str(private_states(made)) == str(private_states(plain))
    assert made.fleet.changed == plain.fleet.changed
    for name, value in plain.server.model.state_dict().items():
        assert value.equal(made.server.model.state_dict()[name])
    assert str(made.server.state) == str(plain.server.state)
    assert report.others["fresh"]["by_client"] != report.by_client
    assert expected.others == {}


def test_no_round_follows_a_last_phase_that_trains_every_client(tiny_task, tmp_path):
    _, report = run(tiny_task, tmp_path, FedRep(), evaluation={"fresh": True})
    figures = report.others["fresh"]
    assert figures["by_client"] == report.by_client
    assert figures["clients"] == report.clients


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if kind.personal])
def test_every_personal_method_has_fresh_models_and_is_not_changed_by_them(no_guests, tmp_path, method):
    settings = [f"model={'resnet8' if method == 'fedbn' else 'small'}", "federation.participation=0.5"]
    plain = make_tiny_run(tmp_path, method, *settings, name="plain")
    fresh = make_tiny_run(tmp_path, method, *settings, "evaluation.fresh=true", name="fresh")
    others = dict(fresh.summary["others"])
    assert others.pop("fresh")["clients"]["matched"]["mean"] is not None
    assert others == plain.summary["others"]
    for key in ("accuracy", "clients", "figures", "bytes", "model_sha256"):
        assert fresh.summary[key] == plain.summary[key]


class Breaking(Ditto):
    """Ditto whose clients fail in the third round; only the second one with `one`."""

    one: bool = False

    def train(self, client, message):
        if client.round == 3 and (not self.one or client.id == 1):
            raise RuntimeError("the machine goes down")
        return super().train(client, message)


@pytest.mark.slow
def test_a_failure_of_the_further_training_leaves_the_result_of_the_run(tiny_task, tmp_path):
    federation = {"retries": 0}
    plain, expected = run(tiny_task, tmp_path / "a", Ditto(), federation=federation)
    with pytest.warns(RuntimeWarning, match="after one more training were not evaluated"):
        made, report = run(tiny_task, tmp_path / "b", Breaking(), federation=federation, evaluation={"fresh": True})
    assert report.others == {}
    assert report.by_client == expected.by_client
    assert made.server.round == plain.server.round == 2


def test_a_client_that_fails_in_the_further_training_is_not_lost_in_the_last_round(tiny_task, tmp_path):
    settings = {"federation": {"retries": 0, "quorum": 0.5}, "evaluation": {"fresh": True}}
    with pytest.warns(RuntimeWarning, match="the machine goes down"):
        _, report = run(tiny_task, tmp_path, Breaking(one=True), **settings)
    assert report.others["fresh"]["clients"]
    assert (report.lost, report.retried) == ([], [])


def test_a_shared_model_has_no_fresh_version(tiny_task, tmp_path):
    _, report = run(tiny_task, tmp_path, FedAvg(), evaluation={"fresh": True})
    assert report.others is None


def test_a_shared_model_under_statistics_of_each_client_has_a_fresh_version(tiny_task, tmp_path):
    settings = {"federation": {"batchnorm": "local"}, "evaluation": {"fresh": True}}
    _, report = run(tiny_task, tmp_path, FedAvg(), **settings)
    assert report.others["fresh"]["by_client"] != report.by_client


def test_studies_compare_fresh_models(tiny_task, tmp_path):
    _, report = run(tiny_task, tmp_path, Ditto(), evaluation={"fresh": True})
    summary = {"others": report.others}
    assert measure_of("matched@fresh").read(summary) == report.others["fresh"]["clients"]["matched"]["mean"]


def test_a_cosine_leaves_no_rate_for_the_further_round(tiny_task):
    settings = {"evaluation": {"fresh": True}, "local": {"schedule": "cosine"}, "federation": {"rounds": 3}}
    setup = make_setup(configure(**settings), Ditto())
    with refused("config.conflict", ConfigError, key="local.schedule", excludes="evaluation.fresh"):
        setup.check(tiny_task.spec, setup.new_model(tiny_task.spec))
    shared = make_setup(configure(**settings), FedAvg())
    shared.check(tiny_task.spec, shared.new_model(tiny_task.spec))
