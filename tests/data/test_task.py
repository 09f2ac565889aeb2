import hashlib
import json
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from tiny import configure, make_setup, make_task

import raylt
from raylt.config import DataConfig, differences, followed, settled
from raylt.data.images.cache import load
from raylt.data.sources.sources import open_source
from raylt.data.splits.check import complete
from raylt.data.splits.split import Split
from raylt.data.task import build_task, judged_images_of
from raylt.errors import ConfigError, DataError

CONFIG = DataConfig(clients=10, alpha=0.3)


@pytest.fixture(scope="module")
def task():
    return build_task(CONFIG)


@pytest.fixture
def split_file(task, tmp_path):
    task.split.save(tmp_path / "split.json")
    return tmp_path / "split.json"


def test_counts_are_the_histograms_of_the_labels(task):
    for shard, counts in zip(task.shards, task.client_counts, strict=True):
        assert counts.tolist() == np.bincount(shard.y, minlength=10).tolist()
        assert len(shard) == len(shard.x) == counts.sum()
    # int(148 * 20^(-c/9)): digits have 148 training images of class 0 and at least 144 of the others
    assert task.counts.tolist() == [148, 106, 76, 54, 39, 28, 20, 14, 10, 7]
    assert task.client_counts.sum(0).tolist() == task.counts.tolist()


def test_groups_follow_the_global_counts(task):
    assert task.groups == ("many",) * 3 + ("medium",) * 4 + ("few",) * 3


def test_properties_agree_with_the_arrays(task):
    assert (task.classes, task.clients, task.shape) == (10, 10, (8, 8, 1))
    assert np.bincount(task.test.y).tolist() == [30] * 10
    assert task.test.x.shape == (300, 8, 8, 1)


def test_the_spec_holds_no_samples_of_clients(task):
    spec = task.spec
    assert (spec.name, spec.class_names, spec.shape) == ("digits", tuple("0123456789"), (8, 8, 1))
    assert (spec.mean, spec.std, spec.classes) == (task.mean, task.std, 10)
    assert len(pickle.dumps(spec)) < 1000


def test_shards_hold_the_samples_that_the_split_lists(task):
    source = open_source(CONFIG)
    for shard, rows in zip(task.shards, task.split.clients, strict=True):
        assert (np.diff(rows) > 0).all()
        assert (load(shard.x) == load(source.x_train)[rows]).all()
        assert shard.y.tolist() == source.y_train[rows].tolist()
    everything = np.concatenate(task.split.clients)
    assert len(np.unique(everything)) == len(everything) == task.counts.sum()


def test_ids_of_a_shard_are_the_places_of_its_samples_in_the_source_also_where_some_are_held_out():
    source = open_source(CONFIG)
    for config in (CONFIG, CONFIG.model_copy(update={"validation": 0.3})):
        for shard in build_task(config).shards:
            assert shard.ids is not None
            assert np.array_equal(load(shard.x), source.x_train[shard.ids])
            assert np.array_equal(shard.y, source.y_train[shard.ids])


def test_the_seed_alone_decides_the_split(task):
    assert build_task(CONFIG).split.sha256 == task.split.sha256
    assert build_task(CONFIG.model_copy(update={"seed": 1})).split.sha256 != task.split.sha256


def test_a_client_without_samples_is_legal():
    task = build_task(DataConfig(clients=50, alpha=0.001))
    sizes = [len(shard) for shard in task.shards]
    assert min(sizes) == 0
    assert task.client_counts[sizes.index(0)].sum() == 0


def test_clients_by_recorded_id_keep_their_samples(tmp_path):
    x = np.arange(6, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8)
    np.savez(
        tmp_path / "it.npz",
        x_train=x,
        y_train=[0, 1, 0, 1, 0, 1],
        x_test=x[:2],
        y_test=[0, 1],
        class_names=["a", "b"],
        id_train=[7, 5, 5, 7, 9, 7],
    )
    task = build_task(DataConfig(source=f"npz:{tmp_path / 'it.npz'}", imbalance=1, partition="by_id", clients=3))
    assert [load(shard.x)[:, 0, 0, 0].tolist() for shard in task.shards] == [[1, 2], [0, 3, 5], [4]]


def test_the_hash_is_of_the_index_lists_as_json():
    split = Split((np.array([0, 2]), np.array([], dtype=np.int64)), "", "digits", 1.0, "iid", 0.5, 0)
    assert split.sha256 == hashlib.sha256(b"[[0,2],[]]").hexdigest()


def test_a_split_survives_its_file(task, split_file):
    loaded = Split.load(split_file)
    assert loaded.as_text() == task.split.as_text()
    assert set(json.loads(split_file.read_text())) == {
        "sha256",
        "labels_sha256",
        "source",
        "imbalance",
        "partition",
        "alpha",
        "seed",
        "clients",
        "seal",
    }


def test_labels_are_hashed_as_little_endian_int64(task):
    labels = open_source(CONFIG).y_train
    assert task.split.labels_sha256 == hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()


def test_an_imported_split_is_used_whatever_the_other_settings(task, split_file):
    config = DataConfig(clients=10, split=str(split_file), seed=5, alpha=9.0, imbalance=2)
    imported = build_task(config)
    assert imported.split.as_text() == task.split.as_text()
    assert imported.client_counts.tolist() == task.client_counts.tolist()
    drawn = task.split
    completed = complete(config, drawn)
    for setting in ("alpha", "imbalance", "partition"):
        assert getattr(completed, setting) == getattr(drawn, setting)
    assert (completed.clients, completed.tail, completed.seed) == (10, "global", 5)
    assert completed.per_client == config.per_client
    (note,) = (note for note in imported.notes if "was drawn with" in note)
    assert note == (
        f"{split_file} was drawn with data.imbalance = {drawn.imbalance} (not 2.0), data.alpha = "
        f"{drawn.alpha} (not 9.0), and is recorded so"
    )
    assert not any("was drawn with" in note for note in build_task(completed).notes)
    assert not any("no effect" in note for note in imported.notes)
    (note,) = (note for note in build_task(config.model_copy(update={"min_size": 3})).notes if "no effect" in note)
    assert note == f"data.min_size = 3 has no effect, since {split_file} lists the samples of each client"


def test_a_run_on_a_split_from_a_file_is_the_one_that_its_study_planned(task, split_file):
    planned = configure(data={"split": str(split_file), "clients": 10})
    made = planned.model_copy(update={"data": complete(planned.data, task.split)})
    assert made.data != planned.data
    assert list(differences(settled(made), settled(followed(planned, made)))) == []
    drawn_anew = planned.model_copy(update={"data": planned.data.model_copy(update={"split": None})})
    assert [key for key, *_ in differences(settled(made), settled(followed(drawn_anew, made)))] == [
        "data.alpha",
        "data.split",
    ]


@pytest.mark.parametrize(("source", "same"), [("npz:a.npz", True), ("npz:b.npz", False)])
def test_settings_that_the_data_decide_follow_a_run_on_the_same_source_alone(source, same):
    decided = {"clients": 7, "imbalance": 3.0, "partition": "iid", "test": 0.3, "test_share": 0.4}
    open_settings = dict.fromkeys(decided)
    made = configure(data={"source": "npz:a.npz", **decided})
    planned = configure(data={"source": source, **open_settings})
    data = followed(planned, made).data
    assert {name: getattr(data, name) for name in decided} == (decided if same else open_settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree["clients"][0].pop(), None),
        (lambda tree: tree["clients"][0].append("7"), r"clients\.0\.\d+: input should be a valid integer"),
        (lambda tree: tree["clients"][0].append(1.5), r"clients\.0\.\d+: input should be a valid integer"),
        (lambda tree: tree["clients"][0].append(2**70), r"clients\.0\.\d+: input should be less than"),
        (lambda tree: tree.update(clients=3), "clients: input should be a valid list"),
        (lambda tree: tree.pop("seed"), "seed: field required"),
        (lambda tree: tree.pop("seal"), "seal: field required"),
        (lambda tree: tree.update(more=1), "more: extra inputs are not permitted"),
        (lambda tree: tree.update(beta=0), "beta: input should be greater than or equal to 1"),
        (lambda tree: tree.update(beta=2), None),
        (lambda tree: tree.update(imbalance=2.0), None),
        (lambda tree: tree.update(seed="1"), "seed: input should be a valid integer"),
        (lambda tree: tree.update(alpha=float("inf")), "alpha: input should be a finite number"),
    ],
)
def test_a_changed_split_is_refused(split_file, change, message):
    tree = json.loads(split_file.read_text())
    change(tree)
    split_file.write_text(json.dumps(tree))
    code = "data.split-changed" if message is None else "file.malformed"
    with refused(code, DataError, path=str(split_file)) as caught:
        Split.load(split_file)
    assert re.search(message or "Draw the split again", str(caught.value))


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{", b"\xff\xfe"])
def test_a_file_that_is_no_split_is_refused(tmp_path, content):
    (tmp_path / "it.json").write_bytes(content)
    with refused("file.malformed", DataError):
        Split.load(tmp_path / "it.json")


def test_a_split_file_that_is_not_there_is_named(tmp_path):
    with refused("data.not-found", DataError, path=str(tmp_path / "gone.json")):
        build_task(DataConfig(split=str(tmp_path / "gone.json")))


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[0, 1], [1]], "more than once"),
        ([[0], [1497]], "from 0 to 1496"),  # 1797 digits without 300 for the test
        ([[-1], [0]], "from 0 to 1496"),
        ([[], []], "at least one"),
        ([[0], [1], [2]], "Set data.clients=3"),
    ],
)
def test_an_imported_split_must_fit_the_source_and_the_clients(task, tmp_path, lists, message):
    clients = tuple(np.array(rows, dtype=np.int64) for rows in lists)
    Split(clients, task.split.labels_sha256, "digits", 1.0, "iid", 0.5, 0).save(tmp_path / "it.json")
    with refused("data.split-mismatch", DataError, split=str(tmp_path / "it.json")) as caught:
        build_task(DataConfig(clients=2, split=str(tmp_path / "it.json")))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("partition", "beta", "message"),
    [
        ("iid", 2, "beta is only for partition classes"),
        ("classes", None, "beta is only for partition classes"),
        ("classes", 2, "beta needs label maps"),
    ],
)
def test_an_imported_split_names_classes_only_of_label_maps(task, tmp_path, partition, beta, message):
    clients = np.array([0, 1]), np.array([2])
    Split(clients, task.split.labels_sha256, "digits", 1.0, partition, 0.5, 0, beta).save(tmp_path / "it.json")
    with refused("data.split-mismatch", DataError, split=str(tmp_path / "it.json")) as caught:
        build_task(DataConfig(clients=2, split=str(tmp_path / "it.json")))
    assert message in str(caught.value)


def test_a_split_of_another_source_is_refused(split_file, tmp_path):
    np.savez(
        tmp_path / "it.npz",
        x_train=np.zeros((2, 2, 2), np.uint8),
        y_train=[0, 1],
        x_test=np.zeros((2, 2, 2), np.uint8),
        y_test=[0, 1],
        class_names=["a", "b"],
    )
    with refused("data.split-mismatch", DataError, split=str(split_file)):
        build_task(DataConfig(source=f"npz:{tmp_path / 'it.npz'}", split=str(split_file)))


def test_building_an_npz_task_imports_no_torch(tmp_path):
    np.savez(
        tmp_path / "it.npz",
        x_train=np.zeros((4, 2, 2), np.uint8),
        y_train=[0, 1, 0, 1],
        x_test=np.zeros((2, 2, 2), np.uint8),
        y_test=[0, 1],
        class_names=["a", "b"],
    )
    code = (
        "import sys\nfrom raylt.config import DataConfig\nfrom raylt.data.task import build_task\n"
        f"build_task(DataConfig(source='npz:{tmp_path / 'it.npz'}', imbalance=1, clients=2))\n"
        "sys.exit(str({'torch', 'torchvision', 'sklearn', 'PIL'} & set(sys.modules) or ''))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).stderr.strip() == b""


def test_without_data_sizes_and_views_alone_are_left(tiny_scenes):
    bare = tiny_scenes.without_data()
    assert bare.sizes.tolist() == tiny_scenes.sizes.tolist()
    assert (bare.views == tiny_scenes.views).all()
    assert sum(shard.x.nbytes + shard.y.nbytes for shard in bare.shards) == 0
    assert bare.client_counts is tiny_scenes.client_counts


def test_a_run_that_nothing_could_be_judged_by_does_not_begin(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "single" / "shop" / name).mkdir(parents=True)
        Image.new("L", (8, 8), 50).save(tmp_path / "single" / "shop" / name / "0.png")
    with refused("data.no-test-images", DataError):
        raylt.run(
            "fedavg",
            out=tmp_path / "out",
            fleet="local",
            quiet=True,
            data={"source": f"folder:{tmp_path / 'single'}", "root": str(tmp_path), "size": 8},
        )
    assert not (tmp_path / "out").exists()


def test_torchvisions_transforms_are_refused_for_channels_that_they_do_not_take():
    spec = replace(build_task(DataConfig(clients=2)).spec, shape=(8, 8, 4))
    setup = make_setup(configure(augment="color_jitter"))
    with refused("config.conflict", ConfigError, key="augment", excludes="channels"):
        setup.check(spec, setup.new_model(spec))


def test_the_same_images_have_the_same_groups_however_they_were_loaded(tmp_path):
    config = DataConfig(source="digits", imbalance=20, clients=3)
    source = open_source(config)
    parts = {key: getattr(source, key) for key in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(tmp_path / "digits.npz", **parts, class_names=np.array(source.class_names))
    built_in = build_task(config)
    loaded = build_task(config.model_copy(update={"source": f"npz:{tmp_path / 'digits.npz'}"}))
    assert loaded.thresholds == built_in.thresholds == (20, 60)
    assert sorted(loaded.groups) == sorted(built_in.groups)
    assert set(built_in.groups) == {"many", "medium", "few"}


def test_images_are_normalised_by_published_statistics_or_not_at_all():
    source = open_source(CONFIG)
    assert (build_task(CONFIG).mean, build_task(CONFIG).std) == (source.mean, source.std)
    plain = build_task(CONFIG.model_copy(update={"normalise": False}))
    assert (plain.mean, plain.std) == ((0.0,), (1.0,))


def test_images_are_normalised_without_those_that_became_test_images(no_guests):
    x, y = np.random.default_rng(0).integers(0, 256, (60, 4, 4, 1), dtype=np.uint8), np.arange(60) % 2
    whole = raylt.Source("halves", x, y, x[:0], y[:0], ("left", "right"), (0.5,), (0.25,))
    raylt.register(lambda config: whole, "halves", kind="source")
    task = build_task(DataConfig(source="halves", clients=2, test_share=0.4))
    pixels = np.concatenate([load(shard.x) for shard in task.shards]) / 255
    assert len(pixels) == 36
    assert (task.mean, task.std) == ((pytest.approx(pixels.mean()),), (pytest.approx(pixels.std()),))


def test_default_thresholds_do_not_count_images_that_become_test_images(no_guests):
    y = np.arange(440) % 2  # 220 images of each class, 176 of which stay training images
    x = np.random.default_rng(0).integers(0, 256, (440, 2, 2, 1), dtype=np.uint8)
    whole = raylt.Source("halves", x, y, x[:0], y[:0], ("left", "right"), (0.5,), (0.25,))
    raylt.register(lambda config: whole, "halves", kind="source")
    assert build_task(DataConfig(source="halves", clients=2)).thresholds == (20, 60)
    assert build_task(DataConfig(source="halves", clients=2, test_share=0.05)).thresholds == (20, 100)


def test_judged_images_are_counted_by_group_and_client(tmp_path):
    make_pictures(tmp_path / "it.npz")
    config = DataConfig(source=f"npz:{tmp_path / 'it.npz'}", partition="by_id", imbalance=1, groups=(4, 6))
    judged = judged_images_of(build_task(config))
    assert judged["images"] == 5
    assert judged["thresholds"] == [4, 6]
    assert judged["groups"] == {"many": 3, "medium": 0, "few": 2}  # 7 training images of class a, 3 of class b
    assert judged["own"] == [4, 1]
    assert judged["one_class"] == ["Bern"]


def test_clients_of_one_class_are_those_of_their_own_test_images_or_else_of_their_training():
    counts = np.array([[5, 0, 0, 0], [3, 2, 0, 0], [0, 0, 0, 0], [0, 7, 0, 0]])
    tiny = replace(make_task(), client_counts=counts, shards=make_task().shards[:4])
    tiny = replace(tiny, client_names=("one", "two", "none", "other"))
    assert judged_images_of(tiny)["one_class"] == ["one", "other"]
    by_class = [np.flatnonzero(load(tiny.test.y) == c) for c in range(4)]
    nothing = np.empty(0, np.int64)
    both = np.concatenate(by_class[:2])
    assert judged_images_of(replace(tiny, own_tests=[both, by_class[1], nothing, nothing]))["one_class"] == [
        "two",
        "other",
    ]


def test_images_of_clients_that_join_after_training_are_not_counted(tmp_path):
    make_pictures(tmp_path / "it.npz")
    config = DataConfig(source=f"npz:{tmp_path / 'it.npz'}", partition="by_id", imbalance=1, new_clients=1)
    task = build_task(config)
    expected = [4, 1]
    expected[task.new_clients[0]] = 0
    assert judged_images_of(task)["own"] == expected


def make_pictures(path):
    """Save images of two clients: Wien has test images of both classes, Bern has one test image."""
    rng = np.random.default_rng(0)
    np.savez(
        path,
        x_train=rng.integers(0, 256, (10, 8, 8), dtype=np.uint8),
        y_train=[0] * 7 + [1] * 3,
        id_train=[0, 0, 0, 0, 1, 1, 1, 0, 1, 1],
        x_test=rng.integers(0, 256, (5, 8, 8), dtype=np.uint8),
        y_test=[0, 0, 1, 1, 0],
        id_test=[0, 0, 0, 0, 1],
        class_names=np.array(["a", "b"]),
        client_names=np.array(["Wien", "Bern"]),
    )


def test_the_share_of_test_images_is_that_of_the_split_from_a_file(no_guests, tmp_path):
    y = np.arange(60) % 3
    x = np.random.default_rng(0).integers(0, 256, (60, 4, 4, 1), dtype=np.uint8)
    thirds = raylt.Source("thirds", x, y, x[:0], y[:0], ("a", "b", "c"), (0.5,), (0.25,))
    raylt.register(lambda config: thirds, "thirds", kind="source")
    split_file = tmp_path / "split.json"
    config = DataConfig(source="thirds", clients=2, test_share=0.5)
    task = build_task(config)
    task.split.save(split_file)
    other = config.model_copy(update={"split": str(split_file), "test_share": 0.25})
    loaded = build_task(other)
    assert len(loaded.test) == len(task.test) == 30
    assert complete(other, loaded.split).test_share == 0.5
    assert f"{split_file} was drawn with data.test_share = 0.5 (not 0.25), and is recorded so" in loaded.notes
    unused = other.model_copy(update={"test": 0.1, "test_share": None})
    (note,) = (note for note in build_task(unused).notes if "no effect" in note)
    assert note == f"data.test = 0.1 has no effect, since {split_file} lists the samples of each client"
    planned = configure(data={"source": other.source, "clients": 2, "split": str(split_file), "test_share": 0.25})
    made = planned.model_copy(update={"data": complete(planned.data, task.split)})
    assert list(differences(settled(made), settled(followed(planned, made)))) == []
