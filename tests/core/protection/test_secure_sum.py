"""Rounds with masked uploads: the sums, lost clients, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refused
from rounds import flat, run
from tiny import configure, make_experiment
from torch import tensor

from raylt.contract.case import Case
from raylt.core.client import Reply
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.reductions import each, mean, total
from raylt.core.protection.masking import Member
from raylt.core.protection.protection import Protection
from raylt.core.protection.secure_sum import FixedPoint, Secure
from raylt.errors import ConfigError, Overflow, TooFewReplies
from raylt.methods.classifiers.ccvr import CCVR
from raylt.methods.fedavg import FedAvg
from raylt.methods.fednova import FedNova
from raylt.methods.mupfl.method import MuPFL
from raylt.methods.scaffold import Scaffold

SECURE = {"secure": True}
PARTS = {
    "model": mean.like({"w": torch.zeros(2, 3), "batches": torch.zeros((), dtype=torch.int64)}),
    "loss": mean.like(0.0),
    "n": total.like(0),
    "classes": total.within({c: {"n": 1, "z": torch.zeros(2, dtype=torch.float64)} for c in range(3)}),
}


def reply(scale, *classes):
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3) * scale, "batches": tensor(3)},
        "loss": 0.25 * scale,
        "n": 2,
        "classes": {c: {"n": 1 + c, "z": tensor([1.5, -scale], dtype=torch.float64)} for c in classes},
    }


def furthest(one, other):
    """Return the largest difference between the floats of two global models; their batch counters may differ."""
    models = [experiment.server.model.state_dict() for experiment in (one, other)]
    return max((models[0][name] - value).abs().max() for name, value in models[1].items() if value.is_floating_point())


class Gone(ClientHost):
    """Loses client 2 in every training."""

    def run(self, fn, message, round, id, shard, private):
        if fn.__name__ == "train" and id == 2:
            raise OSError("gone")
        return super().run(fn, message, round, id, shard, private)


@pytest.mark.parametrize("clients", [3, 10**5])
def test_counters_in_a_mean_may_grow_with_the_run(clients):
    """The batch counter of a normalisation layer passes a million within a thousand rounds."""
    layout = FixedPoint(PARTS, clients, heaviest=1.0)
    grown = [reply(1.0, 0) for _ in range(2)]
    for each_reply, batches in zip(grown, (40_000_000, 40_000_002), strict=True):
        each_reply["model"]["batches"] = tensor(batches)
    got = layout.decode(np.sum([layout.encode(each_reply, 1.0) for each_reply in grown], axis=0, dtype=np.uint64), 2.0)
    assert got["model"]["batches"] == 40_000_001


def test_declared_weights_may_be_larger_than_numbers_of_samples(tiny_task, tmp_path):
    def tell(client, message):
        return Reply(message["weights"][client.id], {"w": tensor([1e3 * client.id])})

    fleet = make_experiment(configure(federation=SECURE), tiny_task, tmp_path).fleet
    weights = {id: 1e9 * (1 + id) for id in fleet.ids}
    got = fleet.ask(tell, fleet.ids, {"weights": weights}, weights, w=mean.like(torch.zeros(1)))
    assert fleet.round_stats.rejected == {}
    expected = sum(weights[id] * 1e3 * id for id in fleet.ids) / sum(weights.values())
    assert got["w"].item() == pytest.approx(expected)


def test_replies_to_an_evaluation_have_no_masks(tiny_task, tmp_path):
    fleet = make_experiment(configure(federation=SECURE), tiny_task, tmp_path).fleet
    with fleet.judging():
        got = fleet.ask(lambda client, message: client.reply(id=client.id), fleet.everyone, {}, id=each)
    assert got["id"] == {id: id for id in fleet.ids}


def test_a_sum_of_vectors_is_the_sum_of_the_parts():
    layout = FixedPoint(PARTS, 3, heaviest=4.0)
    vectors = [layout.encode(reply(1.0, 0), 4.0), layout.encode(reply(-0.5, 0, 2), 1.0)]
    got = layout.decode(np.sum(vectors, axis=0, dtype=np.uint64), 5.0)
    # (4 * 1 - 1 * 0.5) / 5 = 0.7
    assert torch.allclose(got["model"]["w"], 0.7 * torch.arange(6.0).reshape(2, 3), atol=1e-9)
    assert got["model"]["w"].dtype == torch.float32
    assert got["loss"] == pytest.approx(0.175)
    assert got["n"] == 4
    assert got["classes"] == {0: {"n": 2, "z": got["classes"][0]["z"]}, 2: {"n": 3, "z": got["classes"][2]["z"]}}
    assert got["classes"][0]["z"].tolist() == [3.0, -0.5]
    assert got["classes"][2]["z"].tolist() == [1.5, 0.5]


def test_counters_in_a_mean_become_their_rounded_mean():
    layout = FixedPoint(PARTS, 2, heaviest=1.0)
    first, second = reply(1.0), reply(1.0)
    second["model"]["batches"] = tensor(6)
    got = layout.decode(layout.encode(first, 1.0) + layout.encode(second, 1.0), 2.0)
    assert got["model"]["batches"].item() in (4, 5)
    assert got["model"]["batches"].dtype == torch.int64


@pytest.mark.parametrize(
    ("part", "value", "path"),
    [("model", 2e6, "model.w"), ("loss", 2e6, "loss"), ("classes", 2e9, "classes.1.z")],
)
def test_a_value_beyond_the_fixed_point_is_an_error_with_its_path(part, value, path):
    wrong = reply(1.0, 1)
    if part == "loss":
        wrong["loss"] = value
    else:
        (wrong["model"]["w"] if part == "model" else wrong["classes"][1]["z"]).view(-1)[1] = value
    with refused("reply.overflow", Overflow, path=path, value=value):
        FixedPoint(PARTS, 3, 1.0).encode(wrong, 1.0)


def test_counters_of_three_clients_become_the_nearest_whole_number():
    layout = FixedPoint(PARTS, 3, heaviest=1.0)
    grown = [reply(1.0) for _ in range(3)]
    grown[2]["model"]["batches"] = tensor(5)
    got = layout.decode(np.sum([layout.encode(each_reply, 1.0) for each_reply in grown], axis=0, dtype=np.uint64), 3.0)
    assert got["model"]["batches"] == 4  # of 3, 3 and 5


def test_floats_are_rounded_to_the_nearest_step():
    layout = FixedPoint({"w": mean.like(torch.zeros(4, dtype=torch.float64))}, 3, 1.0)
    steps = tensor([0.6, -0.6, 1.4, -1.4], dtype=torch.float64)
    assert layout.encode({"w": steps * layout._entries[0].step}, 1.0).view(np.int64).tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize("value", [-2e6, float("nan"), float("-inf")])
def test_values_far_below_zero_and_no_numbers_do_not_fit_either(value):
    with refused("reply.overflow", Overflow, path="w"):
        FixedPoint({"w": mean.like(torch.zeros(2))}, 3, 1.0).encode({"w": tensor([1.0, value])}, 1.0)


@pytest.mark.parametrize("clients", [2, 3, 100, 4097])
@pytest.mark.parametrize("kind", ["mean", "total"])
def test_the_largest_values_of_all_clients_fit_and_their_step_is_small(clients, kind):
    part = replace(mean if kind == "mean" else total, template=tensor([0.0]))
    layout = FixedPoint({"w": part}, clients, 1.0)
    largest = 1e6 if kind == "mean" else 1e9
    one = layout.encode({"w": tensor([largest])}, 1.0)
    assert clients * int(one.view(np.int64)[0]) < 2**63
    assert layout._entries[0].step <= 8 * clients * largest / 2**63


def test_the_largest_counters_of_all_clients_fit():
    layout = FixedPoint({"batches": mean.like(torch.zeros((), dtype=torch.int64))}, 8, 1.0)
    one = layout.encode({"batches": tensor(2**36)}, 1.0)
    assert layout.decode(8 * one, 8.0)["batches"] == 2**36


def test_a_count_whose_sum_over_all_clients_would_not_fit_is_an_error():
    layout = FixedPoint({"n": total.like(0)}, 3, 1.0)
    assert layout.decode(3 * layout.encode({"n": 2**60}, 1.0), 3.0)["n"] == 3 * 2**60
    with refused("reply.overflow", Overflow, path="n"):
        layout.encode({"n": 2**61}, 1.0)


def test_an_empty_copy_is_for_the_same_clients_and_weights():
    secure = Secure({"loss": mean.like(0.0)}, (3, 5, 8), {3: 1.0, 5: 4.0, 8: 2.0})
    secure.accept(3, Reply(1.0, {"loss": 100.0}))
    copy = secure.empty()
    for id, weight, loss in ((3, 1.0, 1.0), (5, 4.0, 2.0), (8, 2.0, 5.0)):
        copy.accept(id, Reply(weight, {"loss": loss}))
    assert copy.result()["loss"] == pytest.approx(19 / 7)


def test_a_declared_bound_makes_steps_smaller():
    narrow, wide = (
        FixedPoint({"w": mean.like(tensor([0.0])).up_to(bound)}, 3, 1.0)._entries[0].step for bound in (1.0, 1e6)
    )
    assert narrow * 2**20 == wide


def test_parts_that_cannot_be_summed_are_refused_by_name():
    with refused("privacy.not-summable", ConfigError, part="map"):
        FixedPoint({"map": each}, 3, 1.0)
    with refused("privacy.not-summable", ConfigError, part="map"):
        FixedPoint({"map": each.like(torch.zeros(2))}, 3, 1.0)
    with refused("privacy.not-summable", ConfigError, part="delta"):
        FixedPoint({"delta": mean}, 3, 1.0)


def test_what_the_researcher_judges_is_not_masked():
    protection, cohort = Protection(configure(federation=SECURE), {}), Cohort((0, 1), everyone=True)
    with refused("privacy.not-summable", ConfigError, part="confusion"):
        protection.aggregator(1, {}, {"confusion": each}, cohort, {0: 1.0, 1: 1.0})
    with protection.judging():
        aggregator = protection.aggregator(1, {}, {"confusion": each}, cohort, {0: 1.0, 1: 1.0})
    for id in (0, 1):
        aggregator.accept(id, Reply(1.0, {"confusion": 10 + id}))
    assert aggregator.result()["confusion"] == {0: 10, 1: 11}


@pytest.mark.parametrize("method", [FedAvg(), FedNova(), pytest.param(Scaffold(), marks=pytest.mark.slow)])
def test_a_secure_run_differs_by_fixed_point_steps_alone(tiny_task, tmp_path, method):
    plain, secure = (run(tiny_task, tmp_path, method, 1, federation=federation) for federation in ({}, SECURE))
    assert furthest(plain, secure) < 1e-6


def test_secure_runs_repeat_to_the_bit_though_their_masks_do_not(tiny_task, tmp_path):
    one, two = (run(tiny_task, tmp_path, FedAvg(), 1, federation=SECURE) for _ in range(2))
    assert torch.equal(flat(one), flat(two))


def test_a_lost_client_is_left_out_of_a_secure_sum(tiny_task, tmp_path):
    def after_one_round(**federation):
        experiment = make_experiment(
            configure(federation={"retries": 0, "rounds": 1, **federation}), tiny_task, tmp_path, FedAvg(), host=Gone
        )
        return experiment, experiment.step()

    (plain, _), (secure, report) = after_one_round(), after_one_round(secure=True)
    assert furthest(plain, secure) < 1e-6
    assert report.lost == [2]
    assert report.participants == [0, 1, 3, 5]


def test_one_client_alone_is_too_few(tiny_task, tmp_path):
    experiment = make_experiment(configure(federation=SECURE), tiny_task, tmp_path)
    message = experiment.method.message(experiment.server)
    with refused("reply.too-few", TooFewReplies, usable=1, asked=1, needed=2):
        experiment.fleet.ask(
            experiment.method.train, [0], message, model=mean.like(message["model"]), loss=mean.like(0.0)
        )


@pytest.mark.parametrize("privacy", [{}, {"update_epsilon": 100.0, "noise_multiplier": 2.0}], ids=["sum", "noisy sum"])
def test_bytes_are_those_of_the_protocol(tiny_task, tmp_path, privacy):
    experiment = make_experiment(configure(federation=SECURE, privacy=privacy), tiny_task, tmp_path)
    report = experiment.step()
    numbers = sum(value.numel() for value in experiment.server.model.state_dict().values()) + 1
    # 5 clients, each: 8 bytes a number, two keys of 32 bytes, 4 sealed pairs of shares (82 bytes), 5 shares of 33
    # bytes, and hashes of 32 bytes of the seed and of 5 shares of either secret
    assert report.traffic["train"]["up"] == 5 * (8 * numbers + 64 + 4 * 82 + 5 * 33 + 11 * 32)


def test_bytes_to_clients_are_those_of_the_protocol(tiny_task, tmp_path):
    plain, secure = (
        make_experiment(configure(federation=federation), tiny_task, tmp_path).step().traffic["train"]["down"]
        for federation in ({}, SECURE)
    )
    # each of 5 clients gets the two keys of every member, and a sealed pair of shares from each of the 4 others
    assert secure - plain == 5 * (5 * 64 + 4 * 82)


@pytest.mark.parametrize("privacy", [{}, {"update_epsilon": 100.0, "noise_multiplier": 2.0}], ids=["sum", "noisy sum"])
def test_a_wrong_share_is_left_out_and_noted(tiny_task, tmp_path, monkeypatch, privacy):
    honest = Member.unmask

    def wrong(self, survivors):
        answer = honest(self, survivors)
        if self.id == 1:
            answer[0] = answer[0][0], answer[0][1] ^ 1
        return answer

    secure = run(tiny_task, tmp_path, FedAvg(), 1, federation=SECURE, privacy=privacy)
    monkeypatch.setattr(Member, "unmask", wrong)
    with pytest.warns(RuntimeWarning, match="client 1 gave a wrong share of the seed of member 0"):
        lied = run(tiny_task, tmp_path, FedAvg(), 1, federation=SECURE, privacy=privacy)
    assert privacy or torch.equal(flat(secure), flat(lied))


def test_a_wrong_share_is_the_client_s_and_not_that_of_the_client_with_its_number(monkeypatch):
    honest = Member.unmask
    monkeypatch.setattr(Member, "unmask", lambda self, sent: {} if self.id == 1 else honest(self, sent))
    secure = Secure({"loss": mean.like(0.0)}, (1, 5, 8), dict.fromkeys((1, 5, 8), 1.0))
    for id in (1, 5, 8):
        secure.accept(id, Reply(1.0, {"loss": 1.0}))
    secure.result()
    assert [trouble.partition(" gave ")[0] for trouble in secure.troubles] == ["client 5"]


def test_statistics_of_classes_without_samples_stay_away(tmp_path):
    case = Case(CCVR(virtual=20, retrain_epochs=1), "classification", tmp_path)
    plain, secure = case.run(), case.run(case.config(federation=SECURE))
    assert secure.reports[-1].figures["virtual"] == plain.reports[-1].figures["virtual"]
    assert not any(report.rejected for report in secure.reports)


def test_a_method_that_sees_each_client_is_refused_before_it_trains(tiny_task, tmp_path):
    with refused("config.conflict", ConfigError, key="federation.secure", excludes="method"):
        make_experiment(configure(federation=SECURE), tiny_task, tmp_path, MuPFL())
    make_experiment(configure(federation=SECURE), tiny_task, tmp_path, MuPFL(acmu=False, pkcf=False))


@pytest.mark.parametrize(
    ("federation", "key"),
    [
        ({"participation": 0.1}, "federation.secure"),
        ({"participation": 0.6, "sampling": "poisson", "rounds": 1}, "federation.sampling"),
    ],
)
def test_a_sum_of_one_client_is_refused_before_the_first_round(tiny_task, tmp_path, federation, key):
    with refused("config.conflict", key=key, excludes="federation.participation"):
        make_experiment(configure(federation=federation | {"secure": True}), tiny_task, tmp_path)
