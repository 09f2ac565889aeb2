"""ACMU of MuPFL (3.4): client clusters, formed by the directions of the clients' updates.

Similarities are cosines, and k-means uses the number of clusters with the best silhouette. Departures [n] are listed in
method.py.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raylt import tree
from raylt.core.server import Server
from raylt.errors import ConfigError
from raylt.machine import total_memory
from raylt.models.split import StateDict
from raylt.tree import RunningSum

KMEANS_STARTS = 50  # Random starts of k-means.
# With at most this many participants, k-means starts from the best of all partitions. Ten participants have at most
# 42,525 partitions into a given number of clusters. Random starts missed the best one in 3 of 60 draws with eight
# participants, and in 4 of 30 with nine.
MAX_ENUMERATED = 10


class Clustering(NamedTuple):
    """A partition of n clients into clusters.

    Attributes:
        labels: Cluster of each participant, numbered 0, 1, ... by first member.
        silhouettes: Mean silhouette for each number of clusters that was tried.
    """

    labels: list[int]
    silhouettes: dict[int, float]

    @property
    def kappa(self) -> int:
        return max(self.labels) + 1


def update_gram(updates: Sequence[StateDict], names: Iterable[str], block: int = 2**16) -> Tensor:
    """Return the inner products of n updates, restricted to the named entries, float64 [n, n].

    Args:
        updates: The updates.
        names: Names of the entries.
        block: Number of values of each update that are processed together, which limits the memory to n * block values.
    """
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name in names:
        flat = [update[name].flatten() for update in updates]
        for column in range(0, flat[0].numel(), block):
            x = torch.stack([entry[column : column + block] for entry in flat]).double()
            total += x @ x.T
    return total


def mean_update(updates: Iterable[StateDict]) -> StateDict:
    """Return the unweighted mean of updates, Eq. 14 of MuPFL.

    For integer entries, it is the maximum.
    """
    mean = RunningSum()
    for update in updates:
        mean.add(update, 1.0)
    return mean.mean()


def cosines(gram: Tensor) -> Tensor:
    """Return the cosines of vectors, given their inner products [n, n]. A zero vector has cosine 0 with all others."""
    norm = gram.diagonal().clamp(min=0).sqrt()
    zero = norm == 0
    unit = torch.where(zero, 1.0, norm)
    similarity = (gram / unit[:, None] / unit).masked_fill(zero[:, None] | zero, 0.0).clamp(-1, 1)
    return similarity.fill_diagonal_(1.0)


def embed(similarity: Tensor) -> Tensor:
    """Return points [n, n] whose squared distances are 2 (1 - similarity).

    They are the rows of U sqrt(Lambda), where Lambda and U are the eigenvalues and eigenvectors of the similarity.

    Args:
        similarity: Positive semi-definite matrix with ones on the diagonal, such as a mixture of cosine matrices,
            float64 [n, n].
    """
    values, vectors = torch.linalg.eigh(similarity)
    noise = len(values) * torch.finfo(values.dtype).eps * values.max()
    return vectors * values.masked_fill(values < noise, 0).sqrt()


def cluster(similarity: Tensor, kappas: Sequence[int], seed: int) -> Clustering:
    """Run k-means for each number of clusters and return the result with the largest silhouette, Eq. 9-13 of MuPFL.

    The silhouette uses 1 - similarity as the distance; a participant alone in its cluster counts as 0. If silhouettes
    are equal, the smallest number of clusters is used. A number that k-means cannot reach, because participants
    coincide, is skipped.

    Args:
        similarity: Similarity of the participants, float64 [n, n].
        kappas: Numbers of clusters, each in 1..n, ascending. If none can be reached, all participants form one cluster.
        seed: Seed of k-means.
    """
    from sklearn.cluster import KMeans  # Not at the top, because the import takes a second.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import silhouette_score
    from threadpoolctl import threadpool_limits

    n = len(similarity)
    # round, so that equal participants have equal points
    points = embed(similarity).round(decimals=12).numpy()
    distance = (1 - similarity).clamp(min=0).numpy()
    labels_by_kappa: dict[int, list[int]] = {}
    silhouettes: dict[int, float] = {}
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than clusters
        for kappa in kappas:
            start: dict[str, Any] = {"n_init": KMEANS_STARTS, "random_state": seed % 2**32}
            if n <= MAX_ENUMERATED:
                start = {"n_init": 1, "init": _best_centres(points, kappa)}
            means = KMeans(kappa, **start)
            labels = means.fit_predict(points)
            if len(set(labels)) == kappa:
                labels_by_kappa[kappa] = labels.tolist()
                defined = 1 < kappa < n
                silhouettes[kappa] = float(silhouette_score(distance, labels, metric="precomputed")) if defined else 0.0
    if not labels_by_kappa:
        return Clustering([0] * n, {})
    # round, so that equal silhouettes do not differ in the last bit
    best = labels_by_kappa[max(labels_by_kappa, key=lambda kappa: (round(silhouettes[kappa], 9), -kappa))]
    order = {label: number for number, label in enumerate(dict.fromkeys(best))}
    return Clustering([order[label] for label in best], silhouettes)


def _best_centres(points: np.ndarray, kappa: int) -> np.ndarray:
    """Return the centres [kappa, d] of the partition of points [n, d] with the smallest sum of squares."""
    labels = _partitions(len(points), kappa)
    members = (labels[:, None, :] == np.arange(kappa)[None, :, None]).astype(np.float64)
    sizes = members.sum(2)
    # each cluster reduces the sum of squares by |sum of its points|^2 / size
    lowered = (members @ (points @ points.T) * members).sum(2) / sizes
    best = lowered.sum(1).argmax()
    return members[best] @ points / sizes[best][:, None]


@cache
def _partitions(n: int, kappa: int) -> np.ndarray:
    """Return all partitions of n participants into kappa clusters, as labels 0..kappa - 1, int8 [partitions, n]."""
    grown: list[tuple[int, ...]] = [()]
    for _ in range(n):
        # a participant joins a cluster or opens the next one, so no partition is listed twice
        grown = [(*labels, label) for labels in grown for label in range(min(max(labels, default=-1) + 2, kappa))]
    return np.array([labels for labels in grown if max(labels) == kappa - 1], np.int8)


KEPT_ROUNDS = 5  # Number of rounds whose similarities stay in the server's state, for `raylt plot clusters`.


def check_last_updates(clients: int, size: int) -> None:
    """Check that the last updates of all clients fit into half of this machine's memory.

    The other half is for the model, the data and the replies of a round.

    Args:
        clients: Number of clients with samples.
        size: Size of one client's update and map in bytes.

    Raises:
        ConfigError: The updates are too large.
    """
    room = total_memory() // 2
    if clients * size <= room:
        return
    raise ConfigError(
        f"method.clustered: all keeps the last updates of {clients:,} clients in memory, which take "
        f"{clients * size / 2**30:,.1f} GiB, but half of this machine's memory is {room / 2**30:,.1f} GiB (all). Set "
        "method.clustered=participants, or use a smaller model or fewer clients.",
        code="config.out-of-range",
        key="method.clustered",
        value="all",
        clients=clients,
        size=clients * size,
        room=room,
    )


def last_of_all(
    server: Server, updates: Mapping[int, StateDict], maps: Mapping[int, Tensor]
) -> tuple[dict[int, StateDict], dict[int, Tensor]]:
    """Return the latest update and map of every client that has taken part, by ascending id [14].

    They come from this round or, for other clients, from the server's state, which keeps the latest of all clients. The
    mean of a cluster, Eq. 14, needs full updates, so projections of them would not be enough.

    Args:
        server: The server.
        updates: Updates of this round, by client id.
        maps: Maps of this round, by client id.
    """
    last = server.state.get("last_updates", {}) | {
        str(id): {"update": tree.snapshot(update)} | ({"map": maps[id]} if id in maps else {})
        for id, update in updates.items()
    }
    server.state["last_updates"] = last
    ids = sorted(int(id) for id in last)
    return (
        {id: last[str(id)]["update"] for id in ids},
        {id: last[str(id)]["map"] for id in ids if "map" in last[str(id)]},
    )


def form_clusters(
    server: Server,
    updates: Mapping[int, StateDict],
    maps: Mapping[int, Tensor],
    alpha: float,
    kappa: int | None,
    kappa_max: int,
) -> list[list[int]]:
    """Cluster the clients by Eq. 7-13 [4] and log the clusters; return the client ids of each cluster.

    The server's state keeps the similarities of KEPT_ROUNDS rounds.

    Args:
        server: The server.
        updates: Trained model minus the start of the training, by ascending client id, Eq. 7.
        maps: With BAVD, the map M of each of these clients, float32 [size]; otherwise empty.
        alpha: Share of updates, not maps, in Eq. 8.
        kappa: Fixed number of clusters; None for the best of 2 to `kappa_max`, Eq. 13.
        kappa_max: Maximum number of clusters to try.
    """
    names = [name for name, p in server.model.named_parameters() if p.requires_grad]
    similarity = cosines(update_gram(list(updates.values()), names))
    n = len(updates)
    if maps:
        stacked = torch.stack(list(maps.values())).double()
        similarity = alpha * similarity + (1 - alpha) * cosines(stacked @ stacked.T)  # Eq. 8
    kappas = range(2, min(kappa_max, n - 1) + 1) if kappa is None else [min(kappa, n)]
    best = cluster(similarity, kappas if n > 2 else [], server.seed("acmu"))  # [5]
    server.log(
        kappa=best.kappa,
        silhouettes={str(kappa): value for kappa, value in best.silhouettes.items()},
        clusters=best.labels,
        clustered=list(updates),
    )
    kept = list(server.state.get("similarities", {}).values())[1 - KEPT_ROUNDS :]
    kept.append({"round": server.round, "matrix": similarity.float()})
    server.state["similarities"] = {str(place): entry for place, entry in enumerate(kept)}
    return [[id for id, label in zip(updates, best.labels, strict=True) if label == c] for c in range(best.kappa)]
