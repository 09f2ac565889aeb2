import hashlib
import json
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from tiny import configure, make_setup

import raylt
from raylt.config import DataConfig, differences, followed, settled
from raylt.data.cache import load
from raylt.data.sources import open_source
from raylt.data.split import Split
from raylt.data.split_source import complete
from raylt.data.task import build_task
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


def test_facts_are_the_task_without_who_holds_what(task):
    facts = task.facts
    assert (facts.name, facts.class_names, facts.shape) == ("digits", tuple("0123456789"), (8, 8, 1))
    assert (facts.mean, facts.std, facts.classes) == (task.mean, task.std, 10)
    assert len(pickle.dumps(facts)) < 1000


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
    np.savez(tmp_path / "it.npz", x_train=x, y_train=[0, 1, 0, 1, 0, 1], x_test=x[:2], y_test=[0, 1],
             class_names=["a", "b"], id_train=[7, 5, 5, 7, 9, 7])
    task = build_task(DataConfig(source=f"npz:{tmp_path / 'it.npz'}", imbalance=1, partition="by_id", clients=3))
    assert [load(shard.x)[:, 0, 0, 0].tolist() for shard in task.shards] == [[1, 2], [0, 3, 5], [4]]


def test_the_hash_is_of_the_index_lists_as_json():
    split = Split((np.array([0, 2]), np.array([], dtype=np.int64)), "", "digits", 1.0, "iid", 0.5, 0)
    assert split.sha256 == hashlib.sha256(b"[[0,2],[]]").hexdigest()


def test_a_split_survives_its_file(task, split_file):
    loaded = Split.load(split_file)
    assert loaded.as_text() == task.split.as_text()
    assert set(json.loads(split_file.read_text())) == {
        "sha256", "labels_sha256", "source", "imbalance", "partition", "alpha", "seed", "clients", "seal"}


def test_labels_are_hashed_as_little_endian_int64(task):
    labels = open_source(CONFIG).y_train
    assert task.split.labels_sha256 == hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()


def test_an_imported_split_is_used_whatever_the_other_settings(task, split_file):
    config = DataConfig(clients=10, split=str(split_file), seed=5, alpha=9.0, imbalance=2)
    imported = build_task(config)
    assert imported.split.as_text() == task.split.as_text()
    assert imported.client_counts.tolist() == task.client_counts.tolist()
    drawn, there = task.split, complete(config, task.split)
    assert (there.alpha, there.imbalance, there.partition) == (drawn.alpha, drawn.imbalance, drawn.partition)
    assert (there.clients, there.tail, there.seed, there.per_client) == (10, "global", 5, config.per_client)
    told, = (note for note in imported.notes if "was drawn with" in note)
    assert told == (f"{split_file} was drawn with data.imbalance = {drawn.imbalance} (not 2.0), data.alpha = "
                    f"{drawn.alpha} (not 9.0), and is recorded so")
    assert not any("was drawn with" in note for note in build_task(there).notes)


def test_a_run_on_a_split_from_a_file_is_the_one_that_its_study_planned(task, split_file):
    planned = configure(data={"split": str(split_file), "clients": 10})
    made = planned.model_copy(update={"data": complete(planned.data, task.split)})
    assert made.data != planned.data
    assert list(differences(settled(made), settled(followed(planned, made)))) == []
    drawn_anew = planned.model_copy(update={"data": planned.data.model_copy(update={"split": None})})
    assert [key for key, *_ in differences(settled(made), settled(followed(drawn_anew, made)))] == [
        "data.alpha", "data.split"]


@pytest.mark.parametrize(("change", "message"), [
    (lambda tree: tree["clients"][0].pop(), "were changed after the split was saved"),
    (lambda tree: tree["clients"][0].append("7"), r"clients\.0\.\d+: input should be a valid integer"),
    (lambda tree: tree["clients"][0].append(1.5), r"clients\.0\.\d+: input should be a valid integer"),
    (lambda tree: tree["clients"][0].append(2**70), r"clients\.0\.\d+: input should be less than"),
    (lambda tree: tree.update(clients=3), "clients: input should be a valid list"),
    (lambda tree: tree.pop("seed"), "seed: field required"),
    (lambda tree: tree.pop("seal"), "seal: field required"),
    (lambda tree: tree.update(more=1), "more: extra inputs are not permitted"),
    (lambda tree: tree.update(beta=0), "beta: input should be greater than or equal to 1"),
    (lambda tree: tree.update(beta=2), "a field was changed after the split was saved"),
    (lambda tree: tree.update(imbalance=2.0), "a field was changed after the split was saved"),
    (lambda tree: tree.update(seed="1"), "seed: input should be a valid integer"),
    (lambda tree: tree.update(alpha=float("inf")), "alpha: input should be a finite number"),
])
def test_a_changed_split_is_refused(split_file, change, message):
    tree = json.loads(split_file.read_text())
    change(tree)
    split_file.write_text(json.dumps(tree))
    with pytest.raises(DataError, match=rf"split\.json: .*{message}"):
        Split.load(split_file)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{", b"\xff\xfe"])
def test_a_file_that_is_no_split_is_refused(tmp_path, content):
    (tmp_path / "it.json").write_bytes(content)
    with pytest.raises(DataError, match=r"it\.json: not a split"):
        Split.load(tmp_path / "it.json")


def test_a_split_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.json: No such file"):
        build_task(DataConfig(split=str(tmp_path / "gone.json")))


@pytest.mark.parametrize(("lists", "message"), [
    ([[0, 1], [1]], "more than once"),
    ([[0], [1497]], "from 0 to 1496"),      # 1797 digits less 300 for the test
    ([[-1], [0]], "from 0 to 1496"),
    ([[], []], "at least one"),
    ([[0], [1], [2]], r"has 3 clients, data\.clients = 2; set data\.clients=3"),
])
def test_an_imported_split_must_fit_the_source_and_the_clients(task, tmp_path, lists, message):
    clients = tuple(np.array(rows, dtype=np.int64) for rows in lists)
    Split(clients, task.split.labels_sha256, "digits", 1.0, "iid", 0.5, 0).save(tmp_path / "it.json")
    with pytest.raises(DataError, match=message):
        build_task(DataConfig(clients=2, split=str(tmp_path / "it.json")))


@pytest.mark.parametrize(("partition", "beta", "message"), [
    ("iid", 2, "beta belongs to partition classes alone"),
    ("classes", None, "beta belongs to partition classes alone"),
    ("classes", 2, "classes of label maps only, and digits is a problem of classification"),
])
def test_an_imported_split_names_classes_only_of_label_maps(task, tmp_path, partition, beta, message):
    clients = np.array([0, 1]), np.array([2])
    Split(clients, task.split.labels_sha256, "digits", 1.0, partition, 0.5, 0, beta).save(tmp_path / "it.json")
    with pytest.raises(DataError, match=message):
        build_task(DataConfig(clients=2, split=str(tmp_path / "it.json")))


def test_a_split_of_another_source_is_refused(split_file, tmp_path):
    np.savez(tmp_path / "it.npz", x_train=np.zeros((2, 2, 2), np.uint8), y_train=[0, 1],
             x_test=np.zeros((2, 2, 2), np.uint8), y_test=[0, 1], class_names=["a", "b"])
    with pytest.raises(DataError, match="drawn from digits, whose training labels are not those"):
        build_task(DataConfig(source=f"npz:{tmp_path / 'it.npz'}", split=str(split_file)))


def test_building_an_npz_task_imports_no_torch(tmp_path):
    np.savez(tmp_path / "it.npz", x_train=np.zeros((4, 2, 2), np.uint8), y_train=[0, 1, 0, 1],
             x_test=np.zeros((2, 2, 2), np.uint8), y_test=[0, 1], class_names=["a", "b"])
    code = ("import sys\nfrom raylt.config import DataConfig\nfrom raylt.data.task import build_task\n"
            f"build_task(DataConfig(source='npz:{tmp_path / 'it.npz'}', imbalance=1, clients=2))\n"
            "sys.exit(str({'torch', 'torchvision', 'sklearn', 'PIL'} & set(sys.modules) or ''))")
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
    with pytest.raises(DataError, match="no test image has a label, so nothing could be judged"):
        raylt.run("fedavg", out=tmp_path / "out", fleet="local", quiet=True,
                  data={"source": f"folder:{tmp_path / 'single'}", "root": str(tmp_path), "size": 8})
    assert not (tmp_path / "out").exists()


def test_torchvisions_transforms_are_refused_for_channels_that_they_do_not_take():
    facts = replace(build_task(DataConfig(clients=2)).facts, shape=(8, 8, 4))
    with pytest.raises(ConfigError, match="augment = color_jitter: is for images of one channel or three"):
        make_setup(configure(augment="color_jitter")).check(facts)
