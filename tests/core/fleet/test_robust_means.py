"""Robust rules for means: by hand, against numpy and scipy, and in whole rounds with hostile clients."""

import numpy as np
import pytest
import torch
from refusals import refused
from rounds import flat, run
from scipy.stats import trim_mean
from small_runs import QUICK
from tiny import configure, make_experiment
from torch import tensor

from raylt.config import completed, differences, load, settled
from raylt.contract.case import Case
from raylt.contract.lies import FRAMEWORK_CALLS
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.fleet.robust.means import robust_mean
from raylt.errors import ConfigError
from raylt.methods import METHODS
from raylt.methods.fedavg import FedAvg
from raylt.methods.local import Local
from raylt.methods.mupfl.method import MuPFL

RULES = "median", "trimmed_mean", "norm_clipped_mean"


class Hostile(FedAvg):
    """FedAvg whose client 0 reverses its update of the weights and multiplies it by 200."""

    def train(self, client, message):
        reply = super().train(client, message)
        if client.id:
            return reply
        start = message["model"]
        return client.reply(
            loss=reply.tree["loss"],
            model={
                name: value if "running" in name or "num" in name else start[name] - 200 * (value - start[name])
                for name, value in reply.tree["model"].items()
            },
        )


class Noting(LocalFleet):
    """A fleet that notes which parts are asked for as `each`."""

    def ask(self, fn, cohort, message, weights=None, /, **parts):
        if fn.__name__ not in FRAMEWORK_CALLS:
            seen = self.__dict__.setdefault("seen", set())
            seen.update(name for name, part in parts.items() if part.kind == "each")
        return super().ask(fn, cohort, message, weights, **parts)


def part(*rows):
    return [{"w": tensor(row), "n": number} for row, number in rows]


@pytest.fixture
def values():
    """Return the values of 11 clients: a matrix, a batch counter and a number."""
    rng = torch.Generator().manual_seed(0)
    return [
        {"deep": {"w.x": torch.randn(3, 4, generator=rng)}, "count": tensor(i), "loss": float(i * i)} for i in range(11)
    ]


def test_median_of_an_even_number_is_between_the_two_in_the_middle():
    rows = part(([1.0, 9.0], 4.0), ([3.0, -50.0], 1.0), ([100.0, 8.0], 2.0), ([2.0, 7.0], -9.0))
    got = robust_mean("median", rows, [1, 1, 1000, 1])
    assert got["w"].tolist() == [2.5, 7.5]
    assert got["n"] == 1.5


def test_trimmed_mean_leaves_one_of_three_on_either_side():
    got = robust_mean("trimmed_mean", part(([1.0], 0.0), ([5.0], 0.0), ([1e6], 0.0)), [1, 1, 1])
    assert got["w"].tolist() == [5.0]


def test_trimmed_mean_of_ten_leaves_two_on_either_side():
    rows = part(*(([float(x)], 0.0) for x in (*range(8), 1e6, 1e6)))
    assert robust_mean("trimmed_mean", rows, [1] * 10)["w"].tolist() == [4.5]  # of 2 to 7


def test_norm_clipped_mean_draws_in_what_is_far():
    # medians (0, 0), distances 1, 1, 0, 1, 1000, so radius 1; (1 - 1 + 0 + 0 + 1) / 5 and (0 + 0 + 0 - 1 + 0) / 5
    rows = [{"w": tensor(row)} for row in ([1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [0.0, -1.0], [1000.0, 0.0])]
    got = robust_mean("norm_clipped_mean", rows, [2, 2, 2, 2, 2])
    assert torch.allclose(got["w"], tensor([0.2, -0.2]))


def test_norm_clipped_mean_of_what_lies_near_is_the_weighted_mean():
    # distances from the median 0 are 1, 0, 1; their median is 1
    got = robust_mean("norm_clipped_mean", [{"w": tensor([x])} for x in (-1.0, 0.0, 1.0)], [1, 1, 2])
    assert got["w"].item() == pytest.approx(0.25)


def test_norm_clipped_mean_moves_no_client_that_is_nearer_than_the_radius():
    # distances from the median 3 are 3, 2, 0, 7, 8, so radius 3; 3 + (-1*3 - 2*2 + 0 + 4*3 + 6*3) / 16
    rows = [{"w": tensor([x])} for x in (0.0, 1.0, 3.0, 10.0, 11.0)]
    got = robust_mean("norm_clipped_mean", rows, [1, 2, 3, 4, 6])
    assert got["w"].item() == pytest.approx(3 + 23 / 16)


def test_norm_clipped_mean_measures_a_client_by_all_of_its_entries_together():
    # medians 0, lengths 4, 0.5 * 10, 3, 0 and 1 * 10, so radius 4 and shares 1, 0.8, 1, 1 and 0.4
    rows = [
        {"short": tensor([short]), "long": torch.full((100,), long)}
        for short, long in ((4.0, 0.0), (0.0, 0.5), (-3.0, 0.0), (0.0, 0.0), (0.0, -1.0))
    ]
    got = robust_mean("norm_clipped_mean", rows, [1, 2, 1, 1, 1])
    assert got["short"].item() == pytest.approx((4 - 3) / 6)
    assert torch.allclose(got["long"], torch.full((100,), (2 * 0.8 * 0.5 - 0.4) / 6))


def test_of_an_even_number_of_counters_the_lower_middle_one_is_taken():
    rows = [{"count": tensor(count)} for count in (9, 1, 4, 2)]
    assert robust_mean("median", rows, [1, 1, 1, 1])["count"].item() == 2


@pytest.mark.parametrize(
    ("rule", "oracle"), [("median", lambda x: np.median(x, 0)), ("trimmed_mean", lambda x: trim_mean(x, 0.2, 0))]
)
def test_entries_are_those_of_numpy_and_scipy(values, rule, oracle):
    got = robust_mean(rule, values, [1.0] * 11)
    assert np.allclose(got["deep"]["w.x"], oracle(np.stack([v["deep"]["w.x"].numpy() for v in values])))
    assert got["loss"] == pytest.approx(float(oracle(np.array([v["loss"] for v in values]))))


@pytest.mark.parametrize("rule", RULES)
def test_types_and_names_stay_and_counters_take_their_median(values, rule):
    got = robust_mean(rule, values, [1.0] * 11)
    assert got["deep"]["w.x"].dtype == torch.float32
    assert (got["count"].item(), got["count"].dtype) == (5, torch.int64)
    assert list(got) == ["deep", "count", "loss"]


@pytest.mark.parametrize("rule", RULES)
def test_what_a_client_leaves_out_counts_as_zero(rule):
    got = robust_mean(rule, [{"a": tensor([3.0])}, {}, {}], [1, 1, 1])
    assert got["a"].item() == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [1, 2])
def test_one_or_two_replies_have_no_outlier(rule, k):
    got = robust_mean(rule, [{"w": tensor([2.0])}, {"w": tensor([4.0])}][:k], [1, 1][:k])
    assert got["w"].item() == (2.0 if k == 1 else 3.0)


@pytest.mark.parametrize("rule", RULES)
def test_a_hostile_client_moves_a_robust_model_little_and_a_mean_far(tiny_task, tmp_path, rule):
    honest, plain, robust = (
        flat(run(tiny_task, tmp_path, method, 1, federation={"robust": chosen}))
        for method, chosen in ((FedAvg(), None), (Hostile(), None), (Hostile(), rule))
    )
    assert (robust - honest).norm() < 0.1 * (plain - honest).norm()


def test_a_rule_is_not_the_plain_mean_and_repeats(tiny_task, tmp_path):
    plain, *robust = (
        flat(run(tiny_task, tmp_path, FedAvg(), 1, federation={"robust": rule}))
        for rule in (None, "median", "median", "trimmed_mean", "norm_clipped_mean")
    )
    assert torch.equal(robust[0], robust[1])
    assert not any(torch.equal(plain, model) for model in robust)


@pytest.mark.parametrize("method", [Local(), MuPFL()], ids=lambda method: method.name)
def test_methods_that_average_nothing_are_refused_by_name(tiny_task, tmp_path, method):
    with refused("config.conflict", ConfigError, key="federation.robust", excludes="method") as caught:
        make_experiment(configure(federation={"robust": "median"}), tiny_task, tmp_path, method)
    assert method.name in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("fedavg", "ccvr", "mupfl") else pytest.param(name, marks=pytest.mark.slow)
        for name, method in METHODS.items()
        if "classification" in method.problems
    ],
)
def test_methods_say_which_parts_they_see_of_each_client(tmp_path, name):
    case = Case(METHODS[name](**QUICK.get(name, {})), "classification", tmp_path)
    trace = case.run(fleet=Noting)
    assert trace.experiment.fleet.seen == set(case.method.sees_each)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "name",
    [
        "fednova",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("scaffold", "fedrod", "bpfed", "sfd", "fedadam")),
    ],
)
def test_methods_with_other_parts_than_a_model_run_with_every_rule(tmp_path, name, rule):
    case = Case(METHODS[name](**QUICK.get(name, {})), "classification", tmp_path)
    report = case.run(case.config(federation={"robust": rule})).reports[-1]
    assert report.accuracy is not None
    assert not report.rejected


def test_a_rule_is_part_of_what_a_run_is_and_runs_from_before_had_none():
    plain, robust = (settled(load(None, ["method=fedavg", *more])) for more in ([], ["federation.robust=median"]))
    assert list(differences(plain, robust)) == [("federation.robust", None, "median")]
    for name in ("robust", "secure", "sampling"):
        del plain["federation"][name]
    del plain["privacy"]
    assert completed(plain) == settled(load(None, ["method=fedavg"]))
