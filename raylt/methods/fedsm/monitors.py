"""Diagnostic metrics for the components of FedSM. They do not affect training."""

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client
from raylt.core.training.sgd import autocast
from raylt.data.splits.long_tail import shot_groups
from raylt.metrics import GROUPS
from raylt.tree import Tree


def teacher_counts(client: Client, logits: Tensor) -> Tree:
    """Count a client's images (`n`) and the teacher's correct predictions (`right`) per class, int64 [C].

    Args:
        client: The client.
        logits: Logits of the teacher, [n, C].
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
        n: Sum of `n` from `teacher_counts` over all clients, int64 [C].
        right: Sum of `right` from `teacher_counts` over all clients, int64 [C].
        thresholds: Numbers of samples per class that divide the groups, as for `shot_groups`.
    """
    present = n > 0
    accuracy = right[present] / n[present]
    groups = shot_groups(n[present].numpy(), *thresholds)
    members = {group: torch.tensor([of == group for of in groups]) for group in GROUPS}
    return {"all": accuracy.mean().item()} | {
        group: accuracy[of].mean().item() for group, of in members.items() if of.any()
    }


def first_rows(client: Client) -> Tensor:
    """Return the indices, int64 [B], of a client's first samples, as many as in a batch."""
    return torch.arange(min(len(client), client.config.local.batch), device=client.device)


@torch.no_grad()
def some_features(client: Client) -> tuple[Tensor, Tensor]:
    """Return the features [B, d] and labels [B] of a client's first batch of images, without augmentation."""
    batch = client.samples.batch(first_rows(client))
    with autocast(client):
        return client.model.encoder.eval()(batch.x).float(), batch.y


def teacher_cosine(client: Client, teacher: Tensor) -> float:
    """Return the mean cosine between the student's and the teacher's features of the client's first images.

    Args:
        client: The client.
        teacher: Teacher's features of the client's images, [n, d], or of its first images, [B, d].
    """
    z, _ = some_features(client)
    return F.cosine_similarity(z, teacher[: len(z)], dim=1).mean().item()


def drift(before: Tensor, after: Tensor, y: Tensor, prototypes: Tensor) -> float:
    """Return how far training moved class means, relative to the mean distance between two prototypes.

    It shows how much a trained encoder differs from the encoder of the prototypes with which its features are mixed. It
    is 0 with fewer than two prototypes.

    Args:
        before: Features from the encoder of the prototypes, [B, d].
        after: Features from the trained encoder, [B, d].
        y: Labels, int64 [B].
        prototypes: The prototypes, [P, d].
    """
    if len(prototypes) < 2:
        return 0.0
    moved = torch.stack([(after[y == c].mean(0) - before[y == c].mean(0)).norm() for c in y.unique()]).mean()
    return (moved / torch.pdist(prototypes).mean().clamp(min=1e-12).to(moved)).item()
