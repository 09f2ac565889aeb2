"""Figures of segmentation, where each client sees the classes in its own way, against counts by hand."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from refusals import refused
from small_runs import make_tiny_run
from tiny import configure, make_experiment

from raylt.contract.case import CPU, Case, make_scenes
from raylt.core.evaluation.counts import Matrices
from raylt.core.evaluation.evaluator import balance, validate
from raylt.core.fleet.fleet import Answer
from raylt.core.fleet.function_name import function_name
from raylt.data.label_maps import class_counts, class_views
from raylt.data.samples import IGNORED, Samples
from raylt.data.splits.split import IndexLists
from raylt.data.task import Shard
from raylt.errors import ClientError, ConfigError, TooFewReplies
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedper import FedPer
from raylt.models.split import with_classifier


@pytest.fixture
def scenes():
    """Return the tiny scenes, of which client k labels classes k and k + 1, modulo 3."""
    task = make_scenes()
    views = class_views(task.clients, 3, 2)
    shards = tuple(Shard(shard.x, shard.y, view=view) for shard, view in zip(task.shards, views, strict=True))
    return replace(task, shards=shards, client_counts=np.stack([class_counts(s.labels(), 4) for s in shards]))


def test_accuracy_of_a_group_counts_a_class_only_for_clients_that_label_it(scenes, tmp_path):
    # client 0 labels classes a (many) and b (medium), client 1 labels b and c (few); others are background for them
    matrices = {
        0: torch.tensor([[6, 1, 0, 3], [2, 3, 0, 5], [0, 0, 0, 10], [0, 0, 0, 10]]),
        1: torch.tensor([[0, 0, 0, 10], [0, 8, 1, 1], [0, 0, 5, 5], [0, 0, 0, 10]]),
    }
    case = Case(FedAvg(), "segmentation", tmp_path)
    figures = case.experiment(case.config(), task=scenes).evaluator._figures(Matrices(clients=matrices), [0, 1])
    assert figures["groups"] == pytest.approx({"many": 6 / 10, "medium": (3 + 8) / 20, "few": 5 / 10})


def test_the_mean_iou_on_validation_images_has_equal_classes_as_each_client_sees_them(scenes, tmp_path):
    task = replace(scenes, validation=scenes.test, validation_clients=np.zeros(len(scenes.test), dtype=np.int64))
    case = Case(FedAvg(), "segmentation", tmp_path)
    experiment = case.experiment(case.config(), task=task)
    experiment.step()
    samples = Samples(task.validation, task.spec, CPU)
    batch = samples.batch(torch.arange(len(samples)))
    with torch.no_grad():
        answers = experiment.server.model.eval()(batch.x).argmax(1)
    labelled = batch.y != IGNORED
    truth, predicted = batch.y[labelled], answers[labelled]
    weights = 1 / torch.bincount(truth, minlength=4).double()[truth]
    pairs = torch.zeros(4, 4, dtype=torch.float64)
    for id in experiment.fleet.ids:
        view = torch.from_numpy(task.views[id])
        pairs.index_put_((view[truth], view[predicted]), weights, accumulate=True)
    hits = pairs.diagonal()
    iou = (hits / (pairs.sum(0) + pairs.sum(1) - hits)).nanmean().item()
    figures = validate(experiment.method, experiment.server, experiment.fleet, task)
    assert figures["miou"] == pytest.approx(iou)


def test_own_models_have_figures_on_the_clients_own_maps(scenes, tmp_path):
    own_tests = IndexLists.of([np.arange(2), np.arange(2, 6), *(np.arange(0) for _ in range(3))])
    case = Case(FedPer(), "segmentation", tmp_path)
    experiment = case.experiment(case.config(), task=replace(scenes, own_tests=own_tests))
    while not experiment.done:
        report = experiment.step()
    assert [value is None for value in report.by_client["local"]] == [False, False, True, True, True]


def test_an_absent_class_has_no_weight():
    balanced = balance(torch.tensor([[0, 0, 0], [1, 3, 0], [0, 0, 2]]))
    assert balanced.tolist() == [[0, 0, 0], [0.25, 0.75, 0], [0, 0, 1]]


@pytest.mark.parametrize("cut", [lambda logits: logits[:, :3], lambda logits: logits[:1], lambda logits: [logits]])
def test_a_prediction_without_one_logit_per_class_ends_the_evaluation(cut, tiny_task, tmp_path):
    class Cuts(FedAvg):
        def predict(self, model, x):
            return cut(model(x))

    with refused("model.wrong-output", ConfigError, key="method"):
        make_experiment(configure(), tiny_task, tmp_path, Cuts()).step()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lambda client: client.state["own"], "client.failed"),
        (lambda client: client.model.classifier, "model.wrong-type"),
        (lambda client: with_classifier(client.model, client.model.classifier.weight[:2], None), "model.wrong-output"),
    ],
    ids=["raises", "no model", "two classes"],
)
@pytest.mark.parametrize("function", ["client_model", "other_model"])
def test_a_mistake_in_a_client_s_model_ends_the_first_round_not_the_last(function, answer, code, tiny_task, tmp_path):
    class Mistaken(FedPer):
        other_models: ClassVar = ("second",)

        def other_model(self, client, name):
            return client.model

    own = type("Own", (Mistaken,), {function: lambda self, client, *name: answer(client)})
    with refused("reply.too-few", TooFewReplies, round=1, function="try_models", cause=code):
        make_experiment(configure(), tiny_task, tmp_path, own()).step()


def test_a_single_client_that_fails_in_the_trial_of_its_model_ends_no_run(tiny_task, tmp_path):
    class FailsAtOne(FedPer):
        def client_model(self, client):
            assert client.id, "client 0 is hostile"
            return client.model

    report = make_experiment(configure(), tiny_task, tmp_path, FailsAtOne()).step()
    assert (report.lost, report.rejected) == ([], {})


@pytest.mark.parametrize("code", ["client.lost", "client.late", "device.full"])
def test_clients_that_fail_by_chance_in_the_trial_of_their_models_end_no_run(tiny_task, tmp_path, code):
    experiment = make_experiment(configure(), tiny_task, tmp_path, FedPer())
    answers = experiment.fleet._answers
    lost = []

    def lose(fn, ids, *call):
        if function_name(fn) != "try_models":
            yield from answers(fn, ids, *call)
            return
        lost.extend(ids)
        yield from (Answer(id, None, None, ClientError(id, 1, "try_models", "bad luck", code=code)) for id in ids)

    experiment.fleet._answers = lose
    experiment.fleet.on_note = lambda text: None
    report = experiment.step()
    assert lost == [0, 1, 2]
    assert report.clients is None


def test_predictions_of_a_client_s_model_that_are_not_numbers_are_counted_after_the_first_round(tiny_task, tmp_path):
    class NotANumber(FedPer):
        def client_model(self, client):
            classifier = client.model.classifier
            return with_classifier(client.model, classifier.weight * torch.nan, classifier.bias)

    report = make_experiment(configure(), tiny_task, tmp_path, NotANumber()).step()
    assert report.figures["predictions"].startswith("2 predictions of clients' models are not numbers")


@pytest.mark.parametrize(("method", "evaluated"), [("local", False), ("fedproto", False), ("fedper", True)])
def test_a_global_model_that_no_round_trains_is_not_evaluated(tmp_path, method, evaluated):
    summary = make_tiny_run(tmp_path, method).summary
    assert (summary["global_accuracy"] is not None) == evaluated
    assert (summary["quality"] is not None) == evaluated
    assert summary["clients"]["by"]["matched"]["mean"] is not None
