import pytest
import torch
from mupfl_runs import QUICK, average, initial, open_client, replies_of, run
from tiny import Recorder, fingerprint, private_states

from raylt import metrics
from raylt.methods.mupfl.method import MuPFL
from raylt.models.split import part


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
        found = method.client_model(client).state_dict()
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
