import math
from pathlib import Path

import numpy as np
import pytest
import torch
from killed import resume, run_and_kill
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config, load
from raylt.core.experiment import Experiment
from raylt.core.features import features
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.data.task import Task, build_task
from raylt.errors import ConfigError
from raylt.methods import METHODS, make_method
from raylt.methods.sfd.losses import adaptive_supcon
from raylt.methods.sfd.method import OFFICIAL, SFD, encoder
from raylt.ops.moments import moments

CPU = torch.device("cpu")
QUICK = {"name": "sfd", "rf_dim": 60, "m_min": 80, "m_max": 120, "synthesis_steps": 4, "epochs": 3}


def configure(data=None, **fields) -> Config:
    # alpha 0.1: most clients lack some classes
    return Config(data={"clients": 4, "alpha": 0.1} | (data or {}), method=QUICK | fields, federation={"rounds": 2},
                  local={"epochs": 1})


@pytest.fixture(scope="module")
def task() -> Task:
    return build_task(configure().data)


def open_experiment(config: Config, task: Task, folder: Path, host=Host) -> Experiment:
    method = make_method(config.method)
    fleet = LocalFleet(config, task, host(config, method, task.facts, task.test, CPU))
    return Experiment(config, method, task, fleet, CPU, folder)


def finish(experiment: Experiment) -> list:
    reports = []
    while not experiment.done:
        reports.append(experiment.step())
    return reports


@pytest.fixture(scope="module")
def finished(task, tmp_path_factory) -> tuple[Experiment, list]:
    experiment = open_experiment(configure(), task, tmp_path_factory.mktemp("sfd"))
    return experiment, finish(experiment)


class Keeper(Host):
    """Keeps each client object, with the message of its last call."""

    def run(self, fn, message, *rest):
        self.message = message
        return super().run(fn, message, *rest)


@pytest.fixture
def client(task, tmp_path):
    """A client that lacks classes, in the middle of a round, and the message it got."""
    def open_client(**fields):
        experiment = open_experiment(configure(**fields), task, tmp_path, Keeper)
        experiment.step()
        host = experiment.fleet._host
        mine = next(c for c in host.clients.values() if 1 < (c.counts > 0).sum() < 10 and len(c) > 40)
        mine.begin("train", 2)
        return experiment, mine, host.message
    return open_client


def test_model_has_no_bias_and_a_projector_that_is_not_deployed(finished, task):
    experiment, _ = finished
    model, deployed = experiment.server.model, experiment.method.deployed(experiment.server)
    assert "classifier.bias" not in model.state_dict()
    assert model.get_submodule("projector")(torch.randn(3, 64)).shape == (3, 128)
    assert {name.partition(".")[0] for name in deployed.state_dict()} == {"encoder", "classifier"}
    assert deployed(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_projector_of_the_paper_has_164736_parameters():
    from raylt.models import build_model
    model = SFD().build(None, build_model("resnet18", 10, (32, 32, 3)))
    parameters = sum(p.numel() for p in model.get_submodule("projector").parameters())
    assert parameters == 164_736
    assert sum(p.numel() for p in model.parameters()) == 11_168_832 + 512 * 10 + parameters


def test_objective_is_equation_8(client):
    _, mine, message = client(gamma=1.0, beta1=0.5)
    batch = next(mine.batches(1, 16))
    mine.model.train()
    # the first round's message: r = 0, beta = beta1
    assert message["beta"] == 0.5
    loss = SFD(gamma=1.0, beta1=0.5).objective(mine, message)(batch)
    mine.model.train()
    z = mine.model.encoder(batch.x)
    prior = torch.where(mine.counts > 0, mine.counts, mine.counts[mine.counts > 0].min())
    h = F.normalize(mine.model.get_submodule("projector")(z), dim=1)
    expected = (F.cross_entropy(mine.model.classifier(z) + prior.log(), batch.y)
                + 0.5 * adaptive_supcon(h, batch.y, mine.counts.log(), 0.07))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("fields", "shifted"), [
    ({"abbl": "ce"}, False), ({"abbl": "la"}, True), ({"beta1": 0.0, "beta_pi": 0.0}, True),
    ({"beta1": 0.0, "gamma": 0.0}, False)])
def test_ablations_of_the_local_loss(client, fields, shifted):
    _, mine, message = client(**fields)
    batch = next(mine.batches(1, 16))
    loss = SFD(**fields).objective(mine, message)(batch)
    logits = mine.model(batch.x)
    expected = F.cross_entropy(logits + 0.1 * mine.counts.log() if shifted else logits, batch.y)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_weight_of_the_contrastive_loss_falls_along_a_cosine(finished):
    experiment, _ = finished
    server, betas = experiment.server, []
    before = server.round
    for server.round in (1, 2):
        betas.append(experiment.method.message(server)["beta"])
    server.round = before
    assert betas == pytest.approx([0.1, 0.05])          # R = 2: 0.1 (1 + cos 0) / 2 and 0.1 (1 + cos(pi/2)) / 2


def test_summed_statistics_are_those_of_all_features_pooled(finished, task):          # T-SFD-7, at the fleet
    experiment, _ = finished
    method, server, fleet = experiment.method, experiment.server, experiment.fleet
    fleet.begin(9)
    sums = fleet.sum(method.statistics, fleet.ids, {"model": tree.snapshot(encoder(server.model)), "seed": 5})
    model = server.model.eval()
    images = np.concatenate([shard.x for shard in task.shards])
    labels = np.concatenate([shard.y for shard in task.shards])
    mean, std = np.array(task.mean), np.array(task.std)
    x = torch.from_numpy(((images / 255 - mean) / std).transpose(0, 3, 1, 2)).float()
    with torch.no_grad():
        z = model.encoder(x).double().numpy()
    omega = method.frequencies(64, 5).double().numpy()
    for c in range(10):
        own = z[labels == c]
        n, mu, cov = moments(sums[str(c)])
        assert n == len(own) == task.counts[c]
        assert np.allclose(mu, own.mean(0), atol=1e-5)
        assert np.allclose(cov, np.cov(own.T, bias=True), atol=1e-4)
        waves = own @ omega.T
        phi = np.concatenate([np.cos(waves), np.sin(waves)], 1).mean(0) * math.sqrt(2 / 60)
        assert np.allclose(sums[str(c)]["phi"] / n, phi, atol=1e-5)


def test_statistics_hold_the_clients_own_classes_only_and_traffic_counts_them(finished, task):
    experiment, reports = finished
    measured = reports[-1].traffic["statistics"]
    declared = [experiment.method.traffic(experiment.server.model, counts.tolist()) for counts in task.client_counts]
    assert measured["up"] == sum(calls["statistics"][1] for calls in declared)
    assert measured["down"] == sum(calls["statistics"][0] for calls in declared)
    # 8 bytes for count, mean, triangle and Fourier mean of each owned class
    assert measured["up"] == int((task.client_counts > 0).sum()) * 8 * (1 + 64 + 64 * 65 // 2 + 60)
    assert reports[0].traffic["train"]["down"] == sum(calls["train"][0] for calls in declared)


def test_finish_retrains_the_classifier_alone(finished):
    experiment, reports = finished
    server = experiment.server
    deployed = experiment.method.deployed(server).state_dict()
    for name, value in encoder(server.model).items():
        assert torch.equal(deployed[name], value)
    assert not torch.equal(deployed["classifier.weight"], server.model.state_dict()["classifier.weight"])
    assert reports[-1].phase == "finish"
    assert reports[-1].figures["synthetic"] > 10 * 80
    assert set(server.state["synthetic"]) == {str(c) for c in range(10)}


def test_synthetic_features_have_the_moments_of_the_real_ones(finished, task):
    experiment, _ = finished
    method, fleet, server = experiment.method, experiment.fleet, experiment.server
    sums = fleet.sum(method.statistics, fleet.ids, {"model": tree.snapshot(encoder(server.model)), "seed": 5})
    made = fleet.map(method.synthesise, [{"sums": sums["2"], "size": 100, "fourier": 5, "bank": 1}])[0]
    _, mean, cov = moments(sums["2"])
    z = made["z"].double()
    assert torch.allclose(z.mean(0), mean, atol=1e-5)
    assert (torch.cov(z.T) - cov).abs().max() < 1e-4


def test_result_depends_neither_on_the_order_of_the_clients_nor_on_saving_between(finished, task, tmp_path):
    class Backwards(LocalFleet):                                                      # T-SFD-12
        def _answers(self, fn, ids, *rest):
            yield from reversed(list(super()._answers(fn, ids[::-1], *rest)))

    def backwards(folder):
        config = configure()
        method = make_method(config.method)
        fleet = Backwards(config, task, Host(config, method, task.facts, task.test, CPU))
        return Experiment(config, method, task, fleet, CPU, folder)

    first = backwards(tmp_path)
    for _ in range(2):
        report = first.step()
        first.save(report)
    second = backwards(tmp_path)
    second.load(first._saved)
    second.step()
    assert second.conclude() == finished[0].conclude()


@pytest.mark.parametrize("fields", [{"aligner": False}, {"mmd": False}, {"arr": False}, {"mmd": False, "arr": False},
                                    {"preset": "official", "rf_dim": 60}, {"rf_type": "iid", "abbl": "ce"}], ids=str)
def test_variants_run(task, tmp_path, fields):
    reports = finish(open_experiment(configure(**fields), task, tmp_path))
    assert reports[-1].accuracy is not None
    assert math.isfinite(reports[-1].figures["retrain_loss"])


def test_without_synthesis_nothing_is_sent_and_the_model_stays(task, tmp_path):
    experiment = open_experiment(configure(safs=False), task, tmp_path)
    reports = finish(experiment)
    assert reports[-1].traffic == {}
    assert reports[-1].accuracy == reports[-2].accuracy
    assert "statistics" not in experiment.method.traffic(experiment.server.model, [1] * 10)


def test_local_batchnorm_judges_clients_with_the_retrained_classifier(task, tmp_path):
    config = configure().model_copy(update={"federation": configure().federation.model_copy(
        update={"batchnorm": "local"})})
    experiment = open_experiment(config, task, tmp_path)
    reports = finish(experiment)
    assert reports[-1].accuracy != reports[-2].accuracy


def test_official_preset_selects_the_codes_variants_and_explicit_fields_win():
    official = SFD(preset="official")
    assert {name: getattr(official, name) for name in OFFICIAL} == OFFICIAL
    assert SFD(preset="official", rf_dim=5000).rf_dim == 5000
    again = SFD(**official.model_dump())                # as a run folder's config.yaml has it
    assert again == official
    assert SFD().delta == "all"


def test_official_preset_weighs_clients_by_batches(client):
    _, mine, message = client(preset="official")
    reply = SFD(preset="official").train(mine, message)
    assert reply.weight == math.ceil(len(mine) / 32)


@pytest.mark.parametrize(("fields", "message"), [
    ({"m_min": 64}, r"method.m_min = 64: features have d = 64.*at least d \+ 1 = 65.*m_min=152"),
    ({"m_min": 100, "m_max": 90}, "m_min = 100 and method.m_max = 90"),
    ({"aligner": False, "mmd": False}, "both false")])
def test_settings_that_cannot_work_are_refused_before_the_first_round(task, tmp_path, fields, message):
    experiment = open_experiment(configure(**fields), task, tmp_path)
    with pytest.raises(ConfigError, match=message):
        experiment.step()


@pytest.mark.parametrize(("dim", "bank"), [(64, (600, 2000)), (512, (600, 2000)), (1024, (1112, 3706))])
def test_banks_grow_with_the_features(dim, bank):
    assert SFD().bank(dim) == bank


def test_features_are_extracted_in_evaluation_mode_without_augmentation(client):
    _, mine, _ = client()
    mine.model.train()
    before = tree.snapshot(mine.model.state_dict())
    z, y = features(mine)
    assert torch.equal(z, features(mine)[0])
    assert z.shape == (len(mine), 64)
    assert torch.equal(y, mine.samples.y)
    assert all(torch.equal(value, before[name]) for name, value in mine.model.state_dict().items())


def test_sfd_is_what_runs_by_default():
    demonstration = load("recipe:demo").method
    assert demonstration["name"] == "sfd"
    assert set(METHODS["sfd"].model_fields) >= set(demonstration) - {"name"}


@pytest.mark.slow
def test_killed_during_synthesis_and_resumed_it_ends_with_the_same_model(tmp_path):
    settings = ["federation.rounds=2", "local.epochs=1", "data.clients=4", "method.rf_dim=2000",
                "method.synthesis_steps=20", "method.epochs=5"]
    run_and_kill(tmp_path, settings, 0.3)               # statistics take a few milliseconds, synthesis seconds
    straight, killed = resume(tmp_path)
    assert straight["model_sha256"] == killed["model_sha256"]
