"""A reply that is far longer than all others is rejected, in every process alike."""

import pytest
import torch
from small_runs import QUICK
from test_block_sums import IDS, LIKE, PARTS, Scripted, ask, outcome, reply_of, tell

from raylt.contract.case import Case
from raylt.contract.lies import replaced
from raylt.core.client import Reply
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.reductions import each, mean, total
from raylt.core.fleet.robust import outliers
from raylt.core.fleet.robust.outliers import CLOSE, FACTOR, SHORT, SHORT_SUM, LengthBound, exceeds, length
from raylt.core.fleet.schema import Schema
from raylt.methods import METHODS
from raylt.tree import without_values

LIAR = 0


def times(factor: float, reply: Reply) -> Reply:
    model = reply.tree["model"]
    return Reply(reply.weight, reply.tree | {"model": model | {"w": factor * model["w"]}})


@pytest.mark.parametrize("blocked", [(), (0,), (1, 2), (0, 1, 2)])
def test_a_reply_far_longer_than_the_others_is_rejected_in_every_process_alike(blocked):
    answers = {id: reply_of(id) for id in IDS}
    lost = answers | dict.fromkeys((IDS[0], IDS[70]))
    answers |= {IDS[0]: times(1e4, answers[IDS[0]]), IDS[70]: times(-1e5, answers[IDS[70]])}
    fleet, got = ask(answers, blocked, quorum=0.5)
    assert list(fleet.round_stats.rejected) == [IDS[0], IDS[70]]
    assert all("the median of the replies" in reason for reason in fleet.round_stats.rejected.values())
    expected = ask(lost, quorum=0.5)[1]
    assert torch.equal(got["model"]["w"], expected["model"]["w"])
    assert got.weights == expected.weights
    assert outcome(fleet, got) == outcome(*ask(answers, quorum=0.5))


@pytest.mark.parametrize(("blocked", "part"), [((), mean), ((0, 1, 2), mean), ((), each)])
def test_where_most_replies_are_long_none_is_rejected(blocked, part):
    """Clients' training diverges, so lengths are no sign of a lie."""
    answers = {id: times(1 if number % 10 == 3 else 1e4, reply_of(id)) for number, id in enumerate(IDS)}
    fleet, got = ask(answers, blocked, parts=PARTS | {"loss": part}, quorum=0.5)
    assert not fleet.round_stats.rejected
    assert list(got.weights) == IDS
    assert part is mean or list(got["loss"]) == IDS
    weights = sum(reply.weight for reply in answers.values())
    plain = sum(reply.weight * reply.tree["model"]["w"].double() for reply in answers.values()) / weights
    assert torch.allclose(got["model"]["w"], plain.float(), rtol=1e-5)


def test_the_medians_are_computed_once_however_many_replies_are_suspicious(monkeypatch):
    computed = []
    median = outliers.statistics.median
    monkeypatch.setattr(outliers.statistics, "median", lambda values: computed.append(1) or median(values))
    fleet, _ = ask({id: times(1e4, reply_of(id)) for id in IDS}, quorum=0.5)
    assert not fleet.round_stats.rejected
    assert 0 < len(computed) <= 2 * len(PARTS)


@pytest.mark.parametrize(("count", "rejected"), [(2, set()), (3, {IDS[1]})])
def test_two_replies_have_no_majority(count, rejected):
    answers = {id: reply_of(id) for id in IDS[:count]}
    answers[IDS[1]] = times(1e5, answers[IDS[1]])
    fleet = Scripted(answers, quorum=0.5)
    fleet.ask(tell, IDS[:count], {}, **PARTS)
    assert fleet.round_stats.rejected.keys() == rejected


@pytest.mark.parametrize(("factor", "rejected"), [(0.99, False), (1.01, True)])
@pytest.mark.parametrize("sent", [0.0, 30.0])
def test_the_bound_is_a_multiple_of_what_was_sent_and_never_short(factor, rejected, sent):
    like = {"w": torch.tensor([0.6, 0.8]) * sent}
    assert length(like) == pytest.approx(sent)
    unit = {"w": torch.tensor([0.8, -0.6])}
    replies = {id: Reply(1.0, {"model": unit}) for id in IDS[:4]}
    bound = max(SHORT, CLOSE * sent)
    replies[IDS[2]] = Reply(1.0, {"model": {"w": unit["w"] * factor * bound}})
    schema = Schema({"model": mean.like(like)}, dict.fromkeys(IDS, 1))
    assert schema.length_bounds["model"].unsuspicious == pytest.approx(bound)
    summed = schema.restricted_to(IDS[:4]).sum_block(IDS[:4], list(replies.values()))
    assert isinstance(summed[2], Reply) == rejected
    assert sum(isinstance(reply, Reply) for reply in summed) == rejected


@pytest.mark.parametrize(("own", "waits"), [(999.0, False), (1001.0, True)])
def test_a_reply_up_to_the_length_1000_is_never_compared(own, waits):
    bounds = {"model": LengthBound(sent=1.0, per_sample=False)}
    assert exceeds({"model": own}, bounds) == waits


@pytest.mark.parametrize(
    ("times_length", "times_samples", "rejected"),
    [
        (49, 1, False),
        (51, 1, True),
        (51, 0.1, True),
        (51, 1.1, False),  # per sample 46 times
        (400, 1, True),
        (499, 1000, False),  # its samples explain the length
        (501, 1000, True),
    ],
)
def test_a_length_that_samples_do_not_explain_has_the_closer_bound(times_length, times_samples, rejected):
    usual = 4 * SHORT
    bound = LengthBound(sent=usual / 2, per_sample=False)
    own = times_length * usual
    assert own > bound.unsuspicious or not rejected
    assert bound.is_exceeded(own, round(200 * times_samples), usual, usual / 200) == rejected
    # a sum is compared per sample, which is explained already
    assert LengthBound(0.0, True).is_exceeded(own * 1e6, 200, usual * 1e6, usual * 1e6 / 200) == (times_length > FACTOR)


@pytest.mark.parametrize(("times_median", "times_sent"), [(1.0, 60.0), (60.0, 1.0)])
def test_the_closer_bound_is_for_what_exceeds_the_median_and_what_was_sent(times_median, times_sent):
    own = 100 * SHORT
    bound = LengthBound(sent=own / times_sent, per_sample=False)
    assert not bound.is_exceeded(own, 1, own / times_median, own / 60)


def test_an_honest_client_with_most_of_the_samples_is_kept():
    # 42 times as long as the others, and longer than SHORT
    like = {"w": torch.tensor([35.0, 47.0])}
    answers = {id: Reply(1 + id % 9, {"model": {"w": torch.tensor([36.0, 48.0])}}) for id in IDS}
    answers[IDS[1]] = Reply(1 + IDS[1] % 9, {"model": {"w": torch.tensor([1500.0, 2000.0])}})
    fleet, _ = ask(answers, (), parts={"model": mean.like(like)})
    assert fleet.round_stats.rejected == {}


def test_differences_of_variances_may_be_negative():
    like = {"norm.running_var": torch.ones(2)}
    answers = {id: Reply(1 + id % 9, {"update": {"norm.running_var": torch.tensor([0.5, -0.1])}}) for id in IDS}
    fleet, got = ask(answers, (), parts={"update": mean.like(like)})
    assert fleet.round_stats.rejected == {}
    assert got["update"]["norm.running_var"].tolist() == pytest.approx([0.5, -0.1])


def test_parts_of_models_and_sums_are_compared():
    parts = {
        "model": mean.like(LIKE),
        "update": each.like(LIKE).up_to(1e6),
        "values": each.like(LIKE),
        "figures": each.like(LIKE).up_to(10.0),
        "steps": mean.like(LIKE).up_to(1e18),
        "without": mean,
        "sums": total.like(LIKE),
    }
    bounds = {name: bound.unsuspicious for name, bound in Schema(parts, {1: 1}).length_bounds.items()}
    assert bounds == {"model": SHORT, "update": SHORT, "sums": SHORT_SUM}


@pytest.mark.parametrize(
    ("blocked", "factor", "rejected"), [((), 9e5, False), ((), 1.1e6, True), ((0, 1, 2), 1.1e6, True)]
)
def test_sums_are_compared_by_their_length_per_sample(blocked, factor, rejected):
    part = total.like(torch.zeros(2))
    unit = torch.tensor([0.6, 0.8])
    answers = {id: Reply(1 + id % 9, {"sums": (1 + id % 9) * unit}) for id in IDS}
    answers[IDS[1]] = Reply(1 + IDS[1] % 9, {"sums": (1 + IDS[1] % 9) * factor * unit})
    fleet, _ = ask(answers, blocked, parts={"sums": part})
    assert list(fleet.round_stats.rejected) == [IDS[1]] * rejected


@pytest.mark.parametrize("blocked", [(), (0, 1, 2)])
def test_no_model_has_a_negative_variance(blocked):
    like = {"w": torch.ones(2), "norm.running_var": torch.tensor([1.0, 0.0])}  # a dead feature has none
    answers = {id: Reply(1 + id % 9, {"model": like}) for id in IDS}
    answers[IDS[1]] = Reply(1 + IDS[1] % 9, {"model": like | {"norm.running_var": torch.tensor([0.5, -0.1])}})
    fleet, _ = ask(answers, blocked, parts={"model": mean.like(like)})
    assert fleet.round_stats.rejected == {IDS[1]: "model.norm.running_var holds a negative variance (-0.1)"}
    # an update may be negative, and its template has no values
    fleet, _ = ask(answers, blocked, parts={"model": mean.like(without_values(like))})
    assert not fleet.round_stats.rejected


@pytest.mark.parametrize(
    ("federation", "compares"), [({}, True), ({"robust": "median"}, False), ({"secure": True}, False)]
)
def test_robust_rules_and_secure_sums_compare_no_lengths(federation, compares):
    parts = {"model": mean.like(LIKE)}
    answers = {id: Reply(reply_of(id).weight, {"model": reply_of(id).tree["model"]}) for id in IDS[:6]}
    fleet = Scripted(answers | {IDS[1]: times(1e4, answers[IDS[1]])}, **federation)
    fleet.ask(tell, IDS[:6], {}, **parts)
    assert fleet.round_stats.rejected.keys() == ({IDS[1]} if compares else set())


@pytest.mark.parametrize("federation", [{}, {"secure": True}, {"robust": "median"}])
@pytest.mark.parametrize("number", [2**53 + 1, 2**63, -(2**70)])
def test_a_whole_number_that_no_tensor_holds_is_rejected(federation, number):
    answers = {id: Reply(reply_of(id).weight, {"loss": 0.5}) for id in IDS[:6]}
    answers[IDS[1]] = Reply(answers[IDS[1]].weight, {"loss": number})
    fleet = Scripted(answers, **federation)
    got = fleet.ask(tell, IDS[:6], {}, loss=mean.like(0.0))
    assert list(fleet.round_stats.rejected) == [IDS[1]]
    assert got["loss"] == pytest.approx(0.5)


def host(factor: float, part: str) -> type[ClientHost]:
    """Return a host whose client LIAR sends a part of its replies `factor` times as long."""

    class Lying(ClientHost):
        def run(self, fn, message, round, id, shard, private):
            reply, after = super().run(fn, message, round, id, shard, private)
            if id != LIAR or not isinstance(reply, Reply) or part not in reply.tree:
                return reply, after
            longer = replaced(reply.tree[part], lambda x: x * factor if x.is_floating_point() else x)
            return Reply(reply.weight, reply.tree | {part: longer}), after

    return Lying


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "part", "factor"),
    [
        ("fedavg", "model", 400.0),
        ("scaffold", "model", 400.0),
        ("fedavg", "model", 700.0),
        ("fedavg", "model", -1.0),
        ("fedavg", "model", 1e3),
        ("fednova", "direction", 1e5),
        ("fednova", "direction", 1e6),
        ("scaffold", "control", 1e6),
        ("bpfed", "model", 1e4),
        ("fedic", "model", 1e4),
        ("mupfl", "update", 20.0),
        ("mupfl", "update", 1e3),
        ("mupfl", "update", 1e6),
    ],
)
def test_a_client_that_lies_about_a_length_ends_no_run(tmp_path, name, part, factor):
    case = Case(METHODS[name](**QUICK.get(name, {})), "classification", tmp_path)
    config = case.config(federation={"rounds": 4, "retries": 0})
    reports = case.run(config, host=host(factor, part)).reports
    assert {id for report in reports for id in [*report.rejected, *report.lost]} == {LIAR}
    assert len(reports) >= 4
