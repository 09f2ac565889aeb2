"""An image-text model in somebody's folder is refused in one line, or gives finite features; it runs no code."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from refusals import refused
from teachers import CLIP, DIM, PREPROCESS
from tiny import CPU, configure, make_setup

from raylt.errors import ConfigError
from raylt.models import build_model
from raylt.models.clip import open_teacher
from raylt.models.clip_checks import MAX_LAYERS, MAX_NUMBER, check_image_tower, checked_description

CONFIG = {"model_cfg": CLIP, "preprocess_cfg": PREPROCESS}


def changed(place: str, value: object) -> dict:
    """Return the description of the tiny model with one value replaced or added."""
    tree = json.loads(json.dumps(CONFIG))
    *folders, name = place.split(".")
    inner = tree
    for folder in folders:
        inner = inner[folder]
    inner[name] = value
    return tree


@pytest.fixture
def folder(clip_folder, tmp_path) -> Path:
    """Return a folder with a copy of the tiny model."""
    return Path(shutil.copytree(clip_folder, tmp_path / "clip"))


def assert_refused(folder: Path) -> str:
    """Check that a folder is refused as a model and as a teacher; return the message."""
    with pytest.raises(ConfigError) as caught:
        build_model(f"clip:local-dir:{folder}", 4, (8, 8, 3))
    code = caught.value.code
    assert code in ("model.teacher-unavailable", "model.teacher-mismatch")
    with refused(code, ConfigError, key="method.teacher", value=f"local-dir:{folder}"):
        open_teacher(f"local-dir:{folder}").text(["a"], "phrase", CPU)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("model_cfg", 0),
        ("model_cfg", [1, 2]),
        ("model_cfg", {}),
        ("model_cfg.embed_dim", None),
        ("model_cfg.embed_dim", 64.0),
        ("model_cfg.embed_dim", True),
        ("model_cfg.embed_dim", 0),
        ("model_cfg.vision_cfg", "x"),
        ("model_cfg.vision_cfg.width", math.nan),
        ("model_cfg.vision_cfg.width", 10**9),
        ("model_cfg.text_cfg.layers", 10**9),
        ("model_cfg.text_cfg.layers", [3, 10**9]),
        ("model_cfg.text_cfg.more", [[[[[[[[[1]]]]]]]]]),
        ("model_cfg.text_cfg.tokenizer_kwargs", {"trust_remote_code": True}),
        ("model_cfg.text_cfg.tokenizer_kwargs", {"clean": "whitespace", "bpe_path": "/a/pipe"}),
        ("model_cfg.text_cfg.tokenizer_kwargs", "x"),
    ],
)
def test_a_description_that_no_model_has_is_refused(folder, place, value):
    content = json.dumps(changed(place, value))
    with pytest.raises(ValueError, match=r"model_cfg|nested"):
        checked_description(content.encode())
    (folder / "open_clip_config.json").write_text(content)
    assert "open_clip_config.json" in assert_refused(folder)


@pytest.mark.parametrize("content", ["[" * 100_000, "", "3", "[]", '{"model_cfg"', "\ufeff{}"])
def test_a_file_that_is_no_description_is_refused(folder, content):
    (folder / "open_clip_config.json").write_text(content)
    assert_refused(folder)


@pytest.mark.parametrize(
    ("place", "value"),
    [("model_cfg.text_cfg.vocab_size", MAX_NUMBER), ("model_cfg.text_cfg.layers", MAX_LAYERS)],
)
def test_the_largest_numbers_and_the_settings_of_open_clips_own_models_are_kept(place, value):
    described = checked_description(json.dumps(changed(place, value)).encode())
    assert described["embed_dim"] == DIM
    tree = changed("model_cfg.text_cfg.tokenizer_kwargs", {"clean": "canonicalize", "strip_sep_token": True})
    checked_description(json.dumps(tree).encode())


@pytest.mark.slow
def test_a_model_larger_than_its_weights_is_refused_before_it_takes_memory(folder):
    (folder / "open_clip_config.json").write_text(json.dumps(changed("model_cfg.text_cfg.layers", MAX_LAYERS)))
    assert "parameters, more than the" in assert_refused(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", 0),
        ("size", 10**6),
        ("size", [32]),
        ("interpolation", "nearest"),
        ("resize_mode", "../../etc"),
        ("mean", 0.5),
        ("mean", [0.5]),
        ("mean", [0.1, 0.2, math.nan]),
        ("std", [0.1, 0.0, 0.2]),
        ("std", ["0.1", 0.1, 0.2]),
        ("std", None),
    ],
)
def test_preprocessing_that_raylt_does_not_have_is_refused(folder, name, value):
    tower = open_teacher(f"local-dir:{folder}").load().visual
    check_image_tower(tower, DIM)
    tower.preprocess_cfg = tower.preprocess_cfg | {name: value}
    with pytest.raises(ValueError, match=f"preprocess_cfg.{name}"):
        check_image_tower(tower, DIM)


def test_an_image_tower_of_another_width_is_refused(folder):
    with pytest.raises(ValueError, match="the features of an image"):
        check_image_tower(open_teacher(f"local-dir:{folder}").load().visual, DIM + 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_scale", 1e10),
        ("visual.conv1.weight", 3e38),
        ("visual.class_embedding", math.inf),
        ("ln_final.weight", math.nan),
    ],
)
def test_weights_that_give_no_finite_features_are_refused(folder, name, value):
    from safetensors.torch import load_file, save_file

    file = folder / "open_clip_model.safetensors"
    weights = load_file(file)
    weights[name] = torch.full_like(weights[name], value)
    save_file(weights, file)
    assert str(file) in assert_refused(folder)


def test_a_text_tower_that_cannot_read_the_class_names_is_refused(folder, tiny_task):
    (folder / "open_clip_config.json").write_text(json.dumps(changed("model_cfg.text_cfg.embed_cls", 1)))
    setup = make_setup(configure(model=f"clip:local-dir:{folder}", classifier="text"))
    with refused("model.teacher-mismatch", ConfigError, key="model"):
        setup.new_model(tiny_task.spec)


@pytest.mark.parametrize("name", ["open_clip_model.safetensors", "a.bin", "z.pth"])
def test_no_other_file_of_the_folder_is_waited_for(folder, name):
    """open_clip chooses one of the files of weights by their names."""
    (folder / "open_clip_model.safetensors").rename(folder / "b.safetensors")
    os.mkfifo(folder / name)
    assert "is not a plain file" in assert_refused(folder)
