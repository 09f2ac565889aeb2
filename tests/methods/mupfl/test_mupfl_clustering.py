import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, silhouette_score
from tiny import configure, make_experiment
from torch import tensor

from raylt.methods.mupfl import clustering
from raylt.methods.mupfl.clustering import cluster, cosines, embed, form_clusters, last_of_all, mean_update, update_gram
from raylt.methods.mupfl.method import MuPFL

ALL = range(2, 7)


def updates_of(n, seed=0):
    """Return n updates of three entries, one of which is not trained."""
    generator = torch.Generator().manual_seed(seed)

    def one():
        return {
            "a": torch.randn(3, 4, 2, 2, generator=generator),
            "b": torch.randn(5, generator=generator),
            "statistics": torch.randn(5, generator=generator),
            "counter": tensor(3),
        }

    return [one() for _ in range(n)]


def similarity_of(points) -> torch.Tensor:
    x = torch.as_tensor(points, dtype=torch.float64)
    return cosines(x @ x.T)


def silhouette(distance, labels) -> float:
    """Compute Eq. 9-12 directly."""
    total = 0.0
    for i, own in enumerate(labels):
        mates = [j for j, label in enumerate(labels) if label == own and j != i]
        if not mates:
            continue
        a = np.mean([distance[i][j] for j in mates])
        b = min(
            np.mean([distance[i][j] for j, label in enumerate(labels) if label == other])
            for other in set(labels) - {own}
        )
        total += (b - a) / max(a, b)
    return total / len(labels)


@pytest.mark.parametrize("block", [1, 7, 2**16])
def test_gram_matrix_in_blocks_is_that_of_whole_vectors(block):
    updates = updates_of(5)
    updates[2] = updates[2] | {"a": updates[2]["a"].to(memory_format=torch.channels_last)}
    vectors = torch.stack([torch.cat([update[name].reshape(-1) for name in ("a", "b")]) for update in updates]).double()
    found = update_gram(updates, ["a", "b"], block=block)
    assert found.dtype == torch.float64
    assert torch.allclose(found, vectors @ vectors.T, rtol=1e-12)


def test_cosines_are_those_of_the_vectors_and_a_zero_vector_is_like_itself_alone():
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[3] = 0
    found = cosines(x @ x.T)
    for i, j in itertools.product(range(5), range(5)):
        expected = 1.0 if i == j else 0.0 if 3 in (i, j) else torch.cosine_similarity(x[i], x[j], dim=0)
        assert found[i, j].item() == pytest.approx(float(expected), abs=1e-12)


def test_mean_update_counts_every_member_the_same():
    updates = updates_of(3)
    updates[0]["counter"] = tensor(9)
    mean = mean_update(updates)
    for name in ("a", "b", "statistics"):
        expected = torch.stack([update[name] for update in updates]).mean(0)
        assert torch.allclose(mean[name], expected, atol=1e-6)
        assert mean[name].dtype == torch.float32
    assert mean["counter"] == 9


@pytest.mark.parametrize("rank", [2, 5, 30])
def test_embedding_has_the_distances_asked_for(rank):  # T-MUP-7
    points = torch.randn(12, rank, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    other = torch.randn(12, 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    similarity = 0.5 * similarity_of(points) + 0.5 * similarity_of(other)
    e = embed(similarity)
    assert torch.allclose(torch.cdist(e, e).square(), 2 * (1 - similarity), atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_silhouettes_are_those_of_equations_9_to_12_and_of_scikit_learn(seed):  # T-MUP-6
    similarity = similarity_of(np.random.default_rng(seed).normal(size=(9, 3)))
    for kappa in range(2, 9):
        labels, silhouettes = cluster(similarity, [kappa], seed)
        assert len(set(labels)) == kappa
        distance = (1 - similarity).numpy()
        assert silhouettes[kappa] == pytest.approx(silhouette(distance, labels), abs=1e-12)
        assert silhouettes[kappa] == pytest.approx(silhouette_score(distance, labels, metric="precomputed"), abs=1e-12)


def test_participant_alone_counts_as_zero():  # T-MUP-6
    # two pairs of equals, and one participant apart from both: (4 * 1 + 0) / 5
    labels, silhouettes = cluster(similarity_of(np.eye(3)[[0, 0, 1, 1, 2]]), [3], 0)
    assert labels == [0, 0, 1, 1, 2]
    assert silhouettes[3] == pytest.approx(0.8)
    assert cluster(similarity_of(np.eye(3)), [3], 0) == ([0, 1, 2], {3: 0.0})  # every participant is alone


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_two_opposite_directions_are_found(noise):  # T-MUP-8
    rng = np.random.default_rng(0)
    planted = rng.permutation([0, 1] * 5)
    direction = rng.normal(size=200)
    points = np.where(planted, 1, -1)[:, None] * direction + noise * rng.normal(size=(10, 200))
    found = cluster(similarity_of(points), ALL, 0)
    assert found.kappa == 2
    assert adjusted_rand_score(planted, found.labels) == 1
    assert found.labels[0] == 0  # clusters are numbered by their first member


def test_clusters_of_many_participants_are_numbered_by_their_first_members():
    """K-means from random starts numbers them as it likes."""
    x = torch.randn(12, 30, generator=torch.Generator().manual_seed(0)).double()
    for seed in range(3):
        labels = cluster(cosines(x @ x.T), [4], seed).labels
        assert list(dict.fromkeys(labels)) == [0, 1, 2, 3]


@pytest.mark.parametrize("groups", [3, 4, 5])
def test_number_of_clusters_is_the_one_that_was_planted(groups):
    rng = np.random.default_rng(groups)
    planted = np.repeat(np.arange(groups), 4)
    points = rng.normal(size=(groups, 300))[planted] + 0.2 * rng.normal(size=(4 * groups, 300))
    found = cluster(similarity_of(points), ALL, 0)
    assert found.kappa == groups
    assert adjusted_rand_score(planted, found.labels) == 1
    assert max(found.silhouettes, key=lambda kappa: found.silhouettes[kappa]) == groups


def test_of_equal_silhouettes_the_smallest_number_wins():
    found = cluster(similarity_of(np.eye(8)), ALL, 0)  # all distances are equal, so every silhouette is 0
    assert found.kappa == 2
    assert found.silhouettes == pytest.approx(dict.fromkeys(ALL, 0.0), abs=1e-9)


def test_last_bit_of_a_silhouette_does_not_decide():
    """Seven participants are equally far from each other, and rounding makes the silhouette of four clusters 1e-16."""
    similarity = torch.full((7, 7), 0.3, dtype=torch.float64).fill_diagonal_(1)
    assert cluster(similarity, ALL, 0).kappa == 2


def test_participants_that_coincide_form_one_cluster_without_a_warning(recwarn):
    for n in (3, 5, 6, 9, 12):  # of twelve, k-means forms the clusters; of fewer, the enumeration
        assert cluster(torch.ones(n, n, dtype=torch.float64), range(2, n), 0) == ([0] * n, {}), n
    two = cluster(similarity_of(np.eye(2)[[0, 0, 1, 1, 1]]), range(2, 5), 0)
    assert two.labels == [0, 0, 1, 1, 1]
    assert two.silhouettes == {2: 1.0}  # two distinct points cannot form three or four clusters
    assert not recwarn.list


def test_one_cluster_and_none_to_try():
    similarity = similarity_of(np.random.default_rng(0).normal(size=(4, 3)))
    assert cluster(similarity, [1], 0) == ([0, 0, 0, 0], {1: 0.0})
    assert cluster(similarity, [], 0) == ([0, 0, 0, 0], {})


def test_same_seed_gives_the_same_clusters_and_the_seed_may_be_large():
    similarity = similarity_of(np.random.default_rng(0).normal(size=(20, 40)))
    found = [cluster(similarity, ALL, 2**62 + 5) for _ in range(2)]
    assert found[0] == found[1]
    assert cluster(similarity, ALL, 7).silhouettes.keys() == set(ALL)


def test_random_starts_differ_from_round_to_round(tiny_task, tmp_path, monkeypatch):
    server, seeds = make_experiment(configure(), tiny_task, tmp_path, MuPFL()).server, []

    def watched(similarity, kappas, seed):
        seeds.append(seed)
        return cluster(similarity, kappas, seed)

    monkeypatch.setattr(clustering, "cluster", watched)
    updates = {id: server.model.state_dict() for id in range(3)}
    for round in (1, 2):
        server.round = round
        form_clusters(server, updates, {}, 0.5, None, 2)
    assert len(set(seeds)) == 2


def test_last_updates_and_maps_are_the_latest_of_each_client_by_ascending_id():
    server = SimpleNamespace(state={})
    rounds = [{10: 1.0, 2: 2.0}, {2: 3.0, 11: 4.0}]
    for values in rounds:
        updates = {id: {"a": tensor([value])} for id, value in values.items()}
        updates, maps = last_of_all(server, updates, {id: tensor([-value]) for id, value in values.items()})
    assert list(updates) == list(maps) == [2, 10, 11]
    assert [update["a"].item() for update in updates.values()] == [3.0, 1.0, 4.0]
    assert [map.item() for map in maps.values()] == [-3.0, -1.0, -4.0]


def spread(labels, similarity) -> float:
    """Return the within-cluster sum of squares, up to a factor, of points with distances 1 - similarity."""
    parts = [[i for i, label in enumerate(labels) if label == c] for c in set(labels)]
    return sum((1 - similarity[i, j]).item() / len(part) for part in parts for i in part for j in part)


def least_spread(similarity, kappa) -> float:
    every = itertools.product(range(kappa), repeat=len(similarity))
    return min(spread(labels, similarity) for labels in every if len(set(labels)) == kappa)


@pytest.mark.parametrize(("participants", "kappa", "seed"), [(6, 3, 39), (7, 2, 1), (8, 4, 8)])
def test_few_participants_form_the_clusters_with_the_least_squares(participants, kappa, seed):
    """Fifty random starts of k-means miss them in the last case."""
    x = torch.randn(participants, 30, generator=torch.Generator().manual_seed(seed)).double()
    similarity = cosines(x @ x.T)
    least = least_spread(similarity, kappa) if participants < 8 else 3.301087077893665
    assert spread(cluster(similarity, [kappa], seed).labels, similarity) == pytest.approx(least, abs=1e-9)


def test_partitions_are_as_many_as_stirlings_numbers_and_no_two_are_the_same():
    for n, kappa, count in ((1, 1, 1), (5, 2, 15), (8, 4, 1701), (10, 5, 42525)):
        labels = clustering._partitions(n, kappa)
        assert labels.shape == (count, n)
        assert {len(set(row)) for row in labels.tolist()} == {kappa}
        assert len({tuple(np.unique(row, return_inverse=True)[1]) for row in labels.tolist()[:2000]}) == min(
            count, 2000
        )


def test_k_means_starts_often_enough_for_many_participants():
    """Ten random starts miss the best of the partitions that 200 find."""
    x = torch.randn(14, 30, generator=torch.Generator().manual_seed(2)).double()
    similarity = cosines(x @ x.T)
    points = embed(similarity).numpy()
    least = KMeans(4, n_init=200, random_state=0).fit(points).inertia_
    assert spread(cluster(similarity, [4], 0).labels, similarity) == pytest.approx(least, abs=1e-6)
