"""Metrics computed from confusion matrices, int64 [C, C]; rows are true classes, columns predicted classes.

A matrix counts test samples or, for label maps, labelled pixels; `accuracy` is then aAcc and `macro` mAcc.
Accuracies are in [0, 1]. A class without test samples has accuracy NaN and is left out of every mean.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # Avoid importing torch so that `raylt ls` starts quickly.
    from torch import Tensor

GROUPS = ("many", "medium", "few")
KINDS = ("owned", "matched", "long_tailed", "global", "miou")  # Metrics of one client.
LOCAL = "local"  # A further metric, where clients have test images of their own.
FEW_SAMPLES = 100  # Metrics computed on fewer samples are shown with a confidence interval.
CHUNK_CELLS = 2**18  # Counts that are processed together: 2 MiB.


def confusion(predicted: Tensor, truth: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """Return the confusion matrix, int64 [C, C].

    Args:
        predicted: Predicted classes in 0..C-1, int64 of any shape.
        truth: True classes, of the same shape.
        classes: Number of classes, C.
        ignore: A true class that is not counted (unlabelled pixels).
    """
    import torch

    if ignore is not None:
        counted = truth != ignore
        predicted, truth = predicted[counted], truth[counted]
    cells = (truth * classes + predicted).flatten()
    return torch.bincount(cells, minlength=classes * classes).view(classes, classes)


def accuracy(matrix: Tensor) -> float:
    """Return the accuracy, the share of test samples that are classified correctly.

    Args:
        matrix: Counts [C, C].
    """
    return (matrix.diagonal().sum().double() / matrix.sum()).item()


def wilson_interval(share: float, samples: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval for a share of independent samples (Wilson, JASA 1927, Eq. 7).

    Args:
        share: Share of correctly classified samples, in [0, 1].
        samples: Number of samples, at least 1.
    """
    z = 1.959963984540054  # the normal distribution's 97.5 % quantile
    shrink = 1 + z**2 / samples
    centre = (share + z**2 / (2 * samples)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / samples + z**2 / (4 * samples**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def class_accuracy(matrix: Tensor) -> Tensor:
    """Return the accuracy of each class, float64 [..., C].

    It is NaN for a class without test samples.

    Args:
        matrix: Counts [..., C, C].
    """
    return _hits(matrix) / matrix.sum(dim=-1)


def macro(matrix: Tensor) -> float:
    """Return the mean of the class accuracies.

    Args:
        matrix: Counts [C, C].
    """
    return class_accuracy(matrix).nanmean().item()


def group_accuracy(matrix: Tensor, groups: Sequence[str]) -> dict[str, float | None]:
    """Return the accuracy over the test samples of the many-, medium- and few-shot classes.

    It is None for a group without test samples.

    Args:
        matrix: Counts [C, C].
        groups: Group of each class: "many", "medium" or "few".
    """
    figures: dict[str, float | None] = {}
    for group in GROUPS:
        rows = [c for c, group_of_class in enumerate(groups) if group_of_class == group]
        tested = matrix[rows].sum()
        figures[group] = (matrix.diagonal()[rows].sum().double() / tested).item() if tested else None
    return figures


def owned_accuracy(matrix: Tensor, client_counts: Tensor) -> Tensor:
    """Return the mean class accuracy over a client's owned classes (BPFed, Eq. 4, 5 and 21), float64 [...].

    Args:
        matrix: Counts for one or several clients, int64 [..., C, C]. For a shared model, the clients' dimension is 1.
        client_counts: Training samples of each client and class, int64 [..., C].
    """
    return _mean(class_accuracy(matrix), (client_counts > 0).double())


def matched_accuracy(matrix: Tensor, client_counts: Tensor) -> Tensor:
    """Return the accuracy on a test set with the client's own class mix (MuPFL), float64 [...].

    It is the sum of n_c / n times the accuracy of class c. Arguments are as for `owned_accuracy`.
    """
    return _mean(class_accuracy(matrix), client_counts.double())


def long_tailed_accuracy(matrix: Tensor, counts: Tensor) -> Tensor:
    """Return the accuracy on a test set with the class mix of all clients' samples together, float64 [...].

    Args:
        matrix: As for `owned_accuracy`.
        counts: Training samples of each class, int64 [C].
    """
    return _mean(class_accuracy(matrix), counts.double())


def class_iou(matrix: Tensor) -> Tensor:
    """Return the intersection over union of each class, float64 [..., C].

    It is NaN for a class that is neither true nor predicted anywhere.

    Args:
        matrix: Counts [..., C, C].
    """
    hits = _hits(matrix)
    return hits / (matrix.sum(dim=-2) + matrix.sum(dim=-1) - hits)


def mean_iou(matrix: Tensor) -> float:
    """Return the mean intersection over union of the classes that occur in the matrix."""
    return class_iou(matrix).nanmean().item()


def owned_iou(matrix: Tensor, client_counts: Tensor) -> Tensor:
    """Return the mean intersection over union of a client's owned classes that occur in the matrix.

    The matrix counts samples or pixels. Arguments are as for `owned_accuracy`.
    """
    return _mean(class_iou(matrix), (client_counts > 0).double())


def class_figures(matrix: Tensor) -> dict[str, Tensor]:
    """Return recall, precision, F1 and IoU of each class, float64 [C].

    Recall is NaN for a class without test samples, and precision for a class that was never predicted. F1 and IoU are
    NaN for a class with neither test samples nor predictions.

    Args:
        matrix: Counts [C, C].
    """
    hits, tested, predicted = matrix.diagonal().double(), matrix.sum(dim=1), matrix.sum(dim=0)
    return {
        "recall": hits / tested,
        "precision": hits / predicted,
        "f1": 2 * hits / (tested + predicted),
        "iou": class_iou(matrix),
    }


def as_seen(matrix: Tensor, view: Tensor) -> Tensor:
    """Return a confusion matrix with the classes mapped to the classes that one client distinguishes.

    Args:
        matrix: Counts [C, C].
        view: The class that the client sees for each class, int64 [C]; see raylt/data/label_maps.py.
    """
    import torch

    rows = torch.zeros_like(matrix).index_add_(0, view, matrix)
    return torch.zeros_like(matrix).index_add_(1, view, rows)


def seen_by_each(
    matrices: Mapping[int, Tensor] | Tensor, views: np.ndarray | None, ids: Iterable[int]
) -> Mapping[int, Tensor]:
    """Return confusion matrices by client id, with the classes mapped to the classes that each client distinguishes.

    Args:
        matrices: Counts of each client's own model by client id, or the counts of one shared model.
        views: View of each client, int64 [K, C], see `as_seen`; None if all clients see the classes themselves.
        ids: Clients that use the shared model.
    """
    import torch

    own = matrices if isinstance(matrices, Mapping) else dict.fromkeys(ids, matrices)
    if views is None:
        return own
    plain = (views == np.arange(views.shape[1])).all(1).tolist()
    return Computed(own, lambda k: own[k] if plain[k] else as_seen(own[k], torch.from_numpy(views[k])))


class Computed(Mapping[int, "Tensor"]):
    """A mapping from client id to confusion matrix that computes each matrix on access, to save memory.

    Args:
        ids: Ids of the clients, in order.
        matrix: Function that returns the matrix of a client.
    """

    def __init__(self, ids: Iterable[int], matrix: Callable[[int], Tensor]):
        self._ids = dict.fromkeys(ids)
        self._matrix = matrix

    def __getitem__(self, id: int) -> Tensor:
        if id not in self._ids:
            raise KeyError(id)
        return self._matrix(id)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, id: object) -> bool:
        return id in self._ids


def pooled(matrices: Iterable[Tensor]) -> Tensor:
    """Return the sum of several confusion matrices (at least one).

    A matrix that several clients in a row share, as they share a model, is added once, multiplied by their number. Only
    the sum and the last matrix are kept in memory.
    """
    left = iter(matrices)
    last, times = next(left), 1
    total = last * 0
    for matrix in left:
        if matrix is last:
            times += 1
        else:
            total += last * times
            last, times = matrix, 1
    return total.add_(last * times)


def worst_decile(values: Sequence[float]) -> float:
    """Return the mean of the lowest tenth of the values, but of at least one value."""
    lowest = sorted(values)[: -(-len(values) // 10)]
    return sum(lowest) / len(lowest)


def by_client(
    matrices: Mapping[int, Tensor], client_counts: Tensor, own: Mapping[int, Tensor] | None = None
) -> dict[str, list[float | None]]:
    """Return lists of accuracies and IoU by kind, with one value per client (None for a client without evaluation).

    The kinds are owned, matched, long_tailed and global accuracy and the mean IoU of owned classes. Where clients have
    test images, "local" is the accuracy on them. A client is not evaluated if it has no model, or no training sample
    of any tested class.

    Args:
        matrices: Counts by client id, as `seen_by_each` returns them.
        client_counts: Training samples of each client and class, int64 [K, C].
        own: Counts on each client's own test images by client id; None if the clients have no test images.
    """
    import torch

    figures: dict[str, list[float | None]] = {kind: [None] * len(client_counts) for kind in KINDS}
    everyone, classes, all_counts = list(matrices), client_counts.shape[1], client_counts.sum(0)
    shared = all(matrix is matrices[everyone[0]] for matrix in matrices.values())
    at_once = max(1, CHUNK_CELLS // (classes if shared else classes**2))
    for ids in (everyone[start : start + at_once] for start in range(0, len(everyone), at_once)):
        matrix = matrices[ids[0]][None] if shared else torch.stack([matrices[k] for k in ids])
        counts = client_counts[ids]
        judged = (matrix.sum(dim=-1) * counts).any(dim=-1).tolist()
        computed = {
            "owned": owned_accuracy(matrix, counts),
            "matched": matched_accuracy(matrix, counts),
            "long_tailed": long_tailed_accuracy(matrix, all_counts).expand(len(ids)),
            "global": (_hits(matrix).sum(dim=-1) / matrix.sum(dim=(-2, -1))).expand(len(ids)),
            "miou": owned_iou(matrix, counts),
        }
        for kind, values in computed.items():
            for k, value, is_judged in zip(ids, values.tolist(), judged, strict=True):
                figures[kind][k] = value if is_judged else None
    if own is not None:
        figures[LOCAL] = [None] * len(client_counts)
        for k, matrix in own.items():
            if matrix.any():
                figures[LOCAL][k] = accuracy(matrix)
    return figures


def _hits(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).double()


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean along the last dimension, ignoring NaN.

    The result is the same bit for bit for any batch size.
    """
    weights = weights.where(~values.isnan(), 0.0)
    return (weights * values.nan_to_num()).cumsum(-1)[..., -1] / weights.cumsum(-1)[..., -1]


def packed(right: Tensor) -> str:
    """Encode truth values, bool [n], as base64 of bits; the first value is the highest bit of the first byte."""
    return b64encode(np.packbits(right.numpy()).tobytes()).decode()


def unpacked(text: str, n: int) -> np.ndarray:
    """Decode the n truth values, bool [n], that `packed` encoded.

    Raises:
        ValueError: The text does not encode n values.
    """
    octets = np.frombuffer(b64decode(text, validate=True), np.uint8)
    if len(octets) != -(-n // 8):
        raise ValueError(f"{len(octets)} bytes do not hold {n} truth values")
    return np.unpackbits(octets, count=n).astype(bool)


def quality(probabilities: Tensor, truth: Tensor, bins: int = 15) -> dict[str, float | None] | None:
    """Return the AUC and the calibration error of predicted probabilities, or None if the model has diverged.

    Args:
        probabilities: Predicted probabilities, [n, C]; each row sums to 1.
        truth: True classes, int64 [n].
        bins: Number of equal parts of [0, 1] for the calibration error.

    Returns:
        "auc" is the mean over classes of the area under the ROC curve of the class against the rest. Classes with all
        or none of the samples are left out. "calibration_error" is the mean distance between the probability of the
        likeliest class and its accuracy, over bins weighted by their samples (Guo et al., ICML 2017, Eq. 3).
    """
    import torch

    if not torch.isfinite(probabilities).all():
        return None
    areas = [
        _area((truth == c).numpy(), probabilities[:, c].double().numpy())
        for c in range(probabilities.shape[1])
        if 0 < (truth == c).sum() < len(truth)
    ]
    confidence, likeliest = probabilities.double().max(1)
    part = (confidence * bins).ceil().long().clamp(1, bins) - 1  # (0, 1/15], (1/15, 2/15], ...
    right = (likeliest == truth).double()
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, part, confidence - right)
    return {
        "auc": sum(areas) / len(areas) if areas else None,
        "calibration_error": (gaps.abs().sum() / len(truth)).item(),
    }


def _area(positive: np.ndarray, scores: np.ndarray) -> float:
    """Return the area under the ROC curve, with exactly the result of scikit-learn's `roc_auc_score`.

    Importing scikit-learn would cost each process a second and 70 MB.

    Args:
        positive: Whether each sample belongs to the class, bool [n], with both values.
        scores: Score of each sample, [n].
    """
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # last position of each score
    hits = np.cumsum(positive[order], dtype=np.float64)[last]
    misses = 1.0 + last - hits
    corner = np.ones(len(last), dtype=bool)  # leave out points on a line between others
    corner[1:-1] = (np.diff(misses, 2) != 0) | (np.diff(hits, 2) != 0)
    hits, misses = (np.append(0.0, counts[corner]) for counts in (hits, misses))
    return float(np.trapezoid(hits / hits[-1], misses / misses[-1]))


def client_figures(by_kind: dict[str, list[float | None]]) -> dict[str, dict[str, float]]:
    """Return the mean over clients, and the mean of the worst tenth, for each metric of `by_client`.

    Clients without evaluation do not count. A metric without any evaluated client is left out.
    """
    figures = {}
    for kind, values in by_kind.items():
        judged = [value for value in values if value is not None]
        if judged:
            figures[kind] = {"mean": sum(judged) / len(judged), "worst_decile": worst_decile(judged)}
    return figures
