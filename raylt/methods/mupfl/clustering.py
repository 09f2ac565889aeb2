"""Clusters of clients by the directions of their updates: cosines, and k-means with as many clusters as fit best."""

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raylt.models.split import Params
from raylt.tree import Fold


class Clustering(NamedTuple):
    """The cluster of each of n participants, numbered 0, 1, ... by first member; the mean silhouette of each number of
    clusters that was tried, by that number."""

    labels: list[int]
    silhouettes: dict[int, float]

    @property
    def kappa(self) -> int:
        return max(self.labels) + 1


def update_gram(updates: Sequence[Params], names: Iterable[str], block: int = 2 ** 16) -> Tensor:
    """Inner products of n updates over the named entries, float64 [n, n].

    It is summed over blocks of `block` numbers, so beside the updates themselves no more than n * block are in memory.
    """
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name in names:
        flat = [update[name].flatten() for update in updates]
        for column in range(0, flat[0].numel(), block):
            x = torch.stack([entry[column:column + block] for entry in flat]).double()
            total += x @ x.T
    return total


def mean_update(updates: Iterable[Params]) -> Params:
    """The mean of updates, each counting the same, Eq. 14 of MuPFL; of integer entries the largest."""
    mean = Fold()
    for update in updates:
        mean.add(update, 1.0)
    return mean.mean()


def cosines(gram: Tensor) -> Tensor:
    """Cosines [n, n] of vectors from their inner products; a zero vector is like itself alone."""
    norm = gram.diagonal().clamp(min=0).sqrt()
    zero = norm == 0
    unit = torch.where(zero, 1.0, norm)
    similarity = (gram / unit[:, None] / unit).masked_fill(zero[:, None] | zero, 0.0).clamp(-1, 1)
    return similarity.fill_diagonal_(1.0)


def embed(similarity: Tensor) -> Tensor:
    """Points [n, n] whose squared distances are 2 (1 - similarity): the rows of U sqrt(Lambda).

    Args:
        similarity: positive semi-definite with a diagonal of ones, as mixtures of cosine matrices are, float64 [n, n].
    """
    values, vectors = torch.linalg.eigh(similarity)
    noise = len(values) * torch.finfo(values.dtype).eps * values.max()
    return vectors * values.masked_fill(values < noise, 0).sqrt()


def cluster(similarity: Tensor, kappas: Sequence[int], seed: int) -> Clustering:
    """K-means on the embedding, for each number of clusters; the one with the largest silhouette, Eq. 9-13 of MuPFL.

    The silhouette is over 1 - similarity; a participant alone in its cluster counts as 0. Of equals the smallest
    number wins. A number of clusters that k-means cannot reach, because participants coincide, is passed over.

    Args:
        similarity: float64 [n, n].
        kappas: numbers of clusters, each in 1..n, ascending. Without any that can be reached all form one cluster.
    """
    from sklearn.cluster import KMeans  # a second of imports
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import silhouette_score
    from threadpoolctl import threadpool_limits

    n = len(similarity)
    # rounded, so that participants that coincide are one point
    points, distance = embed(similarity).round(decimals=12).numpy(), (1 - similarity).clamp(min=0).numpy()
    found: dict[int, list[int]] = {}
    silhouettes: dict[int, float] = {}
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)         # fewer distinct points than clusters
        for kappa in kappas:
            means = KMeans(kappa, n_init=10, random_state=seed % 2 ** 32)     # pyright: ignore[reportArgumentType]
            labels = means.fit_predict(points)
            if len(set(labels)) == kappa:
                found[kappa] = labels.tolist()
                silhouettes[kappa] = float(silhouette_score(distance, labels, metric="precomputed")) \
                    if 1 < kappa < n else 0.0
    if not found:
        return Clustering([0] * n, {})
    # rounded: equal dissimilarities must not be told apart by the last bit
    best = found[max(found, key=lambda kappa: (round(silhouettes[kappa], 9), -kappa))]
    order = {label: number for number, label in enumerate(dict.fromkeys(best))}
    return Clustering([order[label] for label in best], silhouettes)
