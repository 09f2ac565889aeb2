"""The commands that list: data, methods, settings, recipes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands import SMALL

from raylt.cli.method_page import GROUPS
from raylt.config import settings
from raylt.data.augment import AUGMENTATIONS
from raylt.data.sources import NAMES
from raylt.models import MODELS


def test_classes_and_clients_of_a_split_sum_up(raylt):
    code, out, _ = raylt("data", "data.clients=7", "--format", "json")
    split = json.loads(out)
    assert code == 0
    assert np.array(split["clients"]).shape == (7, 10)
    assert np.array(split["clients"]).sum(0).tolist() == split["classes"]
    assert len(split["names"]) == len(split["groups"]) == 10
    assert set(split["groups"]) == {"many", "medium", "few"}


def test_table_of_a_split_shows_the_sums_of_its_groups(raylt):
    split = json.loads(raylt("data", "--format", "json").out)
    out = raylt("data").out
    sizes = [n for n, group in zip(split["classes"], split["groups"], strict=True) if group == "few"]
    assert f"few: {len(sizes)} classes, {sum(sizes)} samples" in out
    assert split["sha256"] in out


def test_imported_split_is_the_exported_one_whatever_the_seed(raylt, tmp_path):
    file = tmp_path / "split.json"
    exported = json.loads(raylt("data", "data.seed=5", "--export", file, "--format", "json").out)
    imported = json.loads(raylt("data", "--import", file, "--format", "json").out)
    drawn = json.loads(raylt("data", "--format", "json").out)
    assert imported == exported
    assert drawn["sha256"] != exported["sha256"]


def test_split_of_a_run_can_be_imported(raylt, finished):
    folder, (_, out, _) = finished
    imported = json.loads(raylt("data", *SMALL, "--import", folder / "split.json", "--format", "json").out)
    assert imported["sha256"] == json.loads(out)["split_sha256"]


def test_methods_are_listed_with_default_range_and_source(raylt):
    code, out, _ = raylt("methods", "--format", "json")
    listing = json.loads(out)
    assert code == 0
    assert listing["fedprox"]["fields"]["mu"] == {
        "default": 0.01, "range": "[0.0001, 1] log", "source": "weight of the proximal term, Eq. 2",
        "stage": None}
    assert listing["sfd"]["fields"]["aligner"]["stage"] == "finish"
    assert listing["fedavg"]["paper"] == "McMahan et al., AISTATS 2017"
    table = raylt("methods").out
    assert all(name in table for name in listing)
    assert [table.index(f"{group}: ") for group in GROUPS] == sorted(table.index(f"{group}: ") for group in GROUPS)
    assert listing["fednova"]["group"] == "aggregation"
    assert listing["ditto"]["group"] == "personal"
    assert "privileged: labelled images" in " ".join(table.split())


def test_one_method_is_shown_with_its_fields_what_it_sends_and_what_it_costs(raylt):
    out = raylt("methods", "fedncm").out
    assert "statistics" in out
    assert "Departures" in out
    assert re.search(r"finish +statistics +classes +10.1 KiB +4.7 MiB +1 read", out)
    one = json.loads(raylt("methods", "ditto", "--model", "small", "--format", "json").out)
    assert one["ditto"]["calls"][0]["trained"] == 2
    assert "finish on" in raylt("methods", "ccvr", "--model", "small").out
    code, _, err = raylt("methods", "fedncmm")
    assert code == 2
    assert "did you mean fedncm?" in err


@pytest.mark.parametrize(("arguments", "said"), [
    (["--model", "small", "--image", "8x8"], "--image 8x8: is written HEIGHTxWIDTHxCHANNELS"),
    (["--model", "resnet9"], "model = resnet9"), (["--model", "cnn"], "images are 8x8, it needs at least 16x16")])
def test_what_methods_cannot_be_measured_with_is_refused(raylt, arguments, said):
    code, _, err = raylt("methods", "fedavg", *arguments)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_settings_are_listed_with_default_and_meaning(raylt):
    code, out, _ = raylt("settings", "--format", "json")
    listing = json.loads(out)
    assert code == 0
    assert list(listing) == [key for key, _ in settings()]
    assert listing["data.alpha"]["default"] == 0.5
    assert "Dirichlet" in listing["data.alpha"]["what"]
    table = raylt("settings").out
    assert all(key in table for key in listing)


def test_settings_say_which_values_they_take(raylt):
    listing = json.loads(raylt("settings", "--format", "json").out)
    assert listing["federation.batchnorm"]["allowed"] == "average, local"
    assert listing["local.momentum"]["allowed"] == "a number >= 0 and < 1"
    assert listing["data.min_size"]["allowed"] == "a whole number >= 0 and <= 1e+07 or null"
    assert listing["resources.actors"]["allowed"] == "a whole number or auto"
    assert listing["method"]["default"] is None
    assert all(name in listing["model"]["allowed"] for name in MODELS)
    assert all(name in listing["data.source"]["allowed"] for name in NAMES)
    assert all(name in listing["augment"]["allowed"] for name in AUGMENTATIONS)
    table = raylt("settings").out
    assert "must be named" in table
    assert "[number, number] or null" in " ".join(table.split())


def test_recipes_are_listed_with_what_they_are(raylt):
    listing = json.loads(raylt("recipes", "--format", "json").out)
    assert "handwritten digits" in listing["demo"]["what"]
    assert all(entry["what"] and Path(entry["path"]).is_file() for entry in listing.values())
    assert "sfd/cifar10_if100_alpha0.05_k10" in raylt("recipes").out


def test_version_is_said(raylt):
    from importlib.metadata import version
    assert raylt("--version") == (0, f"raylt {version('raylt')}\n", "")


def test_page_of_methods_has_all_of_them_and_is_measured_for_one_model(raylt, tmp_path):
    for more in (["sfd"], ["--model", "cnn"], ["--classes", "100"], ["--format", "json"]):
        code, _, err = raylt("methods", *more, "--page", tmp_path / "methods.md")
        assert code == 2
        assert "has all methods, measured for resnet8; leave out NAME" in " ".join(err.split())
        assert not (tmp_path / "methods.md").exists()


def test_words_longer_than_their_column_are_folded_not_cut(raylt):
    out = raylt("settings").out
    assert "…" not in out
    assert "…" not in raylt("methods", "clip2fl").out


def test_a_file_whose_path_holds_an_equals_sign_is_a_file(raylt, tmp_path):
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    (folder / "best.yaml").write_text("data: {clients: 7}")
    code, out, _ = raylt("data", folder / "best.yaml", "--format", "json")
    assert code == 0
    assert len(json.loads(out)["clients"]) == 7
