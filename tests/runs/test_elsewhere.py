"""Runs with relative paths that are opened from another folder."""

import json
import shutil

import numpy as np
import pytest
import torch
from refusals import refused
from sklearn.datasets import load_digits

import raylt
from raylt import Run
from raylt.errors import ConfigError, DataError
from raylt.runs.folder import provenance
from raylt.studies.records.recorded_runs import read_holdings


def save_digits(file):
    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) * 15).astype(np.uint8)
    names = np.array([str(label) for label in range(10)])
    np.savez(file, x_train=x[:400], y_train=y[:400], x_test=x[400:600], y_test=y[400:600], class_names=names)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Do a run of two rounds over an npz file with a relative path, then change the working directory."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    save_digits(tmp_path / "here/digits.npz")
    monkeypatch.chdir(tmp_path / "here")
    raylt.run(
        "fedavg", data="npz:digits.npz", model="small", rounds=2, clients=3, fleet="local", quiet=True, name="run",
        overrides=["output.keep=2", "local.epochs=1"],
    )  # fmt: skip
    monkeypatch.chdir(tmp_path / "there")
    return tmp_path / "here/runs/run"


def test_data_are_looked_for_where_the_run_was_made(made):
    run = Run.open(made)
    assert run.task.name == "npz:digits.npz"
    assert run.task.test.x.shape == (200, 8, 8, 1)
    assert read_holdings(run.config.model_dump(), made) is not None


def test_a_longer_run_keeps_the_folder_of_the_first(made, tmp_path, monkeypatch):
    longer = raylt.resume(made, ["federation.rounds=3"], fleet="local", quiet=True)
    assert longer.config.data.source == "npz:digits.npz"
    assert provenance.start_of(longer.folder) == tmp_path / "here"
    monkeypatch.chdir("/")
    assert raylt.resume(longer.folder, ["federation.rounds=4"], fleet="local", quiet=True).state == "done"


def test_a_stopped_run_is_resumed_to_the_same_model(made):
    whole = Run.open(made).summary
    (made / "summary.json").unlink()
    shutil.rmtree(max((made / "checkpoints").iterdir()))
    lines = (made / "metrics.jsonl").read_text().splitlines()
    (made / "metrics.jsonl").write_text(lines[0] + "\n")
    assert raylt.resume(made, fleet="local", quiet=True).summary["model_sha256"] == whole["model_sha256"]


def test_the_message_names_the_path_that_was_looked_for(made, tmp_path):
    (tmp_path / "here/digits.npz").unlink()
    with refused("data.not-found", DataError, run=str(made)) as caught:
        _ = Run.open(made).task
    assert f"has moved ({tmp_path / 'here/digits.npz'}). Put it back there" in str(caught.value)
    assert Run.open(made).model().shape == (8, 8, 1)


@pytest.mark.slow
def test_weights_that_were_moved_are_named_with_the_place_to_put_them(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm")
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "encoder.pt")
    save_digits(tmp_path / "digits.npz")
    monkeypatch.chdir(tmp_path)
    run = raylt.run(
        "fedavg", data="npz:digits.npz", model="timm:test_resnet", weights="encoder.pt", input=32, rounds=1, clients=2,
        trainable="classifier", fleet="local", quiet=True, name="run",
    )  # fmt: skip
    prediction = run.model().predict(run.task.test.x[:4]).probabilities
    folder = run.folder.absolute()
    (tmp_path / "encoder.pt").rename(tmp_path / "moved.pt")
    monkeypatch.chdir("/")
    for use in (Run.model, lambda run: raylt.resume(run, ["federation.rounds=2"], fleet="local", quiet=True)):
        with refused("model.weights-unavailable", ConfigError, key="weights", run=str(folder)) as caught:
            use(Run.open(folder))
        assert f"has moved ({tmp_path / 'encoder.pt'}). Put it back there" in str(caught.value)
    (tmp_path / "encoder.pt").symlink_to("moved.pt")
    assert torch.equal(Run.open(folder).model().predict(Run.open(folder).task.test.x[:4]).probabilities, prediction)


@pytest.mark.parametrize("weights", [None, "imagenet", "~/encoder.pt", "encoder.pt"])
def test_weights_that_are_where_they_were_have_not_moved(made, tmp_path, monkeypatch, weights):
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (tmp_path, tmp_path / "here"):
        (folder / "encoder.pt").write_text("")
    run = Run.open(made)
    run.__dict__["config"] = run.config.model_copy(update={"weights": weights})
    run.check_weights()
    monkeypatch.chdir(tmp_path / "here")
    run.check_weights()
    run.__dict__["config"] = run.config.model_copy(update={"weights": "~/other.pt"})
    with refused("model.weights-unavailable", ConfigError, value="~/other.pt"):
        run.check_weights()


def test_a_copy_of_run_and_data_is_found_in_the_working_directory(made, tmp_path):
    shutil.move(tmp_path / "here/digits.npz", tmp_path / "there/digits.npz")
    copy = shutil.copytree(made, tmp_path / "there/run")
    assert Run.open(copy).task.test.x.shape == (200, 8, 8, 1)


def test_the_summary_does_not_publish_the_folder(made):
    assert str(made.parents[1]) not in (made / "summary.json").read_text()
    assert json.loads((made / provenance.FILE).read_text())["directory"] == str(made.parents[1])
