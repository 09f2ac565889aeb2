"""Clients judged on their own test images, and the counts that a run keeps of each evaluation."""

import json
import shutil

import numpy as np
import pytest
import torch
from small_runs import make_tiny_run
from tiny import configure, make_experiment

import raylt
from raylt import Run, metrics
from raylt.core import confusions, judging
from raylt.core.confusions import Matrices
from raylt.core.evaluation import NOBODY
from raylt.data.cache import load
from raylt.errors import CheckpointError, ConfigError
from raylt.plots.classes import confusion_of
from raylt.plots.clients import compare
from raylt.runs.verify import verify

CLIENTS = {"wien": 0, "graz": 1, "linz": 2, "bregenz": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def made(folder):
    """`made(method)`: a run whose clients have test images of their own."""
    runs = {}

    def make(method: str) -> Run:
        if method not in runs:
            fields = ["federation.rounds=2", "local.lr=0.1", "evaluation.personal=1"]
            runs[method] = make_tiny_run(folder, method, "data.partition=by_id", *fields)
        return runs[method]

    return make


def by_hand(run: Run) -> dict[str, float]:
    """Each client's exported model on the client's own test images, one image at a time."""
    with np.load(run.folder.parent / "pictures.npz") as file:
        images, labels, ids = file["x_test"], file["y_test"], file["id_test"]
    path = raylt.export(run)
    figures = {}
    for name, id in CLIENTS.items():
        model = raylt.load_model(path, name if run.method.personal else None)
        answers = [model.predict(image[None]).labels.item() for image in images[ids == id]]
        figures[name] = sum(a == b for a, b in zip(answers, labels[ids == id].tolist(), strict=True)) / len(answers)
    return figures


@pytest.mark.parametrize("method", ["fedavg", "fedper", "bpfed", "mupfl"])
def test_local_figures_are_those_of_the_exported_models_on_the_clients_own_images(made, method):
    run, expected = made(method), by_hand(made(method))
    assert run.reports[-1]["by_client"]["local"] == list(expected.values())
    assert run.summary["clients"]["by"]["local"]["mean"] == sum(expected.values()) / 4
    assert run.summary["clients"]["by"]["local"]["worst_decile"] == min(expected.values())
    assert len(set(expected.values())) > 2
    frame = run.clients.query(f"metric == 'local' and step == {len(run.reports)}")
    assert frame.value.tolist() == list(expected.values())
    means = run.metrics.query(f"metric == 'local' and step == {len(run.reports)} and group == 'mean'").value
    assert means.item() == sum(expected.values()) / 4


def test_clients_without_test_images_of_their_own_have_no_local_figure(made, folder):
    run = make_tiny_run(folder, "fedper", "data.partition=iid", "federation.rounds=1", name="dealt")
    assert run.task.own_tests is None
    assert "local" not in run.summary["clients"]["by"]
    assert "local" not in run.reports[-1]["by_client"]
    with pytest.raises(CheckpointError, match="its clients have no test images of their own; give --metric owned"):
        compare([run], "local")
    assert compare([run]).metric == "owned"
    assert compare([made("fedper")]).metric == "local"


# what a client may say of it

def test_a_client_cannot_say_what_it_is_not_judged_on(made):
    task = made("fedper").task
    own = {id: judging.totals(task.test, 4, rows) for id, rows in enumerate(task.own_tests)}
    schema = judging.counts_on_own(task.test, 4, own)
    honest = torch.stack([torch.diag(judging.totals(task.test, 4)), torch.diag(own[1])])
    condition = schema.own_condition
    assert condition(1, honest) is None
    assert condition(2, honest) == "has not as many counts of each class as the client's own test images"
    doubled = torch.stack([honest[0] * 2, honest[1]])
    assert condition(1, doubled) == "has not as many counts of each class as the test set"
    moved = torch.stack([honest[0].roll(1, 1), honest[1]])
    assert condition(1, moved) == "has more counts on the client's own test images than on all"


def test_a_lie_about_its_own_images_is_rejected(made, tmp_path):
    class Boasting(raylt.Method):
        name = "boasting"
        paper = "for tests"
        personal = True

        def client_model(self, client):
            if client.id == 1:
                counts = client.test.counts

                def better(*given):
                    found = counts(*given)
                    if 1 in found.own:          # the test set is that of all clients of this process
                        found.own = {1: torch.diag(found.own[1].sum(1))}
                    return found

                client.test.counts = better
            return client.model

    task = made("fedper").task
    config = configure(data={"clients": 4}, federation={"rounds": 1, "retries": 0, "quorum": 0.5})
    reports = []
    experiment = make_experiment(config, task, tmp_path, Boasting())
    while not experiment.done:
        reports.append(experiment.advance())
    assert reports[-1].rejected == {1: "confusion has more counts on the client's own test images than on all"}
    assert reports[-1].by_client["local"][1] is None


# the counts that are kept

def test_a_run_keeps_the_counts_of_each_evaluation(made):
    run = made("fedper")
    for step, report in enumerate(run.reports, 1):
        kept = run.matrices(step)
        assert metrics.accuracy(kept.shared) == report["global_accuracy"]
        assert metrics.accuracy(sum(kept.clients.values())) == report["accuracy"]
        assert [metrics.accuracy(kept.own[id]) for id in range(4)] == report["by_client"]["local"]
    images, labels = load(run.task.test.x), torch.from_numpy(load(run.task.test.y))
    assert torch.equal(run.matrices().clients[2], metrics.confusion(
        run.client_model(2).predict(images).labels, labels, 4))
    with pytest.raises(CheckpointError, match="nothing was judged after step 9; evaluations are those after 1, 2"):
        run.matrices(9)


def test_counts_that_were_changed_are_seen(made, tmp_path):
    run = Run.open(shutil.copytree(made("fedavg").folder, tmp_path / "run"))
    file = run.folder / "confusions/000002.npz"
    confusions.write(run.folder, 2, Matrices(torch.eye(4, dtype=torch.int64)))
    with pytest.raises(CheckpointError, match=r"000002\.npz: has other counts than those of step 2; put the original"):
        run.matrices()
    assert [finding.what for finding in verify(run.folder) if not finding.whole] == ["confusions/000002.npz"]
    file.unlink()
    with pytest.raises(CheckpointError, match=r"000002\.npz: cannot be read .*; put the original back"):
        run.matrices()
    file.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"000002\.npz: cannot be read"):
        run.matrices(2)
    assert run.matrices(1).shared is not None


def test_what_is_nobodys_counts_for_nobody(made):
    task, counts = made("fedavg").task, []
    experiment = make_experiment(configure(data={"clients": 4}), task, made("fedavg").folder)
    owners = experiment.evaluator._owners
    assert owners is not None
    owners[task.own_tests[3]] = NOBODY
    counts.append(experiment.evaluator._judge_global(last=False)[0])
    assert counts[0].own.keys() == {0, 1, 2}
    assert counts[0].all.sum() == len(task.test)


# as tables

def test_each_class_has_its_figures(made):
    found = confusion_of(made("fedper"), "linz")
    assert found.title == "fedper: client linz, own test images"
    matrix = found.matrix.tolist()
    for c, row in enumerate(found.figures()):
        hits, tested_, predicted = matrix[c][c], sum(matrix[c]), sum(line[c] for line in matrix)
        assert row["class"] == made("fedper").task.class_names[c]
        assert row["tested"] == tested_
        assert row["recall"] == (hits / tested_ if tested_ else None)
        assert row["precision"] == (hits / predicted if predicted else None)
        assert row["f1"] == (2 * hits / (tested_ + predicted) if tested_ + predicted else None)
    assert confusion_of(made("fedper")).matrix.sum() == 4 * len(made("fedper").task.test)
    assert confusion_of(made("fedavg")).matrix.sum() == 4 * len(made("fedavg").task.test)
    with pytest.raises(ConfigError, match="has no model of a client rom"):
        confusion_of(made("fedavg"), "rom")


def test_quality_is_of_the_global_models_probabilities(made):
    run = made("fedavg")
    shares = run.model().predict(load(run.task.test.x)).probabilities
    expected = metrics.quality(shares, torch.from_numpy(load(run.task.test.y)))
    assert run.summary["quality"] == pytest.approx(expected)
    assert [report["quality"] is None for report in run.reports] == [True, False]
    json.dumps(run.summary["quality"], allow_nan=False)
