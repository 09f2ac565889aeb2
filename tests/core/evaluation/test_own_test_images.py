"""Evaluation of clients on their own test images, and the counts that a run keeps of each evaluation."""

import json
import shutil

import numpy as np
import pytest
import torch
from refusals import refused
from rich.console import Console
from small_runs import make_tiny_run
from tiny import configure, make_experiment

import raylt
from raylt import Run, metrics
from raylt.core.evaluation import client_models, counts
from raylt.core.evaluation.counts import NO_CLIENT, Matrices
from raylt.data.images.cache import load
from raylt.errors import CheckpointError, ConfigError
from raylt.formatting import percent
from raylt.plots.classes import confusion_of
from raylt.plots.clients import compare_clients
from raylt.runs.folder.summary import table_of
from raylt.runs.verify import verify
from raylt.studies.report.listing import listing

CLIENTS = {"wien": 0, "graz": 1, "linz": 2, "bregenz": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def made(folder):
    """Return `made(method)`, a finished run whose clients have test images of their own."""
    runs = {}

    def make(method: str) -> Run:
        if method not in runs:
            fields = ["federation.rounds=2", "local.lr=0.1", "evaluation.personal=1"]
            runs[method] = make_tiny_run(folder, method, "data.partition=by_id", *fields)
        return runs[method]

    return make


def by_hand(run: Run) -> dict[str, float]:
    """Judge each client's exported model on the client's own test images, one image at a time."""
    with np.load(run.folder.parent / "pictures.npz") as file:
        images, labels, ids = file["x_test"], file["y_test"], file["id_test"]
    path = raylt.export(run)
    figures = {}
    for name, id in CLIENTS.items():
        model = raylt.load_model(path, name if run.method.personal else None)
        answers = [model.predict(image[None]).labels.item() for image in images[ids == id]]
        figures[name] = sum(a == b for a, b in zip(answers, labels[ids == id].tolist(), strict=True)) / len(answers)
    return figures


@pytest.mark.sampled(2)
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
    with pytest.raises(CheckpointError, match="metric='owned'"):
        compare_clients([run], "local")
    assert compare_clients([run]).metric == "owned"
    assert compare_clients([made("fedper")]).metric == "local"


def test_numbers_of_test_images_stand_beside_the_clients_figures(made, folder):
    run = made("fedper")
    comparison = compare_clients([run])
    sizes = [len(rows) for rows in run.task.own_tests]
    figures = run.reports[-1]["by_client"]["local"]
    assert comparison.tested == run.summary["tests"]["own"] == sizes
    pooled = sum(n * value for n, value in zip(sizes, figures, strict=True)) / sum(sizes)
    assert comparison.spread()[run.name]["all_images_together"] == pytest.approx(pooled)
    assert run.summary["clients"]["pooled"] == pytest.approx(pooled)
    console = Console(width=150)
    with console.capture() as capture:
        console.print(comparison.table())
    assert "test images" in capture.get()
    assert f"{100 * figures[3]:.2f} % (" in capture.get()  # the client has two test images, so the interval is shown
    card = raylt.export(run)
    assert f"(n = {sizes[3]}," in card.with_name(card.name + ".md").read_text()


def test_personal_models_are_shown_by_their_clients_figures(made, folder):
    run = made("fedper")
    by_own_images = run.summary["clients"]["by"]["local"]["mean"]
    assert run.summary["shown"]["figure"] == "local"
    assert run.summary["shown"]["last"] == by_own_images != run.summary["accuracy"]["last"]
    assert made("fedavg").summary["shown"]["figure"] == "accuracy"
    dealt = make_tiny_run(folder, "fedper", "data.partition=iid", "federation.rounds=1", name="personal")
    assert dealt.summary["shown"] == {
        "figure": "matched",
        **dict.fromkeys(("last", "last10", "best"), dealt.summary["clients"]["by"]["matched"]["mean"]),
        "before_finish": None,
    }
    listed = {entry.name: (entry.accuracy, entry.figure) for entry in listing(folder)}
    assert listed["fedper"] == (by_own_images, "local")
    assert listed["fedavg"] == (made("fedavg").summary["accuracy"]["last"], "accuracy")
    assert listed["personal"] == (dealt.summary["shown"]["last"], "matched")
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table_of(dealt.summary))
    assert f"{percent(dealt.summary['shown']['last'])} (own models, own class mix)" in capture.get()


def test_confusion_of_personal_models_has_each_clients_own_class_mix(folder):
    run = make_tiny_run(folder, "fedper", "data.partition=dirichlet", "federation.rounds=1", name="mixed")
    result = confusion_of(run)
    counts = run.task.client_counts
    assert result.title == "mixed: models of all clients, own class mix"
    assert result.matrix.sum(1).tolist() == pytest.approx(counts.sum(0).tolist())
    hits = sum(
        n * figure for n, figure in zip(counts.sum(1), run.reports[-1]["by_client"]["matched"], strict=True) if n
    )
    assert result.matrix.diagonal().sum().item() == pytest.approx(hits)
    assert [row["tested"] for row in result.figures()] == np.bincount(load(run.task.test.y)).tolist()


def test_a_client_s_model_is_taken_by_name_or_id(made):
    run = made("fedper")
    by_name, by_id = run.client_model("graz"), run.client_model(1)
    for name, value in by_id.network.state_dict().items():
        assert torch.equal(by_name.network.state_dict()[name], value)
    with refused("client.unknown", client="salzburg"):
        run.client_model("salzburg")


# what the server accepts as a client's counts


def test_a_client_cannot_say_what_it_is_not_judged_on(made):
    task = made("fedper").task
    own = client_models.totals_of_each(task.test, 4, dict(enumerate(task.own_tests)))
    schema = client_models.counts_on_own(task.test, 4, own)
    on_all, on_own = torch.diag(client_models.totals(task.test, 4)), torch.diag(own[1])
    honest = counts.cells_of(on_all, on_own)
    condition = schema.own_condition
    assert condition(1, honest) is None
    assert condition(2, honest) == "does not have the number of samples of each class in the client's own test images"
    doubled = counts.cells_of(on_all * 2, on_own)
    assert condition(1, doubled) == "does not have the number of samples of each class in the test set"
    moved = counts.cells_of(on_all.roll(1, 1), on_own)
    assert condition(1, moved) == "has more counts on the client's own test images than on all"
    assert condition(1, honest.flip(0)) == "has cells that are not ascending or outside the matrix"
    assert condition(1, honest + torch.tensor([4, 0, 0])) == "has cells that are not ascending or outside the matrix"
    twice = torch.cat([honest[:1] - torch.tensor([0, 1, 0]), torch.tensor([[0, 1, 0]]), honest[1:]])
    assert condition(1, twice) == "has cells that are not ascending or outside the matrix"
    negative = torch.cat([honest, torch.tensor([[15, -1, -1]])])
    assert condition(1, negative[negative[:, 0].argsort()].unique(dim=0)[1:]) is not None


def test_a_lie_about_its_own_images_is_rejected(made, tmp_path):
    class Boasting(raylt.Method):
        name = "boasting"
        paper = "for tests"
        personal = True

        def client_model(self, client):
            if client.id == 1:
                true_counts = client.test.counts

                def better(*given):
                    result = true_counts(*given)
                    # all clients of this process share `client.test`, so only client 1's counts are changed
                    if 1 in result.own:
                        result.own = {1: torch.diag(result.own[1].sum(1))}
                    return result

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


# the counts that a run keeps


def test_a_run_keeps_the_counts_of_each_evaluation(made):
    run = made("fedper")
    for step, report in enumerate(run.reports, 1):
        kept = run.matrices(step)
        assert metrics.accuracy(kept.shared) == report["global_accuracy"]
        assert metrics.accuracy(sum(kept.clients.values())) == report["accuracy"]
        assert [metrics.accuracy(kept.own[id]) for id in range(4)] == report["by_client"]["local"]
    images, labels = load(run.task.test.x), torch.from_numpy(load(run.task.test.y))
    assert torch.equal(
        run.matrices().clients[2], metrics.confusion(run.client_model(2).predict(images).labels, labels, 4)
    )
    with refused("run.not-judged", CheckpointError, step=9):
        run.matrices(9)


def test_counts_that_were_changed_are_seen(made, tmp_path):
    run = Run.open(shutil.copytree(made("fedavg").folder, tmp_path / "run"))
    file = run.folder / "confusions/000002.npz"
    counts.write(run.folder, 2, Matrices(torch.eye(4, dtype=torch.int64)))
    with refused("run.changed", CheckpointError, path=str(file), step=2):
        run.matrices()
    assert [finding.what for finding in verify(run.folder) if not finding.whole] == ["confusions/000002.npz"]
    file.unlink()
    with refused("file.unreadable", CheckpointError, path=str(file)):
        run.matrices()
    file.write_bytes(b"nothing")
    with refused("file.unreadable", CheckpointError, path=str(file)):
        run.matrices(2)
    assert run.matrices(1).shared is not None


def test_test_images_of_no_client_count_for_no_client(made):
    task, judged = made("fedavg").task, []
    experiment = make_experiment(configure(data={"clients": 4}), task, made("fedavg").folder)
    owners = experiment.evaluator._owners
    assert owners is not None
    owners[task.own_tests[3]] = NO_CLIENT
    judged.append(experiment.evaluator._judge_global(last=False)[0])
    assert judged[0].own.keys() == {0, 1, 2}
    assert judged[0].all.sum() == len(task.test)


# the counts as tables


def test_each_class_has_its_figures(made):
    result = confusion_of(made("fedper"), "linz")
    assert result.title == "fedper: client linz, own test images"
    matrix = result.matrix.tolist()
    for c, row in enumerate(result.figures()):
        hits, tested_, predicted = matrix[c][c], sum(matrix[c]), sum(line[c] for line in matrix)
        assert row["class"] == made("fedper").task.class_names[c]
        assert row["tested"] == tested_
        assert row["recall"] == (hits / tested_ if tested_ else None)
        assert row["precision"] == (hits / predicted if predicted else None)
        assert row["f1"] == (2 * hits / (tested_ + predicted) if tested_ + predicted else None)
    own = confusion_of(made("fedper"))
    assert own.title == "fedper: models of all clients, own test images"
    assert torch.equal(own.matrix, sum(made("fedper").matrices().own.values()))
    assert own.matrix.sum() == len(made("fedper").task.test)
    of_all = confusion_of(made("fedavg"))
    assert torch.equal(of_all.matrix, made("fedavg").matrices().shared)  # counted once, not once for each client
    assert [row["tested"] for row in of_all.figures()] == np.bincount(load(made("fedavg").task.test.y)).tolist()
    with pytest.raises(ConfigError, match="rom"):
        confusion_of(made("fedavg"), "rom")


def test_quality_is_of_the_global_models_probabilities(made):
    run = made("fedavg")
    shares = run.model().predict(load(run.task.test.x)).probabilities
    expected = metrics.quality(shares, torch.from_numpy(load(run.task.test.y)))
    assert run.summary["quality"] == pytest.approx(expected)
    assert [report["quality"] is None for report in run.reports] == [True, False]
    json.dumps(run.summary["quality"], allow_nan=False)


def test_the_global_models_answers_to_each_test_image_are_kept(made):
    run = made("fedavg")
    truth = torch.from_numpy(load(run.task.test.y))
    right = run.model().predict(load(run.task.test.x)).probabilities.argmax(1) == truth
    assert metrics.unpacked(run.summary["answers"], len(truth)).tolist() == right.tolist()
    assert [report["answers"] is None for report in run.reports] == [True, False]
