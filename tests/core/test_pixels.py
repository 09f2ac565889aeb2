"""The loss of pixels without a label (FedSeg's BackCE), against probabilities written out."""

import math
from dataclasses import replace

import pytest
import torch
from refusals import refused
from tiny import configure, make_scenes, make_setup, open_client, pixels
from torch.nn import functional as F

from raylt.core.client import back_cross_entropy, labelled_cross_entropy
from raylt.data.label_maps import class_views
from raylt.data.samples import IGNORED
from raylt.errors import ConfigError
from raylt.methods.ditto import Ditto
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedprox import FedProx
from raylt.methods.mupfl.method import MuPFL
from raylt.methods.mupfl.pkcf import tune


def by_hand(logits, y) -> float:
    p, (batch, classes, height, width) = logits.double().softmax(1), logits.shape
    shown = {int(c) for c in y.flatten() if c != IGNORED}
    absent = [c for c in range(classes) if c not in shown]
    losses = []
    for b in range(batch):
        for i in range(height):
            for j in range(width):
                label = int(y[b, i, j])
                if label != IGNORED:
                    losses.append(-math.log(p[b, label, i, j]))
                elif absent:
                    losses.append(-math.log(sum(p[b, c, i, j].item() for c in absent)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("labels", [[0, 1, IGNORED], [IGNORED], [0, 1, 2, 3, IGNORED], [2, 3], [0, 1, 2, 3]], ids=str)
def test_pixels_without_a_label_are_of_a_class_that_the_batch_does_not_show(labels):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 4, 3, 5, generator=generator)).requires_grad_()
    y = torch.tensor(labels).repeat(30)[:30].view(2, 3, 5)
    loss = back_cross_entropy(logits, y)
    # the loss is 0 if no pixel has a label, up to the rounding of a log-sum-exp
    assert loss.item() == pytest.approx(by_hand(logits.detach(), y), rel=1e-5, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.isfinite().all()
    moved = gradient.abs().sum(1) > 1e-6
    counted = (y != IGNORED) | (set(range(4)) - set(labels) != set())
    # if no pixel has a label, any class may be meant, which has no gradient
    assert torch.equal(moved, counted & ~torch.tensor(set(labels) == {IGNORED}))


@pytest.mark.parametrize("method", [FedAvg(), FedProx(mu=0.0), MuPFL(bavd=False), Ditto(lam=0.0)], ids=lambda m: m.name)
@pytest.mark.parametrize("how", ["ignored", "absent"])
def test_what_they_teach_is_a_setting_of_every_method(method, how):
    scenes = make_scenes()
    client = open_client(scenes, method, config=configure(local={"unlabelled": how}, data={"clients": 5}))
    client.model = pixels(4, (16, 16, 3))
    batch = next(iter(client.batches(1, 4)))
    assert (batch.y == IGNORED).any()
    logits = client.model(batch.x)
    expected = F.cross_entropy(logits, batch.y) if how == "ignored" else back_cross_entropy(logits, batch.y)
    assert method.objective(client, {"model": {}})(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_classes_without_labels_ask_for_that_loss():
    setup = make_setup(configure(data={"erased": "unlabelled"}), FedAvg())
    spec = make_scenes().spec
    with refused("config.conflict", ConfigError, key="data.erased", excludes="local.unlabelled"):
        setup.check(spec, pixels(4, (16, 16, 3)))


@pytest.mark.parametrize("erased", ["background", "unlabelled"])
def test_classifiers_are_tuned_on_classes_as_clients_see_them_or_on_the_classes(erased):
    # if classes only lose their labels, no map of a client contradicts the true classes
    scenes = make_scenes()
    views = class_views(5, 4 if erased == "unlabelled" else 3, 2, erased)
    scenes = replace(
        scenes, shards=tuple(replace(shard, view=view) for shard, view in zip(scenes.shards, views, strict=True))
    )
    method = MuPFL(bavd=False, m=2, tau=1)
    client = open_client(scenes, method, config=configure(data={"clients": 5}))
    client.model = pixels(4, (16, 16, 3))
    seen = []
    client.model.classifier.register_forward_hook(lambda layer, z, logits: seen.append(len(logits)))
    tune(client, torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0)), torch.ones(4, dtype=torch.bool), 1)
    assert sum(seen) == 8
    assert (client.samples.view is None) == (erased == "unlabelled")


def test_a_batch_without_any_label_teaches_nothing():
    logits = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = torch.full((2, 4, 4), IGNORED)
    loss = labelled_cross_entropy(logits, y)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()
    y[0, 1, 2] = 2
    assert torch.equal(labelled_cross_entropy(logits, y), F.cross_entropy(logits, y))  # equal to the bit


def test_each_client_of_the_tiny_scenes_labels_two_classes():
    scenes = make_scenes()
    assert scenes.views.tolist() == class_views(5, 3, 2).tolist()
    assert all(shard.ids is None for shard in scenes.shards)
