import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from sklearn.metrics import adjusted_rand_score
from tiny import Recorder, configure, fingerprint, make_experiment, private_states
from torch import nn
from torch.nn import functional as F

from raylt import metrics, tree
from raylt.core import checkpoint
from raylt.core.client import Client
from raylt.core.features import features
from raylt.core.host import Host
from raylt.core.optimisers import SGD
from raylt.data.task import Shard, build_task
from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg
from raylt.methods.mupfl.bavd import BAVD, layers_of
from raylt.methods.mupfl.clustering import cosines
from raylt.methods.mupfl.method import KEPT_ROUNDS, MuPFL
from raylt.models.split import part
from raylt.ops.matching import class_gradients, match_features, mean_gradients
from raylt.seeds import seed_for

OFF = {"bavd": False, "acmu": False, "pkcf": False}
QUICK = {"m": 5, "tau": 2, "matching_steps": 3}


def open_client(task, id=0, method=None, **parts) -> Client:
    return tiny.open_client(task, method or MuPFL(**QUICK), id, configure(**parts))


def run(task, folder, method=None, until=None, host=Recorder, **parts):
    experiment = make_experiment(configure(**parts), task, folder, method or MuPFL(**QUICK), host=host)
    reports = []
    while not experiment.done and len(reports) != until:
        reports.append(experiment.step())
    return experiment, reports


def replies_of(experiment, function="train", round=1):
    return {id: reply for name, r, id, reply in experiment.fleet._host.replies if (name, r) == (function, round)}


def average(models, weights) -> dict[str, torch.Tensor]:
    return {name: sum(w * model[name].double() for w, model in zip(weights, models, strict=True)) / sum(weights)
            for name in models[0]}


def initial(task, method=None, **parts) -> dict[str, torch.Tensor]:
    return tree.snapshot((method or MuPFL(**QUICK)).new_model(task.facts, configure(**parts)).state_dict())


@pytest.fixture(scope="module")
def finished(tiny_task, tmp_path_factory):
    return run(tiny_task, tmp_path_factory.mktemp("mupfl"))


# reductions

@pytest.mark.parametrize("fields", [{}, {"next_init": "global"}, {"judged": "deploy"}, {"judged": "post_local"}],
                         ids=str)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_everything_off_is_fedavg_to_the_bit(tiny_task, tmp_path, fields, participation):            # T-MUP-12
    parts = {"federation": {"rounds": 3, "participation": participation}}
    plain, theirs = run(tiny_task, tmp_path, FedAvg(), **parts)
    ours, reports = run(tiny_task, tmp_path, MuPFL(**OFF, **fields), **parts)
    assert fingerprint(ours.server.model.state_dict()) == fingerprint(plain.server.model.state_dict())
    assert [r.global_accuracy for r in reports] == [r.global_accuracy for r in theirs]
    assert [r.traffic for r in reports] == [r.traffic for r in theirs]
    assert ours.conclude() == plain.conclude()
    if fields.get("judged") == "deploy":
        assert (reports[-1].clients, reports[-1].by_client) == (theirs[-1].clients, theirs[-1].by_client)
        assert all(state["state"] in ({}, {"own": {}, "cluster": {}}) for state in private_states(ours).values())


def equal_task(task):
    """Clients of the same size: what the creff partition gives."""
    shards = tuple(Shard(shard.x[:8], shard.y[:8]) for shard in task.shards if len(shard) > 7)
    counts = np.stack([np.bincount(shard.y, minlength=4) for shard in shards])
    return replace(task, shards=shards, client_counts=counts)


@pytest.mark.parametrize("kappa", [None, 1, 2, 3])
def test_clusters_change_nothing_in_the_global_model_of_clients_of_equal_size(tiny_task, tmp_path, kappa):  # T-MUP-9
    task, parts = equal_task(tiny_task), {"data": {"clients": 4}, "federation": {"rounds": 3}}
    plain, _ = run(task, tmp_path, FedAvg(), **parts)
    ours, reports = run(task, tmp_path, MuPFL(**OFF | {"acmu": True}, kappa=kappa), **parts)
    for name, value in plain.server.model.state_dict().items():
        assert torch.allclose(ours.server.model.state_dict()[name], value, atol=1e-5), name
    if kappa is not None:
        assert [report.figures["kappa"] for report in reports] == [kappa] * 3


def test_clusters_do_change_it_where_sizes_differ(tiny_task, tmp_path):
    plain, _ = run(tiny_task, tmp_path, FedAvg(), until=1)
    ends = {kappa: run(tiny_task, tmp_path, MuPFL(**OFF | {"acmu": True}, kappa=kappa), until=1)[0]
            .server.model.state_dict()["classifier.weight"] for kappa in (1, 2, 5)}
    same = plain.server.model.state_dict()["classifier.weight"]
    assert torch.allclose(ends[5], same, atol=1e-5)                 # everybody alone
    assert not torch.allclose(ends[2], same, atol=1e-3)
    # one cluster: the unweighted mean of all updates
    models = [reply["model"] for reply in replies_of(run(tiny_task, tmp_path, FedAvg(), until=1)[0]).values()]
    assert torch.allclose(ends[1].double(), average(models, [1] * 5)["classifier.weight"], atol=1e-5)


# a round, equation by equation

def test_model_of_a_cluster_is_its_start_and_the_mean_update_and_the_global_one_their_mean(finished, tiny_task):
    experiment, reports = finished                                                                   # Eq. 14, 15
    start, replies = initial(tiny_task), replies_of(experiment)
    labels = dict(zip(reports[0].participants, reports[0].figures["clusters"], strict=True))
    moved = {}
    for id in replies:
        mates = [other for other in replies if labels[other] == labels[id]]
        update = average([{n: v - start[n] for n, v in replies[other]["model"].items()} for other in mates],
                         [1] * len(mates))
        moved[id] = {name: start[name] + update[name] for name in update}
    sizes = [int(tiny_task.client_counts[id].sum()) for id in moved]
    expected = average(list(moved.values()), sizes)
    method, host = MuPFL(**QUICK), experiment.fleet._host
    second = next(m["model"] for m in host.messages if "model" in m and not torch.equal(
        m["model"]["classifier.weight"], start["classifier.weight"]))
    assert second.keys() == method.shared(experiment.server.model).keys()
    for name, value in second.items():
        if value.is_floating_point():
            assert torch.allclose(value.double(), expected[name], atol=1e-5), name
        else:
            assert value == max(reply["model"][name] for reply in replies.values())
    assert {name for name, *_ in host.replies} == {"join", "train", "keep", "judge"}


def test_clients_keep_the_encoder_of_their_cluster_and_their_own_classifier(tiny_task, tmp_path):
    experiment, (report,) = run(tiny_task, tmp_path, until=1)
    start, replies, states = initial(tiny_task), replies_of(experiment), private_states(experiment)
    labels = dict(zip(report.participants, report.figures["clusters"], strict=True))
    for id, reply in replies.items():
        state = states[id]["state"]
        assert state.keys() == {"own", "cluster"}
        assert state["own"].keys() == {"classifier.weight", "classifier.bias"}
        assert torch.equal(state["own"]["classifier.weight"], reply["model"]["classifier.weight"])
        mates = [replies[other]["model"] for other in replies if labels[other] == labels[id]]
        for name, value in state["cluster"].items():
            assert name.startswith("encoder.")
            if value.is_floating_point():
                assert torch.allclose(value.double(), average(mates, [1] * len(mates))[name], atol=1e-5)
        assert part(start, "encoder.").keys() == state["cluster"].keys()


def test_next_round_starts_from_the_global_encoder_and_the_own_classifier(tiny_task, tmp_path):
    experiment, _ = run(tiny_task, tmp_path, until=1)
    states, method = private_states(experiment), experiment.method
    experiment.step()
    for id, reply in replies_of(experiment, round=2).items():
        assert reply["start"].keys() == {"classifier.weight", "classifier.bias"}        # the rest is the message's
        assert torch.equal(reply["start"]["classifier.weight"], states[id]["state"]["own"]["classifier.weight"])
    assert method.own_start == "classifier."


def test_similarity_is_that_of_equation_8(finished, tiny_task):
    experiment, _ = finished
    start, replies = initial(tiny_task), replies_of(experiment)
    names = [name for name, _ in experiment.server.model.named_parameters()]
    d = torch.stack([torch.cat([(r["model"][n] - start[n]).flatten() for n in names]) for r in replies.values()])
    m = torch.stack([reply["map"] for reply in replies.values()])
    assert m.shape == (5, 64 * 4 * 4)
    assert m.min() == 0
    assert m.max() == 1
    unit = [F.normalize(x.double(), dim=1) for x in (d, m)]
    mixed = 0.5 * unit[0] @ unit[0].T + 0.5 * unit[1] @ unit[1].T
    mixed.fill_diagonal_(1)                         # the client with one sample does not train: its update is zero
    found = experiment.server.state["similarity"]["1"]
    assert torch.allclose(found.double(), mixed, atol=1e-5)


def test_without_dropout_similarity_is_that_of_updates_alone(tiny_task, tmp_path):
    method = MuPFL(**QUICK, bavd=False, pkcf=False)
    experiment, _ = run(tiny_task, tmp_path, method, until=1)
    start, replies = initial(tiny_task, method), replies_of(experiment)
    names = [name for name, _ in experiment.server.model.named_parameters()]
    d = torch.stack([torch.cat([(r["model"][n] - start[n]).flatten() for n in names]) for r in replies.values()])
    d = d.double()
    assert not any("map" in reply for reply in replies.values())
    assert torch.allclose(experiment.server.state["similarity"]["1"].double(), cosines(d @ d.T), atol=1e-6)


def test_features_are_matched_to_the_mean_gradients_of_those_who_own_a_class(tiny_task, tmp_path):   # Eq. 16-20
    experiment, (report,) = run(tiny_task, tmp_path, until=1)
    gradients = []
    for id, reply in replies_of(experiment).items():
        client = open_client(tiny_task, id)
        client.model.load_state_dict(reply["model"])                # the trained model, in evaluation mode
        z, y = features(client)
        head, found = client.model.classifier, {}
        for c in y.unique().tolist():
            weight, bias = torch.autograd.grad(F.cross_entropy(head(z[y == c]), y[y == c]), [head.weight, head.bias])
            found[str(c)] = torch.cat([weight, bias[:, None]], 1)
            assert torch.allclose(reply["gradients"][str(c)], found[str(c)], atol=1e-5)
        assert reply["gradients"].keys() == found.keys()
        gradients.append(reply["gradients"])
    generator = torch.Generator().manual_seed(seed_for(0, "server", "features", 0))
    start = torch.randn(4, 5, 64, generator=generator)
    classes, targets = mean_gradients(gradients)
    h, cosine = match_features(start, classes, targets, experiment.server.model.classifier, steps=3, lr=100.0)
    assert torch.allclose(experiment.server.state["features"], h, atol=1e-4)
    assert report.figures["cosine"] == pytest.approx(cosine.mean().item(), abs=1e-4)


def test_class_that_no_participant_owns_keeps_its_features_and_tunes_nothing(tiny_task, tmp_path):
    shards = tuple(Shard(shard.x[shard.y != 3], shard.y[shard.y != 3]) for shard in tiny_task.shards)
    task = replace(tiny_task, shards=shards, client_counts=np.stack([np.bincount(s.y, minlength=4) for s in shards]))
    experiment, _ = run(task, tmp_path, until=1)
    state = experiment.server.state
    start = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(seed_for(0, "server", "features", 0)))
    assert state["known"].tolist() == [True, True, True, False]
    assert torch.equal(state["features"][3], start[3])
    assert not torch.equal(state["features"][0], start[0])
    experiment.step()                               # round 2 tunes on three classes
    client = open_client(task, 0)
    given = []

    class Given(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, z):
            given.append(z.detach())
            return self.inner(z)

    client.model.classifier = Given(client.model.classifier)
    MuPFL(**QUICK).tune(client, {"features": state["features"], "known": state["known"]})
    seen = {tuple(row.tolist()) for row in torch.cat(given)}
    assert seen == {tuple(row.tolist()) for row in state["features"][:3].flatten(0, 1)}


@pytest.mark.parametrize("view", [None, [0, 3, 2, 3]], ids=["all", "as-the-client-sees-them"])
def test_classifier_is_tuned_by_sgd_on_all_pairs(tiny_task, view):                                   # Eq. 21
    method = MuPFL(m=5, tau=3)
    client = open_client(tiny_task, method=method)
    client.samples.view = None if view is None else torch.tensor(view)
    h = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(0))
    params = [p.detach().clone().requires_grad_() for p in client.model.classifier.parameters()]
    z, y, velocity = h.flatten(0, 1), torch.tensor(view or [0, 1, 2, 3]).repeat_interleave(5), [0.0, 0.0]
    order = torch.Generator().manual_seed(seed_for(0, "tune", 1, 0))
    for _ in range(3):
        for rows in torch.randperm(20, generator=order).split(8):
            grads = torch.autograd.grad(F.cross_entropy(F.linear(z[rows], *params), y[rows]), params)
            velocity = [0.9 * v + g for v, g in zip(velocity, grads, strict=True)]
            params = [(p - 0.05 * v).detach().requires_grad_() for p, v in zip(params, velocity, strict=True)]
    before = fingerprint(client.model.encoder.state_dict())
    method.tune(client, {"features": h, "known": torch.ones(4, dtype=torch.bool)})
    assert torch.allclose(client.model.classifier.weight, params[0], atol=1e-6)
    assert torch.allclose(client.model.classifier.bias, params[1], atol=1e-6)
    assert fingerprint(client.model.encoder.state_dict()) == before


def test_update_starts_from_the_model_before_it_is_tuned(tiny_task, tmp_path):
    # tuning so strongly that local training cannot hide it
    experiment, _ = run(tiny_task, tmp_path, MuPFL(m=5, tau=200, matching_steps=3), local={"epochs": 1, "batch": 8})
    reply = replies_of(experiment, round=2)[3]      # one sample: nothing but tuning moves its model
    assert not torch.equal(reply["model"]["classifier.weight"], reply["start"]["classifier.weight"])
    assert torch.equal(reply["start"]["classifier.weight"],
                       replies_of(experiment, round=1)[3]["model"]["classifier.weight"])


def test_gradients_can_be_those_of_the_model_received(tiny_task, tmp_path):
    experiment, _ = run(tiny_task, tmp_path, MuPFL(**QUICK, gradients="global"), until=1)
    client = open_client(tiny_task, 0)
    client.model.load_state_dict(initial(tiny_task))
    expected = class_gradients(*features(client), client.model.classifier)
    found = replies_of(experiment)[0]["gradients"]
    assert all(torch.allclose(found[c], expected[c], atol=1e-6) for c in expected)
    assert found.keys() == expected.keys()


# dropout

def test_local_training_with_dropout_is_that_of_the_equations_written_out(tiny_task):
    method = MuPFL(**OFF | {"bavd": True})
    client, plain = open_client(tiny_task, method=method), open_client(tiny_task, method=MuPFL(**OFF))
    reply = method.train(client, {"model": tree.snapshot(method.shared(client.model))})
    stage, optimiser = plain.model.encoder, SGD(plain.model.parameters(), 0.05, 0.9)
    plain.model.train()
    m = before = None
    for batch in plain.batches(2, 8):
        h = stage.stage2(stage.stage1(batch.x))
        bar = h.detach().mean(0)
        if m is not None:
            h = h * (m >= m.mean()).float()
        loss = F.cross_entropy(plain.model.classifier(stage.pool(h)), batch.y)
        m = bar if m is None else m - (loss.item() - before) * bar
        before = loss.item()
        optimiser.step(loss)
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(reply.tree["model"][name], value, atol=1e-5), name
    (layer,) = layers_of(client.model)
    assert torch.allclose(layer.map[0], m, atol=1e-4)


@pytest.mark.parametrize("reset", ["round", "never"])
def test_map_starts_anew_in_every_round_or_never(tiny_task, tmp_path, reset, monkeypatch):
    plain, begun = BAVD.reset, []

    def watched(layer, map=None, loss=None):
        begun.append(map is not None)
        plain(layer, map, loss)

    monkeypatch.setattr(BAVD, "reset", watched)
    experiment, _ = run(tiny_task, tmp_path, MuPFL(**QUICK, bavd_reset=reset), until=1)
    begun.clear()
    experiment.step()
    kept = [state["state"].get("bavd") for _, state in sorted(private_states(experiment).items())]
    if reset == "round":
        assert begun == [False] * 5
        assert kept == [None] * 5
    else:
        assert begun == [True, True, True, False, True]             # one sample: it has no map
        assert [k["0"]["map"] is None for k in kept] == [False, False, False, True, False]


def test_nothing_waits_for_the_device_in_a_batch(tiny_task, monkeypatch):
    method = MuPFL(**QUICK)
    client = open_client(tiny_task, method=method)
    objective, batch = method.objective(client, {}), next(iter(client.batches(1, 8)))
    client.model.train()

    def refuse(*_):
        raise AssertionError("reads a value from the device")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    values = [objective(batch) for _ in range(3)]
    monkeypatch.undo()
    assert all(math.isfinite(value.item()) for value in values)


def test_stage_that_is_not_there_is_refused_before_anything_runs(tiny_task):
    with pytest.raises(ConfigError, match=r"bavd_layers = \('stage7',\): the model's stages are stage1, stage2"):
        MuPFL(bavd_layers=("stage7",)).new_model(tiny_task.facts, configure())


# what is personal

@pytest.mark.parametrize("next_init", ["classifier", "cluster", "own", "global"])
@pytest.mark.parametrize("judged", ["cluster", "post_local", "deploy"])
def test_clients_start_and_are_judged_as_the_settings_say(tiny_task, tmp_path, next_init, judged):
    method = MuPFL(**QUICK, next_init=next_init, judged=judged)
    experiment, _ = run(tiny_task, tmp_path, method, until=1)
    states, replies = private_states(experiment), replies_of(experiment)
    cluster_of = private_states(run(tiny_task, tmp_path, MuPFL(**QUICK, next_init="cluster", judged=judged),
                                    until=1)[0])
    after = method.message(experiment.server)["model"]
    for id in (0, 1, 5):
        local, cluster = replies[id]["model"], cluster_of[id]["state"]["cluster"]
        start = {"classifier": after | part(local, "classifier."), "cluster": cluster, "own": local,
                 "global": after}[next_init]
        expected = {"cluster": cluster | part(local, "classifier."), "post_local": local, "deploy": start}[judged]
        client = open_client(tiny_task, id, method)
        client.state = states[id]["state"]
        client.receive(after)
        found = method.personal_model(client).state_dict()
        assert {n for n in found if not torch.allclose(found[n].double(), expected[n].double(), atol=1e-6)} == set()
    experiment.step()
    for id, reply in replies_of(experiment, round=2).items():
        cluster = cluster_of[id]["state"]["cluster"]
        local = replies[id]["model"]
        expected = {"classifier": part(local, "classifier."), "cluster": cluster, "own": local, "global": {}}[next_init]
        assert reply["start"].keys() == expected.keys()
        assert all(torch.allclose(value.double(), expected[name].double(), atol=1e-6)
                   for name, value in reply["start"].items())


@pytest.mark.parametrize("fields", [{}, {"next_init": "own"}, {"next_init": "cluster", "judged": "deploy"}], ids=str)
def test_client_that_never_took_part_is_judged_by_the_global_model(tiny_task, tmp_path, fields):
    experiment, reports = run(tiny_task, tmp_path, MuPFL(**QUICK, **fields), federation={"participation": 0.3})
    host = experiment.fleet._host
    asked = {id for name, _, id, _ in host.replies if name == "train"}
    judged = {id: reply["confusion"] for name, _, id, reply in host.replies if name == "judge"}
    matrix = experiment._judge_global()
    never = set(experiment.fleet.ids) - asked
    assert never
    assert all(torch.equal(judged[id], matrix) for id in never)
    assert any(not torch.equal(judged[id], matrix) for id in asked)
    figures = reports[-1].clients
    assert figures.keys() == set(metrics.KINDS)
    assert all(kind.keys() == {"mean", "worst_decile"} for kind in figures.values())
    assert [value is not None for value in reports[-1].by_client["matched"]] == [True, True, True, True, False, True]
    assert all(private_states(experiment)[id]["state"] == {} for id in never)


def test_client_that_misses_its_clusters_model_keeps_the_one_before(tiny_task, tmp_path):
    class Misses(Recorder):
        def run(self, fn, message, round, id, shard, private):
            if fn.__name__ == "keep" and id == 0 and round == 2:
                raise OSError("out of reach")
            return super().run(fn, message, round, id, shard, private)

    experiment, (first,) = run(tiny_task, tmp_path, until=1, host=Misses)
    assert first.lost == []
    before = fingerprint(private_states(experiment)[0]["state"]["cluster"])
    report = experiment.step()
    assert report.lost == [0]
    assert fingerprint(private_states(experiment)[0]["state"]["cluster"]) == before
    straight, _ = run(tiny_task, tmp_path)
    assert fingerprint(experiment.server.model.state_dict()) == fingerprint(straight.server.model.state_dict())


# what a round reports

def test_clusters_of_every_round_are_reported(finished):
    experiment, reports = finished
    for report in reports:
        figures = report.figures
        assert report.participants == [0, 1, 2, 3, 5]
        assert len(figures["clusters"]) == 5
        assert figures["kappa"] == len(set(figures["clusters"])) == max(figures["clusters"]) + 1
        assert figures["silhouettes"].keys() == {"2", "3", "4"}     # at most one fewer than participants
        best = max(figures["silhouettes"].values())
        assert figures["silhouettes"][str(figures["kappa"])] == best
        assert -1 <= figures["cosine"] <= 1
        json.dumps(figures)
    assert experiment.server.state["similarity"].keys() == {"1", "2"}


def test_only_the_last_similarities_are_kept(tiny_task, tmp_path):
    method = MuPFL(**OFF | {"acmu": True})
    experiment, reports = run(tiny_task, tmp_path, method, federation={"rounds": KEPT_ROUNDS + 3, "participation": 0.5},
                              local={"epochs": 1, "batch": 8})
    kept = experiment.server.state["similarity"]
    assert list(kept) == [str(round) for round in range(4, KEPT_ROUNDS + 4)]
    for round, similarity in kept.items():
        assert len(similarity) == len(reports[int(round) - 1].participants) == 3


def test_two_participants_form_one_cluster(tiny_task, tmp_path):
    _, reports = run(tiny_task, tmp_path, federation={"participation": 0.3})
    assert all(report.figures["kappa"] == 1 and report.figures["silhouettes"] == {} for report in reports)


@pytest.mark.parametrize(("kappa", "expected"), [(1, 1), (2, 2), (4, 4), (5, 5), (9, 5)])
def test_number_of_clusters_can_be_fixed(tiny_task, tmp_path, kappa, expected):                      # Table 5
    _, (report,) = run(tiny_task, tmp_path, MuPFL(**QUICK, kappa=kappa), until=1)
    assert report.figures["kappa"] == expected
    assert report.figures["silhouettes"].keys() == {str(expected)}


@pytest.mark.parametrize("fields", [
    {"acmu": False, "pkcf": False}, {"bavd": False, "pkcf": False}, {"bavd": False, "acmu": False}, {"pkcf": False},
    {"acmu": False}, {"bavd": False}, {"bavd_map": "hw"}, {"bavd_map": "bchw"}, {"bavd_psi": "equation"},
    {"bavd_reset": "never"}, {"bavd_layers": "all"}, {"distance": "rows"}, {"gradients": "global"},
    {"next_init": "own"}, {"next_init": "cluster", "judged": "post_local"}, {"judged": "deploy"},
    {"next_init": "global", "judged": "deploy"}, {"tau": 0}], ids=str)
def test_variants_run_and_declare_their_traffic(tiny_task, tmp_path, fields):
    experiment, reports = run(tiny_task, tmp_path, MuPFL(**QUICK | fields))
    assert math.isfinite(reports[-1].figures["loss"])
    declared = [experiment.method.traffic(experiment.server.model, tiny_task.client_counts[id].tolist())
                for id in experiment.fleet.ids]
    for report in reports:
        assert report.traffic.keys() - {"join"} == declared[0].keys() - {"join"}
        for name, measured in report.traffic.items():
            assert measured["down"] == sum(calls[name][0] for calls in declared)
            assert measured["up"] == sum(calls[name][1] for calls in declared)


def test_traffic_is_that_of_the_papers_setting(tiny_task):
    # ResNet-8, C = 10, m = 100, d = 256: 1.0 MiB of features; 10 * 257 * 4 bytes of gradient per class; 64 KiB of map
    facts = replace(tiny_task.facts, class_names=tuple("abcdefghij"), shape=(32, 32, 3))
    config = configure().model_copy(update={"model": "resnet8"})
    method = MuPFL()
    model = method.new_model(facts, config)
    plain = FedAvg().traffic(model, [5, 3] + [0] * 8)["train"]
    down, up = method.traffic(model, [5, 3] + [0] * 8)["train"]
    assert down - plain[0] == 10 * 100 * 256 * 4 + 10
    assert up - plain[1] == 2 * (10 * 256 + 10) * 4 + (10 * 256 + 10) * 4 + 256 * 8 * 8 * 4


# real digits

def planted_task():
    """Eight clients with digits, evenly; four of them call digit y by the name of y + 5."""
    task = build_task(configure(data={"source": "digits", "imbalance": 1, "partition": "iid", "clients": 8}).data)
    planted = [0, 1, 1, 0, 1, 0, 0, 1]
    shards = tuple(Shard(s.x, (s.y + 5 * group) % 10) for s, group in zip(task.shards, planted, strict=True))
    counts = np.stack([np.bincount(shard.y, minlength=10) for shard in shards])
    return replace(task, shards=shards, client_counts=counts), planted


@pytest.mark.parametrize("fields", [{}, {"pkcf": False}, {"bavd": False, "pkcf": False}], ids=str)
def test_two_groups_with_permuted_labels_are_found(tmp_path, fields):                                # T-MUP-8
    task, planted = planted_task()
    _, reports = run(task, tmp_path, MuPFL(m=20, tau=5, **fields), host=Host,
                     data={"source": "digits", "clients": 8}, local={"batch": 32, "epochs": 2})
    for report in reports:
        assert report.figures["kappa"] == 2
        assert adjusted_rand_score(planted, report.figures["clusters"]) == 1


# killed and resumed

KILLED_IN_CLUSTERING = """
import os, signal, sys
from raylt.methods import mupfl
from raylt import cli
inner, calls = mupfl.update_gram, []
def update_gram(*parts):
    calls.append(None)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(*parts)
mupfl.update_gram = update_gram
cli.main()
"""


@pytest.mark.slow
def test_killed_between_upload_and_clustering_and_resumed_it_ends_the_same(tmp_path):
    settings = ["method=mupfl", "method.m=10", "method.tau=5", "federation.rounds=3", "local.epochs=1",
                "data.clients=6", "--out", str(tmp_path), "--fleet", "local", "--name"]

    def figures(folder: Path) -> list:
        return [json.loads(line)["figures"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def clients(folder: Path) -> dict[str, str]:
        saved, _ = checkpoint.latest(folder / "checkpoints")
        assert saved is not None
        return {name: fingerprint(saved.read(name)) for name in saved.parts}

    plain = [sys.executable, "-m", "raylt"]
    subprocess.run([*plain, "run", *settings, "straight"], check=True, env=os.environ, capture_output=True)
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_CLUSTERING, "run", *settings, "killed"],
                            env=os.environ, capture_output=True)
    assert killed.returncode == -9
    assert len(figures(tmp_path / "killed")) == 1                   # in round 2, after its uploads
    subprocess.run([*plain, "resume", str(tmp_path / "killed"), "--fleet", "local"], check=True, env=os.environ,
                   capture_output=True)
    straight, resumed = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("straight", "killed"))
    assert straight["model_sha256"] == resumed["model_sha256"]
    assert straight["clients"] == resumed["clients"]
    assert figures(tmp_path / "straight") == figures(tmp_path / "killed")
    assert clients(tmp_path / "straight") == clients(tmp_path / "killed")


def test_resumed_run_knows_its_clusters_and_features(finished, tiny_task, tmp_path):
    experiment, (first,) = run(tiny_task, tmp_path, until=1)
    experiment.save(first)
    saved, _ = checkpoint.latest(tmp_path / "checkpoints")
    assert saved is not None
    again = make_experiment(configure(), tiny_task, tmp_path, MuPFL(**QUICK))
    again.load(saved)
    again.step()
    assert fingerprint(again.server.state) == fingerprint(finished[0].server.state)
    assert {i: fingerprint(s) for i, s in private_states(again).items()} == {
        i: fingerprint(s) for i, s in private_states(finished[0]).items()}
