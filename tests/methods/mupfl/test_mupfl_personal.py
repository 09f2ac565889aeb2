import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from mupfl_runs import QUICK, average, ends_of, initial, open_client, replies_of, run
from refusals import refused
from tiny import Recorder, fingerprint, private_states

from raylt import metrics
from raylt.core.evaluation.counts import cells_of
from raylt.errors import ClientLost, TooFewReplies
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedper import FedPer
from raylt.methods.mupfl.method import MODELS, MuPFL
from raylt.models.split import part
from raylt.tree import nbytes


@pytest.mark.slow
def test_clients_keep_the_model_of_their_cluster_and_their_own(tiny_task, tmp_path):
    experiment, (report,) = run(tiny_task, tmp_path, until=1)
    ends, states = ends_of(experiment, initial(tiny_task)), private_states(experiment)
    labels = dict(zip(report.participants, report.figures["clusters"], strict=True))
    for id, end in ends.items():
        state = states[id]["state"]
        assert state.keys() == {"own", "cluster"}
        assert close(state["own"], end)
        mates = [ends[other] for other in ends if labels[other] == labels[id]]
        assert close(state["cluster"], average(mates, [1] * len(mates)))


def test_next_round_starts_from_the_global_encoder_and_the_own_classifier(tiny_task, tmp_path):
    experiment, _ = run(tiny_task, tmp_path, until=1)
    states, method = private_states(experiment), experiment.method
    experiment.step()
    for id, reply in replies_of(experiment, round=2).items():
        # the other entries start from the message
        assert reply["start"].keys() == {"classifier.weight", "classifier.bias"}
        assert torch.equal(reply["start"]["classifier.weight"], states[id]["state"]["own"]["classifier.weight"])
    assert method.own_start == "classifier"


# personal models


def close(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[n].double(), theirs[n].double(), atol=1e-5) for n in ours if ours[n].is_floating_point()
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("next_init", ["classifier", "encoder", "cluster", "own", "global"])
@pytest.mark.parametrize("fields", [{}, {"acmu": False}, {"pkcf": False}], ids=str)
def test_clients_start_and_are_judged_as_the_settings_say(tiny_task, tmp_path, next_init, fields):
    method = MuPFL(**QUICK | fields, next_init=next_init)
    experiment, (report,) = run(tiny_task, tmp_path, method, until=1)
    states, ends = private_states(experiment), ends_of(experiment, initial(tiny_task, method))
    labels = report.figures.get("clusters") or range(len(ends))  # without ACMU each client is a cluster
    labels = dict(zip(report.participants, labels, strict=True))
    after = method.message(experiment.server)["model"]
    starts = {}
    for id, own in ends.items():
        mates = [ends[other] for other in ends if labels[other] == labels[id]]
        whole = average(mates, [1] * len(mates))  # all clients start from the same model
        expected = {
            "post_local": own,
            "whole": whole,
            "cluster": whole | part(own, "classifier."),
            "deploy": after | part(own, "classifier."),
            "swapped": after | part(own, "encoder."),
            "global": after,
        }
        assert expected.keys() == set(method.other_models)
        for name, model in expected.items():
            client = open_client(tiny_task, id, method)
            client.state = states[id]["state"]
            client.receive(after)
            assert close(method.other_model(client, name).state_dict(), after | model), (id, name)
            client.receive(after)
            judged = method.model_copy(update={"judged": name})
            assert close(judged.client_model(client).state_dict(), after | model), (id, name)
        starts[id] = {
            "classifier": part(own, "classifier.") if method.pkcf else {},
            "encoder": part(own, "encoder."),
            "cluster": whole,
            "own": own,
            "global": {},
        }[next_init]
    experiment.step()
    if method.acmu:
        assert all(close(reply["start"], starts[id]) for id, reply in replies_of(experiment, round=2).items())


def test_every_model_is_judged_in_the_end_and_one_before(tiny_task, tmp_path):
    method = MuPFL(**QUICK, judged="deploy")
    _, (first, last) = run(tiny_task, tmp_path, method, evaluation={"personal": 1})
    assert first.others is None
    assert first.clients is not None
    assert last.others.keys() == set(MODELS)
    for key in ("accuracy", "macro", "groups", "clients", "by_client"):
        assert last.others["deploy"][key] == getattr(last, key)
    assert last.others["global"]["accuracy"] == pytest.approx(last.global_accuracy)
    assert len({json.dumps(figures["by_client"]) for figures in last.others.values()}) > 2
    plain = run(tiny_task, tmp_path, FedPer())[1][-1]
    assert plain.others == {}
    assert run(tiny_task, tmp_path, FedAvg())[1][-1].others is None


def test_last_update_trains_everybody_and_leaves_the_global_model(tiny_task, tmp_path):
    parts = {"federation": {"participation": 0.3}}
    plain, before = run(tiny_task, tmp_path, MuPFL(**QUICK), **parts)
    experiment, reports = run(tiny_task, tmp_path, MuPFL(**QUICK, last_update=True), **parts)
    assert [report.phase for report in reports] == ["round", "round", "finish"]
    assert fingerprint(experiment.server.model.state_dict()) == fingerprint(plain.server.model.state_dict())
    assert torch.equal(experiment.server.state["features"], plain.server.state["features"])
    assert reports[-1].others["global"] == before[-1].others["global"]
    assert set(replies_of(experiment, round=3)) == set(experiment.fleet.ids)
    assert len(reports[-1].figures["clusters"]) == len(experiment.fleet.ids)
    ends, states = ends_of(experiment, experiment.server.model.entries(), round=3), private_states(experiment)
    assert all(close(states[id]["state"]["own"], ends[id]) for id in experiment.fleet.ids)
    assert reports[-1].participants == []


@pytest.mark.slow
def test_last_updates_of_all_clients_can_form_the_clusters(tiny_task, tmp_path):
    parts = {"federation": {"participation": 0.3, "rounds": 4}}
    method = MuPFL(**QUICK, clustered="all")
    experiment, reports = run(tiny_task, tmp_path, method, **parts)
    so_far, updates = set(), {}
    for report in reports:
        so_far |= set(report.participants)
        updates |= {id: reply["update"] for id, reply in replies_of(experiment, round=report.step).items()}
        assert report.figures["clustered"] == sorted(so_far)
        assert len(report.figures["clusters"]) == len(so_far)
        assert len(report.participants) == 2
    assert len(so_far) > 2
    # Eq. 14 over a cluster, from where each client's own last update started, whichever clients took part
    labels = dict(zip(reports[-1].figures["clustered"], reports[-1].figures["clusters"], strict=True))
    states = private_states(experiment)
    for id in so_far:
        state, mates = states[id]["state"], [other for other in so_far if labels[other] == labels[id]]
        update = average([updates[other] for other in mates], [1] * len(mates))
        assert close(state["cluster"], {name: state["start"][name] + update[name] for name in update}), id
    few = MuPFL(**QUICK)
    assert fingerprint(run(tiny_task, tmp_path, few, **parts)[0].server.model.state_dict()) != fingerprint(
        experiment.server.model.state_dict()
    )


@pytest.mark.parametrize(
    ("fields", "room", "fits"), [({}, 0.99, False), ({}, 1.01, True), ({"acmu": False}, 0.0, True)]
)
def test_last_updates_that_do_not_fit_in_memory_are_refused_before_the_run(
    tiny_task, tmp_path, monkeypatch, fields, room, fits
):
    experiment, _ = run(tiny_task, tmp_path, MuPFL(**QUICK, clustered="all"), federation={"rounds": 1})
    kept = experiment.server.state["last_updates"]
    assert len(kept) == 5
    monkeypatch.setattr("raylt.methods.mupfl.clustering.total_memory", lambda: int(2 * room * nbytes(kept)))
    method = MuPFL(**QUICK, **fields, clustered="all")
    with (
        nullcontext() if fits else refused("config.out-of-range", key="method.clustered", clients=5, size=nbytes(kept))
    ):
        method.prepare(tiny_task, experiment.config, experiment.server.model)


@pytest.mark.parametrize("fields", [{}, {"next_init": "own"}, {"next_init": "cluster", "judged": "deploy"}], ids=str)
def test_client_that_never_took_part_is_judged_by_the_global_model(tiny_task, tmp_path, fields):
    experiment, reports = run(tiny_task, tmp_path, MuPFL(**QUICK, **fields), federation={"participation": 0.3})
    host = experiment.fleet._host
    asked = {id for name, _, id, _ in host.replies if name == "train"}
    judged: dict[int, torch.Tensor] = {}
    for name, _, id, reply in host.replies:
        if name == "judge":  # the first judgement is that of the first model
            judged.setdefault(id, reply["confusion"])
    cells = cells_of(experiment.evaluator._judge_global(last=False)[0].all)
    never = set(experiment.fleet.ids) - asked
    assert never
    assert all(torch.equal(judged[id], cells) for id in never)
    assert any(not torch.equal(judged[id], cells) for id in asked)
    figures = reports[-1].clients
    assert figures.keys() == set(metrics.KINDS)
    assert all(kind.keys() == {"mean", "worst_decile"} for kind in figures.values())
    assert [value is not None for value in reports[-1].by_client["matched"]] == [True, True, True, True, False, True]
    assert all(private_states(experiment)[id]["state"] == {} for id in never)


class Misses(Recorder):
    """Client 0 does not receive its cluster's model in round 2."""

    def run(self, fn, message, round, id, shard, private):
        if fn.__name__ == "keep" and id == 0 and round == 2:
            raise OSError("out of reach")
        return super().run(fn, message, round, id, shard, private)


@pytest.mark.slow
@pytest.mark.parametrize("kappa", [2, 5], ids=["with-others", "alone"])
def test_lost_client_that_misses_its_clusters_model_keeps_the_one_before(tiny_task, tmp_path, kappa, monkeypatch):
    method = MuPFL(**QUICK, kappa=kappa)
    experiment, (first,) = run(tiny_task, tmp_path, method, until=1, host=Misses)
    ask = experiment.fleet._ask

    def lost(call, id, name):
        answer = ask(call, id, name)
        return replace(answer, error=None if answer.error is None else ClientLost(id, 2, name, "its process died"))

    monkeypatch.setattr(experiment.fleet, "_ask", lost)
    assert first.lost == []
    before = fingerprint(private_states(experiment)[0]["state"]["cluster"])
    report = experiment.step()
    assert report.lost == [0]
    assert fingerprint(private_states(experiment)[0]["state"]["cluster"]) == before
    straight, _ = run(tiny_task, tmp_path, method)
    assert fingerprint(experiment.server.model.state_dict()) == fingerprint(straight.server.model.state_dict())


def test_call_that_fails_at_a_whole_cluster_ends_the_run(tiny_task, tmp_path):
    experiment, _ = run(tiny_task, tmp_path, MuPFL(**QUICK, kappa=5), until=1, host=Misses)
    with pytest.raises(TooFewReplies, match="out of reach"):
        experiment.step()
