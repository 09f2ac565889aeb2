import numpy as np
import pytest
from refusals import refused

from raylt.config import DataConfig
from raylt.data.splits import partitions
from raylt.data.splits.long_tail import long_tail_counts, own_tail
from raylt.data.splits.partitions import extended_dirichlet, partition, pathological, quantity, shards
from raylt.data.splits.split import Split
from raylt.data.task import build_task
from raylt.errors import DataError

COUNTS = long_tail_counts(np.full(10, 500), 20)
LABELS = np.random.default_rng(7).permutation(np.repeat(np.arange(10), COUNTS))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def histograms(parts, labels=LABELS) -> np.ndarray:
    return np.stack([np.bincount(labels[part], minlength=10) for part in parts])


@pytest.mark.parametrize("kind", ["pathological", "shards", "quantity"])
@pytest.mark.parametrize("clients", [5, 12])
def test_clients_together_hold_every_sample_once_and_the_seed_decides(kind, clients):
    def parts(seed):
        return partition(LABELS, DataConfig(partition=kind, clients=clients, seed=seed), None)

    assert np.sort(np.concatenate(parts(1))).tolist() == list(range(len(LABELS)))
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts(1))
    lists = [[part.tolist() for part in parts(seed)] for seed in (1, 1, 2)]
    assert lists[0] == lists[1] != lists[2]


@pytest.mark.parametrize(("clients", "held"), [(10, 2), (7, 3), (5, 10)])
def test_pathological_clients_hold_per_client_classes_and_classes_are_shared_evenly(clients, held):
    table = histograms(pathological(LABELS, clients, held, rng()))
    assert ((table > 0).sum(1) == held).all()
    holders = (table > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for c in range(10):
        shares = table[table[:, c] > 0, c]
        assert shares.max() - shares.min() <= 1


def test_pathological_groups_of_classes_are_not_always_the_same():
    groups = {tuple(np.flatnonzero(row)) for row in histograms(pathological(LABELS, 20, 2, rng()))}
    assert len(groups) > 8


@pytest.mark.parametrize(
    ("clients", "per_client", "remedy"),
    [(10, 11, "at most as many"), (4, 2, "at least 3"), (200, 4, "Lower data.per_client")],
)
def test_pathological_partitions_that_cannot_be_are_refused(clients, per_client, remedy):
    with refused("data.too-few", DataError, key="data.per_client", value=per_client) as caught:
        pathological(LABELS, clients, per_client, rng())
    assert remedy in str(caught.value)


def test_shards_are_of_one_size_and_hold_few_classes():
    parts = shards(LABELS, 20, 2, rng())
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 2
    # a shard holds a fortieth of the samples, of one class or two, so two shards hold at most four classes except in
    # the tail
    owned = (histograms(parts) > 0).sum(1)
    assert np.median(owned) <= 3
    assert owned.mean() < 4
    with refused("data.too-few", DataError, key="data.per_client", value=4):
        shards(LABELS, 1000, 4, rng())


def test_shards_are_the_same_on_every_processor():
    """A sort that is not stable may order the samples of a class by the processor's vectors."""
    draws = rng(3)
    shuffled = draws.permutation(len(LABELS)).tolist()
    cut = np.array_split(sorted(shuffled, key=LABELS.__getitem__), 40)
    dealt = draws.permutation(40).reshape(20, 2)
    for part, (one, other) in zip(shards(LABELS, 20, 2, rng(3)), dealt, strict=True):
        assert part.tolist() == sorted([*cut[one], *cut[other]])


def test_shards_of_a_client_are_drawn_from_all_classes():
    labels = np.repeat(np.arange(10), 40)  # each of 40 shards has one class
    owned = [len(np.unique(labels[part])) for part in shards(labels, 20, 2, rng())]
    assert owned.count(2) > 10


@pytest.mark.parametrize(
    "kind", ["pathological", "shards", "quantity", "exdir", "dirichlet", "dirichlet_min", "hsu", "iid", "creff"]
)
def test_samples_of_a_class_are_dealt_in_a_random_order(kind):
    config = DataConfig(partition=kind, clients=10, per_client=1, alpha=10.0, min_size=0)
    parts = partition(np.zeros(200, dtype=np.int64), config, None)
    assert sum(np.diff(part).max() > 1 for part in parts) >= 9  # the rows of a client are not one piece


@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_extended_dirichlet_gives_few_classes_and_divides_them_unevenly(alpha):
    parts = extended_dirichlet(LABELS, 10, 3, alpha, 1, rng())
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    table = histograms(parts)
    assert ((table > 0).sum(1) <= 3).all()
    sizes = np.array([len(part) for part in parts])
    assert sizes.min() >= 1
    again = extended_dirichlet(LABELS, 10, 3, alpha, 1, rng())
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_extended_dirichlet_gives_nothing_more_to_a_client_with_its_even_share():
    """At this alpha a class goes to one client whole, so the second class goes to the other client."""
    labels = np.repeat(np.arange(2), 50)
    for seed in range(8):
        assert [len(part) for part in extended_dirichlet(labels, 2, 2, 1e-4, 0, rng(seed))] == [50, 50]


def test_extended_dirichlet_depends_on_alpha_and_respects_the_smallest_size():
    labels = np.repeat(np.arange(10), 100)

    def spread(alpha):
        table = np.stack(
            [np.bincount(labels[p], minlength=10) for p in extended_dirichlet(labels, 10, 5, alpha, 20, rng())]
        )
        assert table.sum(1).min() >= 20
        return np.mean([column[column > 0].std() for column in table.T])

    assert spread(0.3) > 2 * spread(1000.0)
    with refused("data.too-few", DataError, key="data.per_client", value=11):
        extended_dirichlet(labels, 10, 11, 1.0, 0, rng())
    with refused("data.too-few", DataError, key="data.alpha"):
        extended_dirichlet(labels, 10, 2, 1.0, 101, rng())
    split = build_task(DataConfig(partition="exdir", per_client=4, clients=5)).split
    assert (split.partition, split.per_client) == ("exdir", 4)


def test_a_partition_that_does_not_exist_is_refused_with_the_nearest():
    # before the source is read, which may take hours
    with refused("config.unknown-name", key="data.partition", value="dirichlett") as caught:
        build_task(DataConfig(partition="dirichlett", source="folder:there-is-none"))
    assert "Did you mean dirichlet?" in str(caught.value)


def test_quantity_skews_sizes_and_not_classes():
    uneven, even = ([len(part) for part in quantity(LABELS, 10, alpha, 1, rng())] for alpha in (0.3, 1e6))
    assert max(uneven) > 5 * min(uneven)
    assert max(even) - min(even) <= 3
    table = histograms(quantity(LABELS, 4, 5.0, 100, rng()))
    expected = table.sum(1, keepdims=True) * COUNTS / COUNTS.sum()
    assert (np.abs(table - expected) < 5 * np.sqrt(expected) + 1).all()
    with refused("data.too-few", DataError, key="data.alpha", value=0.5, clients=10, min_size=200):
        quantity(LABELS, 10, 0.5, 200, rng())


def test_own_tail_of_a_client():
    labels = np.repeat([4, 1, 7], [100, 100, 100])
    kept = own_tail(labels, 25, rng())
    assert sorted(np.unique(labels[kept], return_counts=True)[1].tolist()) == [4, 20, 100]  # 100 * 25^(-i/2)
    orders = {tuple(np.bincount(labels[own_tail(labels, 25, rng(seed))], minlength=8)) for seed in range(20)}
    assert len(orders) == 6
    assert own_tail(labels, 1, rng()).tolist() == list(range(300))
    # no class of a client vanishes, and a class with one sample keeps it
    assert own_tail(np.array([2, 2, 5]), 100, rng()).tolist() in ([0, 1, 2], [0, 2], [1, 2])
    assert own_tail(np.empty(0, np.int64), 100, rng()).tolist() == []
    assert own_tail(np.array([3]), 100, rng()).tolist() == [0]


def test_own_tail_draws_the_samples_of_a_class_at_random():
    labels = np.repeat([0, 1], 50)
    parts = [own_tail(labels, 25, rng(seed)) for seed in range(8)]
    of_the_rarer = [min(rows[rows < 50], rows[rows >= 50], key=len) % 50 for rows in parts]
    assert all(len(rows) == 2 for rows in of_the_rarer)
    assert len(set(map(tuple, of_the_rarer))) > 4


def test_tails_of_clients_depend_on_the_seed_where_the_clients_do_not():
    config = DataConfig(partition="by_id", clients=4, tail="local", imbalance=10)
    one, same, other = (
        [rows.tolist() for rows in partition(LABELS, config.model_copy(update={"seed": s}), np.arange(len(LABELS)) % 4)]
        for s in (0, 0, 1)
    )
    assert one == same != other


@pytest.mark.parametrize("tail", ["global", "local", "mixed"])
def test_tail_says_what_is_long_tailed(tail):
    task = build_task(DataConfig(clients=20, partition="iid", imbalance=10, tail=tail))
    table = task.client_counts
    owns_order = [row.argmax() for row in table]
    pooled = task.counts.max() / task.counts.min()
    if tail == "global":
        assert pooled == pytest.approx(10, rel=0.2)
        assert len(set(owns_order)) < 5
    else:
        assert len(set(owns_order)) >= 5  # each client has its own largest class
        assert table.max(1).mean() > 3 * np.median(table, 1).mean() / 2
    if tail == "local":
        assert pooled < 3  # no class is rare in the union of all clients
    if tail == "mixed":
        assert pooled > 4
    assert task.split.tail == (None if tail == "global" else tail)


def test_tails_differ_in_what_is_drawn_and_are_named_and_hashed():
    hashes = {tail: build_task(DataConfig(tail=tail)).split.sha256 for tail in ("global", "local", "mixed")}
    assert len(set(hashes.values())) == 3
    again = build_task(DataConfig(tail="local"))
    assert again.split.sha256 == hashes["local"]
    assert build_task(DataConfig(tail="local"), again.split).split.seal == again.split.seal
    assert Split.from_json(again.split.as_text()).seal == again.split.seal
    assert build_task(DataConfig(partition="shards", per_client=3)).split.per_client == 3
    assert build_task(DataConfig(per_client=3)).split.per_client is None


def test_tail_of_clients_with_label_maps_is_refused():
    with refused("data.wrong-kind", DataError, key="data.tail", value="local"):
        partition(np.ones((30, 3), dtype=bool), DataConfig(partition="iid", tail="local", clients=2), None)


@pytest.mark.parametrize("seed", range(10))
def test_exdir_draws_until_each_class_has_half_of_its_even_number_of_holders(monkeypatch, seed):
    """Each class needs four holders: 40 clients with two of ten classes each make eight on average."""
    deal, fewest = partitions._deal, []

    def watched(*args):
        fewest.append(args[-1].sum(1).min())
        return deal(*args)

    monkeypatch.setattr(partitions, "_deal", watched)
    extended_dirichlet(np.arange(800) % 10, 40, 2, 10.0, 0, rng(seed))
    assert min(fewest) >= 4


def test_pathological_gives_the_odd_sample_to_any_of_a_class_s_clients():
    sizes = {tuple(map(len, pathological(np.zeros(3, dtype=np.int64), 2, 1, rng(seed)))) for seed in range(10)}
    assert sizes == {(1, 2), (2, 1)}


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet_min", "exdir", "quantity"])
def test_the_smallest_size_may_be_the_even_share(name):
    config = DataConfig(partition=name, clients=3, alpha=1e6, per_client=2, min_size=4, imbalance=1.0)
    assert [len(part) for part in partition(np.arange(12) % 2, config, None)] == [4, 4, 4]
