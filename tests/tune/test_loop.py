"""A search reads its data once, and again where the file or the working directory has changed."""

import json

import numpy as np
import pytest

from raylt.config import load
from raylt.hyper import Uniform
from raylt.runs.callbacks.base import Callback
from tune.loop import SearchLoop, size_of
from tune.plan import SearchPlan
from tune.records import TrialRecord


def save(folder, images):
    """Save images of four classes with labels as a data set, data.npz."""
    folder.mkdir(exist_ok=True)
    x, y = np.zeros((images, 8, 8, 1), np.uint8), np.arange(images) % 4
    np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x[:40], y_test=y[:40], class_names=list("abcd"))


@pytest.mark.slow
def test_data_are_read_again_where_the_file_or_the_folder_changed(tmp_path, monkeypatch):
    config = load(None, ["method=fedavg", "data.source=npz:data.npz", "data.clients=4", "data.imbalance=1"])
    save(tmp_path / "one", 100)
    save(tmp_path / "two", 300)
    for name, images in (("one", 100), ("two", 300)):
        monkeypatch.chdir(tmp_path / name)
        assert sum(size_of(config).clients) == images
    save(tmp_path / "two", 200)
    assert sum(size_of(config).clients) == 200


@pytest.mark.parametrize(("scheduler", "rungs"), [("asha", [1, 3]), ("none", [])])
def test_scores_of_an_interrupted_trial_are_those_of_the_rungs_of_its_search(tmp_path, monkeypatch, scheduler, rungs):
    seen = []
    monkeypatch.setattr(TrialRecord, "check_interrupted", lambda self, folder, metric, steps: seen.append(list(steps)))
    config = load(None, ["method=fedavg", "federation.rounds=9", "data.clients=4"])
    plan = SearchPlan(config, {"fedavg": {"local.lr": Uniform(0.1, 0.2)}}, 1, scheduler=scheduler)
    (tmp_path / "search.json").write_text(json.dumps(plan.to_json()))
    SearchLoop(tmp_path, plan, Callback()).next()
    assert seen == [rungs]
