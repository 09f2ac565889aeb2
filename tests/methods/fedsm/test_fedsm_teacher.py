import pytest
import teachers
import torch
from fedsm_runs import QUICK, bits, open_client, prepare, run, states_of
from refusals import refused
from tiny import configure, make_experiment, private_states
from torch.nn import functional as F

from raylt.contract.hosts import Backwards, FailsFirst, NewHosts, OwnHosts
from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.training import features as feature_module
from raylt.core.training.features import features
from raylt.core.training.sgd import sgd
from raylt.errors import ConfigError
from raylt.methods.fedsm.losses import Projection
from raylt.methods.fedsm.method import FedSM
from raylt.methods.fedsm.tower import ImageTower
from raylt.models.clip import open_teacher
from raylt.runs.folder.summary import summarise

ENCODER = {"finetune": True, "teacher_trains": "encoder"}


def cached(client):
    """Return the teacher's features that a client keeps."""
    [features] = [value for key, value in client.cache.items() if key.startswith("teacher ")]
    return features


# the teacher at the clients


def test_features_are_encoded_once_per_client_and_are_no_part_of_a_checkpoint(tiny_task, tmp_path, npz, monkeypatch):
    opened = []
    monkeypatch.setattr(feature_module, "open_teacher", lambda name: opened.append(name) or open_teacher(name))
    experiment, _ = run(tiny_task, tmp_path, FedSM(teacher=npz, **QUICK), federation={"rounds": 3})
    assert len(opened) == len(experiment.fleet.ids)
    kept = {id: cached(client) for id, client in experiment.fleet._host.clients.items()}
    assert all(features.dtype == torch.float16 for features in kept.values())
    assert all(features.shape == (len(tiny_task.shards[id]), 64) for id, features in kept.items())
    assert all(state["state"].keys() == {"phrase"} for state in private_states(experiment).values())
    assert experiment.server.state.keys() == {"teacher", "text", "teacher_accuracy"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("npz", {}),
        ("npz", {"finetune": True}),
        ("clip", {}),
        ("clip", {"finetune": True}),
        ("clip", ENCODER),
    ],
)
def test_bits_do_not_depend_on_where_and_how_often_features_are_encoded(
    tiny_task, tmp_path, npz, clip_folder, kind, fields
):
    name = npz if kind == "npz" else f"local-dir:{clip_folder}"
    method = FedSM(teacher=name, **fields, **QUICK)
    straight = bits(run(tiny_task, tmp_path, method)[0])
    # loading a model takes time, so the clip teacher is tested with new hosts only
    for host in [NewHosts] if kind == "clip" else [OwnHosts, NewHosts, FailsFirst]:
        assert bits(run(tiny_task, tmp_path, method, host=host)[0]) == straight
    assert bits(run(tiny_task, tmp_path, method, fleet=Backwards)[0]) == straight
    experiment, (report,) = run(tiny_task, tmp_path / kind, method, until=1)
    experiment.save(report)
    resumed = make_experiment(configure(), tiny_task, tmp_path / kind, method)
    saved, _ = checkpoint.latest(tmp_path / kind / "checkpoints")
    assert saved is not None
    resumed.load(saved)
    resumed.step()
    assert bits(resumed) == straight


@pytest.mark.slow
def test_both_towers_of_an_open_clip_model_teach(tiny_task, tmp_path, clip_folder):
    method = FedSM(teacher=f"local-dir:{clip_folder}", **QUICK)
    prepare(method, tiny_task)
    experiment, reports = run(tiny_task, tmp_path, method)
    joins = [m for m in experiment.fleet._host.messages if "phrase" in m]
    assert joins[0]["phrase"].shape == (4, 64)
    assert reports[-1].figures["teacher"] == f"local-dir:{clip_folder}"
    assert reports[0].traffic["join"]["down"] == 5 * 4 * 4 * 64


def test_result_says_that_there_was_no_teacher(tiny_task, tmp_path):
    experiment, reports = run(tiny_task, tmp_path, FedSM(teacher="none", **QUICK))
    summary = summarise([report.record() for report in reports], "fedsm", "", None, experiment.export_model())
    assert summary["figures"]["teacher"] == "none: no distillation, uniform relevance"


# fine-tuning, Table IV


@pytest.mark.parametrize("target", ["unit", "raw"])
def test_fine_tuning_steps_are_those_of_margin_softmax_adamw_and_squared_errors(tiny_task, npz, target):
    fields = {"teacher_lr": 1e-3, "squares": 0.7, "margin": 0.1, "scale": 50.0, "target": target}
    method = FedSM(teacher=npz, finetune=True, **fields)
    client = open_client(tiny_task, method, state=states_of(tiny_task))
    objective = method.objective(client, {})
    arrays = teachers.feature_arrays(tiny_task)
    h = torch.from_numpy(arrays["image"][tiny_task.split.clients[0]]).float()
    text = torch.from_numpy(arrays["text"])
    matrix = torch.eye(64, requires_grad=True)
    optimiser = torch.optim.AdamW([matrix], 1e-3, weight_decay=0.1)
    client.model.eval()
    for rows in torch.arange(24).split(8):
        batch = client.samples.batch(rows)
        raw = h[rows] @ matrix
        u = raw / raw.norm(dim=1, keepdim=True)
        z = client.model.encoder(batch.x)
        away = z - (u if target == "unit" else raw)
        expected = F.cross_entropy(client.model(batch.x), batch.y) + 0.7 * sum(a @ a / 2 for a in away) / len(away)
        assert objective(batch).item() == pytest.approx(expected.item(), rel=1e-5)
        logits = torch.stack([50 * text @ (u[i] - 0.1 * text[batch.y[i]]) for i in range(len(rows))])
        optimiser.zero_grad()
        F.cross_entropy(logits, batch.y).backward()
        optimiser.step()
    assert torch.allclose(client.state["projection"], matrix, atol=1e-5)
    assert not torch.allclose(client.state["projection"], torch.eye(64), atol=1e-4)


@pytest.mark.parametrize("target", ["unit", "raw"])
def test_fine_tuning_of_the_encoder_trains_the_whole_image_tower(tiny_task, clip_folder, target):
    name = f"local-dir:{clip_folder}"
    fields = {"teacher_lr": 1e-3, "squares": 0.7, "margin": 0.1, "scale": 50.0, "target": target}
    method = FedSM(teacher=name, **fields, **ENCODER)
    client = open_client(tiny_task, method, state=states_of(tiny_task))
    objective = method.objective(client, {})
    teacher = open_teacher(name)
    encoder = teacher.load().visual.requires_grad_()
    text = states_of(tiny_task)["phrase"]
    optimiser = torch.optim.AdamW(encoder.parameters(), 1e-3, weight_decay=0.1)
    client.model.eval()
    for rows in torch.arange(24).split(8):
        batch = client.samples.batch(rows)
        raw = encoder(teacher.preprocessed(client.samples.x[rows]))
        u = raw / raw.norm(dim=1, keepdim=True)
        away = client.model.encoder(batch.x) - (u if target == "unit" else raw)
        expected = F.cross_entropy(client.model(batch.x), batch.y) + 0.7 * sum(a @ a / 2 for a in away) / len(away)
        assert objective(batch).item() == pytest.approx(expected.item(), rel=1e-5)
        logits = 50 * (u - 0.1 * text[batch.y]) @ text.T
        optimiser.zero_grad()
        F.cross_entropy(logits, batch.y).backward()
        optimiser.step()
    start = dict(teacher.load().visual.named_parameters())
    trained = client.state["tower"]
    assert trained.keys() == start.keys()
    for entry, value in encoder.named_parameters():
        assert torch.allclose(trained[entry], value, atol=1e-5), entry
    assert not torch.equal(trained["conv1.weight"], start["conv1.weight"])
    assert not torch.equal(trained["proj"], start["proj"])


def test_a_file_of_features_teaches_where_nothing_is_fine_tuned(tiny_task, npz):
    prepare(FedSM(teacher=npz, teacher_trains="encoder"), tiny_task)
    with refused("model.teacher-mismatch", ConfigError, key="method.teacher", value=npz):
        prepare(FedSM(teacher=npz, **ENCODER), tiny_task)


def test_client_continues_with_the_encoder_that_it_has_trained(tiny_task, clip_folder):
    name = f"local-dir:{clip_folder}"
    client = open_client(tiny_task, FedSM(teacher=name, **ENCODER), state=states_of(tiny_task))
    rows = torch.arange(8)
    first = ImageTower(client, name, 1e-2, unit=False)
    before = first.step(rows, client.samples.y[rows], states_of(tiny_task)["phrase"], 0.3, 100.0)
    with torch.no_grad():
        after = first.features(rows)
        again = ImageTower(client, name, 1e-2, unit=False).features(rows)
    assert torch.equal(again, after)
    assert not torch.allclose(before, after, atol=1e-3)
    other = open_client(tiny_task, FedSM(teacher=name, **ENCODER), state=states_of(tiny_task))
    with torch.no_grad():  # the towers of clients are their own
        untrained = ImageTower(other, name, 1e-2, unit=False).features(rows)
    assert torch.allclose(untrained, before, atol=1e-5)


def test_client_continues_with_the_projection_that_it_has_trained(tiny_task, npz):
    client, other = (open_client(tiny_task, FedSM(teacher=npz, finetune=True)) for _ in range(2))
    h = torch.from_numpy(teachers.feature_arrays(tiny_task)["image"][:8]).float()
    Projection(client, npz, 1e-2, unit=False).step(h, client.samples.y[:8], states_of(tiny_task)["phrase"], 0.3, 100.0)
    again, untrained = (Projection(each, npz, 1e-2, unit=False).matrix for each in (client, other))
    assert torch.equal(again, client.state["projection"])
    assert not torch.allclose(again, untrained, atol=1e-3)
    assert torch.equal(untrained, torch.eye(64))  # each client has its own


@pytest.mark.parametrize("part", ["projection", "encoder"])
def test_teacher_is_trained_in_float32_under_autocast(tiny_task, npz, clip_folder, part):
    rows, text = torch.arange(8), states_of(tiny_task)["phrase"]

    def trained(precision):
        client = open_client(tiny_task, FedSM(teacher=npz, finetune=True))
        y = client.samples.y[rows]
        with torch.autocast("cpu", precision, enabled=precision is not None):
            if part == "encoder":
                tower = ImageTower(client, f"local-dir:{clip_folder}", 1e-2, unit=False)
                return tower.step(rows, y, text, 0.3, 100.0), client.state["tower"]["proj"]
            h = torch.from_numpy(teachers.feature_arrays(tiny_task)["image"][:8]).float() + 1e-3
            u = Projection(client, npz, 1e-2, unit=False).step(h, y, text, 0.3, 100.0)
            return u, client.state["projection"]

    for ours, expected in zip(trained(torch.bfloat16), trained(None), strict=True):
        assert torch.equal(ours, expected)


def test_cosine_is_to_the_encoder_as_the_client_has_trained_it(tiny_task, clip_folder):
    name = f"local-dir:{clip_folder}"
    method = FedSM(teacher=name, teacher_lr=1e-2, **ENCODER)
    client = open_client(tiny_task, method, state=states_of(tiny_task))
    parts = method.learn(client, {})
    rows = torch.arange(8)
    with torch.no_grad():
        z = client.model.eval().encoder(client.samples.batch(rows).x)
        trained = ImageTower(client, name, 1e-2, unit=False).features(rows)
        untrained = open_teacher(name).image_encoder(client.device)(
            open_teacher(name).preprocessed(client.samples.x[rows])
        )
    cosine = F.cosine_similarity(z, trained, dim=1).mean().item()
    assert parts["cosine"] == pytest.approx(cosine, abs=1e-5)
    assert cosine != pytest.approx(F.cosine_similarity(z, untrained, dim=1).mean().item(), abs=1e-3)


def test_teacher_that_is_fine_tuned_answers_through_its_projection(tiny_task, clip_folder):
    fields = {"teacher": f"local-dir:{clip_folder}"}
    counts = []
    for method in (FedSM(**fields), FedSM(**fields, finetune=True)):
        client = open_client(tiny_task, method)
        counts.append(method.join(client, states_of(tiny_task)).tree["teacher"])
    plain, tuned = counts
    assert torch.equal(plain["n"], tuned["n"])
    assert torch.equal(plain["right"], tuned["right"])
    assert 0 < plain["right"].sum() < plain["n"].sum()


def test_run_with_encoders_that_clients_train_has_their_cosine_and_their_accuracy(tiny_task, tmp_path, clip_folder):
    method = FedSM(teacher=f"local-dir:{clip_folder}", **ENCODER, **QUICK)
    experiment, reports = run(tiny_task, tmp_path, method, until=1)
    assert any("tower" in state["state"] for state in private_states(experiment).values())
    assert -1 <= reports[0].figures["cosine"] <= 1
    assert "all" in reports[0].figures["teacher_accuracy"]


def test_file_of_features_has_no_encoder_to_train(tiny_task, npz):
    with refused("model.teacher-mismatch", ConfigError, value=npz):
        prepare(FedSM(teacher=npz, **ENCODER), tiny_task)


def test_student_that_is_fine_tuned_comes_to_point_where_its_teacher_does(tiny_task, npz):
    near = {}
    for squares in (0.0, 1.0):
        method = FedSM(teacher=npz, finetune=True, squares=squares)
        client = open_client(tiny_task, method, state=states_of(tiny_task), local={"epochs": 30, "batch": 8})
        sgd(client, method.objective(client, {}))
        u = cached(client).float() @ client.state["projection"]
        near[squares] = F.cosine_similarity(features(client)[0], u, dim=1).mean().item()
    assert near[1.0] > near[0.0] + 0.2
    assert near[1.0] > 0.4


@pytest.mark.slow
def test_cosine_of_students_to_their_teachers_rises_from_round_to_round(tiny_task, tmp_path, npz):
    cosines = {}
    for squares in (0.0, 1.0):
        method = FedSM(teacher=npz, finetune=True, squares=squares, **QUICK)
        _, reports = run(tiny_task, tmp_path, method, federation={"rounds": 5}, local={"epochs": 4})
        cosines[squares] = [report.figures["cosine"] for report in reports]
    assert cosines[1.0] == sorted(cosines[1.0])
    assert cosines[1.0][-1] > cosines[1.0][0] + 0.1
    assert cosines[1.0][-1] > cosines[0.0][-1] + 0.2
    _, reports = run(tiny_task, tmp_path, FedSM(teacher=npz, **QUICK))
    assert "cosine" not in reports[-1].figures


def test_cosine_is_that_of_the_first_batch_after_training(tiny_task, npz):
    method = FedSM(teacher=npz, finetune=True, teacher_lr=1e-2)
    client = open_client(tiny_task, method, state=states_of(tiny_task))
    parts = method.learn(client, {})
    u = cached(client).float() @ client.state["projection"]
    expected = [F.cosine_similarity(a, b, dim=0).item() for a, b in zip(features(client)[0][:8], u[:8], strict=True)]
    assert parts["cosine"] == pytest.approx(sum(expected) / 8, abs=1e-5)


def test_trained_projection_stays_with_its_client_and_is_never_uploaded(tiny_task, tmp_path, npz):
    experiment, _ = run(tiny_task, tmp_path, FedSM(teacher=npz, finetune=True, teacher_lr=1e-3, **QUICK))
    states = {id: state["state"] for id, state in private_states(experiment).items()}
    assert "projection" not in states.pop(3)  # client 3 has one sample, too few for a step
    matrices = [state["projection"] for state in states.values()]
    assert not any(torch.equal(m, torch.eye(64)) for m in matrices)
    assert len({hash_tensors({"m": m}) for m in matrices}) == len(matrices)
    replies = [reply for *_, reply in experiment.fleet._host.replies]
    assert all(
        reply.keys()
        <= {"model", "loss", "retrain_loss", "classes", "confusion", "teacher", "shares", "cosine", "drift"}
        for reply in replies
    )


def test_student_of_another_width_cannot_be_fine_tuned(tiny_task, npz):
    config = configure().model_copy(update={"model": "resnet8_proj"})
    prepare(FedSM(teacher=npz), tiny_task, config)
    with pytest.raises(ConfigError, match="512"):
        prepare(FedSM(teacher=npz, finetune=True), tiny_task, config)
