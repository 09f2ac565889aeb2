"""Clients that join after training: which they are, what methods have them do, and what is reported of them."""

from dataclasses import replace
from typing import ClassVar

import naive
import numpy as np
import pytest
import torch
from refusals import refused
from rounds import ask_only, run
from small_runs import QUICK, make_run
from tiny import configure, fingerprint, make_experiment, open_client, private_states
from torch.nn import functional as F

from raylt import metrics, tree
from raylt.config import DataConfig, load, settled
from raylt.contract.hosts import NewHosts
from raylt.core.evaluation.client_models import judged_entries, judged_model
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.training.features import features
from raylt.core.training.sgd import has_statistics, sgd, take_statistics
from raylt.data.images.cache import load as in_memory
from raylt.data.splits.split import IndexLists
from raylt.data.task import build_task
from raylt.errors import CheckpointError, ConfigError, DataError
from raylt.methods import METHODS
from raylt.methods.balancefl import BalanceFL
from raylt.methods.bpfed.method import BPFed
from raylt.methods.ditto import Ditto
from raylt.methods.fedafa import FedAFA
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedbabu import FedBABU
from raylt.methods.feddyn import FedDyn
from raylt.methods.fedetf import FedETF
from raylt.methods.fedntd import FedNTD
from raylt.methods.fedper import FedPer
from raylt.methods.fedrep import FedRep
from raylt.methods.fedrod import FedRoD
from raylt.methods.flea import FLea
from raylt.methods.moon import MOON
from raylt.methods.mupfl.method import MuPFL
from raylt.methods.qfedavg import QFedAvg
from raylt.ops.moments import unpack
from raylt.runs.folder.identity import check_config
from raylt.runs.folder.summary import table_of
from raylt.store import Folder
from raylt.studies.analysis.measures import measure_of

CONFIG = DataConfig(clients=6, new_clients=2)


class Finishing(FedAvg):
    """FedAvg with a phase after the last round."""

    name: ClassVar[str] = "finishing"
    finishes: ClassVar[bool] = True

    def finish(self, server, fleet):
        server.log(note="finished")


def late(task, *ids: int):
    return replace(task, new_clients=ids)


def joined(experiment, method, id: int):
    """Return a client that joins after a run's last round, by the method's own function."""
    client = open_client(experiment.task, method, id, experiment.config)
    client.begin("settle", experiment.fleet.round)
    torch.manual_seed(0)
    method.settle(client, tree.snapshot(method.message(experiment.server)))
    return client


def test_so_many_clients_with_samples_are_drawn_by_the_data_seed_and_hold_what_they_held():
    task, plain = build_task(CONFIG), build_task(CONFIG.model_copy(update={"new_clients": 0}))
    assert len(task.new_clients) == 2
    assert all(task.sizes[id] for id in task.new_clients)
    assert build_task(CONFIG).new_clients == task.new_clients
    drawn = {build_task(CONFIG.model_copy(update={"seed": seed})).new_clients for seed in range(4)}
    assert len(drawn) > 1
    assert plain.new_clients == ()
    assert task.split.sha256 == plain.split.sha256
    for ours, new_ids in zip(task.shards, plain.shards, strict=True):
        assert np.array_equal(in_memory(ours.x), in_memory(new_ids.x))


def test_somebody_must_be_left_to_train():
    with refused("data.too-few", DataError, key="data.new_clients", value=6):
        build_task(CONFIG.model_copy(update={"new_clients": 6}))


def test_what_the_server_holds_itself_is_not_theirs():
    task = build_task(CONFIG.model_copy(update={"auxiliary": 140}))
    new_ids = np.concatenate([task.shards[id].ids for id in task.new_clients])
    assert not np.isin(task.auxiliary.ids, new_ids).any()


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_nobody_asks_them_before_and_nothing_of_them_is_kept(tiny_task, tmp_path, participation):
    config = configure(federation={"participation": participation})
    experiment = make_experiment(config, late(tiny_task, 0, 2), tmp_path, Ditto())
    assert experiment.fleet.ids == [1, 3, 5]
    assert experiment.fleet.new_clients == [0, 2]
    reports = [experiment.step(), experiment.step()]
    assert {len(report.participants) for report in reports} == {3 if participation == 1 else 2}
    assert private_states(experiment).keys() <= {1, 3, 5}
    assert reports[0].figures.keys().isdisjoint({"new_clients"})
    assert reports[1].figures["new_clients"]["count"] == 2
    assert [value is None for value in reports[1].by_client["matched"]] == [True, False, True, False, True, False]
    assert reports[1].traffic.keys() == {"train"}


def test_they_are_judged_once_after_the_phase_that_follows_the_last_round(tiny_task, tmp_path):
    experiment = make_experiment(configure(), late(tiny_task, 0, 2), tmp_path, Finishing())
    reports = [experiment.step() for _ in range(3)]
    assert ["new_clients" in report.figures for report in reports] == [False, False, True]


def test_share_of_the_clients_is_of_those_that_train(tiny_task, tmp_path):
    experiment = make_experiment(configure(federation={"participation": 0.5}), late(tiny_task, 0, 2, 3), tmp_path)
    assert len(experiment.step().participants) == 2  # ceil(0.5 * (6 - 3)); it would be 3 if all 6 clients counted


def test_a_secure_round_counts_those_that_train(tiny_task, tmp_path):
    later = configure(data={"clients": 6, "new_clients": 4}, federation={"secure": True, "participation": 0.5})
    with refused("config.conflict", key="federation.secure", excludes="federation.participation"):
        make_experiment(later, tiny_task, tmp_path)


def test_figures_are_those_of_the_models_that_they_settled_with(tiny_task, tmp_path):
    method, task = FedPer(), late(tiny_task, 0, 1, 2)
    experiment = run(task, tmp_path, method, rounds=2)
    values = {"owned": [], "matched": [], "global": []}
    for id in task.new_clients:
        client = joined(experiment, method, id)
        model = judged_model(method, client, judged_entries(experiment.server, method))
        matrix = client.test.counts(model, method.predict, 500).all
        counts = torch.from_numpy(task.client_counts[id])
        values["owned"].append(metrics.owned_accuracy(matrix, counts).item())
        values["matched"].append(metrics.matched_accuracy(matrix, counts).item())
        values["global"].append(metrics.accuracy(matrix))
    figures = experiment.server.figures["new_clients"]
    assert figures["count"] == 3
    for kind, each in values.items():
        assert figures[kind] == pytest.approx(sum(each) / 3), kind
    assert figures["worst_decile"] == pytest.approx(min(values["matched"]))


def test_one_that_cannot_settle_is_not_judged(tiny_task, tmp_path):
    class Picky(FedPer):
        name: ClassVar[str] = "picky"

        def settle(self, client, message):
            assert client.id != 0
            super().settle(client, message)

    method, task = Picky(), late(tiny_task, 0, 1)
    experiment = run(task, tmp_path, method, rounds=1, federation={"retries": 0, "quorum": 0.5})
    client = joined(experiment, method, 1)
    model = judged_model(method, client, judged_entries(experiment.server, method))
    matrix = client.test.counts(model, method.predict, 500).all
    expected = metrics.matched_accuracy(matrix, torch.from_numpy(task.client_counts[1])).item()
    assert experiment.server.figures["new_clients"]["matched"] == pytest.approx(expected)


def test_of_a_global_method_they_use_the_global_model(tiny_task, tmp_path):
    task = late(tiny_task, 1, 5)
    experiment = run(task, tmp_path, FedAvg(), rounds=2)
    matrix = experiment.evaluator._judge_global(last=False)[0].all
    expected = [metrics.matched_accuracy(matrix, torch.from_numpy(task.client_counts[id])).item() for id in (1, 5)]
    assert experiment.server.figures["new_clients"]["matched"] == pytest.approx(sum(expected) / 2)


def test_whoever_runs_them_figures_are_the_same(tiny_task, tmp_path):
    task, ends = late(tiny_task, 0, 3), []
    for host in (ClientHost, NewHosts):
        experiment = make_experiment(configure(), task, tmp_path, Ditto(), LocalFleet, host)
        while not experiment.done:
            experiment.step()
        ends.append(experiment.server.figures["new_clients"])
    assert ends[0] == ends[1]


def test_their_own_test_images_count_for_them_alone(tiny_task, tmp_path):
    """All clients share the model: client 0 joins later, client 1 trains, and the others have no test images."""
    own = [np.arange(0, 20, 2), np.arange(1, 20, 2), *(np.arange(0) for _ in range(4))]
    task = replace(late(tiny_task, 0), own_tests=IndexLists.of(own))
    experiment = make_experiment(configure(federation={"rounds": 1}), task, tmp_path, FedAvg())
    report = experiment.step()
    x, y = (torch.from_numpy(in_memory(part)) for part in (task.test.x, task.test.y))
    with torch.no_grad():
        right = experiment.server.model.eval()(naive.pixels(x)).argmax(1) == y
    joined_late, trained = (right[rows].double().mean().item() for rows in own[:2])
    assert joined_late != trained
    assert report.by_client["local"] == [None, pytest.approx(trained), None, None, None, None]
    assert experiment.server.figures["new_clients"]["local"] == pytest.approx(joined_late)


# what methods have new clients do


@pytest.mark.parametrize(
    ("method", "part"),
    [(FedPer(), "classifier."), (FedRoD(), "personal.")],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_is_private_is_trained_as_long_as_in_a_round_under_the_final_model(tiny_task, tmp_path, method, part):
    experiment = run(late(tiny_task, 0), tmp_path, method, rounds=2)
    client = joined(experiment, method, 0)
    other = open_client(experiment.task, method, 0, experiment.config)
    other.begin("settle", 2)
    other.receive(method.shared(experiment.server.model))
    sgd(other, method.objective(other, {}), [p for name, p in other.model.named_parameters() if name.startswith(part)])
    for name, value in other.model.named_parameters():
        assert torch.equal(client.model.state_dict()[name], value), name
        if not name.startswith(part):
            assert torch.equal(value, experiment.server.model.state_dict()[name]), name


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.personal])
def test_a_new_client_of_every_personal_method_uses_a_model_that_it_trained_on_its_samples(tiny_task, tmp_path, name):
    method = METHODS[name](**QUICK.get(name, {}))
    experiment = run(late(tiny_task, 0, 1), tmp_path, method, rounds=1)
    x = open_client(tiny_task, method, 0).samples.batch(torch.arange(10)).x
    unsettled = open_client(tiny_task, method, 0, experiment.config)
    unsettled.receive(method.shared(experiment.server.model))
    logits = []
    for client in (unsettled, joined(experiment, method, 0), joined(experiment, method, 1)):
        with torch.no_grad():
            logits.append(method.predict(method.client_model(client).eval(), x))
    # the second client has no sample of a class that the first client has
    assert not torch.allclose(logits[0], logits[1], atol=1e-4)
    assert not torch.allclose(logits[1], logits[2], atol=1e-4)


def test_fedreps_classifier_gets_the_first_half_of_a_round(tiny_task, tmp_path, monkeypatch):
    seen = []
    experiment = run(late(tiny_task, 0), tmp_path, FedRep(head_epochs=3), rounds=1)
    monkeypatch.setattr(
        "raylt.methods.fedrep.sgd",
        lambda client, objective, params, epochs: seen.append(([p.shape for p in params], epochs)),
    )
    joined(experiment, experiment.method, 0)
    assert seen == [([p.shape for p in experiment.server.model.classifier.parameters()], 3)]


def test_dittos_personal_model_starts_from_the_final_model_and_is_held_near_it(tiny_task, tmp_path):
    """Compare with one epoch of v <- v - lr (gradient + lambda (v - w)) by hand."""
    local = {"epochs": 1, "lr": 0.1, "momentum": 0.0}
    experiment = run(late(tiny_task, 0), tmp_path, Ditto(lam=0.5), rounds=2, local=local)
    w = experiment.server.model.state_dict()
    client = open_client(tiny_task, Ditto(), 0, experiment.config)
    client.begin("settle", 2)
    client.receive(w)
    client.model.train()
    params = dict(client.model.named_parameters())
    for batch in client.batches(1, 8):
        gradients = torch.autograd.grad(F.cross_entropy(client.model(batch.x), batch.y), list(params.values()))
        with torch.no_grad():
            for (name, p), g in zip(params.items(), gradients, strict=True):
                p -= 0.1 * (g + 0.5 * (p - w[name]))
    own = joined(experiment, experiment.method, 0).state["personal"]
    for name, value in client.model.state_dict().items():
        assert torch.allclose(own[name].double(), value.double(), atol=1e-5), name


def test_fedafas_tune_as_everybody_did(tiny_task, tmp_path):
    method = FedAFA(steps=2, accept=0.2, tune_lr=0.05)
    experiment = run(late(tiny_task, 0), tmp_path, method, rounds=1)
    client = joined(experiment, method, 0)
    other = open_client(tiny_task, method, 0, experiment.config)
    other.begin("settle", 2)
    method.personalise(other, method.message(experiment.server))
    assert fingerprint(dict(client.state)) == fingerprint(dict(other.state))


@pytest.mark.parametrize("fields", [{}, {"fa": False}, {"crt": False, "lws": False}], ids=str)
def test_bpfeds_have_a_classifier_of_both_stages(tiny_task, tmp_path, fields):
    method = BPFed(retrain_epochs=2, **fields)
    experiment = run(late(tiny_task, 0), tmp_path, method, rounds=1)
    client = joined(experiment, method, 0)
    own, w = client.model.state_dict(), experiment.server.model.state_dict()
    assert not torch.equal(own["classifier.weight"], w["classifier.weight"])
    assert all(
        torch.equal(own[name], w[name])
        for name in dict(experiment.server.model.named_parameters())
        if name.startswith("encoder.")
    )
    assert "z" not in client.state
    plain = joined(experiment, BPFed(crt=False, lws=False), 0).model.state_dict()
    same = torch.equal(own["classifier.weight"], plain["classifier.weight"])
    assert same == (not method.finishes)  # the second stage changes the result of the first


def test_bpfeds_start_from_classifiers_of_their_own(tiny_task, tmp_path):
    method = BPFed(crt=False, lws=False)
    experiment = run(late(tiny_task, 3), tmp_path, method, rounds=1)
    client = joined(experiment, method, 3)  # its one sample makes no batch, so it trains nothing
    torch.manual_seed(0)
    assert torch.equal(client.model.classifier.weight, torch.nn.Linear(64, 4).weight)


@pytest.mark.parametrize("weight", ["n", "n-1"])
def test_bpfeds_perturb_with_their_own_covariance(tiny_task, tmp_path, monkeypatch, weight):
    """Client 0 has 12, 6, 4 and 2 samples: 24 weights, or 20."""
    method, seen = BPFed(retrain_epochs=1, cov_weight=weight), []
    experiment = run(late(tiny_task, 0), tmp_path, method, rounds=1)
    monkeypatch.setattr(BPFed, "retrain", lambda self, client, message: seen.append((message, client.state["z"])))
    joined(experiment, method, 0)
    (message, z), y = seen[0], open_client(tiny_task, method, 0).samples.y
    each = [torch.cov(z[y == c].double().T) for c in range(4)]
    shares = [12, 6, 4, 2] if weight == "n" else [11, 5, 3, 1]
    expected = sum(n * cov for n, cov in zip(shares, each, strict=True)) / sum(shares)
    assert torch.allclose(unpack(message["covariance"], 64).double(), expected, atol=1e-5)


def test_mupfls_train_once(tiny_task, tmp_path):
    method = MuPFL(m=5, tau=2, matching_steps=3)
    experiment = run(late(tiny_task, 0), tmp_path, method, rounds=1)
    client = joined(experiment, method, 0)
    assert "own" in client.state
    assert "cluster" not in client.state


@pytest.mark.parametrize("method", [FedAvg(), FedDyn(alpha=0.2)], ids=lambda method: method.name)
def test_running_statistics_that_stay_at_clients_are_those_of_the_evaluated_model(
    tiny_task, tmp_path, monkeypatch, method
):
    """FedDyn sends clients a model that is ahead of the evaluated one."""
    ask_only(monkeypatch, method, [1])
    experiment = run(late(tiny_task, 0), tmp_path, method, rounds=2, federation={"batchnorm": "local"})
    client = joined(experiment, method, 0)
    model = judged_model(method, client, judged_entries(experiment.server, method))
    entries = {name: value.clone() for name, value in model.state_dict().items()}
    matrix = client.test.counts(model, method.predict, 500).all
    other = open_client(tiny_task, method, 0, config=experiment.config)
    other.receive({name: value.clone() for name, value in experiment.server.model.named_parameters()})
    take_statistics(other)
    for name, value in other.model.state_dict().items():
        assert torch.equal(entries[name], value), name
    counters = {entries[name].item() for name in other.model.local_buffers if name.endswith("num_batches_tracked")}
    assert counters == {2 * 3}  # two epochs of 24 samples in batches of 8
    figures = experiment.server.figures["new_clients"]
    matched = metrics.matched_accuracy(matrix, torch.from_numpy(tiny_task.client_counts[0])).item()
    assert (figures["count"], figures["matched"]) == (1, pytest.approx(matched))


@pytest.mark.parametrize(
    "method",
    [MOON(), FedNTD(), FLea(layer="stage1"), BalanceFL(fa=False), QFedAvg()],
    ids=lambda method: method.name,
)
def test_a_received_model_that_is_evaluated_at_a_client_has_statistics_of_the_client(tiny_task, method):
    client = open_client(tiny_task, method, 2, config=configure(federation={"batchnorm": "local"}))
    client.begin("train", 1)
    if isinstance(method, QFedAvg):
        method.risk(client)
    else:
        method.objective(client, {})
    entries = client.model.state_dict()
    counters = {entries[name].item() for name in client.model.local_buffers if name.endswith("num_batches_tracked")}
    assert min(counters) > 0


@pytest.mark.parametrize(
    "method",
    [FedETF(turns=0), FedRep(head_epochs=0), FedAFA(cut="stage1", tune_epochs=0), FedBABU(tune_epochs=0)],
    ids=lambda method: method.name,
)
def test_they_are_taken_where_settling_trains_nothing(tiny_task, tmp_path, method):
    experiment = run(late(tiny_task, 0), tmp_path, method, rounds=1, federation={"batchnorm": "local"})
    client = joined(experiment, method, 0)
    judged = method.client_model(client).state_dict()
    counters = {judged[name].item() for name in client.model.local_buffers if name.endswith("num_batches_tracked")}
    assert min(counters) == 2 * 3


def test_features_of_a_client_that_never_trained_are_under_statistics_of_its_own(tiny_task):
    local = open_client(tiny_task, FedAvg(), 1, config=configure(federation={"batchnorm": "local"}))
    features(local)
    entries = local.model.state_dict()
    assert {entries[name].item() for name in local.model.local_buffers if name.endswith("tracked")} == {2 * 2}
    once = {name: entries[name].clone() for name in local.model.local_buffers}
    features(local)  # a second call does not update them again
    assert all(torch.equal(local.model.state_dict()[name], value) for name, value in once.items())
    average = open_client(tiny_task, FedAvg(), 1)
    features(average)
    assert average.model.state_dict()["encoder.stage1.1.num_batches_tracked"] == 0


def test_statistics_are_there_if_a_layer_has_seen_a_batch():
    """A layer that the network does not use never sees one."""
    unused, used = (torch.tensor(count) for count in (0, 3))
    entries = {"a.running_mean": torch.ones(1), "a.num_batches_tracked": unused, "b.num_batches_tracked": used}
    assert has_statistics(entries, frozenset(entries))
    assert not has_statistics(entries, frozenset({"a.running_mean", "a.num_batches_tracked"}))


@pytest.mark.parametrize("method", [FedAvg(), FedPer()], ids=lambda method: method.name)
def test_clients_that_are_never_asked_are_judged_and_exported_under_statistics_of_their_own(
    tiny_task, tmp_path, monkeypatch, method
):
    ask_only(monkeypatch, method, [1])
    experiment = run(tiny_task, tmp_path, method, rounds=1, federation={"batchnorm": "local"})
    entries, seen = judged_entries(experiment.server, method), []
    for name in ("judge", "keep"):  # both calls see the same model
        client = open_client(tiny_task, method, 0, config=experiment.config)
        client.begin(name, 1)
        model = judged_model(method, client, entries).state_dict()
        seen.append({name: model[name].clone() for name in client.model.local_buffers})
    assert {value.item() for name, value in seen[0].items() if name.endswith("tracked")} == {2 * 3}
    other = open_client(tiny_task, method, 0, config=experiment.config)
    other.receive(entries)
    take_statistics(other)
    for name, value in seen[0].items():
        assert torch.equal(value, seen[1][name])
        assert torch.equal(value, other.model.state_dict()[name])


# what is reported of new clients


def test_they_stand_apart_in_summary_table_frame_and_measures(tmp_path):
    made = make_run(tmp_path, "late", "method=ditto", "data.new_clients=1")
    new = made.summary["figures"]["new_clients"]
    assert new["count"] == 1
    assert measure_of("new_matched").read(made.summary) == new["matched"]
    frame = made.metrics
    assert frame[(frame.metric == "new_clients") & (frame.group == "owned")].value.tolist() == [new["owned"]]
    assert set(made.clients.client) == {0, 1, 2} - set(made.task.new_clients)
    names, values = table_of(made.summary).columns
    rows = dict(zip(names.cells, values.cells, strict=True))
    assert rows["new clients, mean (own class mix)"] == f"{100 * new['matched']:.2f} % (1)"
    with pytest.raises(ConfigError, match="joins after training"):
        made.client_model(made.task.new_clients[0])


def test_a_run_that_was_made_before_there_was_a_setting_is_read_with_its_default(tmp_path):
    """The recorded config lacks data.new_clients, as an older version of raylt wrote it."""
    config = load(None, ["method=fedavg", "data.clients=3"])
    recorded = settled(config)
    del recorded["data"]["new_clients"]
    with Folder.open(tmp_path) as folder:
        check_config({"config": recorded}, config, folder)
        with refused("run.changed", CheckpointError, keys=["data.new_clients"]):
            check_config(
                {"config": recorded}, load(None, ["method=fedavg", "data.clients=3", "data.new_clients=2"]), folder
            )
