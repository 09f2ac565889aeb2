import math

import numpy as np
import pytest
import torch
from killed import resume, run_and_kill
from refusals import refused
from rounds import run
from sfd_runs import configure, finish, open_experiment, statistics
from tiny import make_experiment, make_setup

from raylt import tree
from raylt.config import load
from raylt.contract.hosts import Backwards
from raylt.errors import ConfigError
from raylt.methods import METHODS
from raylt.methods.sfd.fourier import bootstrap_floor, fourier_sum
from raylt.methods.sfd.method import OFFICIAL, SFD, encoder
from raylt.ops.moments import class_sums, moments_from_sums


def test_model_has_no_bias_and_a_projector_that_is_not_deployed(finished, task):
    experiment, _ = finished
    model, deployed = experiment.server.model, experiment.method.global_model(experiment.server)
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


def test_summed_statistics_are_those_of_all_features_pooled(finished, task):  # T-SFD-7, in the fleet
    experiment, _ = finished
    method, server = experiment.method, experiment.server
    sums = statistics(experiment)
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
        n, mu, cov = moments_from_sums(sums[c])
        assert n == len(own) == task.counts[c]
        assert np.allclose(mu, own.mean(0), atol=1e-5)
        assert np.allclose(cov, np.cov(own.T, bias=True), atol=1e-4)
        waves = own @ omega.T
        phi = np.concatenate([np.cos(waves), np.sin(waves)], 1).mean(0) * math.sqrt(2 / 60)
        assert np.allclose(sums[c]["phi"] / n, phi, atol=1e-5)


def test_statistics_hold_the_clients_own_classes_only(finished, task):
    experiment, reports = finished
    measured = reports[-1].traffic["statistics"]
    model, clients = experiment.server.model, len(experiment.fleet.ids)
    assert measured["down"] == clients * (tree.nbytes(encoder(model)) + 8)  # the encoder, and 8 bytes for the seed
    # 8 bytes each for the numbers of count, mean, triangle and Fourier mean of each owned class
    assert measured["up"] == int((task.client_counts > 0).sum()) * 8 * (1 + 64 + 64 * 65 // 2 + 60)
    whole = tree.nbytes(model.entries())
    assert reports[0].traffic["train"] == {
        "down": clients * (whole + 8),
        "up": clients * (whole + 24),
        "replies": clients,
    }  # down also beta; up also the loss and two terms' shares


def test_finish_retrains_the_classifier_alone(finished):
    experiment, reports = finished
    server = experiment.server
    deployed = experiment.method.global_model(server).state_dict()
    for name, value in encoder(server.model).items():
        assert torch.equal(deployed[name], value)
    assert not torch.equal(deployed["classifier.weight"], server.model.state_dict()["classifier.weight"])
    assert reports[-1].phase == "finish"
    assert reports[-1].figures["synthetic"] > 10 * 80
    assert set(server.state["synthetic"]["y"].tolist()) == set(range(10))


def test_synthetic_features_have_the_moments_of_the_real_ones(finished, task):
    experiment, _ = finished
    method, fleet = experiment.method, experiment.fleet
    sums = statistics(experiment)
    made = fleet.map(method.synthesise, [{"sums": sums[2], "size": 100, "fourier": 5, "bank": 1}])[0]
    _, mean, cov = moments_from_sums(sums[2])
    z = made["z"].double()
    assert torch.allclose(z.mean(0), mean, atol=1e-5)
    assert (torch.cov(z.T) - cov).abs().max() < 1e-4


def test_result_depends_neither_on_the_order_of_the_clients_nor_on_saving_between(finished, task, tmp_path):
    first, second = (make_experiment(configure(), task, tmp_path, fleet=Backwards) for _ in range(2))  # T-SFD-12
    for _ in range(2):
        report = first.step()
        first.save(report)
    second.load(first._saved)
    second.step()
    assert second.export_model() == finished[0].export_model()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fields",
    [
        {"aligner": False},
        {"mmd": False},
        {"arr": False},
        {"mmd": False, "arr": False},
        {"preset": "official", "rf_dim": 60},
        {"rf_type": "iid", "abbl": "ce"},
    ],
    ids=str,
)
def test_variants_run(task, tmp_path, fields):
    reports = finish(open_experiment(configure(**fields), task, tmp_path))
    assert reports[-1].accuracy is not None
    assert math.isfinite(reports[-1].figures["retrain_loss"])


def test_without_synthesis_nothing_is_sent_and_the_model_stays(task, tmp_path):
    experiment = open_experiment(configure(safs=False), task, tmp_path)
    reports = finish(experiment)
    assert [report.phase for report in reports] == ["round", "round"]
    assert reports[-1].traffic.keys() == {"train"}
    judged = experiment.method.global_model(experiment.server)
    assert torch.equal(judged.classifier.weight, experiment.server.model.classifier.weight)


def test_local_batchnorm_judges_clients_with_the_retrained_classifier(task, tmp_path):
    config = configure().model_copy(
        update={"federation": configure().federation.model_copy(update={"batchnorm": "local"})}
    )
    experiment = open_experiment(config, task, tmp_path)
    reports = finish(experiment)
    assert reports[-1].accuracy != reports[-2].accuracy


def test_official_preset_selects_the_codes_variants_and_explicit_fields_win():
    official = SFD(preset="official")
    assert {name: getattr(official, name) for name in OFFICIAL} == OFFICIAL
    assert SFD(preset="official", rf_dim=5000).rf_dim == 5000
    again = SFD(**official.model_dump())  # as a run folder's config.yaml records it
    assert again == official
    assert SFD().delta == "all"


@pytest.mark.parametrize(
    ("fields", "code", "key", "value"),
    [
        ({"m_min": 64}, "config.out-of-range", "method.m_min", 64),
        ({"m_min": 100, "m_max": 90}, "config.out-of-range", "method.m_min", 100),
        ({"m_min": 0, "aligner": False}, "config.out-of-range", "method.m_min", 0),
        ({"aligner": False, "mmd": False}, "config.conflict", "method.aligner", False),
    ],
)
def test_settings_that_cannot_work_are_refused_by_a_plan(task, tmp_path, fields, code, key, value):
    experiment = open_experiment(configure(**fields), task, tmp_path)
    with refused(code, ConfigError, key=key, value=value):
        experiment.method.prepare(task, experiment.config, experiment.server.model)


@pytest.mark.parametrize(
    "fields",
    [
        {"m_min": 64, "safs": False},
        {"m_min": 64, "aligner": False},
        {"m_min": 64, "classifier": "gaussian"},
        {"m_min": 100, "m_max": 90, "classifier": "ncm"},
        {"aligner": False, "mmd": False, "classifier": "ridge"},
        {"aligner": False, "mmd": False, "classifier": "means"},
    ],
    ids=str,
)
def test_settings_that_are_not_used_are_not_refused(task, tmp_path, fields):
    experiment = open_experiment(configure(**fields), task, tmp_path)
    experiment.method.prepare(task, experiment.config, experiment.server.model)


def test_all_classes_may_get_banks_of_the_same_size():
    assert SFD(m_min=100, m_max=100).bank(64) == (100, 100)


@pytest.mark.parametrize(("dim", "bank"), [(64, (600, 2000)), (512, (600, 2000)), (1024, (1112, 3706))])
def test_banks_grow_with_the_features(dim, bank):
    assert SFD().bank(dim) == bank


def test_sfd_is_what_runs_by_default():
    demonstration = load("recipe:demo").method
    assert demonstration["name"] == "sfd"
    assert set(METHODS["sfd"].model_fields) >= set(demonstration) - {"name"}


@pytest.mark.slow
def test_killed_during_synthesis_and_resumed_it_ends_with_the_same_model(tmp_path):
    settings = [
        "method=sfd",
        "federation.rounds=2",
        "local.epochs=1",
        "data.clients=4",
        "method.retrain_epochs=5",
    ]
    run_and_kill(tmp_path, settings, "raylt.methods.sfd.method", "synthesise", 3)
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 2
    straight, killed = resume(tmp_path)
    assert straight["model_sha256"] == killed["model_sha256"]


@pytest.mark.slow
def test_share_of_the_contrastive_term_grows_with_its_weight_and_falls_with_the_rounds(task, tmp_path):
    seen = {}
    for beta in (0.0, 0.1, 1.0):
        reports = finish(open_experiment(configure(beta1=beta, safs=False), task, tmp_path))
        seen[beta] = [report.figures["shares"]["contrastive"] for report in reports]
        assert all(sum(report.figures["shares"].values()) == pytest.approx(1) for report in reports)
    assert seen[0.0] == [0, 0]
    assert seen[1.0][0] > seen[0.1][0] > 0
    assert seen[1.0][1] < seen[1.0][0]  # beta falls along a cosine, and the term with it
    reports = finish(open_experiment(configure(abbl="ce", safs=False), task, tmp_path))
    assert "shares" not in reports[-1].figures


def test_losses_of_the_synthesis_are_reported_apart_beside_their_floor(finished):
    figures = finished[1][-1].figures
    assert figures["mmd"].keys() == {"start", "end", "floor"}
    assert figures["arr"].keys() == {"start", "end"}
    assert figures["mmd"]["end"] + figures["arr"]["end"] < figures["mmd"]["start"] + figures["arr"]["start"]


def test_figures_of_the_synthesis_are_its_largest_jitter_and_the_classes_mean_losses(tiny_task, tmp_path, monkeypatch):
    """Synthesis is replaced; the tiny task has 26, 21, 10 and 3 samples of its classes."""

    def made(self, item):
        n = item["sums"]["n"]
        z = torch.zeros(item["size"], 64)
        return {"z": z, "jitter": 1e-4 / n, "arr": {"start": 2.0 * n, "end": n}, "mmd": {"floor": 1.0 / n}}

    monkeypatch.setattr(SFD, "synthesise", made)
    method = SFD(rf_dim=60, m_min=80, m_max=120, retrain_epochs=1)
    figures = run(tiny_task, tmp_path, method, rounds=1).server.figures
    assert figures["jitter"] == pytest.approx(1e-4 / 3)
    assert figures["arr"] == pytest.approx({"start": 30, "end": 15})
    assert figures["mmd"] == pytest.approx({"floor": (1 / 26 + 1 / 21 + 1 / 10 + 1 / 3) / 4})


def test_floor_of_a_class_is_that_of_as_many_features_as_are_made():
    method = SFD(rf_dim=20, synthesis_steps=1)
    z = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).relu()
    omega = method.frequencies(6, 5)
    sums = class_sums(z, torch.zeros(50, dtype=torch.int64))[0] | {"phi": fourier_sum(z, omega)}
    _, mean, cov = moments_from_sums(sums)
    floor = bootstrap_floor(sums["phi"] / 50, omega, mean, cov, 20)
    made = method.synthesise({"sums": sums, "size": 20, "fourier": 5, "bank": 1})
    assert made["mmd"]["floor"] == pytest.approx(floor)
    assert floor != pytest.approx(bootstrap_floor(sums["phi"] / 50, omega, mean, cov, 50))


def test_rate_of_each_sample_moves_the_bank_that_the_rate_of_the_bank_leaves(task, tmp_path):
    ends = {}
    for per in ("bank", "sample"):
        reports = finish(open_experiment(configure(synthesis_per=per, synthesis_steps=20, abbl="ce"), task, tmp_path))
        ends[per] = reports[-1].figures["arr"]
    assert ends["bank"]["start"] == ends["sample"]["start"]
    assert ends["bank"]["end"] > 0.8 * ends["bank"]["start"]
    assert ends["sample"]["end"] < 0.5 * ends["sample"]["start"]


def test_shown_classes_are_spread_over_the_sizes_with_the_rarest_and_the_most_frequent(task, tmp_path, monkeypatch):
    monkeypatch.setattr("raylt.methods.sfd.method.SHOWN_CLASSES", 4)
    experiment = open_experiment(configure(abbl="ce"), task, tmp_path)
    finish(experiment)
    by_size = sorted(range(10), key=lambda c: (task.counts[c], c))
    assert list(dict.fromkeys(experiment.server.state["synthetic"]["y"].tolist())) == [by_size[i] for i in (0, 3, 6, 9)]


def test_quick_preset_takes_five_steps_and_explicit_fields_win():
    assert SFD(preset="quick").synthesis_steps == 5
    assert SFD(preset="quick", synthesis_steps=7).synthesis_steps == 7
    assert SFD(preset="quick").model_copy(update={"preset": "paper", "synthesis_steps": 100}) == SFD()


def test_last_phase_is_described_with_its_time(tiny_task):
    spec = tiny_task.spec
    model = make_setup(configure()).new_model(spec)
    fields = {"rf_dim": 60, "m_min": 80, "m_max": 120}
    text = SFD(**fields).last_phase(spec, model)
    assert text.startswith(f"synthesis of {spec.classes} classes in 100 steps each, about ")
    assert "method.preset=quick" in text
    assert "preset" not in SFD(preset="quick", **fields).last_phase(spec, model)
    assert SFD(safs=False, **fields).last_phase(spec, model) == ""
    assert SFD(classifier="gaussian", **fields).last_phase(spec, model) == ""
    assert SFD(mmd=False, arr=False, **fields).last_phase(spec, model) == ""


def test_the_time_of_the_synthesis_is_that_of_its_steps(tiny_task, monkeypatch):
    spec = tiny_task.spec
    model = make_setup(configure()).new_model(spec)
    now = [0.0]
    monkeypatch.setattr("raylt.methods.sfd.method.time.perf_counter", lambda: now[0])

    def steps(*arguments, progress):
        now[0] += 100  # time before the first step does not count
        for seconds in (50, 2, 4):
            now[0] += seconds
            progress(0, 0)

    monkeypatch.setattr("raylt.methods.sfd.method.synthesise", steps)
    method = SFD(rf_dim=60, m_min=80, m_max=120, synthesis_steps=10)
    # 3 s a step at the largest bank; on average a bank has 100 of the largest one's 120 features
    assert method.last_phase_seconds(spec, model) == pytest.approx(3 * 10 * spec.classes * 100 / 120)


def test_batches_that_weigh_a_client_are_those_of_one_epoch(tiny_task, tmp_path):
    config = load(None, ["method=sfd", "data.clients=6", "local.epochs=3", "local.batch=8"])
    experiment = make_experiment(config, tiny_task, tmp_path, SFD(weighting="batches"))
    weights = SFD(weighting="batches").weights(experiment.server, experiment.fleet)
    # a last batch of one sample is left out
    sizes = {id: n for id, n in enumerate(tiny_task.sizes) if n}
    assert weights == {id: max(1, n // 8 + (n % 8 > 1)) for id, n in sizes.items()}
    experiment.step()
    assert experiment.fleet.round_stats.rejected == {}  # no reply states another weight
