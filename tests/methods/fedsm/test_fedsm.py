import numpy as np
import pytest
import teachers
import torch
import yaml
from fedsm_runs import QUICK, message_of, open_client, prepare, run, states_of
from killed import resume, run_and_kill
from refusals import refused
from tiny import configure, fingerprint
from torch.nn import functional as F

import raylt
from raylt import tree
from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.client_states import SavedStates
from raylt.core.evaluation.client_models import judged_entries
from raylt.errors import ConfigError
from raylt.methods import make_method
from raylt.methods.fedsm.method import OFFICIAL, FedSM
from raylt.methods.fedsm.mixup import relevance

# local training, Eq. 1


def test_without_distillation_and_retraining_it_is_fedavg_bit_for_bit(tiny_task, tmp_path):  # T-FSM-1
    ours, reports = run(tiny_task, tmp_path, FedSM(kd=0, retrain_rounds=0))  # no teacher is loaded
    plain, _ = run(tiny_task, tmp_path, make_method({"name": "fedavg"}))
    assert fingerprint(ours.server.model.state_dict()) == fingerprint(plain.server.model.state_dict())
    assert {name for report in reports for name in report.traffic} == {"join", "train"}


@pytest.mark.slow
def test_distillation_changes_the_model_and_retraining_starts_in_the_last_rounds_only(tiny_task, tmp_path, npz):
    method = FedSM(teacher=npz, **QUICK)
    _, reports = run(tiny_task, tmp_path, method, federation={"rounds": 3})
    assert [set(report.traffic) for report in reports] == [
        {"join", "train"},
        {"train"},
        {"prototypes", "train_and_retrain"},
    ]
    distilled, _ = run(tiny_task, tmp_path, FedSM(teacher=npz, retrain_rounds=0), until=2)
    mixed, _ = run(tiny_task, tmp_path, method, until=2, federation={"rounds": 3})
    assert fingerprint(distilled.server.model.state_dict()) == fingerprint(mixed.server.model.state_dict())
    plain, _ = run(tiny_task, tmp_path, FedSM(kd=0, retrain_rounds=0))
    assert fingerprint(distilled.server.model.state_dict()) != fingerprint(plain.server.model.state_dict())
    always = {"teacher", "relevance", "teacher_accuracy", "loss", "shares"}
    assert [set(report.figures) for report in reports] == [always, always, always | {"drift", "retrain_loss"}]


def test_loss_is_that_of_equation_1_written_out(tiny_task, npz):
    method = FedSM(teacher=npz, kd=0.7, temperature=2.0, scale=50.0)
    client = open_client(tiny_task, method, state=states_of(tiny_task))
    arrays = teachers.feature_arrays(tiny_task)
    rows = torch.tensor([3, 0, 7])
    batch = client.samples.batch(rows)
    logits = client.model.eval()(batch.x).double()
    e = arrays["image"][tiny_task.split.clients[0]][rows].astype(np.float64)
    e /= np.linalg.norm(e, axis=1, keepdims=True)
    q = torch.from_numpy(50 * e @ arrays["text"].T.astype(np.float64)).div(2).softmax(1)
    p = (logits / 2).softmax(1)
    expected = F.cross_entropy(logits, batch.y) + 0.7 * 4 * (q * (q / p).log()).sum(1).mean()
    assert method.objective(client, {})(batch).item() == pytest.approx(expected.item(), rel=2e-3)  # half precision


def test_runs_shorter_than_the_rounds_with_retraining_retrain_from_the_first_round():
    assert FedSM(teacher="none", retrain_rounds=50).stages(20)["retraining"] == 0
    assert FedSM(teacher="none", retrain_rounds=5).stages(20)["retraining"] == 15


# the authors' schedule, B1-B13


def test_official_preset_takes_the_codes_choices_and_fields_beside_it_win():
    method = make_method({"name": "fedsm", "preset": "official", "retrain_epochs": 7})
    assert method.model_dump() == FedSM().model_dump() | OFFICIAL | {"preset": "official", "retrain_epochs": 7}


def test_official_classifiers_are_judged_and_never_fed_back(tiny_task, tmp_path):
    path = teachers.save_features(
        tmp_path / "f.npz", tiny_task, text_label=teachers.feature_arrays(tiny_task)["text"][::-1]
    )
    method = FedSM(preset="official", teacher=path, retrain_rounds=1, size=5, retrain_epochs=2)
    experiment, reports = run(tiny_task, tmp_path, method)
    distilled, _ = run(tiny_task, tmp_path, FedSM(teacher=path, retrain_rounds=0))
    assert fingerprint(experiment.server.model.state_dict()) == fingerprint(distilled.server.model.state_dict())
    assert set(reports[-1].traffic) == {"train", "prototypes", "refit"}
    replies = {id: reply for name, _, id, reply in experiment.fleet._host.replies if name == "refit"}
    sizes = {id: len(tiny_task.shards[id]) for id in replies}
    mean = sum(n * replies[id]["classifier"]["weight"].double() for id, n in sizes.items()) / sum(sizes.values())
    deployed = experiment.method.global_model(experiment.server)
    assert torch.allclose(deployed.classifier.weight.double(), mean, atol=1e-6)
    assert not torch.allclose(deployed.classifier.weight, experiment.server.model.classifier.weight, atol=1e-3)
    judged = judged_entries(experiment.server, method)
    assert torch.equal(judged["classifier.weight"], deployed.classifier.weight)
    clients, encoder = len(experiment.fleet.ids), tree.nbytes(experiment.server.model.entries("encoder."))
    assert reports[-1].traffic["refit"] == {
        "down": clients * (encoder + 4 * 64 * 4 + 4),
        "up": clients * (4 * (64 * 4 + 4) + 8),
        "replies": clients,
    }
    owned = int((tiny_task.client_counts > 0).sum())  # the prototype message has a count and a mean of each owned class
    assert reports[-1].traffic["prototypes"] == {
        "down": clients * encoder,
        "up": owned * (8 + 64 * 4),
        "replies": clients,
    }


def test_official_mixing_is_of_unit_features_with_unit_weighted_prototypes_and_texts_of_labels(tiny_task, tmp_path):
    path = teachers.save_features(
        tmp_path / "f.npz", tiny_task, text_label=teachers.feature_arrays(tiny_task)["text"][::-1]
    )
    method = FedSM(preset="official", teacher=path, lam_low=0.0, lam_high=0.0, size=5)
    state = states_of(tiny_task) | {"label": torch.eye(4)}
    client = open_client(tiny_task, method, state=state)
    r, _ = method.pseudo_features(client, message_of(client))
    assert torch.allclose(r.norm(dim=1), torch.ones(20), atol=1e-5)
    assert torch.equal(relevance(client.state["label"], "cosine"), relevance(torch.eye(4), "cosine"))


# refusals before the start


@pytest.mark.parametrize(
    ("fields", "code", "key"),
    [
        ({"lam_low": 0.9, "lam_high": 0.5}, "config.out-of-range", "method.lam_low"),
        ({"teacher": "none", "finetune": True}, "config.conflict", "method.teacher"),
        ({"teacher": "none", "partner": "deterministic"}, "config.conflict", "method.teacher"),
        ({"teacher": "none", "partner": "inverted"}, "config.conflict", "method.teacher"),
        ({"teacher": "none", "partner": "ranked"}, "config.conflict", "method.teacher"),
        ({"teacher": "none", "encoders": "trained", "retrain": "after"}, "config.conflict", "method.encoders"),
    ],
)
def test_settings_that_cannot_work_are_refused(tiny_task, fields, code, key):
    with refused(code, ConfigError, key=key):
        prepare(FedSM(**fields), tiny_task)


def test_settings_at_the_edge_of_what_works_are_taken(tiny_task):
    prepare(FedSM(teacher="none", lam_low=0.8, lam_high=0.8), tiny_task)  # Table V
    prepare(FedSM(teacher="none", partner="ranked", retrain_rounds=0), tiny_task)  # no partner is ever drawn


def test_teacher_that_cannot_be_read_is_refused(tiny_task):
    with pytest.raises(ConfigError, match=r"/nowhere/f\.npz"):
        prepare(FedSM(teacher="npz:/nowhere/f.npz"), tiny_task)


def test_missing_teacher_ends_a_run_before_it_begins_and_leaves_no_folder(tmp_path):
    config = configure(method={"name": "fedsm", "teacher": "npz:/nowhere/f.npz"})
    with pytest.raises(ConfigError, match=r"/nowhere/f\.npz"):
        raylt.run(config, out=tmp_path, name="r", quiet=True)
    assert list(tmp_path.iterdir()) == []


# killed and resumed


@pytest.mark.slow
def test_killed_during_a_retraining_round_and_resumed_it_ends_with_the_same_model(tmp_path, clip_folder):
    settings = [
        "method=fedsm",
        f"method.teacher=local-dir:{clip_folder}",
        "federation.rounds=3",
        "local.epochs=1",
        "data.clients=4",
        "method.retrain_rounds=2",
        "method.retrain_epochs=5",
    ]
    # the sixth call: the second client of the second round with re-training
    run_and_kill(tmp_path, settings, "raylt.methods.fedsm.method", "fit_classifier", 6)
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 2
    saved, _ = checkpoint.latest(tmp_path / "killed" / "checkpoints")
    assert saved is not None
    # the features of texts are saved, those of images are not
    assert SavedStates(saved).read(0)["state"].keys() == {"phrase"}
    straight, killed = resume(tmp_path)
    assert straight["model_sha256"] == killed["model_sha256"]
    assert straight["accuracy"] == killed["accuracy"]
    assert straight["figures"] == killed["figures"]
    assert yaml.safe_load((tmp_path / "killed" / "config.yaml").read_text())["method"]["teacher"].endswith(
        str(clip_folder)
    )
