import math

import numpy as np
import pytest
import teachers
import torch
from fedsm_runs import QUICK, bits, open_client, run, states_of
from tiny import Recorder, configure, make_experiment, private_states
from torch import tensor

from raylt.contract.hosts import Backwards, FailsFirst, NewHosts
from raylt.core.training.features import features
from raylt.core.training.sgd import sgd
from raylt.data.splits.long_tail import shot_groups
from raylt.methods.fedsm.method import FedSM, teacher_counts_fault
from raylt.methods.fedsm.monitors import drift, zero_shot


def test_zero_shot_accuracy_counts_every_class_the_same():
    # right: 30/60, 10/10, 3/4, and a class without samples; many: above 50, few: below 5
    accuracies = zero_shot(tensor([60, 10, 4, 0]), tensor([30, 10, 3, 0]), (5, 50))
    assert accuracies == pytest.approx({"all": (0.5 + 1 + 0.75) / 3, "many": 0.5, "medium": 1.0, "few": 0.75})
    assert zero_shot(tensor([60, 10]), tensor([30, 10]), (5, 50)).keys() == {"all", "many", "medium"}


@pytest.mark.parametrize("finetune", [False, True])
def test_teachers_accuracy_is_that_of_its_features_against_its_texts(tiny_task, tmp_path, finetune):
    arrays = teachers.feature_arrays(tiny_task)
    rng = np.random.default_rng(1)
    arrays["image"] = (arrays["image"] + 0.6 * rng.standard_normal(arrays["image"].shape)).astype(np.float16)
    # lengths without meaning, which normalisation of the texts removes
    arrays["text"] = arrays["text"] * np.array([[1.0], [5.0], [0.2], [1.0]], np.float32)
    path = teachers.save_features(tmp_path / "noisy.npz", tiny_task, **arrays)
    method = FedSM(teacher=path, finetune=finetune, **QUICK)
    _, reports = run(tiny_task, tmp_path, method, data={"groups": [20, 29]})
    text = arrays["text"] / np.linalg.norm(arrays["text"], axis=1, keepdims=True)
    answers = (arrays["image"].astype(np.float64) @ text.T).argmax(1)
    rows = np.concatenate(tiny_task.split.clients)
    y = np.concatenate([shard.y for shard in tiny_task.shards])
    by_class = [(answers[rows][y == c] == c).mean() for c in range(4)]
    groups = shot_groups(tiny_task.counts, 20, 29)
    expected = {"all": np.mean(by_class)} | {
        group: np.mean([share for share, of in zip(by_class, groups, strict=True) if of == group])
        for group in set(groups)
    }
    assert 0.3 < expected["all"] < 1
    assert len(expected) > 2
    assert all(report.figures["teacher_accuracy"] == pytest.approx(expected) for report in reports)


def test_without_distillation_no_image_is_encoded_and_no_teacher_is_reported(tiny_task, tmp_path, npz):
    _, reports = run(tiny_task, tmp_path, FedSM(teacher=npz, kd=0, **QUICK))
    assert "teacher_accuracy" not in reports[-1].figures
    assert "shares" not in reports[-1].figures


@pytest.mark.slow
@pytest.mark.parametrize("finetune", [False, True])
def test_share_of_distillation_grows_with_its_weight(tiny_task, tmp_path, npz, finetune):
    seen = []
    for weight in (0.0, 0.2, 2.0) if finetune else (0.2, 2.0):
        fields = {"finetune": True, "squares": weight} if finetune else {"kd": weight}
        _, reports = run(tiny_task, tmp_path, FedSM(teacher=npz, **QUICK | fields))
        shares = reports[0].figures["shares"]
        assert sum(shares.values()) == pytest.approx(1)
        seen.append(shares["hint" if finetune else "distillation"])
    assert seen == sorted(set(seen))


def test_drift_by_hand():
    before = tensor([[0.0, 0.0], [2.0, 0.0], [5.0, 5.0]])
    after = tensor([[0.0, 1.0], [2.0, 3.0], [5.0, 5.0]])
    # the mean of class 0 moves from (1, 0) to (1, 2), that of class 1 stays: 1 on average; the prototypes are 5 apart
    assert drift(before, after, tensor([0, 0, 1]), tensor([[0.0, 0.0], [3.0, 4.0]])) == pytest.approx(1 / 5)
    assert drift(before, after, tensor([0, 0, 1]), tensor([[0.0, 0.0]])) == 0


def test_samples_that_move_in_opposite_directions_are_no_drift_of_their_class():
    before, after = tensor([[0.0], [2.0]]), tensor([[-1.0], [3.0]])
    assert drift(before, after, tensor([0, 0]), tensor([[0.0], [3.0]])) == 0


def test_drift_is_relative_to_the_mean_distance_of_two_prototypes():
    before, after = tensor([[0.0], [5.0]]), tensor([[1.0], [6.0]])
    assert drift(before, after, tensor([0, 1]), tensor([[0.0], [1.0], [3.0]])) == pytest.approx(1 / 2)  # of 1, 2, 3


def test_drift_is_that_of_local_training_on_the_first_batch(tiny_task, npz):
    method = FedSM(teacher=npz, **QUICK)
    client, twin = (open_client(tiny_task, method, state=states_of(tiny_task)) for _ in range(2))
    means = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    message = {
        "model": {n: v.clone() for n, v in client.model.entries().items()},
        "means": means,
        "present": tensor([True, True, False, True]),
    }
    before, y = (part[:8] for part in features(twin))
    sgd(twin, method.objective(twin, {}))
    after = features(twin)[0][:8]
    reported = method.train_and_retrain(client, message).tree["drift"]
    assert reported > 0.01
    assert reported == pytest.approx(drift(before, after, y, means[[0, 1, 3]]), rel=1e-4)


def test_rounds_report_drift_where_prototypes_are_those_of_another_encoder(tiny_task, tmp_path, npz):
    for fields, has_drift in [({}, True), ({"encoders": "trained"}, False), ({"retrain": "after"}, False)]:
        _, reports = run(tiny_task, tmp_path, FedSM(teacher=npz, **QUICK | fields))
        assert ("drift" in reports[-1].figures) == has_drift
        assert math.isfinite(reports[-1].figures["retrain_loss"])


def test_trained_model_waits_at_the_client_and_leaves_nothing_behind(tiny_task, tmp_path, npz):
    experiment, reports = run(
        tiny_task, tmp_path, FedSM(teacher=npz, encoders="trained", **QUICK), federation={"participation": 0.5}
    )
    assert set(reports[-1].traffic) == {"train_first", "retrain_next"}
    down = reports[-1].traffic["retrain_next"]["down"] / reports[-1].traffic["retrain_next"]["replies"]
    assert down == 4 * 64 * 4 + 4  # the means and a flag for each class, but no model
    ids = {id for name, _, id, _ in experiment.fleet._host.replies if name == "retrain_next"}
    assert ids == set(reports[-1].participants) < set(experiment.fleet.ids)
    assert all(state["state"].keys() == {"phrase"} for state in private_states(experiment).values())


def test_of_an_over_selected_round_only_those_that_trained_are_retrained(tiny_task, tmp_path, monkeypatch):
    federation = {"rounds": 1, "participation": 0.5, "over_select": 0.5}
    method = FedSM(teacher="none", encoders="trained", **QUICK)
    experiment = make_experiment(configure(federation=federation), tiny_task, tmp_path, method)
    ask, asked = experiment.fleet.ask, {}
    monkeypatch.setattr(
        experiment.fleet,
        "ask",
        lambda fn, ids, *args, **parts: asked.update({fn.__name__: [*ids]}) or ask(fn, ids, *args, **parts),
    )
    report = experiment.step()
    assert set(asked["retrain_next"]) == set(report.participants) < set(asked["train_first"])
    assert not report.lost


def test_model_that_waits_moves_with_its_client_to_another_process(tiny_task, tmp_path, npz):
    method = FedSM(teacher=npz, encoders="trained", **QUICK)
    straight = bits(run(tiny_task, tmp_path, method)[0])
    assert bits(run(tiny_task, tmp_path, method, host=NewHosts)[0]) == straight  # a new host for each call
    assert bits(run(tiny_task, tmp_path, method, host=FailsFirst)[0]) == straight
    assert bits(run(tiny_task, tmp_path, method, fleet=Backwards)[0]) == straight


def test_classifiers_for_the_averaged_encoder_do_not_depend_on_the_process_that_trains_them(tiny_task, tmp_path):
    method = FedSM(teacher="none", retrain="after", **QUICK)
    straight, moved = (
        bits(run(tiny_task, tmp_path, method, host=host, federation={"rounds": 1})[0]) for host in (Recorder, NewHosts)
    )
    assert straight == moved


def test_teacher_has_no_more_correct_predictions_than_images_of_any_class():
    assert teacher_counts_fault({"n": tensor([3, 0, 5]), "right": tensor([3, 0, 1])}) is None
    assert teacher_counts_fault({"n": tensor([3, 0, 5]), "right": tensor([2, 1, 1])})
