"""Everything that is read off a confusion matrix: int64 [C, C], rows the truth, columns the prediction.

It counts test samples, or the labelled pixels of them: `accuracy` is then segmentation's aAcc, `macro` its mAcc.
Accuracies are in [0, 1]. A class without a test sample has accuracy NaN and is left out of every mean.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

GROUPS = ("many", "medium", "few")
KINDS = ("owned", "matched", "global", "miou")      # of figures of one client


def confusion(predicted: Tensor, truth: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """How often each class was predicted as each class.

    Args:
        predicted, truth: int64, of the same shape, in 0..C-1.
        classes: C.
        ignore: a truth that is not counted (unlabelled pixels).
    """
    if ignore is not None:
        counted = truth != ignore
        predicted, truth = predicted[counted], truth[counted]
    cells = (truth * classes + predicted).flatten()
    return torch.bincount(cells, minlength=classes * classes).view(classes, classes)


def accuracy(matrix: Tensor) -> float:
    """Share of the test samples that are predicted rightly."""
    return (matrix.diagonal().sum().double() / matrix.sum()).item()


def class_accuracy(matrix: Tensor) -> Tensor:
    """Share of each class's test samples that are predicted rightly, float64 [C]; NaN for a class without any."""
    return matrix.diagonal().double() / matrix.sum(dim=1)


def macro(matrix: Tensor) -> float:
    """Mean of the class accuracies."""
    return class_accuracy(matrix).nanmean().item()


def group_accuracy(matrix: Tensor, groups: Sequence[str]) -> dict[str, float | None]:
    """Accuracy over the test samples of the many, medium and few classes; None for a group without test samples.

    Args:
        groups: of each class, "many", "medium" or "few".
    """
    figures: dict[str, float | None] = {}
    for group in GROUPS:
        rows = [c for c, its in enumerate(groups) if its == group]
        tested = matrix[rows].sum()
        figures[group] = (matrix.diagonal()[rows].sum().double() / tested).item() if tested else None
    return figures


def owned_accuracy(matrix: Tensor, client_counts: Tensor) -> float:
    """Mean class accuracy over the classes that a client holds, Eq. 4, 5 and 21 of BPFed.

    Args:
        client_counts: the client's training samples per class, int64 [C].
    """
    return class_accuracy(matrix)[client_counts > 0].nanmean().item()


def matched_accuracy(matrix: Tensor, client_counts: Tensor) -> float:
    """Accuracy on a test set with the client's own class mix: sum of n_c / n * accuracy of class c (MuPFL)."""
    tested = matrix.sum(dim=1) > 0
    weights = client_counts[tested].double()
    return (weights @ class_accuracy(matrix)[tested] / weights.sum()).item()


def class_iou(matrix: Tensor) -> Tensor:
    """Intersection over union of each class, float64 [C]; NaN for a class in neither truth nor prediction."""
    hits = matrix.diagonal().double()
    return hits / (matrix.sum(dim=0) + matrix.sum(dim=1) - hits)


def mean_iou(matrix: Tensor) -> float:
    """Mean intersection over union of the classes that occur in truth or prediction."""
    return class_iou(matrix).nanmean().item()


def owned_iou(matrix: Tensor, client_counts: Tensor) -> float:
    """Mean intersection over union of the classes that a client holds and that occur in truth or prediction.

    Args:
        client_counts: the client's training samples or pixels per class, int64 [C].
    """
    return class_iou(matrix)[client_counts > 0].nanmean().item()


def as_seen(matrix: Tensor, view: Tensor) -> Tensor:
    """The counts when each class, in truth and prediction, is what it is to one client; same type, [C, C].

    Args:
        view: int64 [C], see raylt/data/maps.py.
    """
    rows = torch.zeros_like(matrix).index_add_(0, view, matrix)
    return torch.zeros_like(matrix).index_add_(1, view, rows)


def seen_by_each(matrices: dict[int, Tensor] | Tensor, views: Tensor, ids: Iterable[int]) -> dict[int, Tensor]:
    """The counts of each client's own model, or of one model that all share, as each client sees the classes.

    Args:
        matrices: by client id, or the shared one.
        views: int64 [K, C].
        ids: of the clients that share the one.
    """
    own = dict.fromkeys(ids, matrices) if isinstance(matrices, Tensor) else matrices
    itself = torch.arange(views.shape[1])
    return {k: matrix if torch.equal(views[k], itself) else as_seen(matrix, views[k]) for k, matrix in own.items()}


def worst_decile(values: Sequence[float]) -> float:
    """Mean of the lowest tenth of the values, of one value at least."""
    lowest = sorted(values)[:-(-len(values) // 10)]
    return sum(lowest) / len(lowest)


def by_client(matrices: dict[int, Tensor], client_counts: Tensor) -> dict[str, list[float | None]]:
    """Owned, matched and global accuracy and mean IoU of the owned classes of each client, [K]; None for one that is
    not judged.

    A client without a model or without a sample of any tested class is not.

    Args:
        matrices: by client id, as `seen_by_each` gives them.
        client_counts: training samples per client and class, int64 [K, C].
    """
    figures: dict[str, list[float | None]] = {kind: [None] * len(client_counts) for kind in KINDS}
    for k, matrix in matrices.items():
        matrix, counts = matrix.cpu(), client_counts[k].cpu()
        if (matrix.sum(dim=1) * counts).any():
            figures["owned"][k] = owned_accuracy(matrix, counts)
            figures["matched"][k] = matched_accuracy(matrix, counts)
            figures["global"][k] = accuracy(matrix)
            figures["miou"][k] = owned_iou(matrix, counts)
    return figures


def client_figures(each: dict[str, list[float | None]]) -> dict[str, dict[str, float]]:
    """Of each list of `by_client`, the mean over the clients that have a figure, and the mean of the worst tenth."""
    judged = {kind: [value for value in values if value is not None] for kind, values in each.items()}
    return {kind: {"mean": sum(values) / len(values), "worst_decile": worst_decile(values)}
            for kind, values in judged.items()}
