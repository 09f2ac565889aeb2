"""Robust rules for sums over samples: by hand, against hostile clients, and consistent with their counts."""

import pytest
import torch
from tiny import configure, make_experiment
from torch import tensor

from raylt.core.client import Reply
from raylt.core.fleet.aggregation import Robust
from raylt.core.fleet.reductions import each, mean, total
from raylt.core.fleet.robust.sums import robust_sum
from raylt.methods.classifiers.ccvr import CCVR
from raylt.methods.classifiers.fed3r import Fed3R
from raylt.methods.classifiers.fedncm import FedNCM
from raylt.ops.moments import class_sums, moments_fault, moments_from_sums, nearest_moments

RULES = "median", "trimmed_mean", "norm_clipped_mean"
CLASSES = total.within({c: {"n": 1, "z": torch.empty(1)} for c in range(3)})


def entry(n, mean):
    return {"n": n, "z": n * tensor([mean])}


@pytest.mark.parametrize(
    ("rule", "mean"),
    [
        ("median", 2.0),
        ("trimmed_mean", (1 * 1 + 2 * 2 + 3 * 3) / 6),
        # values are moved to the distance 1 of the median 2.5: 1.5, 2, 3 and 3.5
        ("norm_clipped_mean", (1 * 1.5 + 2 * 2 + 3 * 3 + 4 * 3.5) / 10),
    ],
)
def test_a_class_is_summed_by_the_means_of_its_clients(rule, mean):
    values = [{0: entry(1, 1.0)}, {0: entry(2, 2.0)}, {0: entry(3, 3.0)}, {0: entry(4, 1e4)}, {1: entry(7, 5.0)}]
    if rule == "median":
        values.append({0: entry(1, 2.0)})
    summed = robust_sum(rule, CLASSES, values, [9] * len(values))
    n = 11 if rule == "median" else 10
    assert summed[0]["n"] == n
    assert summed[0]["z"].item() == pytest.approx(n * mean)
    assert summed[1] == {"n": 7, "z": tensor([35.0])}  # a class with one client has the plain sum
    two = robust_sum(rule, CLASSES, [{0: entry(1, 1.0)}, {0: entry(9, 2.0)}], [1, 9])  # and so has one with two
    assert two[0]["z"].item() == pytest.approx(19.0)


@pytest.mark.parametrize(("means", "kept"), [((1.0, 2.0, 1e4), 1.5), ((1.0, 2.0, 3.0, 1e4, 1e4), 2.0)])
def test_a_quarter_of_the_clients_is_trimmed_rounded_up(means, kept):
    summed = robust_sum("trimmed_mean", CLASSES, [{0: entry(1, mean)} for mean in means], [1] * len(means))
    assert summed[0]["z"].item() == pytest.approx(len(means) * kept)


def test_blocks_are_of_two_clients_where_ten_have_the_class():
    values = [{0: entry(1, float(i))} for i in range(10)]  # the means of the blocks are 0.5, 2.5, 4.5, ...
    assert robust_sum("median", CLASSES, values, [1] * 10)[0]["z"].item() == pytest.approx(10 * 4.5)
    values[0] = {0: entry(1, 1e6)}
    assert robust_sum("median", CLASSES, values, [1] * 10)[0]["z"].item() == pytest.approx(10 * 6.5)


@pytest.mark.parametrize("rule", RULES)
def test_columns_are_classes_and_counts_stay(rule):
    # D + 1 = 2, C = 2; five clients have two samples of class 0, one of these clients is hostile; one client has class
    # 1
    honest = tensor([[2.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    hostile = tensor([[-2e3, 0.0], [2.0, 0.0]], dtype=torch.float64)
    other = tensor([[0.0, 9.0], [0.0, 3.0]], dtype=torch.float64)
    summed = robust_sum(rule, total.by_column(), [honest] * 4 + [hostile, other], [2] * 5 + [3])
    assert summed.tolist() == [[10.0, 9.0], [10.0, 3.0]]


@pytest.mark.parametrize("rule", RULES)
def test_a_part_without_classes_is_trimmed(rule):
    values = [n * tensor([1.0, 2.0]) for n in (1, 2, 3)] + [4 * tensor([1e3, -1e3])]
    assert robust_sum(rule, total, values, [1, 2, 3, 4]).tolist() == [10.0, 20.0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("hostile", [0, 1, 2])
def test_two_of_ten_hostile_clients_move_no_mean_far(rule, hostile):
    generator = torch.Generator().manual_seed(0)
    values = []
    for k in range(10):
        z = 5 + torch.randn(3 + k, 4, generator=generator, dtype=torch.float64)
        values.append(class_sums(-10 * z if k < hostile else z, torch.zeros(len(z), dtype=torch.int64)))
    part = total.within({0: {"n": 1, "z": torch.empty(4), "zz": torch.empty(10)}}).bounded({}, nearest_moments)
    summed = robust_sum(rule, part, values, [3 + k for k in range(10)])
    n, mean, cov = moments_from_sums(summed[0])
    assert n == sum(3 + k for k in range(10))
    assert (mean - 5).abs().max() < 1.5
    assert moments_fault(summed) is None
    assert cov.diagonal().max() < 50


class Enlarged(FedNCM):
    def statistics(self, client, message):
        reply = super().statistics(client, message)
        if client.id != 0:
            return reply
        return client.reply(
            classes={c: of_class | {"z": 10 * of_class["z"]} for c, of_class in reply.tree["classes"].items()}
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [CCVR(virtual=20, retrain_epochs=1), Fed3R(), Enlarged()], ids=lambda method: method.name
)
@pytest.mark.parametrize("rule", RULES)
def test_methods_finish_with_robust_sums(tiny_task, tmp_path, method, rule):
    config = configure(federation={"rounds": 1, "robust": rule})
    experiment = make_experiment(config, tiny_task, tmp_path, method)
    reports = []
    while not experiment.done:
        reports.append(experiment.step())
    assert not any(report.rejected or report.lost for report in reports)
    assert reports[-1].accuracy is not None


def test_replies_are_combined_by_the_rule_of_the_run_and_the_samples_of_those_who_replied():
    samples = {id: 1 + id for id in range(6)}  # the first client does not reply
    values = dict(zip(range(1, 6), (0.0, 1.0, 5.0, 6.0, 10.0), strict=True))
    first = Robust({"model": mean, "sums": total, "loss": each}, list(samples), "trimmed_mean", samples)
    for aggregator in (first, first.empty()):  # the second is for replies of another layout
        sums = {id: {"z": samples[id] * tensor([value])} for id, value in values.items()}
        for id, value in values.items():
            parts = {"model": {"w": tensor([value])}, "sums": sums[id], "loss": value}
            aggregator.accept(id, Reply(samples[id], parts))
        replies = aggregator.result()
        assert replies["model"]["w"].item() == 4  # (1 + 5 + 6) / 3; the median is 5
        expected = robust_sum("trimmed_mean", total, list(sums.values()), [samples[id] for id in values])
        assert torch.equal(replies["sums"]["z"], expected["z"])
        assert replies["loss"] == values
