"""A run survives one hostile client: it ends as if the client had been lost, or as if nothing had happened."""

from collections import OrderedDict
from functools import cache

import numpy as np
import pytest
import torch
from hostile import COMPARED, COUNTS, KINDS, Hostile, Judged
from tiny import configure, make_experiment

from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.client import Reply
from raylt.core.fleet.reductions import mean
from raylt.core.fleet.wire import Fault, Unusable, packed, sendable, unpacked
from raylt.errors import CODES


@pytest.fixture(scope="module")
def ended(tiny_task, tmp_path_factory):
    """Return a function that runs with a hostile client and returns the hash of the model and the reports."""

    @cache
    def run(kind, culprit=0, method=Hostile):
        config = configure(federation={"rounds": 2, "retries": 0}, evaluation={"every": 9})
        experiment = make_experiment(
            config, tiny_task, tmp_path_factory.mktemp("run"), method(kind=kind, culprit=culprit)
        )
        reports = []
        while not experiment.done:
            reports.append(experiment.advance())
        return hash_tensors(experiment.server.model.state_dict()), reports

    return run


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("culprit", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_hostile_client_affects_its_own_reply_only(ended, kind, culprit):
    hash, reports = ended(kind, culprit)
    outcome = KINDS[kind][0]
    refused = {id for report in reports for id in [*report.rejected, *report.lost]}
    if outcome == "rejected":
        assert hash == ended("lost", culprit)[0] != ended("", culprit)[0]
        assert refused == {culprit}
        reasons = [reason for report in reports for reason in report.rejected.values()]
        assert all(len(reason) < 300 and "\n" not in reason for reason in reasons)
    else:
        assert refused == set()
        assert (hash == ended("", culprit)[0]) == (outcome == "harmless")
    assert all(len(report.participants) == 5 - (culprit in refused) for report in reports[1:])


@pytest.mark.parametrize("kind", COUNTS)
def test_a_judgement_counts_only_with_the_counts_of_the_test_set(ended, kind):
    _, reports = ended(kind, 0, Judged)
    _, lost = ended("lost", 0, Judged)
    assert list(reports[-1].rejected) == [0]
    assert reports[-1].rejected[0].startswith("confusion")
    for figure in ("accuracy", "macro", "clients", "by_client"):
        assert getattr(reports[-1], figure) == getattr(lost[-1], figure)
    assert reports[-1].by_client["owned"][0] is None


@pytest.mark.slow
def test_without_templates_the_replies_that_most_clients_sent_refuse_it_as_well(tiny_task, tmp_path):
    experiment = make_experiment(configure(federation={"retries": 0}), tiny_task, tmp_path)
    fleet, message = experiment.fleet, experiment.method.message(experiment.server)
    for kind, (outcome, _) in KINDS.items():
        if kind in COMPARED:
            continue
        fleet.begin(2)
        got = fleet.ask(Hostile(kind=kind).train, fleet.everyone, message, model=mean, loss=mean)
        refused = {*fleet.round_stats.rejected, *fleet.round_stats.lost}
        assert (refused == {0}) == (outcome == "rejected"), kind
        assert len(got.weights) == len(fleet.ids) - len(refused)


@pytest.mark.parametrize("where", ["reply", "state"])
def test_a_reply_or_a_state_takes_no_more_than_its_room(where):
    small, large = {"x": torch.zeros(10)}, {"x": torch.zeros(10), "y": torch.zeros(16)}
    for tree, fits in ((small, True), (large, False)):
        reply, state = (Reply(1.0, tree), {}) if where == "reply" else (Reply(1.0, {}), tree)
        sent, _ = sendable(reply, state, room=100)  # bytes
        assert isinstance(sent, Reply) == fits
    assert sent.fault.code == "reply.too-large"


@pytest.mark.parametrize(
    "fault",
    ["a text", None, Fault("reply.no-such-code", "short"), Fault(7, "short"), Fault("reply.missing", "x" * 9999)],
)
def test_a_fault_that_a_client_sends_has_a_code_that_exists_and_a_short_text(fault):
    arrived = unpacked(Unusable(fault, nbytes=3))
    assert isinstance(arrived, Unusable)
    assert arrived.fault.code in CODES
    assert len(arrived.fault.text) <= 400
    assert arrived.nbytes == 3


def dicts_in_dicts(number):
    tree = {}
    for _ in range(number):
        tree = {"inner": tree}
    return tree


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "code"),
    [
        (dicts_in_dicts(16), None),
        (dicts_in_dicts(17), "reply.too-large"),
        ({1 - 2**63: 0.0, 2**63 - 1: 0.0}, None),
        ({2**63: 0.0}, "reply.not-sendable"),
        ({"x" * 500: 0.0}, None),
        ({"x" * 501: 0.0}, "reply.not-sendable"),
        ({"text": "x" * 10_000}, None),
        ({"text": "x" * 10_001}, "reply.too-large"),
        (dict.fromkeys(range(200_000), 0), None),
        (dict.fromkeys(range(200_001), 0), "reply.too-large"),
        ({"inner": {number: {} for number in range(200_000)}}, "reply.too-large"),
    ],
    ids=["deep", "deeper", "64 bits", "65 bits", "name", "long name", "text", "long text", "names", "more", "dicts"],
)
def test_each_process_lets_names_and_texts_pass_up_to_their_limits(tree, code):
    for checked in (sendable(Reply(1.0, tree), {}, room=100)[0], unpacked(Reply(1.0, tree))):
        if code is None:
            assert checked == Reply(1.0, tree)
        else:
            assert isinstance(checked, Unusable)
            assert checked.fault.code == code


def test_a_process_that_sends_its_own_classes_sends_nothing_usable():
    assert isinstance(unpacked(Reply(1.0, {"x": 1.0})), Reply)
    assert isinstance(unpacked(Reply(1.0, OrderedDict(x=1.0))), Unusable)
    for values in (np.ones(1, np.uint16), np.ones(1, np.complex64), np.array([None])):
        assert isinstance(unpacked(Reply(1.0, {"x": values})), Unusable)
    assert unpacked(Unusable(Fault("reply.missing", "x is missing"), nbytes="many")).nbytes == 0


def test_numbers_of_numpy_arrive_as_plain_ones():
    reply, state = sendable(Reply(np.float32(3), {"n": np.int64(5)}), {"m": np.float64(0.5)}, room=100)
    arrived = unpacked(packed(reply, state)[0])
    values = arrived.weight, arrived.tree["n"], state["m"]
    assert values == (3.0, 5, 0.5)
    assert [type(value) for value in values] == [float, int, float]
