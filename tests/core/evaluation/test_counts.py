"""Counts of evaluations in a run folder: which are kept."""

import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
from refusals import refused
from tiny import CPU, configure, make_experiment

import raylt
from raylt import Run, metrics
from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.client import Reply
from raylt.core.evaluation import client_models, counts
from raylt.core.evaluation.counts import CountsByClient, Matrices
from raylt.core.fleet.schema import Schema
from raylt.data.samples import IGNORED, Batch, Samples
from raylt.data.task import Shard
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


def test_counts_are_copied_unless_they_are_others_than_the_run_reported(tmp_path):
    for name in ("run", "branch"):
        (tmp_path / name).mkdir()
    for step in (1, 2):
        counts.write(tmp_path / "run", step, ONE)
    with refused("run.changed", CheckpointError, step=2):
        counts.copy(tmp_path / "run", tmp_path / "branch", {1: ONE.sha256, 2: "0" * 64})
    assert not (tmp_path / "branch/confusions").exists()
    counts.copy(tmp_path / "run", tmp_path / "branch", {1: ONE.sha256, 3: ONE.sha256})
    assert steps(tmp_path / "branch") == [1]


def test_a_run_folder_has_the_counts_of_a_hundred_evaluations(tmp_path):
    for step in range(1, 103):
        counts.write(tmp_path, step, ONE)
    counts.prune(tmp_path, 102, [])
    assert steps(tmp_path) == list(range(3, 103))


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


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1, 2])
def test_few_counts_may_lack_none(tmp_path, monkeypatch, kept):
    settings = ["federation.rounds=2", "local.steps=1", "data.clients=3", "data.imbalance=100"]
    run = raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=settings)
    (run.folder / f"confusions/{kept:06d}.npz").unlink()
    assert [finding.what for finding in verify(run.folder) if not finding.whole] == [f"confusions/{kept:06d}.npz"]


# counts of clients, which keep only the cells that are not zero


def random_counts(clients, classes, labels, seed=0):
    chance = torch.Generator().manual_seed(seed)
    drawn = torch.randint(classes, (2, clients, labels), generator=chance)
    return {
        3 * id: metrics.confusion(predicted, truth, classes) for id, (truth, predicted) in enumerate(drawn.unbind(1))
    }


def test_matrices_of_clients_are_those_that_their_cells_were_taken_from():
    dense = random_counts(5, 7, 20)
    kept = CountsByClient(7, {id: counts.cells_of(matrix) for id, matrix in dense.items()})
    assert list(kept) == list(dense)
    assert all(torch.equal(kept[id], matrix) for id, matrix in dense.items())
    assert list(kept.of({3, 6, 7})) == [3, 6]
    assert 4 not in kept
    with pytest.raises(KeyError):
        kept[4]


@pytest.mark.parametrize("shape", [(), (3, 2)], ids=["images", "maps"])
def test_counts_on_each_clients_own_images_are_those_of_its_images_alone(shape):
    chance = torch.Generator().manual_seed(1)
    y, predicted = torch.randint(4, (2, 50, *shape), generator=chance)
    y[::7] = IGNORED
    owners = torch.randint(-1, 3, (50,), generator=chance)
    judged = counts.Counts(4, CPU, owners)
    for rows in torch.arange(50).split(8):
        logits = torch.nn.functional.one_hot(predicted[rows], 4).movedim(-1, 1).float()
        judged.add(logits, Batch(torch.empty(0), y[rows], rows))
    judged.cpu()
    assert list(judged.own) == [0, 1, 2]
    for id, matrix in judged.own.items():
        owned = owners == id
        assert torch.equal(matrix, metrics.confusion(predicted[owned], y[owned], 4, IGNORED))
    assert torch.equal(judged.all, metrics.confusion(predicted, y, 4, IGNORED))


def test_figures_of_kept_cells_are_those_of_dense_matrices_to_the_bit():
    dense = random_counts(40, 11, 60)
    kept = CountsByClient(11, {id: counts.cells_of(matrix) for id, matrix in dense.items()})
    chance = torch.Generator().manual_seed(2)
    views = torch.arange(11).repeat(200, 1)
    views[::2, 3:] = 10
    owned = torch.randint(4, (200, 11), generator=chance)
    seen = metrics.seen_by_each(kept, views.numpy(), ())
    by_hand = {id: matrix if id % 2 else metrics.as_seen(matrix, views[id]) for id, matrix in dense.items()}
    assert torch.equal(metrics.pooled(seen.values()), sum(by_hand.values()))
    assert metrics.by_client(seen, owned, seen) == metrics.by_client(by_hand, owned, by_hand)


def test_many_classes_take_no_more_memory_than_the_test_set_has_labels():
    dense = random_counts(3, 1000, 5000)
    kept = CountsByClient(1000, {id: counts.cells_of(matrix) for id, matrix in dense.items()})
    assert all(cells.nbytes <= 8 * 5000 for cells in kept.cells.values())  # the whole matrix has 8,000,000 bytes
    assert counts.cell_type(1000, 2**31) == counts.cell_type(46_341, 1) == torch.int64


def test_a_client_sends_no_more_cells_than_the_test_set_has_labels():
    few = Shard(np.zeros((3, 1, 1, 1), dtype=np.uint8), np.array([0, 1, 1]))
    cells = torch.tensor([[0, 1], [7, 1], [8, 1], [9, 0]], dtype=torch.int32)
    schema = Schema({"confusion": client_models.counts_on(few, 5)}, {0: 2})
    assert schema.fault(0, Reply(2, {"confusion": cells[:3]})) is None
    assert schema.fault(0, Reply(2, {"confusion": cells})).code == "reply.wrong-shape"


def test_counts_in_the_form_of_earlier_versions_are_read(tmp_path):
    dense, shared = random_counts(3, 5, 9), torch.eye(5, dtype=torch.int64)
    stacked = torch.stack(list(dense.values()))
    earlier = {"shared": shared, "clients": stacked, "clients_ids": torch.tensor(list(dense)), "own": stacked}
    earlier["own_ids"] = earlier["clients_ids"]
    (tmp_path / "confusions").mkdir()
    np.savez_compressed(tmp_path / "confusions/000004.npz", **{name: value.numpy() for name, value in earlier.items()})
    read = counts.read(tmp_path, 4, hash_tensors(earlier))
    assert torch.equal(read.shared, shared)
    assert all(torch.equal(found[id], dense[id]) for found in (read.clients, read.own) for id in dense)
    counts.write(tmp_path, 5, read)
    again = counts.read(tmp_path, 5, read.sha256)
    assert list(again.own) == list(dense)
    assert all(torch.equal(again.clients[id], dense[id]) for id in dense)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clients_classes": torch.tensor(4)},
        {"clients_classes": torch.tensor(10**9)},
        {"clients_classes": torch.tensor([5, 5])},
        {"clients_sizes": torch.tensor([1, 1, 1])},
        {"clients_sizes": torch.tensor([-1, 1, 1])},
        {"clients_ids": torch.tensor([0, 1])},
        {"clients_cells": torch.ones(3, 3, dtype=torch.int32)},
        {"clients_cells": torch.ones(3)},
        {"clients_cells": torch.tensor(3)},
    ],
    ids=str,
)
def test_cells_that_no_matrix_has_are_refused_in_one_line(tmp_path, wrong):
    dense = random_counts(3, 5, 9)
    cells = {id: counts.cells_of(matrix) for id, matrix in dense.items()}
    tensors = Matrices(clients=CountsByClient(5, cells)).tensors() | wrong
    (tmp_path / "confusions").mkdir()
    np.savez_compressed(tmp_path / "confusions/000004.npz", **{name: value.numpy() for name, value in tensors.items()})
    with refused("file.unreadable", CheckpointError, path=str(tmp_path / "confusions/000004.npz")):
        counts.read(tmp_path, 4, hash_tensors(tensors))


# predictions that are not numbers


class Unsure(FedAvg):
    """FedAvg whose model predicts NaN for some images."""

    name: ClassVar[str] = "unsure"
    own: bool = False

    @property
    def personal(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.own

    def predict(self, model, x):
        logits = super().predict(model, x)
        logits[:2] = torch.nan
        return logits


def test_a_nan_prediction_counts_as_wrong(tiny_task):
    samples = Samples(tiny_task.test, tiny_task.spec, CPU)

    def predict(x):
        logits = torch.full((len(x), tiny_task.classes), torch.nan)
        logits[0] = 0.0
        logits[1, 1:] = torch.inf
        return logits

    judged = counts.counts_of(predict, samples, tiny_task.classes, 10_000)
    assert int(judged.nan_predictions) == len(tiny_task.test) - 1
    assert judged.all.diagonal().sum() <= 1
    assert judged.all.sum() == len(tiny_task.test)


def test_nan_predictions_for_pixels_without_a_label_are_not_counted():
    labels = torch.tensor([[[0, IGNORED], [IGNORED, 1]]])
    judged = counts.Counts(2, CPU)
    judged.add(torch.full((1, 2, 2, 2), torch.nan), Batch(torch.empty(0), labels, torch.tensor([0])))
    assert judged.nan_predictions == 2


def test_all_predictions_of_a_client_may_be_nan_but_not_more_than_there_are_labels(tiny_task):
    labels = len(tiny_task.test)
    condition = client_models.nan_predictions_on(tiny_task.test).condition
    assert condition(labels) is None
    assert condition(labels + 1) == f"is more than the {labels} labels"


@pytest.mark.parametrize("own", [False, True], ids=["global", "personal"])
def test_a_run_says_how_many_predictions_are_nan(tiny_task, tmp_path, own):
    experiment = make_experiment(configure(federation={"rounds": 1}), tiny_task, tmp_path, Unsure(own=own))
    report = experiment.step()
    of_each = "10 predictions of clients' models" if own else "2 predictions of the global model"
    assert f"{of_each} are not numbers; they count as wrong" in report.figures["predictions"]
    assert " of the global model are not numbers" in report.figures["predictions"]  # both where both are judged
    if not own:
        right = metrics.unpacked(report.answers, len(tiny_task.test))
        assert right.mean() == pytest.approx(report.accuracy)
