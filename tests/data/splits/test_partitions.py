import numpy as np
import pytest
from refusals import refused

from raylt.config import DataConfig
from raylt.data.splits import partitions
from raylt.data.splits.long_tail import long_tail_counts
from raylt.data.splits.partitions import by_id, creff, dirichlet, dirichlet_min, hsu, iid, partition
from raylt.errors import DataError

COUNTS = long_tail_counts(np.full(10, 500), 50)
LABELS = np.random.default_rng(7).permutation(np.repeat(np.arange(10), COUNTS))
IDS = np.random.default_rng(8).integers(0, 12, len(LABELS)) * 3


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def histograms(parts) -> np.ndarray:
    return np.stack([np.bincount(LABELS[part], minlength=10) for part in parts])


@pytest.mark.parametrize("kind", ["creff", "dirichlet", "dirichlet_min", "hsu", "iid", "by_id"])
@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_clients_together_hold_every_sample_once(kind, alpha):
    parts = partition(LABELS, DataConfig(partition=kind, alpha=alpha, clients=12), IDS)
    assert len(parts) == 12
    assert np.sort(np.concatenate(parts)).tolist() == list(range(len(LABELS)))
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert histograms(parts).sum(0).tolist() == COUNTS.tolist()


@pytest.mark.parametrize("kind", ["creff", "dirichlet", "dirichlet_min", "hsu", "iid"])
def test_the_seed_alone_decides(kind):
    def lists(seed):
        return [part.tolist() for part in partition(LABELS, DataConfig(partition=kind, clients=10, seed=seed), None)]

    assert lists(1) == lists(1)
    assert lists(1) != lists(2)


@pytest.mark.parametrize("clients", [10, 11, 19, 20, 25])
@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_creff_sizes_differ_by_at_most_one(clients, alpha):
    sizes = [len(part) for part in creff(LABELS, clients, alpha, rng())]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_creff_is_that_of_its_code_written_out(seed):
    """Ten clients are one group. The code deals their samples out again in equal parts."""
    draws, clients = rng(seed), [[] for _ in range(10)]
    shuffled = draws.permutation(len(LABELS))
    labels, share = LABELS[shuffled], len(LABELS) / 10
    while min(map(len, clients)) < int(0.5 * share):
        clients = [[] for _ in range(10)]
        for c in range(10):
            p = draws.dirichlet(np.full(10, 0.5)) * [len(client) < share for client in clients]
            ends = [int(end * COUNTS[c]) for end in np.cumsum(p / p.sum())[:-1]]
            rows = draws.permutation(np.flatnonzero(labels == c))
            for client, part in zip(clients, np.split(rows, ends), strict=True):
                client.extend(np.sort(part))
    expected = np.array_split(shuffled[np.concatenate(clients).astype(int)], 10)
    for part, rows in zip(creff(LABELS, 10, 0.5, rng(seed)), expected, strict=True):
        assert part.tolist() == np.sort(rows).tolist()


@pytest.mark.parametrize(
    ("clients", "sizes", "samples"), [(25, [10, 10, 5], [399, 399, 201]), (20, [10, 10], [499, 500])]
)
def test_creff_draws_within_groups_of_ten_clients_and_the_rest(monkeypatch, clients, sizes, samples):
    deal, groups = partitions._deal_until, []

    def watched(labels, size, *others):
        groups.append((size, len(labels)))
        return deal(labels, size, *others)

    monkeypatch.setattr(partitions, "_deal_until", watched)
    creff(LABELS[:999], clients, 1.0, rng())
    assert groups == list(zip(sizes, samples, strict=True))


def test_creff_clients_own_fewer_classes_at_a_smaller_alpha():
    owned = [(histograms(creff(LABELS, 20, alpha, rng())) > 0).sum(1).mean() for alpha in (0.1, 100.0)]
    assert owned[0] < 0.6 * owned[1]


def test_creff_needs_ten_clients():
    with refused("config.out-of-range", DataError, key="data.clients", value=9):
        creff(LABELS, 9, 0.5, rng())


def test_creff_gives_up_on_an_alpha_at_which_one_client_takes_each_class():
    # the first class holds a third of the samples and goes to one client whole, so other clients get a rare class only
    with refused("data.too-few", DataError, key="data.alpha", value=0.0001):
        creff(LABELS, 10, 1e-4, rng())


@pytest.mark.parametrize("alpha", [1e-6, 0.05, 0.5, 100.0])
@pytest.mark.parametrize("clients", [3, 20, 37])
def test_hsu_sizes_differ_by_at_most_one_whatever_runs_out(alpha, clients):
    sizes = [len(part) for part in hsu(LABELS, clients, alpha, rng())]
    assert max(sizes) - min(sizes) <= 1


def test_hsu_at_a_huge_alpha_gives_every_client_the_mix_of_all_samples():
    for seed in range(3):
        table = histograms(hsu(LABELS, 10, 1e7, rng(seed)))
        # samples are drawn one by one: n_k p_c with a standard deviation of at most sqrt(n_k p_c)
        assert (np.abs(table - COUNTS / 10) < 5 * np.sqrt(COUNTS / 10) + 1).all()


def test_hsu_at_a_tiny_alpha_gives_a_client_one_class_as_long_as_there_is_enough_of_it():
    first = [histograms(hsu(LABELS, 40, 1e-5, rng(seed)))[0] for seed in range(20)]
    assert all((row > 0).sum() == 1 for row in first if COUNTS[row.argmax()] > row.sum())


def test_hsu_clients_draw_their_mix_around_the_frequencies_of_all_samples_not_around_equal_ones():
    # first clients of 400 draws; E q = p and Var q_c = p_c (1 - p_c) / (alpha + 1)
    mixes = np.stack([histograms(hsu(LABELS, 40, 2.0, rng(seed)))[0] for seed in range(400)])
    p = COUNTS / COUNTS.sum()
    mean, error = (mixes / mixes.sum(1, keepdims=True)).mean(0), np.sqrt(p * (1 - p) / 3 / 400)
    large = 2 * mixes.sum(1).max() < COUNTS  # classes that the first client cannot use up
    assert large.sum() >= 3
    assert (np.abs(mean - p) < 4 * error + 0.01)[large].all()
    spread = (mixes / mixes.sum(1, keepdims=True)).std(0)[large]
    assert np.allclose(spread, np.sqrt(p * (1 - p) / 3)[large], rtol=0.3)


def test_dirichlet_at_a_huge_alpha_gives_every_client_its_share_of_each_class():
    table = histograms(dirichlet(LABELS, 10, 1e6, 0, rng()))
    # n_c p_k has a standard deviation of about 500 * sqrt(0.1 * 0.9 / 1e7) = 0.05, and rounding adds less than 1
    assert (np.abs(table - COUNTS / 10) < 1.5).all()


def test_dirichlet_at_a_tiny_alpha_gives_each_class_to_one_client():
    table = histograms(dirichlet(LABELS, 10, 1e-3, 0, rng()))
    assert (table.max(0) / COUNTS > 0.95).mean() >= 0.9


def test_dirichlet_allows_empty_clients():
    # ten classes that go to one client each, so most of the 40 clients stay empty
    sizes = [len(part) for part in dirichlet(LABELS, 40, 1e-4, 0, rng())]
    assert len(sizes) == 40
    assert min(sizes) == 0


@pytest.mark.parametrize("deal", [dirichlet, dirichlet_min])
def test_clients_are_redrawn_until_they_have_the_smallest_size(deal):
    sizes = [min(map(len, deal(LABELS, 10, 0.2, 10, rng(seed)))) for seed in range(5)]
    assert min(sizes) >= 10
    # also if the last client is the one without a sample
    assert all(min(map(len, deal(np.zeros(40, np.int64), 2, 0.1, 1, rng(seed)))) for seed in range(20))


def test_dirichlet_redraws_until_clients_have_the_smallest_size_that_is_set():
    config = DataConfig(partition="dirichlet", alpha=0.5, clients=10)
    assert min(map(len, partition(LABELS, config, None))) < 60
    assert min(map(len, partition(LABELS, config.model_copy(update={"min_size": 60}), None))) >= 60


def test_dirichlet_min_stops_clients_at_their_even_share():
    # a client below n/K gains at most one more class, so it ends below n/K + the largest class
    sizes = [len(part) for part in dirichlet_min(LABELS, 10, 0.1, 0, rng())]
    assert max(sizes) < len(LABELS) / 10 + COUNTS.max()


def test_dirichlet_has_no_smallest_size():
    free = DataConfig(partition="dirichlet", alpha=0.01, clients=10)
    assert min(map(len, partition(LABELS, free, None))) < 10


def test_dirichlet_min_gives_nothing_more_to_a_client_with_exactly_its_even_share():
    """At this alpha a class goes to one client whole, so the second class goes to the other client."""
    labels = np.repeat(np.arange(2), 50)
    for seed in range(8):
        assert [len(part) for part in dirichlet_min(labels, 2, 1e-4, 0, rng(seed))] == [50, 50]


@pytest.mark.parametrize(("kind", "clients"), [("dirichlet_min", 20), ("exdir", 10)])
def test_the_smallest_size_is_ten_unless_it_is_set(kind, clients):
    for seed in range(5):
        config = DataConfig(partition=kind, alpha=0.1, per_client=3, clients=clients, seed=seed)
        assert min(map(len, partition(LABELS, config, None))) >= 10
        free = partition(LABELS, config.model_copy(update={"min_size": 0}), None)
        assert min(map(len, free)) < 10


@pytest.mark.parametrize("deal", [dirichlet, dirichlet_min])
def test_retries_are_bounded(deal):
    with refused("data.too-few", DataError, key="data.alpha", value=1e-3, clients=10, min_size=60):
        deal(LABELS[:500], 10, 1e-3, 60, rng())  # 10 * 60 > 500


def test_iid_sizes_differ_by_at_most_one():
    sizes = [len(part) for part in iid(LABELS, 7, rng())]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("kind", ["creff", "iid", "by_id"])
def test_a_smallest_size_that_a_partition_cannot_reach_is_refused(kind):
    config = DataConfig(partition=kind, clients=12, min_size=len(LABELS) // 12 + 1)
    with refused("data.too-few", DataError, key="data.min_size", value=config.min_size):
        partition(LABELS, config, IDS)


def test_by_id_makes_one_client_of_each_id_in_their_order():
    parts = by_id(np.array(["b", "a", "c", "a"]), 3)
    assert [part.tolist() for part in parts] == [[1, 3], [0], [2]]


def test_by_id_gives_no_samples_to_a_client_of_which_the_long_tail_left_none():
    parts = by_id(np.array(["a", "c", "a"]), 3, np.array(["a", "b", "c"]))
    assert [part.tolist() for part in parts] == [[0, 2], [], [1]]


def test_by_id_tells_the_number_of_ids():
    with refused("config.conflict", DataError, key="data.clients", value=5, ids=12):
        by_id(IDS, 5)


def test_by_id_needs_ids():
    with refused("data.no-ids", DataError, key="data.partition"):
        by_id(None, 5)


def test_more_clients_than_samples_are_refused():
    assert sorted(map(len, partition(LABELS[:10], DataConfig(clients=10, partition="iid"), None))) == [1] * 10
    with refused("data.too-few", DataError, key="data.clients", value=11):
        partition(LABELS[:10], DataConfig(clients=11), None)
