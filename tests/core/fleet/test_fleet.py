import dataclasses
import math
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from tiny import COUNTS, CPU, configure, fingerprint, make_experiment, make_setup, private_states
from torch import tensor

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.fleet.reductions import Reduction, each, mean, total
from raylt.core.round_stats import RoundStats, Traffic
from raylt.core.server import Server
from raylt.errors import ConfigError, TooFewReplies
from raylt.methods.fedavg import FedAvg

IDS = [0, 1, 2, 3, 5]  # client 4 holds no samples
SIZES = [24, 14, 9, 1, 12]  # 60 in all


# client functions, at module level so that they can be pickled


def tell(client: Client, message: Message) -> Reply:
    """Reply with the client's number as a float tensor, an integer tensor and a plain number, at two depths."""
    id = client.id
    return client.reply(w=tensor([1.0, id]), deep={"count": tensor(id), "half": tensor([id / 3]).half()}, id=id)


def tell_partly(client: Client, message: Message) -> Reply:
    return client.reply(owners={f"class{c}": tensor([1.0]) for c in range(4) if client.counts[c] > 0})


def tell_rows(client: Client, message: Message) -> Reply:
    return client.reply(rows=torch.ones(client.id, 2))


def parts_of_tell(kind: Reduction) -> dict[str, Reduction]:
    """Return the reductions for the parts of `tell`."""
    return {"w": kind, "deep": kind, "id": kind}


def parts_of_remember(kind: Reduction) -> dict[str, Reduction]:
    """Return the reductions for the parts of `remember`, with a template of the model."""
    return {"model": kind.like(message()["model"]), "loss": kind}


def remember(client: Client, message: Message) -> Reply:
    """Change the private state, then misbehave as `message["faults"]` says."""
    client.state["last"] = tensor(float(client.round))
    client.state["calls"] = client.state.get("calls", 0) + 1
    w, extra, weight = torch.full((2, 2), float(client.id)), {"loss": 1.0}, float(len(client))
    match message["faults"].get(str(client.id)):
        case "nan":
            w[1, 0] = torch.nan
        case "infinite":
            extra["loss"] = float("inf")
        case "shape":
            w = torch.ones(4)
        case "type":
            w = w.double()
        case "missing":
            return Reply(weight, {"model": {}, **extra})
        case "part":
            del extra["loss"]
        case "additional":
            extra["more"] = 1.0
        case "weight":
            weight = 0.0
        case "raises":
            raise ValueError("no such luck")
    return Reply(weight, {"model": {"w": w}, **extra})


def tell_name(client: Client, message: Message) -> Reply:
    return client.reply(name=f"client {client.id}")


def write_late(client: Client, message: Message) -> Reply:
    w, kept = torch.ones(2), torch.ones(2)
    client.state = {"deep": {"kept": kept[:1]}} if message["change"] == "nested" else {"kept": kept}
    default = client.state.setdefault("default", torch.ones(2))
    reply = client.reply(model={"w": w})
    match message["change"]:
        case "reply":
            w[0] = 2
        case "state":
            kept.mul_(2)
        case "nested":
            kept.add_(1)
        case "default":
            default.add_(1)
        case "merged":
            state, merged = client.state, torch.ones(2)
            state |= {"merged": merged}
            merged.add_(1)
        case "removed":
            client.state.pop("kept")
            del client.state["default"]
            kept.add_(1)
            default.add_(1)
    return reply


def halve(client: Client, message: Message) -> Reply:
    return client.reply(w=message["inner"]["w"].mul_(0.5))


def repeat(client: Client, message: Message) -> Reply:
    return client.reply(serial=message["serial"])


def draw_number(client: Client, message: Message, factor: float = 1.0) -> Reply:
    return client.reply(x=factor * torch.rand(1))


def redraw(client: Client, message: Message) -> Reply:
    return draw_number(client, message)


def alias(client: Client, message: Message) -> Reply:
    client.state["own"] = client.model.state_dict()
    return client.reply(model=client.model.state_dict())


def message(faults: dict[int, str] | None = None) -> Message:
    return {"model": {"w": torch.zeros(2, 2)}, "faults": {str(id): fault for id, fault in (faults or {}).items()}}


@pytest.fixture
def make_fleet(tiny_task, tmp_path):
    def make(fleet=LocalFleet, host=ClientHost, **federation) -> LocalFleet:
        return make_experiment(configure(federation=federation), tiny_task, tmp_path, None, fleet, host).fleet

    return make


class Flaky(ClientHost):
    """Raises after each of the first `failures` attempts of client 2."""

    failures = 2

    def run(self, fn, message, round, id, shard, private):
        result = super().run(fn, message, round, id, shard, private)
        if id == 2 and self.failures:
            self.failures -= 1
            raise OSError("the cable is out")
        return result


class Counting(LocalFleet):
    """Counts the replies in memory each time a client answers; `most` is the largest count."""

    def __init__(self, *args):
        super().__init__(*args)
        self.alive, self.most = weakref.WeakSet(), 0

    def _ask(self, call, id, name):
        answer = super()._ask(call, id, name)
        self.alive.add(answer.reply.tree["w"])
        self.most = max(self.most, len(self.alive))
        return answer


def test_clients_without_samples_are_not_in_the_fleet(make_fleet):
    fleet = make_fleet()
    assert fleet.ids == IDS
    assert fleet.sizes == dict(zip(IDS, SIZES, strict=True))


def test_mean_weights_each_reply_by_its_samples(make_fleet):
    got = make_fleet().ask(tell, IDS, {}, **parts_of_tell(mean))
    # (24 * 0 + 14 * 1 + 9 * 2 + 1 * 3 + 12 * 5) / 60 = 95 / 60; integer tensors take the maximum
    assert got["w"].tolist() == pytest.approx([1.0, 95 / 60])
    assert got["w"].dtype == torch.float32
    assert got["deep"]["count"].item() == 5
    assert got["deep"]["count"].dtype == torch.int64
    assert got["deep"]["half"].dtype == torch.float16
    assert got["deep"]["half"].item() == pytest.approx(95 / 180, rel=1e-3)
    assert got["id"] == pytest.approx(95 / 60)


def test_mean_over_some_clients_weights_those_alone(make_fleet):
    # (14 * 1 + 12 * 5) / 26
    assert make_fleet().ask(tell, [5, 1], {}, **parts_of_tell(mean))["w"][1].item() == pytest.approx(74 / 26)


def test_sum_adds_replies_without_weights(make_fleet):
    # the limit is given because ids are not counts of samples
    got = make_fleet().ask(tell, IDS, {}, **parts_of_tell(total.up_to(9)))
    assert got["w"].tolist() == [5.0, 11.0]  # 0 + 1 + 2 + 3 + 5
    assert got["w"].dtype == torch.float64
    assert got["deep"]["count"].item() == 11
    assert got["id"] == 11


def test_sum_counts_a_name_that_a_client_leaves_out_as_zero(make_fleet):
    template = {f"class{c}": torch.empty(1) for c in range(4)}
    got = make_fleet().ask(tell_partly, IDS, {}, owners=total.within(template))
    owners = (COUNTS > 0).sum(0)  # the number of clients that hold each class
    assert {name: value.item() for name, value in got["owners"].items()} == {f"class{c}": owners[c] for c in range(4)}


def test_each_gives_every_value_by_client_in_ascending_order_with_its_weight(make_fleet):
    got = make_fleet().ask(tell, [5, 0, 3], {}, **parts_of_tell(each))
    assert [value[1].item() for value in got["w"].values()] == [0, 3, 5]
    assert list(got["w"]) == list(got.weights) == [0, 3, 5]
    assert list(got.weights.values()) == [24, 1, 12]


def test_parts_are_reduced_each_in_its_own_way(make_fleet):
    got = make_fleet().ask(tell, IDS, {}, w=mean, deep=each, id=total.up_to(9))
    assert got["w"][1].item() == pytest.approx(95 / 60)
    assert got["deep"][5]["count"].item() == 5
    assert got["id"] == 11
    assert set(got) == {"w", "deep", "id"}


@pytest.mark.parametrize("kind", [mean, total])
def test_reduced_parts_hold_two_replies_at_most(make_fleet, kind):
    fleet = make_fleet(Counting)
    fleet.ask(tell, IDS, {}, **parts_of_tell(kind))
    # the newest reply, and the one before, to which a loop variable still refers
    assert 1 <= fleet.most <= 2
    got = fleet.ask(tell, IDS, {}, **parts_of_tell(each))
    assert fleet.most == len(got.weights) == 5  # shows that the count above can detect replies that are kept


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "model.w is not finite"),
        ("infinite", "loss is inf"),
        ("shape", "model.w is float32 [4], expected float32 [2, 2]"),
        ("type", "model.w is float64 [2, 2], expected float32 [2, 2]"),
        ("missing", "model.w is missing"),
        ("part", "loss is missing"),
        ("additional", "more was not asked for"),
        ("weight", "weight 0.0, expected {samples} (its samples; fleet.ask takes others after the message)"),
    ],
)
def test_mean_leaves_out_a_reply_that_cannot_be_used_and_says_why(make_fleet, fault, reason, culprit):
    fleet = make_fleet(quorum=0.8)  # 4 of 5 replies are needed
    fleet.begin(1)
    fleet.ask(remember, IDS, message(), **parts_of_remember(mean))
    before = dict(fleet.private_states(IDS))
    fleet.begin(2)
    got = fleet.ask(remember, IDS, message({culprit: fault}), **parts_of_remember(mean))
    honest = [(id, size) for id, size in zip(IDS, SIZES, strict=True) if id != culprit]
    expected = sum(id * size for id, size in honest) / sum(size for _, size in honest)
    assert got["model"]["w"].flatten().tolist() == pytest.approx([expected] * 4)
    assert fleet.round_stats.rejected == {culprit: reason.format(samples=SIZES[IDS.index(culprit)])}
    assert fleet.round_stats.lost == fleet.round_stats.retried == []
    for id, state in fleet.private_states(IDS):
        assert state["state"]["last"] == (1 if id == culprit else 2)
    assert fingerprint(dict(fleet.private_states([culprit]))[culprit]) == fingerprint(before[culprit])


def tell_counted(client: Client, message: Message) -> Reply:
    return Reply(message["weights"][client.id], {"w": tensor([float(client.id)])})


def test_other_weights_than_samples_count_where_the_server_declares_them(make_fleet):
    fleet = make_fleet(quorum=0.5)
    weights = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 5: 5.0}
    got = fleet.ask(tell_counted, IDS, {"weights": weights}, weights, w=mean)
    assert got["w"].item() == pytest.approx((2 + 2 * 3 + 3 * 4 + 5 * 5) / 15)
    got = fleet.ask(tell_counted, IDS, {"weights": weights | {5: 1e9}}, weights, w=mean)
    assert fleet.round_stats.rejected == {5: "weight 1000000000.0, expected 5 (declared)"}
    assert got["w"].item() == pytest.approx((2 + 2 * 3 + 3 * 4) / 10)


def tell_statistics(client: Client, message: Message) -> Reply:
    classes = {1: {"n": 1, "z": tensor([1.0])}}
    match message["fault"] if client.id == 0 else None:
        case "half":
            classes[2] = {"z": tensor([1.0])}
        case "empty":
            classes[2] = {}
        case "none":
            classes[1]["n"] = 0
        case "negative":
            classes[1]["n"] = -1
        case "text":
            classes["1"] = classes.pop(1)
        case "float":
            classes[1]["n"] = 1.0
        case "large":
            classes[1]["z"] = tensor([1e19])
        case "condition":
            classes[1]["z"] = tensor([7.0])
    return client.reply(classes=classes)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("half", "classes.2.n is missing"),
        ("empty", "classes.2.n is missing"),
        ("none", "classes.1.n is 0, expected a count of at least 1"),
        ("negative", "classes.1.n is -1, expected a count of at least 1"),
        ("text", "classes.1.n has a name of the wrong type: 1 is not '1'"),
        ("float", "classes.1.n is number, expected count"),
        ("large", "classes.1.z holds 1e+19, beyond 2.4e+09"),
        ("condition", "classes holds a seven"),
    ],
)
def test_sums_of_classes_are_whole_and_counted(make_fleet, fault, reason):
    fleet = make_fleet()
    like = total.within({c: {"n": 1, "z": torch.empty(1, device="meta")} for c in range(4)})
    wanted = like.where(lambda classes: "holds a seven" if classes[1]["z"] == 7 else None)
    got = fleet.ask(tell_statistics, IDS, {"fault": fault}, classes=wanted)
    assert fleet.round_stats.rejected == {0: reason}
    assert got["classes"] == {1: {"n": 4, "z": 4}}


@pytest.mark.parametrize("kind", [total, each])
@pytest.mark.parametrize("fault", ["nan", "infinite", "weight"])
def test_sums_and_values_leave_out_replies_that_are_not_finite_or_weigh_nothing(make_fleet, kind, fault):
    fleet = make_fleet()
    got = fleet.ask(remember, IDS, message({3: fault}), **parts_of_remember(kind))
    assert list(fleet.round_stats.rejected) == [3]
    if kind is each:
        assert list(got["model"]) == [0, 1, 2, 5]
    else:
        assert got["model"]["w"][0, 0].item() == 0 + 1 + 2 + 5


@pytest.mark.parametrize(("quorum", "enough"), [(1.0, False), (0.81, False), (0.8, True), (0.5, True)])
def test_quorum_is_the_share_of_clients_that_must_reply_usably(make_fleet, quorum, enough):
    fleet = make_fleet(quorum=quorum)  # 4 of 5 clients reply usably: 0.8 * 5 = 4, ceil(0.81 * 5) = 5
    fleet.begin(7)
    if enough:
        fleet.ask(remember, IDS, message({2: "nan"}), **parts_of_remember(mean))
        return
    counts = {"usable": 4, "asked": 5, "needed": 5}
    with refused("reply.too-few", TooFewReplies, round=7, client=2, cause="reply.not-finite", **counts) as caught:
        fleet.ask(remember, IDS, message({2: "nan"}), **parts_of_remember(mean))
    assert "lower local.lr (0.05)" in str(caught.value)


def test_only_diverged_replies_bring_the_advice_on_the_learning_rate(make_fleet):
    with refused("reply.too-few", cause="reply.wrong-shape") as caught:
        make_fleet(quorum=1.0).ask(remember, IDS, message({2: "shape"}), **parts_of_remember(mean))
    assert "local.lr" not in str(caught.value)


def test_quorum_needs_one_reply_at_least(make_fleet):
    with refused("reply.too-few", TooFewReplies, usable=0, needed=1, client=0):
        make_fleet(quorum=0.01).ask(remember, IDS, message(dict.fromkeys(IDS, "weight")), **parts_of_remember(each))


def test_a_call_on_no_client_raises_too_few_replies(make_fleet):
    with refused("reply.too-few", TooFewReplies, asked=0):
        make_fleet().ask(tell, [], {}, **parts_of_tell(mean))


def test_client_that_raises_is_asked_again_and_then_counts_as_any_other(make_fleet):
    fleet = make_fleet(host=Flaky, retries=2, quorum=1.0)
    got = fleet.ask(tell, IDS, {}, **parts_of_tell(mean))
    assert got["w"][1].item() == pytest.approx(95 / 60)
    assert fleet.round_stats.retried == [2, 2]
    assert fleet.round_stats.lost == []


def test_failed_attempts_leave_nothing_in_the_private_state(make_fleet):
    fleet = make_fleet(host=Flaky, retries=2)
    fleet.ask(remember, IDS, message(), **parts_of_remember(each))
    assert fleet.round_stats.retried == [2, 2]
    assert dict(fleet.private_states([2]))[2]["state"]["calls"] == 1


def test_client_that_raises_more_often_than_retries_is_lost(make_fleet):
    fleet = make_fleet(host=Flaky, retries=1)
    got = fleet.ask(tell, IDS, {}, **parts_of_tell(mean))
    assert got["w"][1].item() == pytest.approx((95 - 18) / 51)
    assert fleet.round_stats.retried == fleet.round_stats.lost == [2]
    assert fleet.round_stats.rejected == {}
    assert 2 not in dict(fleet.private_states(fleet.changed))


def test_loss_of_a_client_names_its_error_and_place(make_fleet):
    with refused("reply.too-few", TooFewReplies, client=5, cause="client.failed") as caught:
        make_fleet(quorum=1.0).ask(remember, IDS, message({5: "raises"}), **parts_of_remember(each))
    error = caught.value.__cause__
    assert (error.client, error.round, error.function) == (5, 0, "remember")
    assert error.cause.startswith("ValueError: no such luck (test_fleet.py:")


def test_deadline_leaves_out_the_clients_that_take_longer_themselves(make_fleet, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("raylt.core.fleet.local_fleet.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(ClientHost):
        def run(self, fn, message, round, id, *rest):
            now[0] += 30 if id in (0, 3) else 10
            return super().run(fn, message, round, id, *rest)

    fleet = make_fleet(host=Slow, deadline_s=25, quorum=0.6)
    assert list(fleet.ask(tell, IDS, {}, **parts_of_tell(each)).weights) == [1, 2, 5]
    assert fleet.round_stats.lost == [0, 3]
    with refused("reply.too-few", TooFewReplies, client=0, cause="client.late"):
        make_fleet(host=Slow, deadline_s=25, quorum=0.8).ask(tell, IDS, {}, **parts_of_tell(each))


def test_the_reason_of_a_failure_is_noted_once_in_a_round(make_fleet):
    fleet, notes = make_fleet(quorum=0.2), []
    fleet.on_note = notes.append
    for round in (1, 2):
        fleet.begin(round)
        fleet.ask(remember, IDS, message({2: "raises", 5: "raises", 1: "nan"}), **parts_of_remember(each))
        assert fleet.round_stats.lost == [2, 5]
    assert len(notes) == 2
    for round, text in enumerate(notes, 1):
        assert text.startswith(f"client 2, round {round}, remember: ValueError: no such luck (test_fleet.py:")


@pytest.mark.parametrize(
    ("participation", "over_select", "asked", "used"),
    [
        (0.5, 0.0, 3, 3),  # ceil(0.5 * 6) = 3
        (0.5, 0.4, 5, 3),  # ceil(3 * 1.4) = 5
        (0.3, 0.1, 3, 2),  # ceil(2 * 1.1) = 3, though 3 / 1.1 is nearer to 3
        (0.8, 0.5, 5, 5),  # ceil(0.8 * 6) = 5 are needed, and only 5 clients hold samples
    ],
)
def test_over_selection_asks_more_and_takes_the_first_share(
    make_fleet, tiny_task, participation, over_select, asked, used
):
    fleet = make_fleet(participation=participation, over_select=over_select, quorum=1.0)
    method = FedAvg()
    server = Server(fleet.config, tiny_task.spec, make_setup(fleet.config).new_model(tiny_task.spec), CPU)
    ids = method.sample(server, fleet)
    assert len(ids) == asked
    got = fleet.ask(tell, ids, {}, **parts_of_tell(mean))
    first = [(id, SIZES[IDS.index(id)]) for id in got.weights]
    assert len(first) == used
    assert set(got.weights) <= set(ids)
    assert list(got.weights) == sorted(got.weights)
    assert got["w"][1].item() == pytest.approx(sum(id * n for id, n in first) / sum(n for _, n in first))
    assert fleet.round_stats.traffic["tell"].replies == used
    assert fleet.round_stats.lost == []


def test_answers_come_in_the_order_of_ids_whoever_is_first(make_fleet):
    fleet = make_fleet()
    for round in range(5):
        fleet.begin(round)
        ids = [answer.id for answer in fleet._answers(tell, IDS, {}, 4, lambda id, reply: True, None)]
        assert len(ids) == 4
        assert ids == sorted(ids)


def test_every_client_is_among_the_first_at_times_and_the_same_again(make_fleet):
    rounds = []
    for _ in range(2):
        fleet = make_fleet(quorum=1.0)
        chosen = []
        for fleet.round in range(20):
            chosen.append(tuple(fleet.ask(tell, Cohort(IDS, 2), {}, **parts_of_tell(mean)).weights))
        rounds.append(chosen)
    assert rounds[0] == rounds[1]
    assert {id for chosen in rounds[0] for id in chosen} == set(IDS)


def test_over_selection_waits_for_usable_replies(make_fleet):
    fleet = make_fleet(quorum=1.0)
    got = fleet.ask(remember, Cohort(IDS, 3), message({0: "nan", 2: "raises"}), **parts_of_remember(mean))
    # clients 1, 3 and 5 with 14, 1 and 12 samples: (14 * 1 + 1 * 3 + 12 * 5) / 27
    assert got["model"]["w"][0, 0].item() == pytest.approx(77 / 27)
    assert list(fleet.round_stats.rejected) == [0]


@pytest.mark.parametrize("kind", [mean, total, each])
@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("shape", "model.w is float32 [4], most replies have float32 [2, 2]"),
        ("missing", "model.w is missing, most replies have it"),
    ],
)
def test_without_a_template_the_layout_of_most_replies_counts_whoever_comes_first(
    make_fleet, kind, culprit, fault, reason
):
    fleet = make_fleet()
    got = fleet.ask(remember, IDS, message({culprit: fault}), model=kind, loss=kind)
    assert fleet.round_stats.rejected == {culprit: reason}
    assert list(got.weights) == [id for id in IDS if id != culprit]
    assert culprit not in fleet.changed | fleet.round_stats.participants


def test_a_robust_rule_leaves_out_a_reply_of_another_layout(make_fleet):
    fleet = make_fleet(robust="median")
    got = fleet.ask(remember, IDS, message({0: "shape"}), model=mean, loss=mean)
    assert list(fleet.round_stats.rejected) == [0]
    assert got["model"]["w"].tolist() == [[2.5, 2.5], [2.5, 2.5]]  # the median of 1, 2, 3 and 5
    assert list(got.weights) == [1, 2, 3, 5]


def test_a_clipped_mean_weights_each_reply_by_its_samples(make_fleet):
    got = make_fleet(robust="norm_clipped_mean").ask(tell, [0, 1, 5], {}, w=mean, deep=each, id=mean)
    # distances from the median 1 are 1, 0 and 4, so the radius is 1: 1 + (24 * -1 + 14 * 0 + 12 * 1) / 50
    assert got["w"][1].item() == pytest.approx(0.76)
    assert list(got["deep"]) == [0, 1, 5]


def test_where_two_layouts_are_equally_frequent_no_reply_counts(make_fleet):
    fleet = make_fleet(quorum=0.1)
    with refused("reply.too-few", TooFewReplies, usable=0, asked=4, cause="reply.no-majority"):
        fleet.ask(remember, [0, 1, 2, 5], message({0: "shape", 5: "shape"}), model=mean, loss=mean)
    assert list(fleet.round_stats.rejected) == [0, 5, 1, 2]
    assert not fleet.changed


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ({"class0": torch.empty(1)}, "owners.class1 is additional"),
        ({f"class{c}": torch.empty(2) for c in range(4)}, "owners.class0 is float32 [1], expected float32 [2]"),
    ],
)
def test_a_part_that_does_not_lie_within_its_template_is_refused(make_fleet, template, reason):
    fleet = make_fleet()
    with refused("reply.too-few", TooFewReplies, client=0):
        fleet.ask(tell_partly, [0], {}, owners=total.within(template))
    assert fleet.round_stats.rejected == {0: reason}


def test_names_of_a_template_may_be_left_out_within_it_but_not_like_it(make_fleet):
    template = {f"class{c}": torch.empty(1) for c in range(4)}
    fleet = make_fleet(quorum=1.0)
    got = fleet.ask(tell_partly, [0, 2], {}, owners=each.within(template))
    assert [sorted(owned) for owned in got["owners"].values()] == [sorted(template), ["class1"]]
    with refused("reply.too-few", TooFewReplies, client=2, cause="reply.missing"):
        fleet.ask(tell_partly, [0, 2], {}, owners=each.like(template))


def test_a_part_may_have_fewer_rows_than_its_template_where_that_is_asked_for(make_fleet):
    fleet = make_fleet(quorum=0.1)
    template = torch.empty(2, 2)
    got = fleet.ask(tell_rows, IDS, {}, rows=each.like(template).or_shorter())
    assert {id: len(rows) for id, rows in got["rows"].items()} == {0: 0, 1: 1, 2: 2}
    assert fleet.round_stats.rejected == dict.fromkeys([3, 5]) | {
        3: "rows is float32 [3, 2], expected float32 [2, 2]",
        5: "rows is float32 [5, 2], expected float32 [2, 2]",
    }
    for other in (torch.empty(2, 3), torch.empty(2, 2, dtype=torch.float64), torch.empty(2), torch.tensor(0.0), 0.0):
        with refused("reply.too-few", TooFewReplies, cause="reply.wrong-shape"):
            make_fleet().ask(tell_rows, [1], {}, rows=each.like(other).or_shorter())


def test_only_values_by_client_may_be_texts(make_fleet):
    fleet = make_fleet()
    assert fleet.ask(tell_name, [0, 1], {}, name=each.like(""))["name"] == {0: "client 0", 1: "client 1"}
    with refused("reply.too-few", TooFewReplies, cause="reply.wrong-shape"):
        fleet.ask(tell_name, [0, 1], {}, name=mean)
    assert fleet.round_stats.rejected[0] == "name is a str, which has no mean"


def test_participants_are_those_who_replied_to_a_call_that_was_not_for_everyone(make_fleet):
    fleet = make_fleet()
    fleet.ask(tell, fleet.everyone, {}, **parts_of_tell(mean))
    assert fleet.round_stats.participants == set()
    fleet.ask(tell, [3, 0], {}, **parts_of_tell(mean))  # a plain list of ids is a cohort too
    fleet.ask(tell, Cohort([5]), {}, **parts_of_tell(mean))
    assert fleet.round_stats.participants == {0, 3, 5}


def test_over_selection_leaves_no_client_out_of_a_call_for_everyone(make_fleet):
    fleet = make_fleet(participation=0.5, over_select=0.5)
    fleet.ask(tell, fleet.everyone, {}, **parts_of_tell(total))
    assert fleet.round_stats.traffic["tell"].replies == 5


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ("reply", "reply.model.w"),
        ("state", "state.kept"),
        ("nested", "state.deep.kept"),
        ("default", "state.default"),
        ("merged", "state.merged"),
    ],
)
def test_a_tensor_that_is_changed_after_it_was_handed_over_is_an_error_that_names_it(make_fleet, change, path):
    fleet = make_fleet(retries=0)
    with refused("reply.too-few", TooFewReplies, client=1, cause="reply.late-write") as caught:
        fleet.ask(write_late, [1], {"change": change}, model=mean)
    assert f"client 1: {path} was changed" in str(caught.value)
    for harmless in ("nothing", "removed"):
        assert fleet.ask(write_late, [1], {"change": harmless}, model=mean)["model"]["w"].tolist() == [1, 1]


def test_a_client_that_changes_its_message_in_place_is_an_error_that_names_the_tensor(make_fleet):
    fleet = make_fleet(retries=0)
    with refused("reply.too-few", TooFewReplies, client=0, cause="reply.late-write") as caught:
        fleet.ask(halve, IDS, {"inner": {"w": torch.ones(2)}}, w=each)
    assert "client 0: message.inner.w was changed in place" in str(caught.value)
    assert "change a copy (tree.snapshot)" in str(caught.value)


@pytest.mark.parametrize("serial", [tensor([2**62 + 1]), 2**62 + 1])
def test_a_whole_number_that_is_too_large_is_no_divergence(make_fleet, serial):
    with refused("reply.too-few", TooFewReplies, client=0, cause="reply.wrong-integer") as caught:
        make_fleet().ask(repeat, IDS, {"serial": serial}, serial=each)
    problem = f"serial holds the whole number {2**62 + 1}, outside -{2**53}..{2**53}."
    assert problem in str(caught.value)
    assert "local.lr" not in str(caught.value)


def test_a_partial_is_called_under_the_name_of_its_function(make_fleet):
    fleet = make_fleet()
    fleet.begin(1)
    for fn in (draw_number, partial(draw_number, factor=1.0), partial(partial(draw_number), factor=1.0)):
        assert fleet.ask(fn, [0], {}, x=each)["x"] == fleet.ask(draw_number, [0], {}, x=each)["x"]
    assert fleet.ask(partial(redraw), [0], {}, x=each)["x"] != fleet.ask(draw_number, [0], {}, x=each)["x"]
    assert set(fleet.round_stats.traffic) == {"draw_number", "redraw"}


class Nameless:
    def __call__(self, *arguments):
        raise AssertionError


@pytest.mark.parametrize("fn", [Nameless(), partial(Nameless())])
def test_a_function_without_a_name_is_refused(make_fleet, fn):
    fleet = make_fleet()
    with refused("method.wrong-argument", ConfigError, key="fleet"):
        fleet.ask(fn, [0], {})
    with refused("method.wrong-argument", ConfigError, key="fleet"):
        fleet.map(fn, [])


def test_what_is_handed_over_may_share_memory_with_a_model_that_is_left_as_it_is(make_fleet):
    fleet = make_fleet()
    fleet.ask(alias, [0], {}, model=each)
    (state,) = [state for _, state in fleet.private_states([0])]
    assert torch.equal(state["state"]["own"]["classifier.bias"], fleet._host.model.classifier.bias)


@pytest.mark.parametrize(
    ("participation", "clients", "k"),
    [(0.4, 20, 8), (0.2, 19, 4), (0.21, 10, 3), (0.1, 30, 3), (0.07, 100, 7), (1.0, 7, 7), (0.001, 10, 1)],
)
def test_sample_takes_the_ceiling_of_the_share(tiny_task, participation, clients, k):
    # ceil(0.2 * 19) = ceil(3.8) = 4; ceil(2.1) = 3; 0.07 * 100 = 7, although in floating point it is 7.000000000000001
    ids = sample(tiny_task, clients, range(clients), participation=participation)
    assert len(set(ids)) == k
    assert ids == sorted(ids)


def sample(task, clients: int, ids, round: int = 1, seed: int = 0, **federation) -> list[int]:
    config = configure(seed=seed, data={"clients": clients}, federation=federation)
    server = Server(config, task.spec, torch.nn.Identity(), CPU)
    server.round = round
    return list(FedAvg().sample(server, SimpleNamespace(ids=list(ids), new_clients=[])))


def test_sample_draws_from_clients_with_samples_only(tiny_task):
    drawn = [sample(tiny_task, 6, IDS, round, participation=0.5) for round in range(1, 30)]
    assert {id for ids in drawn for id in ids} == set(IDS)
    # ceil(0.9 * 6) = 6 are wanted, 5 hold samples
    assert sample(tiny_task, 6, IDS, participation=0.9) == IDS


def test_sample_depends_on_seed_and_round_only(tiny_task):
    def draw(**keys):
        return tuple(sample(tiny_task, 20, range(20), participation=0.4, **keys))

    first = draw()
    torch.rand(10)  # torch's global generator has no effect
    assert draw() == first
    assert len({first, draw(round=2), draw(round=3), draw(seed=1)}) == 4


def test_sample_takes_every_client_equally_often(tiny_task):
    # 400 rounds of 4 clients out of 10: each is drawn 160 times, standard deviation sqrt(400 * 0.4 * 0.6) = 9.8
    drawn = [id for round in range(400) for id in sample(tiny_task, 10, range(10), round, participation=0.4)]
    assert all(abs(drawn.count(id) - 160) < 4 * 9.8 for id in range(10))


def test_a_cohort_names_each_client_once_and_needs_one_answer_to_as_many_as_clients():
    with refused("method.wrong-argument", ConfigError, key="ids", value=3):
        Cohort([3, 1, 3])
    for needed in (-1, 0, 3):
        with refused("method.wrong-argument", ConfigError, key="needed", value=needed):
            Cohort([1, 2], needed)
    for ids in (None, 5, ["a"], [[1]], [0.7, 1.2], "56"):
        with refused("method.wrong-argument", ConfigError, key="ids"):
            Cohort(ids)  # pyright: ignore[reportArgumentType]
    assert Cohort([2, 1], 1).ids == (1, 2)
    assert Cohort([], 0).ids == ()


@pytest.mark.parametrize("id", [-1, 4, 99])  # client 4 has no samples
def test_only_clients_with_samples_can_be_asked(make_fleet, id):
    with refused("method.wrong-argument", ConfigError, function="tell", id=id):
        make_fleet().ask(tell, [0, id], {}, **parts_of_tell(mean))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, None, "1"])
def test_a_weight_must_be_a_finite_number_of_at_least_0(make_fleet, weight):
    with refused("method.wrong-argument", ConfigError, function="tell", id=1):
        make_fleet().ask(tell, [0, 1], {}, {0: 1.0, 1: weight}, **parts_of_tell(mean))


@pytest.mark.parametrize("weights", [{0: 1.0}, [1.0, 1.0]])
def test_weights_must_name_every_client_that_is_asked(make_fleet, weights):
    with refused("method.wrong-argument", ConfigError, function="tell"):
        make_fleet().ask(tell, [0, 1], {}, weights, **parts_of_tell(mean))


def test_replies_without_weight_have_no_mean(make_fleet):
    def weightless(client, message):
        return Reply(0.0, tell(client, message).tree)

    fleet = make_fleet()
    with refused("method.wrong-argument", ConfigError, function="weightless"):
        fleet.ask(weightless, [0, 1], {}, {0: 0.0, 1: 0.0}, **parts_of_tell(mean))
    fleet.ask(weightless, [0, 1], {}, {0: 0.0, 1: 0.0}, **parts_of_tell(total.up_to(9)))  # a sum has no weights
    median = make_fleet(robust="median")
    median.ask(weightless, [0, 1], {}, {0: 0.0, 1: 0.0}, **parts_of_tell(mean))  # nor has a median


def test_each_part_must_be_asked_for_by_a_reduction(make_fleet):
    with refused("method.wrong-argument", ConfigError, function="tell", part="w"):
        make_fleet().ask(tell, [0], {}, w="mean")


@pytest.mark.parametrize(
    "wrong", [None, [1], {"w": torch.nn.Parameter(torch.ones(1))}, {"w": torch.ones(1, device="meta")}]
)
def test_a_message_that_cannot_be_sent_is_refused(make_fleet, wrong):
    with refused("method.wrong-argument", ConfigError, function="tell"):
        make_fleet().ask(tell, [0], wrong, **parts_of_tell(mean))


def test_an_evaluation_leaves_its_clients_with_problems_in_the_statistics_and_no_bytes(make_fleet):
    fleet = make_fleet(retries=0)
    fleet.ask(tell, IDS, {}, **parts_of_tell(each))
    before = dataclasses.asdict(fleet.round_stats)
    with fleet.judging():
        fleet.ask(tell, IDS, {}, **parts_of_tell(each))
        fleet.ask(remember, IDS, message({2: "raises"}), **parts_of_remember(each))
    after = dataclasses.asdict(fleet.round_stats)
    assert after.pop("lost") == [2]
    before.pop("lost")
    assert after == before


def test_all_troubles_of_an_evaluation_are_added_and_nothing_else():
    stats = RoundStats(lost=[1], rejected={5: "of before"}, participants={1})
    stats.add_troubles(RoundStats({"judge": Traffic(1, 2, 3)}, [2], [3, 3], {4: "no number"}, {2}))
    assert stats == RoundStats({}, [1, 2], [3, 3], {5: "of before", 4: "no number"}, {1}, stats.timings)


def test_traffic_counts_bytes_by_function(make_fleet):
    fleet = make_fleet()
    sent = {"model": {"w": torch.zeros(3, 5)}, "name": "abc", "mu": 0.1, "none": None}
    fleet.ask(tell, IDS, sent, **parts_of_tell(each))
    fleet.ask(tell, [0, 1], sent, **parts_of_tell(total))
    fleet.ask(tell_partly, [2], {}, owners=total)
    # down to each of 7: 15 floats of 4 bytes, 3 letters, a number of 8, 71 in all. up: two floats, an int64, a half, a
    # number
    assert dataclasses.asdict(fleet.round_stats.traffic["tell"]) == {
        "down": 7 * 71,
        "up": 7 * (8 + 8 + 2 + 8),
        "replies": 7,
    }
    assert dataclasses.asdict(fleet.round_stats.traffic["tell_partly"]) == {"down": 0, "up": 4, "replies": 1}
    fleet.begin(1)
    assert fleet.round_stats.traffic == {}


@pytest.mark.parametrize(("retries", "replies"), [(1, 4), (2, 5)])
def test_traffic_counts_one_message_for_each_client_whether_lost_or_asked_again(make_fleet, retries, replies):
    fleet = make_fleet(host=Flaky, retries=retries)
    fleet.ask(tell, IDS, {"w": torch.zeros(10)}, **parts_of_tell(each))
    assert fleet.round_stats.traffic["tell"] == Traffic(5 * 40, replies * 26, replies)


def test_client_state_is_handed_to_its_next_call_and_to_no_other_client(make_fleet):
    fleet = make_fleet()
    for round in (1, 2):
        fleet.begin(round)
        fleet.ask(remember, [0] if round == 2 else [0, 1], message(), **parts_of_remember(each))
    states = dict(fleet.private_states([0, 1]))
    assert states[0]["state"] == {"last": 2, "calls": 2}
    assert states[1]["state"] == {"last": 1, "calls": 1}
    assert fleet.changed == {0, 1}


def test_restored_private_states_are_those_of_the_next_call(make_fleet, tiny_task, tmp_path):
    first, second = (make_experiment(configure(), tiny_task, tmp_path / name) for name in ("a", "b"))
    first.fleet.ask(remember, IDS, message(), **parts_of_remember(each))
    for id, state in private_states(first).items():
        second.fleet.restore(id, state)
    assert fingerprint(private_states(second)[5]) == fingerprint(private_states(first)[5])
    assert second.fleet.changed == set()
