"""Counts of evaluations in a run folder: how many stay."""

import shutil
from typing import ClassVar

import pytest
import torch
from refusals import refused
from tiny import CPU, configure, make_experiment

import raylt
from raylt import Run
from raylt.core.evaluation import counts
from raylt.core.evaluation.counts import Matrices
from raylt.data.samples import Samples
from raylt.errors import CheckpointError
from raylt.methods.fedavg import FedAvg
from raylt.runs.verify import verify

ONE = Matrices(torch.eye(2, dtype=torch.int64))


def steps(folder):
    return sorted(int(file.stem) for file in (folder / "confusions").iterdir())


def test_the_last_evaluations_and_those_with_a_checkpoint_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(counts, "KEPT", 3)
    for step in (1, 2, 4, 6, 8, 9):
        counts.write(tmp_path, step, ONE)
    (tmp_path / "confusions/of-mine.txt").touch()
    counts.prune(tmp_path, 8, [2, 5])
    (tmp_path / "confusions/of-mine.txt").unlink()
    assert steps(tmp_path) == [2, 4, 6, 8]


def test_a_run_drops_its_oldest_counts_and_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(counts, "KEPT", 3)
    settings = ["federation.rounds=7", "local.steps=1", "data.clients=3", "data.imbalance=100"]
    run = raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=settings)
    assert steps(run.folder) == [5, 6, 7]
    assert all(finding.whole for finding in verify(run.folder))
    assert run.matrices().shared is not None
    with refused("file.unreadable", CheckpointError):
        run.matrices(1)
    for gone, whole in ((6, False), (5, True)):
        copied = Run.open(shutil.copytree(run.folder, tmp_path / f"without-{gone}"))
        (copied.folder / f"confusions/{gone:06d}.npz").unlink()
        shutil.rmtree(copied.folder / f"checkpoints/{gone:06d}", ignore_errors=True)
        damaged = [finding.what for finding in verify(copied.folder) if not finding.whole]
        assert damaged == ([] if whole else [f"confusions/{gone:06d}.npz"])


@pytest.mark.parametrize("kept", [1, 2])
def test_few_counts_may_lack_none(tmp_path, monkeypatch, kept):
    settings = ["federation.rounds=2", "local.steps=1", "data.clients=3", "data.imbalance=100"]
    run = raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=settings)
    (run.folder / f"confusions/{kept:06d}.npz").unlink()
    assert [finding.what for finding in verify(run.folder) if not finding.whole] == [f"confusions/{kept:06d}.npz"]


# predictions that are not numbers


class Unsure(FedAvg):
    """FedAvg whose model has no answer to some images."""

    name: ClassVar[str] = "unsure"
    own: bool = False

    @property
    def personal(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.own

    def predict(self, model, x):
        logits = super().predict(model, x)
        logits[:2] = torch.nan
        return logits


def test_a_prediction_that_is_no_number_counts_as_wrong(tiny_task):
    samples = Samples(tiny_task.test, tiny_task.spec, CPU)

    def predict(x):
        logits = torch.full((len(x), tiny_task.classes), torch.nan)
        logits[0] = 0.0
        logits[1, 1:] = torch.inf
        return logits

    judged = counts.counts_of(predict, samples, tiny_task.classes, 10_000)
    assert int(judged.not_numbers) == len(tiny_task.test) - 1
    assert judged.all.diagonal().sum() <= 1
    assert judged.all.sum() == len(tiny_task.test)


@pytest.mark.parametrize("own", [False, True], ids=["global", "personal"])
def test_a_run_says_how_many_predictions_are_no_numbers(tiny_task, tmp_path, own):
    experiment = make_experiment(configure(federation={"rounds": 1}), tiny_task, tmp_path, Unsure(own=own))
    report = experiment.step()
    models = "clients' models" if own else "the global model"
    assert f" of {models} are not numbers; they count as wrong" in report.figures["predictions"]
