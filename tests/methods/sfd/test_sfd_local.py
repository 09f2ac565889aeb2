import math

import pytest
import torch
from torch.nn import functional as F

from raylt import tree
from raylt.core.training.features import features
from raylt.methods.sfd.local_losses import adaptive_supcon
from raylt.methods.sfd.method import SFD


def test_objective_is_equation_8(open_client):
    _, client, message = open_client(gamma=1.0, beta1=0.5)
    batch = next(client.batches(1, 16))
    client.model.train()
    # in the first round's message r = 0 and beta = beta1
    assert message["beta"] == 0.5
    loss = SFD(gamma=1.0, beta1=0.5).objective(client, message)(batch)
    client.model.train()
    z = client.model.encoder(batch.x)
    prior = torch.where(client.counts > 0, client.counts, client.counts[client.counts > 0].min())
    h = F.normalize(client.model.get_submodule("projector")(z), dim=1)
    expected = F.cross_entropy(client.model.classifier(z) + prior.log(), batch.y) + 0.5 * adaptive_supcon(
        h, batch.y, client.counts.log(), 0.07
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "shifted"),
    [
        ({"abbl": "ce"}, False),
        ({"abbl": "la"}, True),
        ({"beta1": 0.0, "beta_pi": 0.0}, True),
        ({"beta1": 0.0, "gamma": 0.0}, False),
    ],
)
def test_ablations_of_the_local_loss(open_client, fields, shifted):
    _, client, message = open_client(**fields)
    batch = next(client.batches(1, 16))
    loss = SFD(**fields).objective(client, message)(batch)
    logits = client.model(batch.x)
    expected = F.cross_entropy(logits + 0.1 * client.counts.log() if shifted else logits, batch.y)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_weight_of_the_contrastive_loss_falls_along_a_cosine(finished):
    experiment, _ = finished
    server, betas = experiment.server, []
    before = server.round
    for server.round in (1, 2):
        betas.append(experiment.method.message(server)["beta"])
    server.round = before
    assert betas == pytest.approx([0.1, 0.05])  # R = 2: 0.1 (1 + cos 0) / 2 and 0.1 (1 + cos(pi/2)) / 2


def test_official_preset_weighs_clients_by_batches(open_client):
    _, client, message = open_client(preset="official")
    reply = SFD(preset="official").train(client, message)
    assert reply.weight == math.ceil(len(client) / 32)


def test_features_are_extracted_in_evaluation_mode_without_augmentation(open_client):
    _, client, _ = open_client()
    client.model.train()
    before = tree.snapshot(client.model.state_dict())
    z, y = features(client)
    assert torch.equal(z, features(client)[0])
    assert z.shape == (len(client), 64)
    assert torch.equal(y, client.samples.y)
    assert all(torch.equal(value, before[name]) for name, value in client.model.state_dict().items())
