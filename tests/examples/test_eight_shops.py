"""The example of eight shops, from folders to a trained run, with the names of the shops."""

import importlib.util
import json
from pathlib import Path

import pytest
from refusals import refused

import raylt
from raylt.cli.data import split_table
from raylt.config import load
from raylt.data.task import build_task
from raylt.errors import DataError

EXAMPLE = Path(__file__).parents[2] / "raylt/templates/eight_shops.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("eight_shops", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shops(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("example") / "shops"
    return folder, example.make(folder, most=12)


def settings(folder, *more):
    return [f"data.source=folder:{folder}", f"data.root={folder.parent / 'root'}", "data.size=16", *more]


def test_the_file_that_is_cut_off_is_named(shops):
    with refused("data.undecodable", DataError, count=1) as caught:
        build_task(load(None, ["method=fedavg", *settings(shops[0])]).data)
    assert "Wien/shirt/cut off.jpg" in str(caught.value)


def test_from_folders_to_a_trained_run_with_the_shops_names(example, shops, tmp_path):
    folder, made = shops
    config = load(
        None,
        ["method=fedper", "federation.rounds=2", "local.epochs=1", "model=small", *settings(folder, "data.bad=skip")],
    )
    run = raylt.run(config, out=tmp_path, name="shops", fleet="local", quiet=True)
    assert (run.config.data.clients, run.config.data.partition, run.config.data.imbalance) == (8, "by_id", 1)
    task = run.task
    assert task.client_names == tuple(sorted(example.SHOPS))
    assert task.class_names == tuple(sorted(example.KINDS))
    assert task.sizes.sum() + len(task.test) == made  # no image is left out by default
    assert task.notes[0] == "2 files are not images and were left out: 1 .db, 1 .txt"
    assert task.notes[1].startswith("left out: 1 image cannot be decoded: ")
    names = list(split_table(task, 200).columns[0].cells)
    assert names[:8] == sorted(example.SHOPS)
    assert json.loads((run.folder / "split.json").read_text())["client_names"] == sorted(example.SHOPS)
    # reopened, the run has the same test images
    again = raylt.Run.open(run.folder).task
    assert again.split.seal == task.split.seal
    assert run.summary["rounds"] == 2


def test_every_shop_is_judged_by_images_of_its_own(shops):
    task = build_task(load(None, ["method=fedavg", *settings(shops[0], "data.bad=skip")]).data)
    assert task.shape == (16, 16, 3)
    assert task.own_tests is not None
    assert all(len(rows) for rows in task.own_tests)


@pytest.mark.slow
def test_on_ray_and_in_one_process_the_same_hash(shops, tmp_path):
    config = load(
        None,
        [
            "method=fedper",
            "federation.rounds=2",
            "local.epochs=1",
            "model=small",
            "resources.actors=2",
            *settings(shops[0], "data.bad=skip"),
        ],
    )
    local, on_ray = (raylt.run(config, out=tmp_path, name=fleet, fleet=fleet, quiet=True) for fleet in ("local", "ray"))
    assert on_ray.summary["model_sha256"] == local.summary["model_sha256"]
    assert on_ray.summary["split_sha256"] == local.summary["split_sha256"]
    assert on_ray.reports[-1]["by_client"] == local.reports[-1]["by_client"]
    assert on_ray.matrices().sha256 == local.matrices().sha256
