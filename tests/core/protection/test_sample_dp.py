"""Sums with noise: epsilon against an integral, sensitivities against samples, and the noise that is really added."""

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from refusals import refused
from rounds import run
from scipy import integrate, stats
from small_runs import QUICK, make_run
from tiny import configure, make_experiment, open_client
from torch import tensor

import raylt
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.aggregation import Plain
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import mean, total
from raylt.core.protection.accounting import calibrated_sigma, delta_of
from raylt.core.protection.protection import Protection, check_delta
from raylt.core.protection.sample_dp import Noise, SampleDP
from raylt.core.server import Server
from raylt.core.training.features import features
from raylt.data.samples import Samples
from raylt.errors import BudgetSpent, ConfigError
from raylt.methods import METHODS as BUILT_IN
from raylt.methods.classifiers.ccvr import CCVR
from raylt.methods.classifiers.fed3r import Fed3R
from raylt.methods.classifiers.fedncm import FedNCM
from raylt.methods.fedavg import FedAvg
from raylt.methods.sfd.fourier import draw_frequencies, fourier_sum
from raylt.methods.sfd.method import SFD
from raylt.models.split import clipped
from raylt.ops.moments import class_sums, nearest_moments, pack, sample_lengths, unpack
from raylt.runs.export.artefact import read

SMALL_SFD = {"rf_dim": 60, "m_min": 80, "m_max": 120, "synthesis_steps": 1, "retrain_epochs": 1}
METHODS = [
    CCVR(virtual=20, retrain_epochs=1),
    FedNCM(),
    Fed3R(),
    SFD(**SMALL_SFD),
]
BUDGET = {"epsilon": 2.0, "delta": 1e-4, "clip": 3.0}


def sums(client: Client, message: Message) -> Reply:
    return client.reply(classes={int(client.counts.argmax()): {"n": len(client), "z": torch.ones(50)}})


def wanted(dim=50):
    return {
        "classes": total.within({c: {"n": 1, "z": torch.empty(dim, device="meta")} for c in range(4)}).bounded(
            {"n": 1.0, "z": 3.0}
        )
    }


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_delta_is_the_integral_of_what_one_density_has_beyond_e_to_epsilon_of_the_other(epsilon, delta):
    sigma = calibrated_sigma(epsilon, delta)
    with_sample, without = stats.norm(1, sigma), stats.norm(0, sigma)
    # the densities' ratio is e^epsilon at x = 1/2 + epsilon sigma^2
    crossing = 0.5 + epsilon * sigma**2
    beyond, _ = integrate.quad(
        lambda x: with_sample.pdf(x) - math.exp(epsilon) * without.pdf(x),
        crossing,
        crossing + 40 * sigma,
        epsabs=1e-14,
        points=[crossing + sigma],
        limit=200,
    )
    assert beyond == pytest.approx(delta, rel=1e-3)
    assert delta_of(0.999 * sigma, epsilon) > delta


def test_sigma_is_that_of_the_papers_algorithm():
    assert calibrated_sigma(1.0, 1e-5) == pytest.approx(3.7306, abs=1e-3)
    # the classical bound holds for epsilon < 1 and is larger
    assert calibrated_sigma(0.5, 1e-5) < math.sqrt(2 * math.log(1.25e5)) / 0.5


@pytest.mark.parametrize("clip", [0.5, 2.0])
def test_no_sample_adds_more_than_is_declared_and_some_adds_as_much(clip):
    rng = torch.Generator().manual_seed(0)
    z = clipped(torch.cat([5 * torch.randn(200, 6, generator=rng), 9 * torch.eye(6), 0.01 * torch.ones(1, 6)]), clip)
    omega = draw_frequencies(6, 40, 0.1, "orf", 0)
    lengths, longest = sample_lengths(clip) | {"phi": 1.0}, dict.fromkeys(("n", "z", "zz", "phi"), 0.0)
    for i in range(len(z)):
        one = class_sums(z[i : i + 1], tensor([0]))[0] | {"phi": fourier_sum(z[i : i + 1], omega)}
        for name, length in lengths.items():
            added = torch.as_tensor(one[name], dtype=torch.float64).norm().item()
            assert added <= length * (1 + 1e-6)
            longest[name] = max(longest[name], added)
    assert longest == pytest.approx(lengths, rel=1e-5)


def declared_lengths(method, config, task, folder, monkeypatch):
    """Return the largest length that the method says a sample adds, by part, or by leaf of a part with classes."""
    lengths, of = {}, Noise.of.__func__

    def recorded(cls, parts, config):
        lengths.update({name: part.per_sample for name, part in parts.items() if part.per_sample is not None})
        return of(cls, parts, config)

    monkeypatch.setattr(Noise, "of", classmethod(recorded))
    experiment = make_experiment(config, task, folder, method)
    while not experiment.done:
        experiment.step()
    return lengths


@pytest.mark.parametrize("clip", [0.1, 10.0])
@pytest.mark.parametrize("name", [name for name, kind in BUILT_IN.items() if kind.sums_samples])
def test_no_method_declares_less_than_a_sample_adds_or_twice_as_much(tiny_task, tmp_path, monkeypatch, name, clip):
    method = BUILT_IN[name](**QUICK.get(name, {}))
    config = configure(privacy=BUDGET | {"clip": clip}, method={"name": name}, federation={"rounds": 1})
    lengths = declared_lengths(method, config, tiny_task, tmp_path, monkeypatch)
    client = open_client(tiny_task, method, 0, config)
    with torch.no_grad():
        for value in client.model.encoder.parameters():
            value.mul_(100 if value.ndim == 1 else 1)  # features are far longer than the clip
    message = {"model": client.model.entries("encoder."), "seed": 0}
    x, y = client.samples.x, client.samples.y
    for i in range(8):
        client.samples.x, client.samples.y = x[i : i + 1], y[i : i + 1]
        parts = method.statistics(client, message).tree
        assert lengths.keys() <= parts.keys()
        for part, length in lengths.items():
            (added,) = parts[part].values() if isinstance(length, dict) else ({None: parts[part]},)
            for leaf, most in (length if isinstance(length, dict) else {None: length}).items():
                assert most / 2 < torch.as_tensor(added[leaf]).double().norm().item() <= most * (1 + 1e-6), (part, leaf)


def test_clipping_leaves_short_features_alone():
    z = tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    assert torch.allclose(clipped(z, 1.0), tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_features_are_clipped_where_noise_is_asked_for_and_only_there(tiny_task):
    config = configure(method={"name": "fedncm"})
    longest = features(open_client(tiny_task, FedNCM(), config=config))[0].norm(dim=1).max().item()
    short = configure(method={"name": "fedncm"}, privacy=BUDGET | {"clip": longest / 2})
    z, _ = features(open_client(tiny_task, FedNCM(), config=short))
    assert z.norm(dim=1).max().item() == pytest.approx(longest / 2, rel=1e-5)


def test_leaf_by_leaf_a_sample_is_hidden_as_by_one_mechanism():
    noise = Noise.of(wanted(), configure(privacy=BUDGET, method={"name": "fedncm"}))
    deviations = noise.deviations["classes"]
    # sum over the leaves of (length / deviation)^2 is 1 / sigma^2
    assert (1 / deviations["n"]) ** 2 + (3 / deviations["z"]) ** 2 == pytest.approx(
        1 / calibrated_sigma(2.0, 1e-4) ** 2
    )


def test_a_sum_without_names_gets_noise_of_its_own_length():
    parts = {"a": total.like(torch.zeros(2)).bounded(2.0), "b": total.like(torch.zeros(2)).bounded(5.0)}
    deviations = Noise.of(parts, configure(privacy=BUDGET, method={"name": "fed3r"})).deviations
    assert 5 * deviations["a"] == pytest.approx(2 * deviations["b"])
    assert (2 / deviations["a"]) ** 2 + (5 / deviations["b"]) ** 2 == pytest.approx(
        1 / calibrated_sigma(2.0, 1e-4) ** 2
    )


def test_replies_of_another_layout_get_the_same_share_of_the_noise():
    parts = {"a": total.like(torch.zeros(4000)).bounded(1.0)}
    noise = Noise.of(parts, configure(privacy=BUDGET, method={"name": "fed3r"}))
    aggregator = SampleDP(Plain(parts, (0,)), noise, parts, 1 / 4, {}).empty()
    aggregator.accept(0, Reply(1.0, {"a": torch.zeros(4000)}))
    assert aggregator.result()["a"].std().item() == pytest.approx(noise.deviations["a"] / 2, rel=0.06)


@pytest.mark.parametrize("secure", [False, True])
def test_the_noise_has_the_stated_variance_in_every_class(tiny_task, tmp_path, secure):
    config = configure(privacy=BUDGET, federation={"secure": secure}, method={"name": "fedncm"})
    values = []
    for _ in range(20):
        fleet = make_experiment(config, tiny_task, tmp_path, FedNCM()).fleet
        with fleet.protection.finishing():
            got = fleet.ask(sums, fleet.everyone, {}, **wanted())
        assert sorted(got["classes"]) == [0, 1, 2, 3]  # classes without a sample get noise too
        values += [of_class["z"] for of_class in got["classes"].values()]
    z = torch.stack(values)  # [80, 50]
    deviation = Noise.of(wanted(), config).deviations["classes"]["z"]
    # five clients add their own noise; with secure sums four of them add up to the whole noise
    expected = deviation * math.sqrt(5 / 4 if secure else 5)
    spread = (z - z.mean(1, keepdim=True)).std().item()
    assert spread == pytest.approx(expected * math.sqrt(49 / 50), rel=0.05)


def bytes_up(task, folder, fn, secure):
    """Return the counted bytes of one noisy call in which all clients send the sums of `fn`."""
    config = configure(privacy=BUDGET, federation={"secure": secure}, method={"name": "fedncm"})
    fleet = make_experiment(config, task, folder, FedNCM()).fleet
    with fleet.protection.finishing():
        fleet.ask(fn, fleet.everyone, {}, **wanted())
    return fleet.round_stats.traffic[fn.__name__].up


def no_sums(client: Client, message: Message) -> Reply:
    return client.reply(classes={})


@pytest.mark.parametrize("secure", [False, True])
def test_counted_bytes_do_not_show_which_classes_a_client_has(tiny_task, tmp_path, secure):
    up = bytes_up(tiny_task, tmp_path, sums, secure)
    assert up == bytes_up(tiny_task, tmp_path, no_sums, secure)
    if not secure:
        # five replies with a count and 50 float64 for each of the four classes
        assert up == 5 * 4 * (8 + 50 * 8)


def test_numbers_get_their_part_of_a_share_of_the_noise_also_where_a_client_has_none():
    parts = {"n": total.within(dict.fromkeys(range(4000), 0)).bounded(1.0)}
    noise = Noise.of(parts, configure(privacy=BUDGET, method={"name": "fedncm"}))
    drawn = noise.add_to(Reply(1.0, {"n": {}}), parts, 1 / 4).tree["n"]
    assert np.std(list(drawn.values())) == pytest.approx(noise.deviations["n"] / 2, rel=0.06)


def test_noise_is_never_that_of_the_seed(tiny_task, tmp_path):
    def drawn():
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        experiment = run(tiny_task, tmp_path, FedNCM(), 1, privacy=BUDGET)
        return experiment.server.state["classifier"]["weight"], experiment.server.model.state_dict()

    (one, model), (two, same) = drawn(), drawn()
    assert all(torch.equal(model[name], same[name]) for name in model)
    assert not torch.equal(one, two)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("secure", [False, True])
def test_methods_finish_with_noise_and_say_what_it_covers(tiny_task, tmp_path, method, secure):
    privacy = {"epsilon": 50.0, "delta": 1e-3, "clip": 3.0}
    experiment = make_experiment(
        configure(federation={"rounds": 1, "secure": secure}, privacy=privacy), tiny_task, tmp_path, method
    )
    experiment.step()
    report = experiment.step()
    assert report.accuracy is not None
    assert not report.rejected
    assert report.figures["privacy"]["epsilon"] == 50
    assert report.figures["privacy"]["against"] == (
        "anyone who sees the sum" if secure else "anyone who sees an upload"
    )


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_model_cuts_features_as_those_were_cut_that_its_classifier_was_fitted_to(tiny_task, tmp_path, method):
    config = configure(federation={"rounds": 1}, privacy={"epsilon": 50.0, "delta": 1e-3, "clip": 0.5})
    experiment = make_experiment(config, tiny_task, tmp_path, method)
    experiment.step()
    experiment.step()
    model = method.global_model(experiment.server).eval()
    x = Samples(tiny_task.test, tiny_task.spec, torch.device("cpu")).batch(torch.arange(20)).x
    z, classifier = model.encoder(x), experiment.server.state["classifier"]
    cut = torch.stack([row * 0.5 / max(0.5, row.norm()) for row in z])
    assert not torch.allclose(cut, z)
    assert torch.allclose(model(x), cut @ classifier["weight"].T + classifier["bias"], atol=1e-5)


def test_an_exported_model_cuts_them_too(tmp_path):
    run = make_run(tmp_path, "run", "method=fed3r", "privacy.epsilon=1000", "privacy.clip=0.5")
    images = run.task.test.x[:8]
    expected = run.model().predict(images).probabilities
    assert torch.equal(read(raylt.export(run)).model().predict(images).probabilities, expected)


def test_little_noise_is_near_none(tiny_task, tmp_path):
    weights = [
        run(tiny_task, tmp_path, FedNCM(), 1, privacy=privacy).server.state["classifier"]["weight"]
        for privacy in ({}, {"epsilon": 1000.0, "delta": 0.01, "clip": 10.0})
    ]
    assert torch.nn.functional.cosine_similarity(*weights).max() > 0.8


def test_moments_with_noise_become_those_of_samples():
    z = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    of_class = class_sums(z, torch.zeros(40, dtype=torch.int64))[0]
    assert torch.allclose(nearest_moments({0: of_class})[0]["zz"], of_class["zz"])
    noisy = {
        0: {"n": 39.6, "z": of_class["z"], "zz": of_class["zz"] - pack(100 * torch.eye(3, dtype=torch.float64))},
        1: of_class | {"n": 0.4},
    }
    mended = nearest_moments(noisy)
    assert (list(mended), mended[0]["n"]) == ([0], 40)
    cov = unpack(mended[0]["zz"], 3) / 40 - torch.outer(z.mean(0), z.mean(0))
    assert torch.linalg.eigvalsh(cov).min() > -1e-9
    with pytest.raises(ConfigError, match="leaves no class with a positive count"):
        nearest_moments({0: of_class | {"n": -3.0}})


def test_a_second_upload_stops_the_run(tiny_task, tmp_path):
    fleet = make_experiment(configure(privacy=BUDGET), tiny_task, tmp_path, FedNCM()).fleet
    with fleet.protection.finishing():
        fleet.ask(sums, fleet.everyone, {}, **wanted())
        with refused("privacy.budget-spent", BudgetSpent, parts=["classes"]):
            fleet.ask(sums, fleet.everyone, {}, **wanted())


def test_a_rehearsal_uploads_nothing(tiny_task, tmp_path):
    experiment = make_experiment(configure(privacy=BUDGET), tiny_task, tmp_path, FedNCM())
    experiment.step()
    with refused("privacy.rehearsal", ConfigError, key="privacy.epsilon"), experiment.rehearsal():
        pass


def asked(protection, *ids):
    """Return the empty aggregator of a noisy number from each client."""
    cohort = Cohort(ids, everyone=True)
    with protection.finishing():
        return protection.aggregator(1, {}, {"n": total.like(0).bounded(1.0)}, cohort, dict.fromkeys(ids, 1.0))


def test_a_rehearsal_in_a_rehearsal_does_not_end_it():
    protection = Protection(configure(privacy=BUDGET, method={"name": "fedncm"}), {0: 5, 1: 5})
    with protection.rehearsing():
        with protection.rehearsing():
            pass
        with refused("privacy.rehearsal", ConfigError, key="privacy.epsilon"):
            asked(protection, 0, 1)
    asked(protection, 0, 1)


def test_noisy_counts_are_added_up_under_a_robust_rule_too():
    config = configure(
        privacy={"epsilon": 1000.0, "delta": 0.01}, federation={"robust": "median"}, method={"name": "fedncm"}
    )
    aggregator = asked(Protection(config, dict.fromkeys(range(3), 10)), 0, 1, 2)
    for id, n in enumerate((10, 10, 1000)):
        aggregator.accept(id, Reply(1.0, {"n": n}))
    assert aggregator.result()["n"] == pytest.approx(1020, abs=10)


def test_noisy_replies_of_another_layout_are_not_added_to_those_of_the_first():
    aggregator = asked(Protection(configure(privacy=BUDGET, method={"name": "fedncm"}), {0: 5, 1: 5}), 0, 1)
    aggregator.accept(0, Reply(1.0, {"n": 5}))
    assert (aggregator.weights, aggregator.empty().weights) == ({0: 1.0}, {})


def test_a_delta_is_small_enough_for_the_samples_of_all_clients_together():
    check_delta(configure(privacy=BUDGET | {"delta": 0.05}, method={"name": "fedncm"}), [4, 8, 0])
    with refused("config.out-of-range", ConfigError, key="privacy.delta", count=12):
        check_delta(configure(privacy=BUDGET | {"delta": 0.1}, method={"name": "fedncm"}), [4, 8, 0])


class Uncovered(FedNCM):
    """FedNCM whose clients also send, or only send, a sum over samples without a bound."""

    name: ClassVar[str] = "uncovered"
    where: str = "finish"

    def ones(self, client: Client, message: Message) -> Reply:
        return client.reply(ones=torch.ones(3))

    def bounded_and_not(self, client: Client, message: Message) -> Reply:
        return client.reply(ones=torch.ones(3), twos=2 * torch.ones(3))

    def start(self, server: Server, fleet: Fleet) -> None:
        if self.where == "start":
            fleet.ask(self.ones, fleet.everyone, {}, ones=total.like(torch.ones(3)))

    def round(self, server: Server, fleet: Fleet) -> None:
        if self.where == "bounded in rounds":
            fleet.ask(self.ones, fleet.everyone, {}, ones=total.like(torch.ones(3)).bounded(1.0))
        super().round(server, fleet)

    def finish(self, server: Server, fleet: Fleet) -> None:
        if self.where == "finish":
            fleet.ask(self.ones, fleet.everyone, {}, ones=total.like(torch.ones(3)))
        if self.where == "mean":
            fleet.ask(self.ones, fleet.everyone, {}, ones=mean.like(torch.ones(3)).bounded(1.0))
        if self.where == "same call":
            bounded = total.like(torch.ones(3)).bounded(2.0)
            fleet.ask(self.bounded_and_not, fleet.everyone, {}, ones=total.like(torch.ones(3)), twos=bounded)


@pytest.mark.parametrize("where", ["start", "bounded in rounds", "finish", "mean", "same call"])
def test_a_part_without_noise_is_refused_by_its_name(tiny_task, tmp_path, where):
    with refused("privacy.not-covered", ConfigError, key="privacy.epsilon", part="ones"):
        run(tiny_task, tmp_path, Uncovered(where=where), 1, privacy=BUDGET)


def test_a_last_phase_without_a_noisy_sum_is_refused(tiny_task, tmp_path):
    with refused("privacy.not-covered", ConfigError, key="privacy.epsilon", value=2.0):
        run(tiny_task, tmp_path, Uncovered(where="nowhere"), 1, privacy=BUDGET)


def test_without_a_budget_a_method_may_upload_what_it_likes(tiny_task, tmp_path):
    for where in ("start", "bounded in rounds", "finish", "mean", "same call"):
        run(tiny_task, tmp_path, Uncovered(where=where), 1)


def test_methods_without_such_sums_are_refused(tiny_task, tmp_path):
    with refused("config.conflict", ConfigError, key="privacy.epsilon", excludes="method"):
        make_experiment(configure(privacy=BUDGET), tiny_task, tmp_path, FedAvg())
    with refused("config.conflict", ConfigError, key="privacy.epsilon", excludes="method"):
        make_experiment(configure(privacy=BUDGET), tiny_task, tmp_path, SFD(safs=False))


def test_statistics_of_random_crops_are_refused(tiny_task, tmp_path):
    """Crops are drawn in the order of the samples, so without one sample all later samples have other features."""
    for fields in ({"preset": "official"}, {"statistics_area": 0.93}):
        with refused("config.conflict", key="privacy.epsilon", excludes="method"):
            make_experiment(configure(privacy=BUDGET), tiny_task, tmp_path, SFD(**fields))
    whole = SFD(preset="official", statistics_area=1.0)
    make_experiment(configure(privacy=BUDGET), tiny_task, tmp_path, whole)


def test_running_statistics_that_stay_at_clients_are_refused(tiny_task, tmp_path):
    """Running statistics depend on all samples of a client, so one sample would move the features of the others."""
    config = configure(privacy=BUDGET, federation={"batchnorm": "local"})
    with refused("config.conflict", key="privacy.epsilon", excludes="federation.batchnorm"):
        make_experiment(config, tiny_task, tmp_path, FedNCM())


def test_summary_has_epsilon_and_delta_and_what_they_do_not_cover(tmp_path):
    summary = make_run(tmp_path, "run", "method=fedncm", "privacy.epsilon=100").summary
    assert {key: summary["privacy"][key] for key in ("epsilon", "delta", "covers")} == {
        "epsilon": 100.0,
        "delta": 1e-5,
        "covers": "classes",
    }
    assert summary["privacy"]["not_covered"].startswith("earlier rounds and numbers of samples: the model")


def test_without_rounds_there_are_no_earlier_rounds_that_a_budget_leaves_out(tmp_path):
    settings = ("method=fedncm", "federation.rounds=0", "trainable=classifier", "privacy.epsilon=100")
    summary = make_run(tmp_path, "run", *settings).summary
    assert summary["privacy"]["not_covered"].startswith("numbers of samples: each upload")
