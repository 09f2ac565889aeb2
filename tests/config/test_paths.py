"""Relative paths in settings that are resolved against another folder than the working directory."""

from pathlib import Path

import pytest

from raylt.config import load, located


@pytest.fixture
def folders(tmp_path, monkeypatch):
    start, other = tmp_path / "start", tmp_path / "other"
    for folder in (start, other):
        folder.mkdir()
    monkeypatch.chdir(other)
    return start, other


def settings(*overrides):
    return load(None, ["method=fedavg", *overrides])


@pytest.mark.parametrize("source", ["folder:shops", "npz:shops", "ray:shops"])
def test_a_source_starts_where_the_run_was_made(folders, source):
    start, _ = folders
    kind = source.partition(":")[0]
    assert located(settings(f"data.source={source}"), start).data.source == f"{kind}:{start / 'shops'}"


def test_an_address_of_an_object_store_stays(folders):
    start, _ = folders
    config = settings("data.source=ray:s3://bucket/shops")
    assert located(config, start).data.source == "ray:s3://bucket/shops"


def test_the_folder_of_an_image_tower_is_a_path_too(folders):
    start, _ = folders
    assert located(settings("model=clip:local-dir:tower"), start).model == f"clip:local-dir:{start / 'tower'}"
    assert located(settings("model=clip:ViT-B-32/openai"), start).model == "clip:ViT-B-32/openai"


def test_a_tilde_is_the_home_folder(folders, tmp_path, monkeypatch):
    start, _ = folders
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert located(settings("data.root=~/sets"), start).data.root == str(tmp_path / "me" / "sets")


def test_what_exists_only_in_the_working_directory_is_found_there(folders):
    start, other = folders
    (other / "shops").mkdir()
    assert located(settings("data.source=folder:shops"), start).data.source == f"folder:{other / 'shops'}"
    (start / "shops").mkdir()
    assert located(settings("data.source=folder:shops"), start).data.source == f"folder:{start / 'shops'}"


def test_a_saved_data_set_has_a_path_and_one_of_the_hub_has_none(folders):
    start, _ = folders
    (start / "saved").mkdir()
    assert located(settings("data.source=hf:saved"), start).data.source == f"hf:{start / 'saved'}"
    assert located(settings("data.source=hf:some/set@1"), start).data.source == "hf:some/set@1"


def test_root_split_weights_and_teacher_are_paths_too(folders):
    start, _ = folders
    config = located(settings("data.root=sets", "data.split=s.json", "weights=w.pt"), start)
    assert (config.data.root, config.data.split) == (str(start / "sets"), str(start / "s.json"))
    assert config.weights == str(start / "w.pt")
    for teacher, expected in [
        ("npz:f.npz", f"npz:{start / 'f.npz'}"),
        ("local-dir:clip", f"local-dir:{start / 'clip'}"),
        ("ViT-B-32/openai:w.pt", f"ViT-B-32/openai:{start / 'w.pt'}"),
        ("ViT-B-32/openai", "ViT-B-32/openai"),
        ("none", "none"),
    ]:
        config = located(load(None, ["method=fedsm", f"method.teacher={teacher}"]), start)
        assert config.method["teacher"] == expected


def test_names_and_absolute_paths_stay(folders, tmp_path):
    start, _ = folders
    config = settings("data.source=digits", f"data.root={tmp_path}", "weights=imagenet")
    assert located(config, start) == config


def test_nothing_changes_in_the_folder_itself_or_without_a_record(folders):
    _, other = folders
    config = settings("data.source=folder:shops", "data.root=sets")
    assert located(config, other) is config
    assert located(config, None) is config
    assert Path.cwd() == other
