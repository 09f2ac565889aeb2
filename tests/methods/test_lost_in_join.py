"""A client that is lost when the others join takes part in later rounds."""

import pytest
import teachers
import torch
from tiny import configure, fingerprint, make_experiment, open_client

from raylt.core.fleet.client_host import ClientHost
from raylt.methods.fedloge import FedLoGe
from raylt.methods.fedsm.method import FedSM
from raylt.methods.flea import FLea
from raylt.methods.la import LogitAdjustment

RETRAINED = {"size": 5, "retrain_epochs": 1}


class AwayAtFirst(ClientHost):
    """Client host that cannot reach client 0 before the first round."""

    def run(self, fn, message, round, id, shard, private):
        if round == 0 and id == 0:
            raise OSError("no route to host")
        return super().run(fn, message, round, id, shard, private)


def final_model(task, folder, method, host):
    experiment = make_experiment(configure(), task, folder, method, host=host)
    experiment.fleet.on_note = lambda text: None
    while not experiment.done:
        report = experiment.step()
    assert report.lost == []
    assert report.rejected == {}
    assert 0 in report.participants
    return fingerprint(experiment.method.global_model(experiment.server).state_dict())


@pytest.mark.parametrize(
    "method",
    [
        FedLoGe(steps=20),
        FLea(share=0.3),
        FedSM(teacher="none", **RETRAINED),
    ],
    ids=lambda method: method.name,
)
def test_model_is_the_one_without_the_loss(tiny_task, tmp_path, method):
    lost, straight = (
        final_model(tiny_task, tmp_path / kind.__name__, method, kind) for kind in (AwayAtFirst, ClientHost)
    )
    assert lost == straight


@pytest.mark.parametrize("fields", [{}, {"retrain": "after"}, {"encoders": "trained"}], ids=str)
def test_late_client_of_fedsm_gets_the_texts(tiny_task, tmp_path, fields):
    method = FedSM(teacher=teachers.save_features(tmp_path / "f.npz", tiny_task), **RETRAINED, **fields)
    lost, straight = (
        final_model(tiny_task, tmp_path / kind.__name__, method, kind) for kind in (AwayAtFirst, ClientHost)
    )
    assert lost == straight


def test_messages_of_rounds_have_no_frame_and_no_texts_if_all_clients_joined(tiny_task, tmp_path):
    for method in (FedLoGe(steps=20), FedSM(teacher=teachers.save_features(tmp_path / "f.npz", tiny_task))):
        experiment = make_experiment(configure(), tiny_task, tmp_path, method)
        method.start(experiment.server, experiment.fleet)
        assert method.message(experiment.server).keys() == {"model"}


def test_class_of_a_client_whose_counts_were_lost_stays_in_the_softmax(tiny_task):
    method = LogitAdjustment(prior="global")
    client = open_client(tiny_task, method, 0)  # class counts 12, 6, 4, 2
    shift = torch.tensor([14.0, 15, 5, 2]).log()
    batch = client.samples.batch(torch.arange(24))
    client.model.eval()
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(client.model(batch.x) + shift, batch.y)
        loss = method.objective(client, {"counts": torch.tensor([14, 15, 5, 0])})(batch)
    assert loss.item() == pytest.approx(expected.item())


class AwayBeforeRefit(ClientHost):
    """Client host that cannot reach client 0 before it is asked to re-train in round 1."""

    def run(self, fn, message, round, id, shard, private):
        if id == 0 and (round == 0 or (round == 1 and fn.__name__ == "train")):
            raise OSError("no route to host")
        return super().run(fn, message, round, id, shard, private)


def test_client_of_fedsm_that_is_reached_after_training_gets_the_texts(tiny_task, tmp_path):
    method = FedSM(
        teacher=teachers.save_features(tmp_path / "f.npz", tiny_task), retrain="after", retrain_rounds=2, **RETRAINED
    )
    experiment = make_experiment(configure(), tiny_task, tmp_path, method, host=AwayBeforeRefit)
    notes = []
    experiment.fleet.on_note = notes.append
    report = experiment.step()
    assert report.rejected == {}
    assert report.traffic["refit"]["replies"] == report.traffic["train"]["replies"] + 1
    assert all("no route to host" in note for note in notes)
