"""Figures that tell whether the parts of FedSM can work at all; none of them changes a training."""

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client
from raylt.core.training import autocast
from raylt.data.longtail import group_of
from raylt.metrics import GROUPS
from raylt.tree import Tree


def answers(client: Client, logits: Tensor) -> Tree:
    """Of each class, how many of the client's images there are, `n`, and are answered rightly, `right`; int64 [C].

    Args:
        logits: of the teacher, [n, C].
    """
    y, classes = client.samples.y, client.model.classes
    return {"n": torch.bincount(y, minlength=classes),
            "right": torch.bincount(y[logits.argmax(1) == y], minlength=classes)}


def zero_shot(n: Tensor, right: Tensor, thresholds: tuple[int, int]) -> dict[str, float]:
    """Accuracy over all classes and over those of each group, every class counting the same, as on a balanced test set.

    Args:
        n, right: sums of `answers`, int64 [C]. Classes without a sample and groups without a class are left out.
        thresholds: samples per class that divide the groups, as `group_of` takes them.
    """
    held = n > 0
    accuracy, groups = right[held] / n[held], group_of(n[held].numpy(), *thresholds)
    members = {group: torch.tensor([of == group for of in groups]) for group in GROUPS}
    return {"all": accuracy.mean().item()} | {
        group: accuracy[of].mean().item() for group, of in members.items() if of.any()}


@torch.no_grad()
def some_features(client: Client) -> tuple[Tensor, Tensor]:
    """What the client's encoder makes of one batch of its images, the first ones, unaugmented: [B, d]; labels [B]."""
    rows = torch.arange(min(len(client), client.config.local.batch), device=client.device)
    batch = client.samples.batch(rows)
    with autocast(client):
        return client.model.encoder.eval()(batch.x).float(), batch.y


def towards(client: Client, teacher: Tensor) -> float:
    """The mean cosine of the student's features of these images to the teacher's; 1: they point alike.

    Args:
        teacher: features of all of the client's images, [n, d].
    """
    z, _ = some_features(client)
    return F.cosine_similarity(z, teacher[:len(z)], dim=1).mean().item()


def drift(before: Tensor, after: Tensor, y: Tensor, prototypes: Tensor) -> float:
    """How far an encoder has moved away from that of the prototypes that its features are mixed with: the mean way of
    the classes' means, over the mean distance between two prototypes; 0 where there are not two.

    Args:
        before: features under the encoder of the prototypes, [B, d]; after: under the one that has been trained.
        prototypes: [P, d].
    """
    if len(prototypes) < 2:
        return 0.0
    way = torch.stack([(after[y == c].mean(0) - before[y == c].mean(0)).norm() for c in y.unique()]).mean()
    return (way / torch.pdist(prototypes).mean().clamp(min=1e-12).to(way)).item()
