"""FedSM and CLIP2FL with a teacher: one client's lie about a part of its replies ends no run and blames no other."""

import math

import pytest
import teachers
import torch
from torch import Tensor

from raylt.contract.case import Case, make_task
from raylt.contract.checks import fault_of, lies_blame_nobody_else
from raylt.contract.lies import LIAR, replaced
from raylt.core.client import Reply
from raylt.core.fleet.client_host import ClientHost
from raylt.methods import METHODS

FIELDS = {
    "fedsm": {"retrain_rounds": 1, "size": 5, "retrain_epochs": 1},
    "fedsm, trained encoders": {"retrain_rounds": 1, "size": 5, "retrain_epochs": 1, "encoders": "trained"},
    "fedsm, afterwards": {"retrain_rounds": 1, "size": 5, "retrain_epochs": 1, "retrain": "after", "norm": "l2"},
    "clip2fl": {"per_class": 5, "matching_steps": 3, "retrain_epochs": 1, "contrast": 0.5},
}


# all but the first run with the slow tests
KINDS = [pytest.param(kind, marks=pytest.mark.slow if number else []) for number, kind in enumerate(FIELDS)]


def scaled(factor):
    return lambda x: x * factor if is_float(x) else x


def is_float(x):
    return x.is_floating_point() if isinstance(x, Tensor) else type(x) is float


def counted(change):
    return lambda x: x if is_float(x) or (isinstance(x, Tensor) and x.dtype == torch.bool) else change(x)


# by part, for all calls: lies that are rejected in each call that has the part
REJECTED = {
    "model": {
        "x 1000": scaled(1000.0),
        "x 1e6": scaled(1e6),
        "negative variances": scaled(-1.0),
        "nan": scaled(math.nan),
    },
    "classifier": {"x 1e6": scaled(1e6), "nan": scaled(math.nan)},
    "teacher": {
        "one more": counted(lambda x: x + 1),
        "none": counted(lambda x: x * 0),
        "negative": counted(lambda x: -x),
    },
    "classes": {
        "one more": counted(lambda x: x + 1),
        "x 1e6": scaled(1e6),
        "x -1": scaled(-1.0),
        "nan": scaled(math.nan),
    },
    "gradients": {"x 10": scaled(10.0), "x -1": scaled(-1.0), "nan": scaled(math.nan)},
    "loss": {"nan": scaled(math.nan), "x 1e300": scaled(1e300)},
}
# lies that look like a client's reply: the run ends, and no client is rejected for them
BELIEVED = {
    "model": {"x 10": scaled(10.0), "zero": lambda x: x * 0 if is_float(x) else x},
    "gradients": {"zero": scaled(0.0)},
    "classes": {"x 0.5": scaled(0.5), "zero": scaled(0.0)},
    "loss": {"x 1e9": scaled(1e9), "x -10": scaled(-10.0)},
    "shares": {"x 1e9": scaled(1e9)},
    "retrain_loss": {"x 1e9": scaled(1e9)},
    "drift": {"x 1e9": scaled(1e9)},
}


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    def make(kind):
        folder = tmp_path_factory.mktemp("taught")
        teacher = teachers.save_features(folder / "f.npz", make_task())
        return Case(METHODS[kind.partition(",")[0]](teacher=teacher, **FIELDS[kind]), "classification", folder)

    return make


def outcome(case, part, lie):
    """Run three rounds in which a client lies about a part.

    Returns:
        The rejected and lost clients, and whether the client sent the part.
    """
    lied = []

    class Lying(ClientHost):
        def run(self, fn, message, round, id, shard, private):
            reply, after = super().run(fn, message, round, id, shard, private)
            if id != LIAR or not isinstance(reply, Reply) or part not in reply.tree:
                return reply, after
            lied.append(round)
            return Reply(reply.weight, reply.tree | {part: replaced(reply.tree[part], lie)}), after

    config = case.config(federation={"rounds": 3, "retries": 0})
    reports = case.run(config, host=Lying).reports
    assert all(math.isfinite(x) for report in reports for x in report.figures.values() if isinstance(x, float))
    return {id for report in reports for id in [*report.rejected, *report.lost]}, bool(lied)


def lies(outcomes):
    return [pytest.param(part, lie, id=f"{part} {what}") for part, all in outcomes.items() for what, lie in all.items()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("part", "lie"), lies(REJECTED))
def test_a_lie_that_no_samples_make_is_rejected(case_of, kind, part, lie):
    refused, lied = outcome(case_of(kind), part, lie)
    assert refused == ({LIAR} if lied else set())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("part", "lie"), lies(BELIEVED))
def test_a_lie_that_looks_honest_ends_no_run_and_blames_nobody(case_of, kind, part, lie):
    assert outcome(case_of(kind), part, lie)[0] == set()


def test_sums_of_unit_features_that_are_longer_than_their_number_are_rejected(case_of):
    assert outcome(case_of("fedsm, afterwards"), "classes", scaled(3.0)) == ({LIAR}, True)


@pytest.mark.parametrize("kind", FIELDS)
def test_a_client_that_lies_in_every_part_is_the_only_one_blamed(case_of, kind):
    assert fault_of(lies_blame_nobody_else, case_of(kind)) is None
