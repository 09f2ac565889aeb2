import numpy as np
import pytest
from refusals import refused
from tiny import CPU, make_scenes

from raylt.config import DataConfig
from raylt.data.label_maps import VOID, class_counts, class_views, present_classes, relabel
from raylt.data.samples import Samples
from raylt.data.splits.partitions import by_class, partition
from raylt.data.splits.split import Split
from raylt.data.task import build_task, outline_of, task_from
from raylt.errors import DataError

MAPS = np.array([[[0, 1], [1, VOID]], [[2, 2], [2, 2]], [[VOID, VOID], [0, 1]]], dtype=np.uint8)


def shows(n: int = 60, classes: int = 5) -> np.ndarray:
    """Return which class is shown by which image; class c is in about one image of c + 1."""
    return np.random.default_rng(0).random((n, classes)) < 1 / (np.arange(classes) + 1)


def test_counts_are_of_labelled_pixels_and_of_images():
    assert class_counts(MAPS, 3).tolist() == [2, 3, 4]
    assert class_counts(np.array([0, 3, 3]), 4).tolist() == [1, 0, 0, 2]
    assert class_counts(MAPS[:0], 3).tolist() == [0, 0, 0]


def test_counts_of_large_maps_are_those_of_numpy():
    # 21 million pixels, which are counted in two parts
    maps = np.random.default_rng(0).integers(0, 9, (50, 700, 600), dtype=np.uint8)
    assert class_counts(maps, 7).tolist() == np.bincount(maps.ravel())[:7].tolist()


def test_shown_says_which_classes_an_image_has():
    assert present_classes(MAPS, 3).tolist() == [[True, True, False], [False, False, True], [True, True, False]]


def test_views_keep_beta_classes_in_a_ring_and_make_the_rest_background():
    assert class_views(4, 3, 1).tolist() == [[0, 3, 3, 3], [3, 1, 3, 3], [3, 3, 2, 3], [0, 3, 3, 3]]
    assert class_views(3, 3, 2).tolist() == [[0, 1, 3, 3], [3, 1, 2, 3], [0, 3, 2, 3]]


def test_views_may_take_the_labels_of_the_rest_away():
    views = class_views(4, 3, 1, "unlabelled")
    assert views.tolist() == [[0, VOID, VOID], [VOID, 1, VOID], [VOID, VOID, 2], [0, VOID, VOID]]
    assert relabel(MAPS, views[1]).tolist() == [[[VOID, 1], [1, VOID]], [[VOID] * 2] * 2, [[VOID, VOID], [VOID, 1]]]


@pytest.mark.slow
@pytest.mark.parametrize("erased", ["background", "unlabelled"])
def test_erased_classes_are_one_more_class_or_have_no_label(erased):
    task = build_task(DataConfig(source="shapes", partition="classes", beta=2, clients=4, imbalance=1, erased=erased))
    plain = build_task(DataConfig(source="shapes", partition="iid", clients=4, imbalance=1))
    assert task.class_names == (*plain.class_names, *(["background"] if erased == "background" else []))
    for k, shard in enumerate(task.shards):
        kept = {k % plain.classes, (k + 1) % plain.classes}
        seen = set(np.unique(shard.labels()).tolist()) - {VOID}
        assert seen <= kept | ({plain.classes} if erased == "background" else set())
        assert task.client_counts[k].sum() == sum(int((shard.labels() == c).sum()) for c in seen)
    # a client judges either the classes as it sees them, or the true classes
    if erased == "background":
        assert all(view.tolist() != list(range(task.classes)) for view in task.views)
    else:
        assert task.views is None


def test_relabelled_maps_keep_void():
    assert relabel(MAPS, class_views(3, 3, 1)[1]).tolist() == [
        [[3, 1], [1, VOID]],
        [[3, 3], [3, 3]],
        [[VOID, VOID], [3, 1]],
    ]


@pytest.mark.parametrize(("clients", "imbalance"), [(5, 1.0), (5, 10.0), (7, 4.0)])
def test_clients_of_by_class_share_the_images_in_falling_sizes(clients, imbalance):
    parts = by_class(shows(), clients, 2, imbalance, np.random.default_rng(0))
    sizes = [len(part) for part in parts]
    assert np.sort(np.concatenate(parts)).tolist() == list(range(60))
    assert sizes == sorted(sizes, reverse=True)
    # 60 r^k / sum with r = IF^(-1 / (K - 1)); rounding changes each by less than one
    exact = imbalance ** (-np.arange(clients) / (clients - 1))
    assert np.abs(sizes - 60 * exact / exact.sum()).max() < 1


def test_clients_of_by_class_get_images_with_their_classes_while_there_are_any():
    table = shows()
    parts = by_class(table, 5, 1, 1.0, np.random.default_rng(0))
    # classes 3 and 4 are in fewer than 12 images, a client's size; client 4 draws first and gets all of class 4
    assert table[:, 4].sum() < 12
    assert table[parts[4], 4].sum() == table[:, 4].sum()
    assert table[parts[0], 0].all()  # class 0 is in every image


def test_an_image_suits_a_client_if_it_shows_one_of_the_clients_classes():
    # client k keeps classes k and k + 1; half of the images show class 0 alone, half class 2 alone
    table = np.zeros((40, 4), bool)
    table[::2, 0] = table[1::2, 2] = True
    parts = by_class(table, 4, 2, 1.0, np.random.default_rng(0))
    assert [table[part].sum(0).tolist() for part in parts] == [
        [10, 0, 0, 0],
        [0, 0, 10, 0],
        [0, 0, 10, 0],
        [10, 0, 0, 0],
    ]


def test_the_client_with_the_rarest_class_draws_first():
    table = np.zeros((8, 2), bool)
    table[:, 0] = True  # class 0 is in every image, class 1 in three
    table[[1, 4, 6], 1] = True
    for seed in range(5):
        parts = by_class(table, 2, 1, 1.0, np.random.default_rng(seed))
        assert {1, 4, 6} <= set(parts[1].tolist())


def test_the_seed_alone_decides_by_class():
    lists = [
        [part.tolist() for part in partition(shows(), DataConfig(partition="classes", clients=5, seed=seed), None)]
        for seed in (1, 1, 2)
    ]
    assert lists[0] == lists[1] != lists[2]


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        ("beta", 6, "config.out-of-range"),
        ("imbalance", 1e6, "data.too-few"),
        ("partition", "dirichlet", "data.wrong-kind"),
    ],
)
def test_partitions_that_images_with_maps_cannot_have_are_refused(setting, value, code):
    changes = {setting: value}
    with refused(code, DataError, key=f"data.{setting}", value=value):
        partition(shows(), DataConfig(**({"partition": "classes", "clients": 5} | changes)), None)


def test_labels_of_whole_images_cannot_be_relabelled_pixel_by_pixel():
    with refused("data.wrong-kind", DataError, key="data.partition", value="classes"):
        build_task(DataConfig(partition="classes"))


# the task of a scene source


@pytest.fixture(scope="module")
def task():
    return build_task(DataConfig(source="shapes", partition="classes", beta=2, clients=6, imbalance=4))


def test_clients_see_their_classes_and_background(task):
    assert (task.kind, task.classes, task.class_names[-1]) == ("segmentation", 7, "background")
    assert task.views.tolist() == class_views(6, 6, 2).tolist()
    for k, (shard, counts) in enumerate(zip(task.shards, task.client_counts, strict=True)):
        labels = shard.labels()
        assert set(np.unique(labels)) <= {k, (k + 1) % 6, 6, VOID}
        assert counts.tolist() == np.bincount(labels.ravel(), minlength=256)[:7].tolist()
        assert counts[k] > 0
    assert task.sizes.sum() == 320


def test_the_test_set_keeps_the_true_classes(task):
    assert set(np.unique(task.test.labels())) == {0, 1, 2, 3, 4, 5, VOID}


def test_groups_follow_the_share_of_pixels_over_all_clients(task):
    plain = build_task(DataConfig(source="shapes", partition="iid", clients=3, imbalance=1))
    share = plain.counts / plain.counts.sum()
    assert task.groups == (*plain.groups, "-")
    assert plain.groups == tuple("many" if s > 0.05 else "few" if s < 0.01 else "medium" for s in share)


def test_a_split_of_classes_survives_its_file_with_its_beta(task, tmp_path):
    task.split.save(tmp_path / "split.json")
    assert Split.load(tmp_path / "split.json").beta == 2
    again = build_task(DataConfig(source="shapes", clients=6, split=str(tmp_path / "split.json")))
    assert again.client_counts.tolist() == task.client_counts.tolist()


def test_classes_that_share_images_are_never_thinned():
    with refused("data.wrong-kind", DataError, key="data.imbalance", value=20):
        build_task(DataConfig(source="shapes", partition="iid", imbalance=20))


@pytest.mark.parametrize(("partition", "clients"), [("by_id", 4), ("iid", 10)])
def test_scenes_that_are_not_thinned_need_no_other_setting(partition, clients):
    task = build_task(DataConfig(source="shapes", partition=partition))
    assert (task.clients, int(task.sizes.sum())) == (clients, 320)
    assert DataConfig(source="shapes", partition="classes").imbalance == 20


def test_recordings_become_clients_and_validation_takes_images_of_each_kind_of_client():
    task = build_task(DataConfig(source="shapes", partition="by_id", clients=4, imbalance=1, validation=0.25))
    assert task.sizes.sum() == 240
    assert len(task.validation) == 80
    assert task.validation.labels().shape == (80, 64, 64)


def test_samples_count_the_labelled_pixels_of_each_class_as_their_holder_sees_them():
    scenes = make_scenes()
    for shard, counts in zip(scenes.shards, scenes.client_counts, strict=True):
        assert Samples(shard, scenes.spec, CPU).counts(4).tolist() == counts.tolist()


def test_a_task_from_its_outline_has_as_many_images_and_pixels_of_each_class():
    scenes = make_scenes()
    again = task_from(outline_of(scenes), scenes.split)
    assert (again.kind, again.sizes.tolist()) == ("segmentation", scenes.sizes.tolist())
    for shard, size, counts in zip(again.shards, scenes.sizes, scenes.client_counts, strict=True):
        assert (len(shard), shard.y.ndim, shard.y.dtype) == (size, 3, np.uint8)
        assert class_counts(shard.labels(), 4).tolist() == counts.tolist()
