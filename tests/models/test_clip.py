"""Teachers from a pretrained model, a file or a folder; here all have random weights, loaded by `OpenClip.load`."""

import fcntl
import json
import os
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import teachers
import torch
from PIL import Image
from refusals import refused
from tiny import CPU
from torch.nn import functional as F

from raylt.data.samples import Samples
from raylt.data.task import Shard, TaskSpec
from raylt.errors import ConfigError
from raylt.models import clip
from raylt.models.clip import OpenClip, open_teacher
from raylt.models.teacher import describe

COLOUR = TaskSpec("colour", ("maple_tree", "cat", "ship"), (20, 24, 3), (0.5,) * 3, (0.25,) * 3)


@pytest.fixture(scope="module")
def teacher(clip_folder) -> OpenClip:
    found = open_teacher(f"local-dir:{clip_folder}")
    assert isinstance(found, OpenClip)
    return found


@pytest.fixture(scope="module")
def images() -> Samples:
    rng = np.random.default_rng(0)
    return Samples(Shard(rng.integers(0, 256, (70, 20, 24, 3), dtype=np.uint8), np.zeros(70, np.int64)), COLOUR, CPU)


@pytest.fixture
def tag(clip_folder, tmp_path, monkeypatch):
    """Return `tag(**source)`, which registers the tiny architecture with open_clip and with weights called `theirs`."""
    import open_clip

    architectures = tmp_path / "architectures"
    architectures.mkdir()
    (architectures / "Tiny.json").write_text(json.dumps(teachers.CLIP))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
    open_clip.add_model_config(architectures)

    def register(**source):
        monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "Tiny", {"theirs": source})
        clip._tower.cache_clear()

    yield register
    clip._tower.cache_clear()


def by_hand(folder: Path, samples: Samples, quick_gelu: bool = False, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)):
    """Compute the whole model's image features, with the saved preprocessing (squash, bilinear) written out."""
    import open_clip
    from safetensors.torch import load_file

    model = open_clip.CLIP(**teachers.CLIP, quick_gelu=quick_gelu)
    model.load_state_dict(load_file(folder / "open_clip_model.safetensors"))
    x = []
    for image in samples.x.numpy():
        small = np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BILINEAR), dtype=np.float64) / 255
        x.append(((small - np.array(mean)) / np.array(std)).transpose(2, 0, 1))
    with torch.no_grad():
        return model.eval().encode_image(torch.from_numpy(np.stack(x)).float())


def embed(teacher: OpenClip, samples: Samples):
    projection = teacher.projection(CPU)
    assert projection is not None
    return teacher.images(samples) @ projection


# the image tower


def test_images_are_preprocessed_as_the_weights_ask_and_encoded_by_their_tower(teacher, clip_folder, images):
    assert torch.allclose(embed(teacher, images), by_hand(clip_folder, images), atol=1e-5)


def test_cached_half_precision_features_give_the_teachers_live_logits(teacher, clip_folder, images):  # T-FSM-2
    text = F.normalize(teacher.text(COLOUR.class_names, "phrase", CPU), dim=1)
    cached = F.normalize(embed(teacher, images), dim=1).half()
    live = F.normalize(by_hand(clip_folder, images), dim=1)
    assert cached.dtype == torch.float16
    assert (cached.float() @ text.T - live @ text.T).abs().max() < 1e-3


def test_features_are_the_same_bits_every_time_and_leave_the_global_generator_alone(teacher, images):
    before = torch.random.get_rng_state()
    first = teacher.images(images)
    clip._tower.cache_clear()
    assert torch.equal(teacher.images(images), first)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_grey_images_are_taken_as_colour_images_with_equal_channels(teacher, images):
    grey = images.x[..., :1]
    spec = TaskSpec("grey", COLOUR.class_names, (20, 24, 1), (0.5,), (0.25,))
    one, three = (Samples(Shard(x.numpy(), images.y.numpy()), spec, CPU) for x in (grey, grey.expand(-1, -1, -1, 3)))
    assert torch.equal(teacher.images(one), teacher.images(three))


def test_one_tower_serves_all_clients_of_a_process(teacher, images, monkeypatch):
    clip._tower.cache_clear()
    loads, load = [], OpenClip.load
    monkeypatch.setattr(OpenClip, "load", lambda self: loads.append(self) or load(self))
    for _ in range(3):
        open_teacher(teacher.name).images(images)
    assert len(loads) == 1


# the text tower


def test_texts_are_those_of_the_text_tower(teacher, clip_folder):
    import open_clip
    from safetensors.torch import load_file

    model = open_clip.CLIP(**teachers.CLIP)
    model.load_state_dict(load_file(clip_folder / "open_clip_model.safetensors"))
    for wording, lines in [
        ("phrase", ["a photo of a maple tree", "a photo of a cat", "a photo of a ship"]),
        ("label", ["maple tree", "cat", "ship"]),
    ]:
        with torch.no_grad():
            expected = model.eval().encode_text(open_clip.SimpleTokenizer()(lines))
        assert torch.allclose(teacher.text(COLOUR.class_names, wording, CPU), expected, atol=1e-5)
    assert teacher.dim == 64


def test_ids_of_imagenet_become_names_in_the_order_of_the_ids():
    ids = [f"n{i:08d}" for i in range(1000)]
    from open_clip import IMAGENET_CLASSNAMES

    assert describe(ids[::-1], "label")[:2] == [IMAGENET_CLASSNAMES[999], IMAGENET_CLASSNAMES[998]]
    with refused("model.teacher-mismatch", ConfigError, name="n00000000"):
        describe(ids[:200], "phrase")


# names of teachers


@pytest.mark.parametrize("name", ["ViT-B-32", "npz:", "npz", "local-dir:", "", "a/b/c", "ViT-B-32/openai:"])
def test_name_of_another_form_is_refused_with_the_forms_that_there_are(name):
    with refused("config.unknown-name", ConfigError, key="method.teacher", value=name):
        open_teacher(name)


@pytest.mark.parametrize("name", ["npz:f.npz", "local-dir:f", "ViT-B-32/openai:f.bin", "ViT-B-32/openai"])
def test_name_of_an_opened_teacher_has_absolute_paths_and_opens_it_again(name):
    found = open_teacher(name)
    assert found.name == name.replace(":f", f":{Path.cwd()}/f")
    assert open_teacher(found.name).name == found.name


# weights of teachers


def test_weights_of_a_tag_bring_their_own_activation_and_preprocessing(tag, clip_folder, images):
    file, plain = clip_folder / "open_clip_model.safetensors", {"interpolation": "bilinear", "resize_mode": "squash"}
    for source in (
        {"quick_gelu": True, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)},
        {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)},
    ):
        tag(hf_hub="nobody/tiny/", **plain, **source)
        found = embed(open_teacher(f"Tiny/theirs:{file}"), images)
        expected = by_hand(clip_folder, images, source.get("quick_gelu", False), source["mean"], source["std"])
        assert torch.allclose(found, expected, atol=1e-5)


def test_weights_that_were_fetched_once_are_found_without_a_network(
    tag, clip_folder, images, tiny_task, monkeypatch, tmp_path
):
    import huggingface_hub
    import open_clip

    file = clip_folder / "open_clip_model.safetensors"
    asked = []
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *what: asked.append(what) or str(file))
    monkeypatch.setattr(open_clip, "download_pretrained", lambda *_: pytest.fail("nothing is to be fetched"))
    tag(
        hf_hub="nobody/tiny/", interpolation="bilinear", resize_mode="squash", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
    )
    teacher = open_teacher("Tiny/theirs")
    teacher.check(tiny_task, {"phrase"})
    assert torch.allclose(embed(teacher, images), by_hand(clip_folder, images), atol=1e-5)
    assert set(asked) == {("nobody/tiny", "open_clip_model.safetensors")}


def test_missing_weights_without_a_network_are_one_error_with_file_place_and_ways_out(tag, tiny_task, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    tag(hf_hub="nobody/tiny/")
    with refused("model.teacher-unavailable", ConfigError, value="Tiny/theirs") as raised:
        open_teacher("Tiny/theirs").check(tiny_task, {"phrase"})
    message = str(raised.value)
    assert "\n" not in message
    for part in (
        "open_clip_model.safetensors of nobody/tiny",
        huggingface_hub.constants.HF_HUB_CACHE,
        "method.teacher=Tiny/theirs:FILE",
        "method.teacher=npz:FILE",
        "method.teacher=none",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("ViT-B-33/openai", "config.unknown-name", "ViT-B-32"),
        ("ViT-B-32/opanai", "config.unknown-name", "openai"),
        ("ViT-B-32/openai:/nowhere/w.bin", "model.teacher-unavailable", "/nowhere/w.bin"),
        ("local-dir:/nowhere", "model.teacher-unavailable", "open_clip_config.json"),
        ("npz:/nowhere/f.npz", "model.teacher-unavailable", "image, y, text and class_names"),
    ],
)
def test_what_does_not_exist_is_named(tiny_task, name, code, word):
    with refused(code, ConfigError, value=name) as caught:
        open_teacher(name).check(tiny_task, {"phrase"})
    assert word in str(caught.value)
    assert "permissions" not in str(caught.value)  # the remedy of the file that could not be read


@pytest.mark.parametrize("damage", [b"\x93NUMPY\x01\x00\x04\x00{(((", b"", b"\x93NUMPY\x09\x00"])
def test_damaged_features_of_a_teacher_are_one_error(tiny_task, tmp_path, damage):
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as file:
        for key in ("image", "y", "text", "class_names"):
            file.writestr(f"{key}.npy", damage)
    with refused("model.teacher-mismatch", ConfigError):
        open_teacher(f"npz:{tmp_path / 'f.npz'}").check(tiny_task, {"phrase"})


def test_folder_without_weights_is_refused(tiny_task, clip_folder, tmp_path):
    (tmp_path / "open_clip_config.json").write_bytes((clip_folder / "open_clip_config.json").read_bytes())
    with refused("model.teacher-unavailable", ConfigError):
        open_teacher(f"local-dir:{tmp_path}").check(tiny_task, {"phrase"})


def test_damaged_weights_are_one_error(clip_folder, tmp_path):
    (tmp_path / "open_clip_config.json").write_bytes((clip_folder / "open_clip_config.json").read_bytes())
    (tmp_path / "open_clip_model.safetensors").write_bytes(b"not weights")
    with refused("model.teacher-mismatch", ConfigError):
        open_teacher(f"local-dir:{tmp_path}").text(["a"], "phrase", CPU)


def test_tower_without_a_projection_matrix_cannot_be_fine_tuned(tiny_task):
    with refused("model.teacher-mismatch", ConfigError, value="RN50/openai"):
        open_teacher("RN50/openai").check(tiny_task, {"phrase"}, 64)


def test_one_process_of_a_node_fetches_at_a_time(tmp_path, monkeypatch):
    """While another process holds the lock, this one does not look for weights; then it finds those of the other."""
    import huggingface_hub

    brought, looks = tmp_path / "brought", []
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *what: looks.append(what) or str(brought))
    with ThreadPoolExecutor() as pool:
        with (Path(tempfile.gettempdir()) / f"raylt-weights-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting = pool.submit(clip.OpenClip("Tiny", "theirs", None)._fetch, {"hf_hub": "nobody/tiny/"})
            time.sleep(0.3)
            assert not looks
            assert not waiting.done()
        assert waiting.result(20) == brought


# feature files


def test_features_are_taken_by_sample_id(tiny_task, tmp_path):
    teacher = open_teacher(teachers.save_features(tmp_path / "f.npz", tiny_task))
    teacher.check(tiny_task, {"phrase"}, teachers.DIM)
    arrays = teachers.feature_arrays(tiny_task)
    for k in (1, 5):
        found = teacher.images(Samples(tiny_task.shards[k], tiny_task.spec, CPU))
        assert np.array_equal(found.numpy(), arrays["image"][tiny_task.split.clients[k]].astype(np.float32))
    assert np.array_equal(teacher.text(tiny_task.class_names, "phrase", CPU), arrays["text"])
    assert teacher.about == f"a stand-in (npz:{tmp_path}/f.npz)"
    assert torch.equal(teacher.projection(CPU), torch.eye(teachers.DIM))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"class_names": np.array(["a", "b", "d", "c"])}, "class_names are not the classes of tiny"),
        ({"y": np.zeros(60, np.int64)}, "y are not the labels of tiny's training samples"),
        ({"image": np.zeros((59, 64), np.float16)}, "image is float16 [59, 64]"),
        ({"image": np.full((60, 64), np.nan, np.float32)}, "image is float32"),
        ({"text": np.zeros((4, 32), np.float32)}, "text is float32 [4, 32]"),
        ({"text": np.zeros((4, 64), np.int64)}, "text is int64"),
        ({"text": None}, "it has no text"),
    ],
)
def test_feature_file_that_does_not_fit_is_refused(tiny_task, tmp_path, changes, problem):
    teacher = open_teacher(teachers.save_features(tmp_path / "f.npz", tiny_task, **changes))
    with refused("model.teacher-mismatch", ConfigError, value=teacher.name) as caught:
        teacher.check(tiny_task, {"phrase"})
    assert problem in str(caught.value)


def test_texts_of_labels_are_asked_of_a_feature_file_only_where_needed(tiny_task, tmp_path):
    teacher = open_teacher(teachers.save_features(tmp_path / "f.npz", tiny_task))
    with refused("model.teacher-mismatch", ConfigError, value=teacher.name):
        teacher.check(tiny_task, {"phrase", "label"})


def test_student_whose_features_are_compared_must_be_as_wide(tiny_task, tmp_path):
    teacher = open_teacher(teachers.save_features(tmp_path / "f.npz", tiny_task))
    with refused("model.teacher-mismatch", ConfigError, key="model", value=256):
        teacher.check(tiny_task, {"phrase"}, 256)


def test_each_image_encoder_is_a_copy_that_can_be_trained(teacher):
    one, other = (list(teacher.image_encoder(CPU).parameters()) for _ in range(2))
    assert {value.data_ptr() for value in one}.isdisjoint(value.data_ptr() for value in other)
    assert all(value.requires_grad for value in one)


def test_a_loaded_teacher_neither_trains_nor_draws(teacher):
    model = teacher.load()
    assert not any(value.requires_grad for value in model.parameters())
    assert not any(module.training for module in model.modules())
