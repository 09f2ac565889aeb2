"""Diagnostic figures for the components of FedSM. They do not affect training."""

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client
from raylt.core.training.sgd import autocast
from raylt.data.splits.long_tail import shot_groups
from raylt.metrics import GROUPS
from raylt.tree import Tree


def answers(client: Client, logits: Tensor) -> Tree:
    """Count a client's images per class (`n`) and those that the teacher classifies correctly (`right`), int64 [C].

    Args:
        client: the client.
        logits: logits of the teacher, [n, C].
    """
    y, classes = client.samples.y, client.model.classes
    return {
        "n": torch.bincount(y, minlength=classes),
        "right": torch.bincount(y[logits.argmax(1) == y], minlength=classes),
    }


def zero_shot(n: Tensor, right: Tensor, thresholds: tuple[int, int]) -> dict[str, float]:
    """Return the teacher's unweighted mean accuracy over all classes and over each group of classes.

    Classes without a sample and groups without a class are left out.

    Args:
        n: sum of the `n` of `answers`, int64 [C].
        right: sum of the `right` of `answers`, int64 [C].
        thresholds: samples per class that divide the groups, as for `shot_groups`.
    """
    present = n > 0
    accuracy = right[present] / n[present]
    groups = shot_groups(n[present].numpy(), *thresholds)
    members = {group: torch.tensor([of == group for of in groups]) for group in GROUPS}
    return {"all": accuracy.mean().item()} | {
        group: accuracy[of].mean().item() for group, of in members.items() if of.any()
    }


def first_rows(client: Client) -> Tensor:
    """Return the positions int64 [B] of one batch of a client's samples, its first ones."""
    return torch.arange(min(len(client), client.config.local.batch), device=client.device)


@torch.no_grad()
def some_features(client: Client) -> tuple[Tensor, Tensor]:
    """Return the features [B, d] and labels [B] of one batch, the client's first images without augmentation."""
    batch = client.samples.batch(first_rows(client))
    with autocast(client):
        return client.model.encoder.eval()(batch.x).float(), batch.y


def towards(client: Client, teacher: Tensor) -> float:
    """Return the mean cosine between the student's and the teacher's features of the client's first images.

    Args:
        client: the client.
        teacher: features of the client's images, [n, d], or of its first ones, [B, d].
    """
    z, _ = some_features(client)
    return F.cosine_similarity(z, teacher[: len(z)], dim=1).mean().item()


def drift(before: Tensor, after: Tensor, y: Tensor, prototypes: Tensor) -> float:
    """Return how far training moved class means, relative to the mean distance between two prototypes.

    It shows the distance of an encoder from that of the prototypes with which its features are mixed. It is 0 with
    fewer than two prototypes.

    Args:
        before: features under the encoder of the prototypes, [B, d].
        after: features under the trained encoder, [B, d].
        y: labels, int64 [B].
        prototypes: [P, d].
    """
    if len(prototypes) < 2:
        return 0.0
    moved = torch.stack([(after[y == c].mean(0) - before[y == c].mean(0)).norm() for c in y.unique()]).mean()
    return (moved / torch.pdist(prototypes).mean().clamp(min=1e-12).to(moved)).item()
