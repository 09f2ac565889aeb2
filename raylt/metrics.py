"""Everything that is read off a confusion matrix: int64 [C, C], rows the truth, columns the prediction.

It counts test samples, or the labelled pixels of them: `accuracy` is then segmentation's aAcc, `macro` its mAcc.
Accuracies are in [0, 1]. A class without a test sample has accuracy NaN and is left out of every mean.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

GROUPS = ("many", "medium", "few")
KINDS = ("owned", "matched", "global", "miou")      # of figures of one client
LOCAL = "local"                                     # the one that there is where clients have test images
AT_ONCE = 2**18                                     # counts that are looked at together: 2 MiB


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
    """Share of each class's test samples that are predicted rightly, float64 [..., C] of counts [..., C, C]; NaN for a
    class without any."""
    return _hits(matrix) / matrix.sum(dim=-1)


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


def owned_accuracy(matrix: Tensor, client_counts: Tensor) -> Tensor:
    """Mean class accuracy over the classes that a client holds, Eq. 4, 5 and 21 of BPFed, float64 [...].

    Args:
        matrix: of one client or of several, int64 [..., C, C]; one that they share has a 1 in their place.
        client_counts: the clients' training samples per class, int64 [..., C].
    """
    return _mean(class_accuracy(matrix), (client_counts > 0).double())


def matched_accuracy(matrix: Tensor, client_counts: Tensor) -> Tensor:
    """Accuracy on a test set with the client's own class mix: sum of n_c / n * accuracy of class c (MuPFL); as
    `owned_accuracy`."""
    return _mean(class_accuracy(matrix), client_counts.double())


def class_iou(matrix: Tensor) -> Tensor:
    """Intersection over union of each class, float64 [..., C]; NaN for a class in neither truth nor prediction."""
    hits = _hits(matrix)
    return hits / (matrix.sum(dim=-2) + matrix.sum(dim=-1) - hits)


def mean_iou(matrix: Tensor) -> float:
    """Mean intersection over union of the classes that occur in truth or prediction."""
    return class_iou(matrix).nanmean().item()


def owned_iou(matrix: Tensor, client_counts: Tensor) -> Tensor:
    """Mean intersection over union of the classes that a client holds and that occur in truth or prediction; as
    `owned_accuracy`, of samples or of pixels."""
    return _mean(class_iou(matrix), (client_counts > 0).double())


def class_figures(matrix: Tensor) -> dict[str, Tensor]:
    """Recall, precision, F1 and IoU of each class, float64 [C]; NaN where nothing of the class was tested (recall) or
    predicted (precision), or neither (F1, IoU)."""
    hits, tested, predicted = matrix.diagonal().double(), matrix.sum(dim=1), matrix.sum(dim=0)
    return {"recall": hits / tested, "precision": hits / predicted, "f1": 2 * hits / (tested + predicted),
            "iou": class_iou(matrix)}


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
    plain = (views == torch.arange(views.shape[1])).all(1).tolist()
    return {k: matrix if plain[k] else as_seen(matrix, views[k]) for k, matrix in own.items()}


def worst_decile(values: Sequence[float]) -> float:
    """Mean of the lowest tenth of the values, of one value at least."""
    lowest = sorted(values)[:-(-len(values) // 10)]
    return sum(lowest) / len(lowest)


def by_client(matrices: dict[int, Tensor], client_counts: Tensor,
              own: dict[int, Tensor] | None = None) -> dict[str, list[float | None]]:
    """Owned, matched and global accuracy and mean IoU of the owned classes of each client, and where clients have test
    images the accuracy on their own, [K]; None for one that is not judged.

    A client without a model or without a sample of any tested class is not.

    Args:
        matrices: by client id, as `seen_by_each` gives them.
        client_counts: training samples per client and class, int64 [K, C].
        own: as `matrices`, on each client's own test images alone; None where clients have none.
    """
    figures: dict[str, list[float | None]] = {kind: [None] * len(client_counts) for kind in KINDS}
    everyone, classes = list(matrices), client_counts.shape[1]
    shared = all(matrix is matrices[everyone[0]] for matrix in matrices.values())
    at_once = max(1, AT_ONCE // (classes if shared else classes**2))
    for ids in (everyone[start:start + at_once] for start in range(0, len(everyone), at_once)):
        matrix = matrices[ids[0]][None] if shared else torch.stack([matrices[k] for k in ids])
        counts = client_counts[ids]
        judged = (matrix.sum(dim=-1) * counts).any(dim=-1).tolist()
        known = {"owned": owned_accuracy(matrix, counts), "matched": matched_accuracy(matrix, counts),
                 "global": (_hits(matrix).sum(dim=-1) / matrix.sum(dim=(-2, -1))).expand(len(ids)),
                 "miou": owned_iou(matrix, counts)}
        for kind, values in known.items():
            for k, value, there in zip(ids, values.tolist(), judged, strict=True):
                figures[kind][k] = value if there else None
    if own is not None:
        figures[LOCAL] = [accuracy(own[k]) if k in own and own[k].any() else None for k in range(len(client_counts))]
    return figures


def _hits(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).double()


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean along the last dimension of what is not NaN, added up in its order however many there are."""
    weights = weights.where(~values.isnan(), 0.0)
    return (weights * values.nan_to_num()).cumsum(-1)[..., -1] / weights.cumsum(-1)[..., -1]


def quality(probabilities: Tensor, truth: Tensor, bins: int = 15) -> dict[str, float | None] | None:
    """What probabilities are worth beyond the likeliest class.

    Args:
        probabilities: [n, C], rows of which sum to 1.
        truth: int64 [n].

    Returns:
        "auc": mean over the classes of the area under each one's curve of true against false positives; a class that
        all or none of the samples are of has none. "calibration_error": mean distance of the likeliest class's
        probability from how often it is right, over `bins` equal parts of [0, 1] weighted by their samples (Guo et al.,
        ICML 2017, Eq. 3). None of a model that has diverged.
    """
    if not torch.isfinite(probabilities).all():
        return None
    areas = [_area((truth == c).numpy(), probabilities[:, c].double().numpy())
             for c in range(probabilities.shape[1]) if 0 < (truth == c).sum() < len(truth)]
    confidence, likeliest = probabilities.double().max(1)
    part = (confidence * bins).ceil().long().clamp(1, bins) - 1         # (0, 1/15], (1/15, 2/15], ...
    right = (likeliest == truth).double()
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, part, confidence - right)
    return {"auc": sum(areas) / len(areas) if areas else None,
            "calibration_error": (gaps.abs().sum() / len(truth)).item()}


def _area(positive: np.ndarray, scores: np.ndarray) -> float:
    """Area under the curve of true against false positives, to the bits of scikit-learn's `roc_auc_score`, whose
    import takes a second and 70 MB of a process that needs nothing else of it.

    Args:
        positive: bool [n], with both values.
        scores: [n].
    """
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)       # of each different score
    hits = np.cumsum(positive[order], dtype=np.float64)[last]
    misses = 1.0 + last - hits
    corner = np.ones(len(last), dtype=bool)         # what lies on a line between others counts nothing
    corner[1:-1] = (np.diff(misses, 2) != 0) | (np.diff(hits, 2) != 0)
    hits, misses = (np.append(0.0, counts[corner]) for counts in (hits, misses))
    return float(np.trapezoid(hits / hits[-1], misses / misses[-1]))


def client_figures(each: dict[str, list[float | None]]) -> dict[str, dict[str, float]]:
    """Of each list of `by_client`, the mean over the clients that have a figure, and the mean of the worst tenth."""
    judged = {kind: judged for kind, values in each.items() if (judged := [v for v in values if v is not None])}
    return {kind: {"mean": sum(values) / len(values), "worst_decile": worst_decile(values)}
            for kind, values in judged.items()}
