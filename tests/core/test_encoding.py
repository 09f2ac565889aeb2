"""Frozen encoders run once: features are cached by weights and pixels, and training on them gives the same run."""

import hashlib
import os
from dataclasses import replace
from functools import cached_property

import numpy as np
import pytest
import torch
from refusals import refused
from small_runs import QUICK, make_tiny_run
from teachers import save_features
from tiny import configure, make_setup, make_task, open_client, tiny_pretrained

import raylt
from actors.shards import packs
from raylt import metrics, tree
from raylt.contract.case import Case
from raylt.contract.trace import private_states
from raylt.core.encoding import BATCH, KEY_BYTES, FeatureCache, FeatureFiles, _key_of_view, _write, encode
from raylt.core.training.features import teacher_features
from raylt.data.augment import AUGMENTATIONS, crop_flip, draw_view, normalise
from raylt.data.images.cache import caches, load
from raylt.data.samples import Samples
from raylt.data.task import Holdings, Shard, Task
from raylt.errors import ConfigError, DataError
from raylt.methods import METHODS
from raylt.models import SplitModel
from raylt.models.trainable import FrozenEncoder
from raylt.runs.callbacks.prediction_grid import draw_prediction_grid
from raylt.store import Folder, folder_for
from raylt.studies.records.record import read_run
from raylt.studies.records.seal import contradiction

CPU = torch.device("cpu")
NAME = "counting"
encoded_batches = 0


def counting(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Return the tiny model with an encoder that counts its calls."""
    model = tiny_pretrained(classes, shape)

    def count(*_: object) -> None:
        global encoded_batches
        encoded_batches += 1

    model.encoder.register_forward_pre_hook(count)
    return model


@pytest.fixture(autouse=True)
def registered():
    raylt.register(counting, NAME, kind="model")


def setup_for(folder, seed=0, **parts):
    config = configure(model=NAME, trainable="classifier", seed=seed, data={"clients": 6, "root": str(folder)}, **parts)
    return make_setup(config)


def features_of(shard: Shard) -> np.ndarray:
    assert isinstance(shard.x, np.ndarray)
    return shard.x


def size_of(task) -> int:
    return sum(len(part) for part in [*task.shards, task.test, task.validation, task.auxiliary] if part is not None)


def test_features_are_those_of_the_encoder(tiny_task, tmp_path):
    setup, task = encode(setup_for(tmp_path), tiny_task)
    encoder = setup.new_model(tiny_task.spec).encoder
    assert isinstance(encoder, FrozenEncoder)
    mean, std = torch.tensor(tiny_task.mean), torch.tensor(tiny_task.std)
    for before, after in zip([*tiny_task.shards, tiny_task.test], [*task.shards, task.test], strict=True):
        assert after.x.shape == (len(before), 1, 5)
        assert features_of(after).dtype == np.float32
        if len(before):
            z = encoder(normalise(torch.from_numpy(load(before.x)), mean, std))
            assert torch.allclose(torch.from_numpy(features_of(after)[:, 0]), z, atol=1e-6)
    assert task.spec.shape == tiny_task.spec.shape
    assert encode(setup, task) == (setup, task)


def test_an_image_is_encoded_once(tiny_task, tmp_path):
    notices = []
    _, first = encode(setup_for(tmp_path), tiny_task, notices.append)
    before = encoded_batches
    # the same images, with other clients, another order and another method
    shards = tuple(replace(shard, x=shard.x[::-1], y=shard.y[::-1]) for shard in reversed(tiny_task.shards))
    _, second = encode(
        setup_for(tmp_path, method={"name": "scaffold"}), replace(tiny_task, shards=shards), notices.append
    )
    assert encoded_batches == before + 1  # one batch: the fixed images that identify the encoder
    images = size_of(tiny_task)
    assert f"{images} images encoded, 0 found" in notices[0]
    assert f"0 images encoded, {images} found" in notices[1]
    for a, b in zip(reversed(first.shards), second.shards, strict=True):
        assert np.array_equal(features_of(a)[::-1], features_of(b))


def test_a_feature_does_not_depend_on_the_images_beside_it(tiny_task, tmp_path):
    _, whole = encode(setup_for(tmp_path / "a"), tiny_task)
    few = replace(
        tiny_task, shards=tuple(shard if id == 2 else shard_of_none(shard) for id, shard in enumerate(tiny_task.shards))
    )
    _, alone = encode(setup_for(tmp_path / "b"), few)
    assert np.array_equal(features_of(whole.shards[2]), features_of(alone.shards[2]))


def test_every_batch_of_images_has_one_size(tiny_task, tmp_path):
    sizes = []
    with torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, given: sizes.append(len(given[0])) if isinstance(module, FrozenEncoder) else None
    ):
        encode(setup_for(tmp_path), tiny_task)
    assert set(sizes) == {BATCH}  # another size would change the last bits of some features


def shard_of_none(shard):
    return replace(shard, x=shard.x[:0], y=shard.y[:0])


def one_of(shard):
    return replace(shard, x=shard.x[:1], y=shard.y[:1])


@pytest.mark.parametrize("change", ["weights", "normalisation", "precision"])
def test_features_of_another_encoder_are_not_used(tiny_task, tmp_path, change):
    setup = setup_for(tmp_path)
    encode(setup, tiny_task)
    task = replace(tiny_task, mean=(0.1,)) if change == "normalisation" else tiny_task
    parts = {"local": {"precision": "bfloat16"}} if change == "precision" else {}
    other = setup_for(tmp_path, seed=1 if change == "weights" else 0, **parts)
    notices = []
    encode(other, task, notices.append)
    judged = len(task.test)
    if change == "precision":  # the test set is judged in float32, so its features are found
        assert f"{size_of(task) - judged} images encoded, {judged} found" in notices[0]
    else:
        assert f"{size_of(task)} images encoded, 0 found" in notices[0]


def test_models_are_judged_on_validation_features_in_float32(tiny_task, tmp_path):
    shards = tiny_task.shards[:1]
    task = replace(tiny_task, shards=shards, test=one_of(tiny_task.test), validation=shards[0])
    half, single = (
        encode(setup_for(tmp_path / precision, local={"precision": precision}), task)[1]
        for precision in ("bfloat16", "float32")
    )
    assert np.array_equal(features_of(half.validation), features_of(single.validation))
    assert not np.array_equal(features_of(half.shards[0]), features_of(single.shards[0]))


def test_each_view_of_an_image_is_drawn_from_a_seed_of_its_own(tiny_task, tmp_path):
    setup = setup_for(tmp_path, augment="crop_flip", views=8)
    shards = tiny_task.shards
    few = replace(tiny_task, shards=(one_of(shards[0]), *map(shard_of_none, shards[1:])), test=one_of(tiny_task.test))
    _, task = encode(setup, few)
    features = torch.from_numpy(features_of(task.shards[0]))
    image = load(few.shards[0].x)
    assert len(features[0, 1:].unique(dim=0)) > 4  # of eight views, which repeat by chance alone
    # of the third view, by hand
    encoder = setup.new_model(tiny_task.spec).encoder
    cache = FeatureCache(setup, tiny_task.spec, encoder, CPU, "float32")
    pixels = hashlib.blake2b(image[0].tobytes(), digest_size=KEY_BYTES).digest()
    seed = int.from_bytes(_key_of_view(pixels, cache._augmentation, 3)[:7], "big")
    x, _ = crop_flip(torch.from_numpy(image), torch.zeros(1), torch.Generator().manual_seed(seed))
    z = encoder(normalise(x, torch.tensor(tiny_task.mean), torch.tensor(tiny_task.std)))
    assert torch.allclose(features[0, 3], z[0], atol=1e-6)


def test_views_follow_from_the_pixels_and_batches_take_one_of_them(tiny_task, tmp_path):
    setup, task = encode(setup_for(tmp_path, augment="crop_flip", views=3), tiny_task)
    _, again = encode(setup_for(tmp_path / "other", augment="crop_flip", views=2, method={"name": "la"}), tiny_task)
    x = features_of(task.shards[0])
    assert x.shape == (len(tiny_task.shards[0]), 4, 5)
    assert np.array_equal(x[:, :3], features_of(again.shards[0]))
    assert task.test.x.shape[1] == 1
    assert setup.augment is draw_view
    samples = Samples(task.shards[0], task.spec, CPU)
    rows = torch.arange(len(samples))
    assert torch.equal(samples.batch(rows).x, torch.from_numpy(x[:, 0]))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([samples.batch(rows, setup.augment, generator).x for _ in range(40)])
    among = (drawn[:, :, None] == torch.from_numpy(x)).all(-1)  # [40, n, 4]
    assert among[..., 1:].any(-1).all()
    assert among[..., 1:].any(0).all()
    view = crop_flip(torch.from_numpy(tiny_task.shards[0].x[:1]), torch.zeros(1), generator)[0]
    assert view.shape == tiny_task.shards[0].x[:1].shape


def test_a_frozen_encoder_of_random_weights_is_said(tiny_task, tmp_path):
    notices = []
    encode(setup_for(tmp_path), tiny_task, notices.append)
    assert notices[0].endswith("; its weights are random, since weights is not set")


@pytest.mark.parametrize(
    ("settings", "said_so"),
    [
        (["views=2"], True),
        (["views=2", "augment=crop_flip"], True),
        (["views=2", f"model={NAME}", "trainable=classifier"], True),
        (["views=2", f"model={NAME}", "trainable=classifier", "augment=crop_flip"], False),
        (["augment=crop_flip"], False),
    ],
)
def test_views_without_effect_are_said(tmp_path, settings, said_so):
    notices = []

    class Messages(raylt.Callback):
        def on_message(self, text, minor=False):
            notices.append(text)

    config = make_tiny_run(tmp_path, "fedavg", *settings, f"data.root={tmp_path}", name="first").config
    raylt.run(config, out=tmp_path, name="second", fleet="local", quiet=True, callbacks=[Messages()])
    assert any(text.startswith("views = 2 has no effect, ") for text in notices) == said_so


@pytest.mark.parametrize("trainable", ["lora:2", "all"])
def test_frozen_parts_of_random_weights_are_said_where_images_are_not_encoded(tmp_path, trainable):
    notices = []

    class Messages(raylt.Callback):
        def on_message(self, text, minor=False):
            notices.append(text)

    config = make_tiny_run(tmp_path, "fedavg", f"model={NAME}", f"trainable={trainable}", name="first").config
    raylt.run(config, out=tmp_path, name="second", fleet="local", quiet=True, callbacks=[Messages()])
    random = [text for text in notices if "random" in text]
    assert random == [f"the frozen parts of {NAME} are random, since weights is not set"] * (trainable == "lora:2")


def test_views_of_an_own_augmentation_that_changed_are_not_reused(tiny_task, tmp_path, monkeypatch):
    def encoded(augmentation):
        monkeypatch.setitem(AUGMENTATIONS, "own", augmentation)
        notices = []
        _, task = encode(setup_for(tmp_path, augment="own", views=1), tiny_task, notices.append)
        return features_of(task.shards[0]), notices[0]

    light, _ = encoded(lambda x, y, generator: (x, y))
    dark, notice = encoded(lambda x, y, generator: (x // 2, y))
    views = sum(len(shard) for shard in tiny_task.shards)
    assert f"{views} images encoded" in notice
    assert np.array_equal(light[:, 0], dark[:, 0])
    assert not np.array_equal(light[:, 1], dark[:, 1])
    assert "0 images encoded" in encoded(lambda x, y, generator: (x // 2, y))[1]


def test_holdings_stay_holdings(tiny_task, tmp_path):
    shards = tiny_task.shards
    whole = replace(
        shards[0], x=np.concatenate([s.x for s in shards]), y=np.concatenate([s.y for s in shards]), ids=None
    )
    held = Holdings(whole, np.cumsum([len(s) for s in shards]))
    _, a = encode(setup_for(tmp_path), tiny_task)
    _, b = encode(setup_for(tmp_path), replace(tiny_task, shards=held))
    assert isinstance(b.shards, Holdings)
    assert all(
        np.array_equal(features_of(one), features_of(other)) for one, other in zip(a.shards, b.shards, strict=True)
    )
    pack = next(iter(packs(b.shards)))
    assert np.array_equal(features_of(pack.shard(1)), features_of(a.shards[1]))


def test_other_runs_keep_their_images(tiny_task, tmp_path):
    for part in ("all", "last:1"):
        setup = make_setup(configure(model=NAME, trainable=part))
        assert encode(setup, tiny_task) == (setup, tiny_task)


def test_a_damaged_cache_is_named(tiny_task, tmp_path):
    encode(setup_for(tmp_path), tiny_task)
    (cache,) = caches(tmp_path)
    assert cache.images == size_of(tiny_task)
    assert cache.of == f"features of {NAME}"
    for kind in ("features", "keys"):
        file = next((tmp_path / "cache" / cache.name).glob(f"{kind}.*"))
        content = file.read_bytes()
        file.write_bytes(content[:100])
        with refused("data.cache-unreadable", DataError, key="data.root", path=str(file)) as caught:
            encode(setup_for(tmp_path), tiny_task)
        assert f"raylt data data.root={tmp_path} --clear-cache {cache.name}" in str(caught.value)
        file.write_bytes(content)


def test_a_changed_feature_is_named_instead_of_used(tiny_task, tmp_path):
    _, plain = encode(setup_for(tmp_path), tiny_task)
    (cache,) = caches(tmp_path)
    file = next((tmp_path / "cache" / cache.name).glob("features.*"))
    features = np.load(file)
    changed = features.copy()
    changed[1, 0] += 1
    np.save(file, changed)
    with refused("data.cache-unreadable", DataError, key="data.root", path=str(file)) as caught:
        encode(setup_for(tmp_path), tiny_task)
    assert "row 1 was changed after it was written" in str(caught.value)
    np.save(file, features)
    _, again = encode(setup_for(tmp_path), tiny_task)
    assert np.array_equal(features_of(plain.test), features_of(again.test))


def test_keys_of_features_are_read_once_and_those_of_other_processes_are_found(tmp_path, monkeypatch):
    keys = [bytes([number]) * KEY_BYTES for number in range(4)]
    features = np.arange(8, dtype=np.float32).reshape(4, 2)
    files, read = FeatureFiles(), []
    monkeypatch.setattr(Folder, "read", lambda folder, name, own=Folder.read: read.append(name) or own(folder, name))
    with folder_for(tmp_path) as folder:
        for known in (2, 4):
            _write(folder, keys[known - 2 : known], features[known - 2 : known])  # as another process does
            for _ in range(2):
                files.read_new_keys(folder)
            found = files.get(keys)
            assert list(found) == keys[:known]
            assert np.array_equal(list(found.values()), features[:known])
            assert len(read) == len(set(read)) == known // 2
    assert len(files) == 4


def test_no_file_of_features_stays_open(tmp_path):
    keys = [bytes([number]) * KEY_BYTES for number in range(40)]
    files, rows = FeatureFiles(), np.ones((1, 2), np.float32)
    with folder_for(tmp_path) as folder:
        for key in keys:
            _write(folder, [key], rows)
        before = len(os.listdir("/proc/self/fd"))
        files.read_new_keys(folder)
        features = files.get(keys)
        assert len(features) == 40
        assert len(os.listdir("/proc/self/fd")) == before


def test_features_whose_keys_were_not_written_do_not_count(tmp_path, monkeypatch):
    files, key, rows = FeatureFiles(), bytes(KEY_BYTES), np.ones((1, 2), np.float32)
    with folder_for(tmp_path) as folder:
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "write", interrupted_after_one(Folder.write))
            with pytest.raises(KeyboardInterrupt):
                _write(folder, [key], rows)
        files.read_new_keys(folder)
        assert len(files) == 0
        _write(folder, [key], rows)
        files.read_new_keys(folder)
        assert len(files) == 1


def interrupted_after_one(write):
    """Return a function that writes one file and raises on its next call."""
    written = []

    def once(folder, name, content):
        if written:
            raise KeyboardInterrupt
        written.append(name)
        write(folder, name, content)

    return once


def test_keys_of_other_features_are_named(tmp_path):
    with folder_for(tmp_path) as folder:
        _write(folder, [bytes([number]) * KEY_BYTES for number in range(2)], np.ones((2, 2), np.float32))
        (file,) = tmp_path.glob("features.*")
        np.save(file, np.ones((1, 2), np.float32))
        with refused("data.cache-unreadable", DataError, key="data.root", path=str(file)):
            FeatureFiles().read_new_keys(folder)


def test_a_file_that_is_lost_after_its_keys_were_read_is_named(tmp_path):
    key, files = bytes(KEY_BYTES), FeatureFiles()
    with folder_for(tmp_path) as folder:
        _write(folder, [key], np.ones((1, 2), np.float32))
        files.read_new_keys(folder)
        (file,) = tmp_path.glob("features.*")
        file.unlink()
        with refused("data.cache-unreadable", DataError, key="data.root", path=str(file)):
            files.get([key])


# whole runs


def test_a_run_on_features_gives_the_model_that_was_judged(tmp_path):
    run = make_tiny_run(tmp_path, "sfd", f"model={NAME}", "trainable=classifier", f"data.root={tmp_path}")
    before = encoded_batches
    other = make_tiny_run(tmp_path, "scaffold", f"model={NAME}", "trainable=classifier", f"data.root={tmp_path}")
    assert encoded_batches - before < 12  # batches of probes and of the prediction grid, none of training
    for each in (run, other):
        images = load(each.task.test.x)
        labels = raylt.load_model(raylt.export(each)).predict(images).labels
        truth = torch.from_numpy(np.asarray(each.task.test.y))
        shared = each.matrices().shared
        assert shared is not None
        assert torch.equal(metrics.confusion(labels, truth, 4, None), shared)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_the_picture_of_predictions_encodes_no_other_image(tmp_path, method):
    run = make_tiny_run(tmp_path, method, f"model={NAME}", "trainable=classifier", f"data.root={tmp_path}")
    elsewhere = run.config.data.model_copy(update={"root": str(tmp_path / "elsewhere")})
    setup = replace(run.setup, config=run.config.model_copy(update={"data": elsewhere}))
    picture = draw_prediction_grid(setup, run.task, run.folder)
    assert picture.png.startswith(b"\x89PNG")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("method", "code", "key"),
    [
        ({"name": "fedyoyo"}, "config.conflict", "trainable"),
        ({"name": "sfd", "statistics_area": 0.9}, "config.conflict", "trainable"),
        ({"name": "fedsm", "teacher": "ViT-B-32/openai"}, "config.conflict", "trainable"),
        ({"name": "clip2fl", "kd": 1.0}, "config.conflict", "trainable"),
        ({"name": "flea"}, "model.lacks-layer", "method.layer"),
        ({"name": "fedafa"}, "model.lacks-layer", "method.cut"),
        ({"name": "mupfl"}, "model.lacks-layer", "method.bavd_layers"),
        ({"name": "ratioloss"}, "config.conflict", "data.auxiliary"),
        ({"name": "fedic"}, "config.conflict", "data.auxiliary"),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_methods_that_need_images_are_refused_before_any_is_encoded(tmp_path, method, code, key):
    fields = [f"method.{name}={value}" for name, value in method.items() if name != "name"]
    fields += ["data.auxiliary=0"]
    with refused(code, ConfigError, key=key):
        make_tiny_run(
            tmp_path, method["name"], f"model={NAME}", "trainable=classifier", f"data.root={tmp_path}", *fields
        )
    assert list(tmp_path.rglob("features.*")) == []


NEED_IMAGES = {"fedyoyo", "flea", "fedafa"}
# nothing of them is left
ON_ENCODER = {"fedper", "fedrep", "fedbabu", "fedbn", "feddecorr", "moon", "fednh", "fedproto"}
FEATURES = sorted(
    set(METHODS) - NEED_IMAGES - ON_ENCODER - {"ratioloss", "fedic"}
)  # these two need images at the server
FIELDS = QUICK | {"mupfl": QUICK["mupfl"] | {"bavd": False}}


class ImageCase(Case):
    """A case whose encoder is frozen, and runs in every round."""

    def config(self, *args, **parts):
        return super().config(*args, data={"clients": 6, "root": str(self.folder)}, **parts)


class FeatureCase(ImageCase):
    """The same case on features that the encoder gave before the first round."""

    @cached_property
    def task(self) -> Task:
        return encode(self.setup(self.config()), make_task())[1]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("fedavg", "bpfed") else pytest.mark.slow) for n in FEATURES]
)
def test_a_method_gives_the_same_model_on_features_as_on_images(tmp_path, name):
    # features of mixed images are not mixed features
    fields = FIELDS.get(name, {}) | ({"alpha": 0.0} if name == "bpfed" else {})
    cases = [
        kind(METHODS[name](**fields), "classification", tmp_path, "classifier") for kind in (ImageCase, FeatureCase)
    ]
    on_images, on_features = (learned(case.run(case.config()).experiment) for case in cases)
    assert on_images.keys() == on_features.keys()
    for path, value in on_images.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert torch.allclose(value, on_features[path], rtol=1e-3, atol=1e-4), path


def learned(experiment):
    """Return what the server and the clients have learned, by path."""
    parts = {
        "model": experiment.server.model.state_dict(),
        "server": experiment.server.state,
        "clients": {str(id): state for id, state in private_states(experiment).items()},
    }
    return dict(tree.leaves(parts))


def test_bpfed_mixes_features(tmp_path):
    case = FeatureCase(METHODS["bpfed"](), "classification", tmp_path, "classifier")
    calls = []
    with torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, given: calls.append(given[0].ndim) if isinstance(module, FrozenEncoder) else None
    ):
        task = case.task
        calls.clear()
        case.run(case.config(), task=task)
    assert set(calls) == {2}


def test_features_of_a_file_are_the_teachers_also_where_clients_hold_features_of_the_encoder(tiny_task, tmp_path):
    setup, task = encode(setup_for(tmp_path), tiny_task)
    teacher = save_features(tmp_path / "teacher.npz", tiny_task)
    clients = [open_client(each, setup.method, 0, setup.config) for each in (tiny_task, task)]
    assert [client.samples.encoded for client in clients] == [False, True]
    of_images, of_features = (teacher_features(client, teacher) for client in clients)
    assert torch.equal(of_images, of_features)


@pytest.mark.parametrize("name", sorted(ON_ENCODER))
def test_a_method_that_would_be_fedavg_under_a_frozen_encoder_is_refused(tmp_path, name):
    code, key = ("model.lacks-layer", "model") if name == "fedbn" else ("config.conflict", "trainable")
    with refused(code, ConfigError, key=key):
        make_tiny_run(tmp_path, name, f"model={NAME}", "trainable=classifier", f"data.root={tmp_path}")


def test_fedbn_is_refused_where_no_batchnorm_layer_learns(tmp_path):
    settings = (f"model={NAME}", "trainable=lora:2", f"data.root={tmp_path}")
    with refused("model.lacks-layer", ConfigError, key="model", value=NAME):
        make_tiny_run(tmp_path, "fedbn", *settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FEATURES if name not in ("fedavg", "posthoc", "oracle")])
def test_no_other_method_is_fedavg_under_a_frozen_encoder(tmp_path, name):
    method = METHODS[name](**FIELDS.get(name, {}))
    cases = [FeatureCase(each, "classification", tmp_path, "classifier") for each in (METHODS["fedavg"](), method)]
    fedavg, other = (case.run(case.config()) for case in cases)
    assert fedavg.experiment.export_model() != other.experiment.export_model() or method.personal


# runs without rounds


@pytest.mark.parametrize("name", ["fedncm", "fed3r", "ccvr", "sfd"])
def test_one_exchange_makes_a_classifier_without_rounds(tmp_path, name):
    settings = (f"model={NAME}", "trainable=classifier", f"data.root={tmp_path}", "federation.rounds=0")
    run = make_tiny_run(tmp_path, name, *settings)
    (report,) = run.reports
    assert report["phase"] == "finish"
    assert run.summary["rounds"] == 0
    assert run.summary["accuracy"]["last"] == report["accuracy"]
    assert "train" not in report["traffic"]
    assert contradiction(read_run(run.folder)) is None  # a study keeps it on record
    model = raylt.load_model(raylt.export(run))
    assert len(model.predict(load(run.task.test.x)).labels) == 42


@pytest.mark.parametrize(
    ("method", "trainable", "excludes"), [("fedavg", "classifier", "method"), ("ccvr", "last:1", "trainable")]
)
def test_no_rounds_are_refused_where_something_learns_in_them(tmp_path, method, trainable, excludes):
    settings = (f"model={NAME}", f"trainable={trainable}", f"data.root={tmp_path}", "federation.rounds=0")
    with refused("config.conflict", ConfigError, key="federation.rounds", value=0, excludes=excludes):
        make_tiny_run(tmp_path, method, *settings)
