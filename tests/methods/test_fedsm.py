from dataclasses import asdict

import numpy as np
import pytest
import teachers
import tiny
import torch
import yaml
from killed import resume, run_and_kill
from test_contract import Backwards, FailsFirst, NewHosts, OwnHosts
from tiny import Recorder, configure, fingerprint, make_experiment, private_states
from torch.nn import functional as F

import raylt
from raylt.core import checkpoint
from raylt.core.checkpoint import hash_tensors
from raylt.core.client import Client
from raylt.core.features import features
from raylt.core.optimisers import SGD
from raylt.errors import ClientError, ConfigError, TooFewReplies
from raylt.methods import make_method
from raylt.methods.fedsm import teaching
from raylt.methods.fedsm.method import OFFICIAL, FedSM
from raylt.methods.fedsm.mixup import relevance
from raylt.models.clip import open_teacher
from raylt.runs.summary import summarise
from raylt.seeds import seed_for

QUICK = {"rounds": 1, "size": 5, "epochs": 2}


@pytest.fixture(scope="module")
def npz(tiny_task, tmp_path_factory) -> str:
    """A feature file for the tiny task."""
    return teachers.save_features(tmp_path_factory.mktemp("features") / "f.npz", tiny_task)


def run(task, folder, method, until=None, host=Recorder, fleet=None, **parts):
    more = {} if fleet is None else {"fleet": fleet}
    experiment = make_experiment(configure(**parts), task, folder, method, host=host, **more)
    reports = []
    while not experiment.done and len(reports) != until:
        reports.append(experiment.step())
    return experiment, reports


def bits(experiment) -> dict[str, str]:
    states = {f"client {id}": fingerprint(state) for id, state in private_states(experiment).items()}
    return states | {"server": fingerprint(experiment.server.state),
                     "model": fingerprint(experiment.server.model.state_dict())}


def open_client(task, method, id=0, state=None, **parts) -> Client:
    client = tiny.open_client(task, method, id, configure(**parts))
    client.state = state or {}
    return client


def states_of(task) -> dict[str, torch.Tensor]:
    return {"phrase": torch.from_numpy(teachers.feature_arrays(task)["text"])}


def message_of(client, present=(True, True, True, True)):
    d, mask = client.model.dim, torch.tensor(present)
    return {"means": torch.randn(len(mask), d, generator=torch.Generator().manual_seed(0)) * mask[:, None],
            "present": mask}


# local training, Eq. 1

def test_without_distillation_and_retraining_it_is_fedavg_bit_for_bit(tiny_task, tmp_path):           # T-FSM-1
    ours, reports = run(tiny_task, tmp_path, FedSM(kd=0, rounds=0))         # and no teacher is looked for
    plain, _ = run(tiny_task, tmp_path, make_method({"name": "fedavg"}))
    assert fingerprint(ours.server.model.state_dict()) == fingerprint(plain.server.model.state_dict())
    assert {name for report in reports for name in report.traffic} == {"join", "train"}


def test_distillation_changes_the_model_and_retraining_starts_in_the_last_rounds_only(tiny_task, tmp_path, npz):
    method = FedSM(teacher=npz, **QUICK)
    _, reports = run(tiny_task, tmp_path, method, federation={"rounds": 3})
    assert [set(report.traffic) for report in reports] == [{"join", "train"}, {"train"},
                                                           {"prototypes", "train_and_retrain"}]
    distilled, _ = run(tiny_task, tmp_path, FedSM(teacher=npz, rounds=0), until=2)
    mixed, _ = run(tiny_task, tmp_path, method, until=2, federation={"rounds": 3})
    assert fingerprint(distilled.server.model.state_dict()) == fingerprint(mixed.server.model.state_dict())
    plain, _ = run(tiny_task, tmp_path, FedSM(kd=0, rounds=0))
    assert fingerprint(distilled.server.model.state_dict()) != fingerprint(plain.server.model.state_dict())
    assert [len(report.figures) for report in reports] == [2, 2, 3]         # teacher, loss, retrain_loss


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
    assert method.objective(client, {})(batch).item() == pytest.approx(expected.item(), rel=2e-3)   # half precision


# pseudo-features, Eq. 4-6

@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_lambda_of_one_gives_prototypes_and_of_zero_local_features(tiny_task, npz, lam):              # T-FSM-5
    method = FedSM(teacher=npz, lam_low=lam, lam_high=lam, size=20)
    client = open_client(tiny_task, method, id=1, state=states_of(tiny_task))                # class 3 is missing
    message = message_of(client)
    r, y = method.pseudo_features(client, message)
    assert torch.bincount(y).tolist() == [20] * 4
    if lam == 1:
        assert torch.equal(r, message["means"][y])
    else:
        z, _ = features(client)
        assert (r[:, None] == z).all(2).any(1).all()


@pytest.mark.parametrize("partner", ["probabilistic", "deterministic", "random"])
@pytest.mark.parametrize("id", [0, 2, 3])                                               # 2 owns one class, 3 one sample
@pytest.mark.parametrize("unit", ["class", "sample"])
def test_every_class_with_a_prototype_gets_its_share_and_no_other(tiny_task, npz, unit, id, partner):  # T-FSM-8
    method = FedSM(teacher=npz, size=7, partner=partner, unit=unit)
    client = open_client(tiny_task, method, id=id, state=states_of(tiny_task))
    r, y = method.pseudo_features(client, message_of(client, (True, False, True, True)))
    assert r.shape == (21, 64)
    assert torch.bincount(y, minlength=4).tolist() == [7, 0, 7, 7]


def test_lambdas_are_uniform_in_their_range_and_one_for_each_pair(tiny_task, npz):
    method = FedSM(teacher=npz, size=500)
    client = open_client(tiny_task, method, id=3, state=states_of(tiny_task))                # one sample, so one z
    message = message_of(client)
    r, y = method.pseudo_features(client, message)
    z, means = features(client)[0], message["means"][y]
    lam = ((r - z) * (means - z)).sum(1) / (means - z).square().sum(1)
    assert lam.min() >= 0.65 - 1e-4
    assert lam.max() <= 0.9 + 1e-4
    # the mean of 2000 draws from U(0.65, 0.9): 0.775 with a standard error of 0.25 / sqrt(12 * 2000)
    assert abs(lam.mean().item() - 0.775) < 5 * 0.25 / (12 * 2000) ** 0.5
    assert len(lam.mul(1e6).round().unique()) > 1900


def test_without_a_teacher_relevance_is_uniform(tiny_task):
    kinds = [FedSM(teacher="none", partner=partner) for partner in ("probabilistic", "random")]
    first, second = (method.pseudo_features(c := open_client(tiny_task, method), message_of(c)) for method in kinds)
    assert torch.equal(first[0], second[0])


def test_class_that_nobody_holds_gets_no_pseudo_features_anywhere(tiny_task, tmp_path, npz):
    experiment = make_experiment(configure(), tiny_task, tmp_path, FedSM(teacher=npz, size=6))
    experiment.fleet.begin(1)
    experiment.fleet.ids = [2, 3]                       # they own class 1 and class 2
    message = experiment.method.global_prototypes(experiment.server, experiment.fleet)
    assert message["present"].tolist() == [False, True, True, False]
    client = open_client(tiny_task, experiment.method, state=states_of(tiny_task))
    _, y = experiment.method.pseudo_features(client, message)
    assert torch.bincount(y, minlength=4).tolist() == [0, 6, 6, 0]


def test_prototypes_are_those_of_the_global_encoder_over_all_clients(tiny_task, tmp_path, npz):       # T-FSM-4
    experiment, _ = run(tiny_task, tmp_path, FedSM(teacher=npz, **QUICK), until=1, federation={"participation": 0.3})
    model = experiment.server.model.eval()
    x = np.concatenate([shard.x for shard in tiny_task.shards])
    y = np.concatenate([shard.y for shard in tiny_task.shards])
    with torch.no_grad():
        z = model.encoder(torch.from_numpy(((x / 255 - 0.5) / 0.25).transpose(0, 3, 1, 2)).float()).numpy()
    experiment.step()
    means = next(m["means"] for m in experiment.fleet._host.messages if "means" in m)
    for c in range(4):
        assert np.allclose(means[c], z[y == c].mean(0), atol=1e-5)


# re-training, Eq. 7

def test_retraining_is_that_of_equation_7_and_touches_the_classifier_alone(tiny_task, npz):           # T-FSM-7
    method = FedSM(teacher=npz, size=9, epochs=3, batch=8)
    client, twin = (open_client(tiny_task, method, id=1, state=states_of(tiny_task)) for _ in range(2))
    message = message_of(client)
    before = hash_tensors(client.model.entries("encoder."))
    method.fit(client, client.model.classifier, message)
    assert hash_tensors(client.model.entries("encoder.")) == before
    r, y = method.pseudo_features(twin, message)
    head = torch.nn.Linear(64, 4)
    head.load_state_dict(twin.model.classifier.state_dict())
    order = torch.Generator().manual_seed(seed_for(0, "retrain", 1, 1))
    optimiser = SGD(head.parameters(), 0.01)
    for _ in range(3):
        for rows in torch.randperm(36, generator=order).split(8):
            optimiser.step(F.cross_entropy(head(r[rows]), y[rows]))
    assert torch.equal(head.weight, client.model.classifier.weight)
    assert not torch.equal(head.weight, twin.model.classifier.weight)


def test_retrained_classifiers_are_averaged_and_fed_back(tiny_task, tmp_path, npz):
    experiment, _ = run(tiny_task, tmp_path, FedSM(teacher=npz, **QUICK))
    replies = {id: reply for name, _, id, reply in experiment.fleet._host.replies if name == "train_and_retrain"}
    sizes = {id: len(tiny_task.shards[id]) for id in replies}
    mean = sum(n * replies[id]["model"]["classifier.weight"].double() for id, n in sizes.items()) / sum(sizes.values())
    assert torch.allclose(experiment.server.model.classifier.weight.double(), mean, atol=1e-6)
    assert experiment.method.deployed(experiment.server) is experiment.server.model


# the authors' schedule, B1-B13

def test_official_preset_takes_the_codes_choices_and_fields_beside_it_win():
    method = make_method({"name": "fedsm", "preset": "official", "epochs": 7})
    assert method.model_dump() == FedSM().model_dump() | OFFICIAL | {"preset": "official", "epochs": 7}


def test_official_classifiers_are_judged_and_never_fed_back(tiny_task, tmp_path):
    path = teachers.save_features(tmp_path / "f.npz", tiny_task,
                                  text_label=teachers.feature_arrays(tiny_task)["text"][::-1])
    method = FedSM(preset="official", teacher=path, rounds=1, size=5, epochs=2)
    experiment, reports = run(tiny_task, tmp_path, method)
    distilled, _ = run(tiny_task, tmp_path, FedSM(teacher=path, rounds=0))
    assert fingerprint(experiment.server.model.state_dict()) == fingerprint(distilled.server.model.state_dict())
    assert set(reports[-1].traffic) == {"train", "prototypes", "refit"}
    replies = {id: reply for name, _, id, reply in experiment.fleet._host.replies if name == "refit"}
    sizes = {id: len(tiny_task.shards[id]) for id in replies}
    mean = sum(n * replies[id]["classifier"]["weight"].double() for id, n in sizes.items()) / sum(sizes.values())
    deployed = experiment.method.deployed(experiment.server)
    assert torch.allclose(deployed.classifier.weight.double(), mean, atol=1e-6)
    assert not torch.allclose(deployed.classifier.weight, experiment.server.model.classifier.weight, atol=1e-3)
    judged = experiment.method.message(experiment.server)["model"]
    assert torch.equal(judged["classifier.weight"], deployed.classifier.weight)
    declared = method.traffic(experiment.server.model, tiny_task.client_counts[0].tolist())
    assert declared["refit"][1] == 4 * (64 * 4 + 4) + 8
    for name, measured in (reports[0].traffic | reports[1].traffic).items():
        assert measured["down"] == sum(method.traffic(experiment.server.model, tiny_task.client_counts[id].tolist())[
            name][0] for id in experiment.fleet.ids), name


def test_official_mixing_is_of_unit_features_with_unit_weighted_prototypes_and_texts_of_labels(tiny_task, tmp_path):
    path = teachers.save_features(tmp_path / "f.npz", tiny_task,
                                  text_label=teachers.feature_arrays(tiny_task)["text"][::-1])
    method = FedSM(preset="official", teacher=path, lam_low=0.0, lam_high=0.0, size=5)
    state = states_of(tiny_task) | {"label": torch.eye(4)}
    client = open_client(tiny_task, method, state=state)
    r, _ = method.pseudo_features(client, message_of(client))
    assert torch.allclose(r.norm(dim=1), torch.ones(20), atol=1e-5)
    assert torch.equal(relevance(method.text(client, "label"), "cosine"), relevance(torch.eye(4), "cosine"))


# the teacher at the clients

def test_features_are_encoded_once_per_client_and_are_no_part_of_a_checkpoint(tiny_task, tmp_path, npz, monkeypatch):
    opened = []
    monkeypatch.setattr(teaching, "open_teacher", lambda name: opened.append(name) or open_teacher(name))
    experiment, _ = run(tiny_task, tmp_path, FedSM(teacher=npz, **QUICK), federation={"rounds": 3})
    assert len(opened) == len(experiment.fleet.ids)
    caches = {id: client.cache for id, client in experiment.fleet._host.clients.items()}
    assert all(cache["teacher"].dtype == torch.float16 for cache in caches.values())
    assert all(cache["teacher"].shape == (len(tiny_task.shards[id]), 64) for id, cache in caches.items())
    assert all(state["state"].keys() == {"phrase"} for state in private_states(experiment).values())
    assert experiment.server.state.keys() == {"teacher"}


@pytest.mark.slow
@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("kind", ["npz", "clip"])
def test_bits_do_not_depend_on_where_and_how_often_features_are_encoded(tiny_task, tmp_path, npz, clip_folder, kind,
                                                                        finetune):
    name = npz if kind == "npz" else f"local-dir:{clip_folder}"
    method = FedSM(teacher=name, finetune=finetune, **QUICK)
    straight = bits(run(tiny_task, tmp_path, method)[0])
    # every model load takes time: all of these hosts for the file, the lost actors for both
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


def test_both_towers_of_an_open_clip_model_teach(tiny_task, tmp_path, clip_folder):
    method = FedSM(teacher=f"local-dir:{clip_folder}", **QUICK)
    method.prepare(tiny_task, configure())
    experiment, reports = run(tiny_task, tmp_path, method)
    joins = [m for m in experiment.fleet._host.messages if "phrase" in m]
    assert joins[0]["phrase"].shape == (4, 64)
    assert reports[-1].figures["teacher"] == f"local-dir:{clip_folder}"
    declared = [method.traffic(experiment.server.model, [1] * 4)["join"][0]] * len(experiment.fleet.ids)
    assert reports[0].traffic["join"]["down"] == sum(declared) == 5 * 4 * 4 * 64


def test_client_that_did_not_join_says_so(tiny_task, tmp_path, npz):
    experiment = make_experiment(configure(), tiny_task, tmp_path, FedSM(teacher=npz))
    experiment.fleet.begin(1)
    with pytest.raises(TooFewReplies, match=r"did not take part in FedSM\.join") as raised:
        experiment.fleet.call(experiment.method.train, experiment.fleet.ids, experiment.method.message(
            experiment.server))
    assert isinstance(raised.value.__cause__, ClientError)


def test_result_says_that_there_was_no_teacher(tiny_task, tmp_path):
    experiment, reports = run(tiny_task, tmp_path, FedSM(teacher="none", **QUICK))
    summary = summarise([asdict(report) for report in reports], "fedsm", "", experiment.conclude())
    assert summary["figures"]["teacher"] == "none: no distillation, uniform relevance"


# fine-tuning, Table IV

def test_fine_tuning_steps_are_those_of_margin_softmax_adamw_and_squared_errors(tiny_task, npz):
    method = FedSM(teacher=npz, finetune=True, teacher_lr=1e-3, mse=0.5)
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
        u = h[rows] @ matrix
        u = u / u.norm(dim=1, keepdim=True)
        z = client.model.encoder(batch.x)
        expected = F.cross_entropy(client.model(batch.x), batch.y) + 0.5 * (z - u).square().mean()
        assert objective(batch).item() == pytest.approx(expected.item(), rel=1e-5)
        logits = torch.stack([100 * text @ (u[i] - 0.3 * text[batch.y[i]]) for i in range(len(rows))])
        optimiser.zero_grad()
        F.cross_entropy(logits, batch.y).backward()
        optimiser.step()
    assert torch.allclose(client.state["projection"], matrix, atol=1e-5)
    assert not torch.allclose(client.state["projection"], torch.eye(64), atol=1e-4)


def test_trained_projection_stays_with_its_client_and_is_never_uploaded(tiny_task, tmp_path, npz):
    experiment, _ = run(tiny_task, tmp_path, FedSM(teacher=npz, finetune=True, teacher_lr=1e-3, **QUICK))
    matrices = [state["state"]["projection"] for state in private_states(experiment).values()]
    # client 3 has one sample, too few for a step
    assert sum(not torch.equal(m, torch.eye(64)) for m in matrices) == len(matrices) - 1
    assert len({hash_tensors({"m": m}) for m in matrices}) == len(matrices)
    replies = [reply for *_, reply in experiment.fleet._host.replies]
    assert all(reply.keys() <= {"model", "loss", "retrain_loss", "0", "1", "2", "3", "confusion"} for reply in replies)


# what is refused before anything starts

@pytest.mark.parametrize(("fields", "said"), [
    ({"lam_low": 0.9, "lam_high": 0.5}, "method.lam_low = 0.9, method.lam_high = 0.5: swap them"),
    ({"teacher": "none", "finetune": True}, "method.teacher = none: method.finetune=true needs a teacher"),
    ({"teacher": "none", "partner": "deterministic"}, "method.partner=deterministic needs a teacher"),
    ({"teacher": "npz:/nowhere/f.npz"}, "cannot be read .no such file."),
])
def test_settings_that_cannot_work_are_refused(tiny_task, fields, said):
    with pytest.raises(ConfigError, match=said):
        FedSM(**fields).prepare(tiny_task, configure())


def test_student_of_another_width_cannot_be_fine_tuned(tiny_task, npz):
    config = configure().model_copy(update={"model": "resnet8_proj"})
    FedSM(teacher=npz).prepare(tiny_task, config)
    with pytest.raises(ConfigError, match="its features have d = 512"):
        FedSM(teacher=npz, finetune=True).prepare(tiny_task, config)


def test_missing_teacher_ends_a_run_before_it_begins_and_leaves_no_folder(tmp_path):
    config = configure(method={"name": "fedsm", "teacher": "npz:/nowhere/f.npz"})
    with pytest.raises(ConfigError, match="no such file"):
        raylt.run(config, out=tmp_path, name="r", quiet=True)
    assert list(tmp_path.iterdir()) == []


# killed

@pytest.mark.slow
def test_killed_during_a_retraining_round_and_resumed_it_ends_with_the_same_model(tmp_path, clip_folder):
    settings = ["method=fedsm", f"method.teacher=local-dir:{clip_folder}", "federation.rounds=3", "local.epochs=1",
                "data.clients=4", "method.rounds=2", "method.epochs=100"]
    run_and_kill(tmp_path, settings, 0.5)               # local training takes milliseconds, re-training seconds
    saved, _ = checkpoint.latest(tmp_path / "killed" / "checkpoints")
    assert saved is not None
    assert saved.read("client-000")["state"].keys() == {"phrase"}      # text features, and none of images
    straight, killed = resume(tmp_path)
    assert straight["model_sha256"] == killed["model_sha256"]
    assert straight["accuracy"] == killed["accuracy"]
    assert straight["figures"] == killed["figures"]
    assert yaml.safe_load((tmp_path / "killed" / "config.yaml").read_text())["method"]["teacher"].endswith(
        str(clip_folder))
