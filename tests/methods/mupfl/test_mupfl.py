import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from mupfl_runs import OFF, QUICK, average, ends_of, equal_task, initial, replies_of, run
from sklearn.metrics import adjusted_rand_score
from tiny import configure, fingerprint, make_experiment
from torch.nn import functional as F

from raylt.core.fleet.client_host import ClientHost
from raylt.data.task import Shard, build_task
from raylt.methods.fedavg import FedAvg
from raylt.methods.mupfl.clustering import KEPT_ROUNDS, cosines
from raylt.methods.mupfl.method import MuPFL

# reductions to simpler methods


@pytest.mark.parametrize(
    "fields", [{}, {"next_init": "global"}, {"judged": "global"}, {"judged": "post_local"}], ids=str
)
@pytest.mark.parametrize("participation", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_everything_off_is_fedavg_to_the_bit(tiny_task, tmp_path, fields, participation):  # T-MUP-12
    parts = {"federation": {"rounds": 3, "participation": participation}}
    plain, theirs = run(tiny_task, tmp_path, FedAvg(), **parts)
    ours, reports = run(tiny_task, tmp_path, MuPFL(**OFF, **fields), **parts)
    assert fingerprint(ours.server.model.state_dict()) == fingerprint(plain.server.model.state_dict())
    assert [r.global_accuracy for r in reports] == [r.global_accuracy for r in theirs]
    assert [r.traffic for r in reports] == [r.traffic for r in theirs]
    assert ours.export_model() == plain.export_model()
    others, figures = reports[-1].others, theirs[-1]
    assert (others["global"]["clients"], others["global"]["by_client"]) == (figures.clients, figures.by_client)
    if fields.get("judged") == "global":
        assert (reports[-1].clients, reports[-1].by_client) == (figures.clients, figures.by_client)


@pytest.mark.slow
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
    ends = {
        kappa: run(tiny_task, tmp_path, MuPFL(**OFF | {"acmu": True}, kappa=kappa), until=1)[
            0
        ].server.model.state_dict()["classifier.weight"]
        for kappa in (1, 2, 5)
    }
    same = plain.server.model.state_dict()["classifier.weight"]
    assert torch.allclose(ends[5], same, atol=1e-5)  # every client is a cluster of its own
    assert not torch.allclose(ends[2], same, atol=1e-3)
    # with one cluster the global model is the unweighted mean of all updates
    models = [reply["model"] for reply in replies_of(run(tiny_task, tmp_path, FedAvg(), until=1)[0]).values()]
    assert torch.allclose(ends[1].double(), average(models, [1] * 5)["classifier.weight"], atol=1e-5)


# a round, equation by equation


def test_model_of_a_cluster_is_its_start_and_the_mean_update_and_the_global_one_their_mean(finished, tiny_task):
    experiment, reports = finished  # Eq. 14, 15
    start, replies = initial(tiny_task), ends_of(experiment, initial(tiny_task))
    labels = dict(zip(reports[0].participants, reports[0].figures["clusters"], strict=True))
    moved = {}
    for id in replies:
        mates = [other for other in replies if labels[other] == labels[id]]
        update = average([{n: v - start[n] for n, v in replies[other].items()} for other in mates], [1] * len(mates))
        moved[id] = {name: start[name] + update[name] for name in update}
    sizes = [int(tiny_task.client_counts[id].sum()) for id in moved]
    expected = average(list(moved.values()), sizes)
    method, host = MuPFL(**QUICK), experiment.fleet._host
    second = next(
        m["model"]
        for m in host.messages
        if "model" in m and not torch.equal(m["model"]["classifier.weight"], start["classifier.weight"])
    )
    assert second.keys() == method.shared(experiment.server.model).keys()
    for name, value in second.items():
        if value.is_floating_point():
            assert torch.allclose(value.double(), expected[name], atol=1e-5), name
        else:
            assert value == max(reply[name] for reply in replies.values())
    assert {name for name, *_ in host.replies} == {"train", "keep", "try_models", "judge"}


def test_similarity_is_that_of_equation_8(finished, tiny_task):
    experiment, _ = finished
    replies = replies_of(experiment)
    names = [name for name, _ in experiment.server.model.named_parameters()]
    d = torch.stack([torch.cat([r["update"][n].flatten() for n in names]) for r in replies.values()])
    m = torch.stack([reply["map"] for reply in replies.values()])
    assert m.shape == (5, 64 * 4 * 4)
    assert m.min() == 0
    assert m.max() == 1
    unit = [F.normalize(x.double(), dim=1) for x in (d, m)]
    mixed = 0.5 * unit[0] @ unit[0].T + 0.5 * unit[1] @ unit[1].T
    mixed.fill_diagonal_(1)  # the client with one sample does not train, so its update is zero
    found = experiment.server.state["similarities"]["0"]["matrix"]
    assert torch.allclose(found.double(), mixed, atol=1e-5)


def test_without_dropout_similarity_is_that_of_updates_alone(tiny_task, tmp_path):
    method = MuPFL(**QUICK, bavd=False, pkcf=False)
    experiment, _ = run(tiny_task, tmp_path, method, until=1)
    replies = replies_of(experiment)
    names = [name for name, _ in experiment.server.model.named_parameters()]
    d = torch.stack([torch.cat([r["update"][n].flatten() for n in names]) for r in replies.values()])
    d = d.double()
    assert not any("map" in reply for reply in replies.values())
    assert torch.allclose(experiment.server.state["similarities"]["0"]["matrix"].double(), cosines(d @ d.T), atol=1e-6)


# figures of a round


def test_clusters_of_every_round_are_reported(finished):
    experiment, reports = finished
    for report in reports:
        figures = report.figures
        assert report.participants == [0, 1, 2, 3, 5]
        assert len(figures["clusters"]) == 5
        assert figures["kappa"] == len(set(figures["clusters"])) == max(figures["clusters"]) + 1
        assert figures["silhouettes"].keys() == {"2", "3", "4"}  # at most one cluster fewer than participants
        best = max(figures["silhouettes"].values())
        assert figures["silhouettes"][str(figures["kappa"])] == best
        assert -1 <= figures["cosine"] <= 1
        json.dumps(figures)
    assert [e["round"] for e in experiment.server.state["similarities"].values()] == [1, 2]


def test_only_the_last_similarities_are_kept(tiny_task, tmp_path):
    method = MuPFL(**OFF | {"acmu": True})
    experiment, reports = run(
        tiny_task,
        tmp_path,
        method,
        federation={"rounds": KEPT_ROUNDS + 3, "participation": 0.5},
        local={"epochs": 1, "batch": 8},
    )
    kept = experiment.server.state["similarities"].values()
    assert [entry["round"] for entry in kept] == list(range(4, KEPT_ROUNDS + 4))
    for round, similarity in ((entry["round"], entry["matrix"]) for entry in kept):
        assert len(similarity) == len(reports[int(round) - 1].participants) == 3


@pytest.mark.parametrize("kappa", [None, 2])
def test_two_participants_form_one_cluster(tiny_task, tmp_path, kappa):
    _, reports = run(tiny_task, tmp_path, MuPFL(**QUICK, kappa=kappa), federation={"participation": 0.3})
    assert all(report.figures["kappa"] == 1 and report.figures["silhouettes"] == {} for report in reports)


@pytest.mark.parametrize(("kappa", "expected"), [(1, 1), (2, 2), (4, 4), (5, 5), (9, 5)])
def test_number_of_clusters_can_be_fixed(tiny_task, tmp_path, kappa, expected):  # Table 5
    _, (report,) = run(tiny_task, tmp_path, MuPFL(**QUICK, kappa=kappa), until=1)
    assert report.figures["kappa"] == expected
    assert report.figures["silhouettes"].keys() == {str(expected)}


@pytest.mark.parametrize(("most", "tried"), [(2, {"2"}), (3, {"2", "3"}), (4, {"2", "3", "4"}), (8, {"2", "3", "4"})])
def test_numbers_of_clusters_are_tried_up_to_the_largest(tiny_task, tmp_path, most, tried):
    _, (report,) = run(tiny_task, tmp_path, MuPFL(**QUICK, kappa_max=most), until=1)
    assert report.figures["silhouettes"].keys() == tried


# runs on real digits


def planted_task():
    """Return a task of eight iid clients with digits, and their groups; one group of four labels digit y as y + 5."""
    task = build_task(configure(data={"source": "digits", "imbalance": 1, "partition": "iid", "clients": 8}).data)
    planted = [0, 1, 1, 0, 1, 0, 0, 1]
    shards = tuple(Shard(s.x, (s.y + 5 * group) % 10) for s, group in zip(task.shards, planted, strict=True))
    counts = np.stack([np.bincount(shard.y, minlength=10) for shard in shards])
    return replace(task, shards=shards, client_counts=counts), planted


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"pkcf": False}, {"bavd": False, "pkcf": False}], ids=str)
def test_two_groups_with_permuted_labels_are_found(tmp_path, fields):  # T-MUP-8
    task, planted = planted_task()
    _, reports = run(
        task,
        tmp_path,
        MuPFL(m=20, tau=5, **fields),
        host=ClientHost,
        data={"source": "digits", "clients": 8},
        local={"batch": 32, "epochs": 2},
    )
    for report in reports:
        assert report.figures["kappa"] == 2
        assert adjusted_rand_score(planted, report.figures["clusters"]) == 1


def test_class_known_once_stays_known(tiny_task, tmp_path, monkeypatch):
    asked = [[0], [2]]  # client 2 owns class 1 alone
    monkeypatch.setattr(MuPFL, "sample", lambda self, server, fleet: asked[server.round - 1])
    experiment = make_experiment(configure(), tiny_task, tmp_path, MuPFL(**QUICK))
    experiment.step()
    known = experiment.server.state["known"].tolist()
    experiment.step()
    assert known == experiment.server.state["known"].tolist() == (tiny_task.client_counts[0] > 0).tolist()
    assert sum(known) > 1
