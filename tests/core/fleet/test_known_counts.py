"""The server refuses counts and sums that contradict what it knows of a client's samples, and names the client."""

import math
from typing import Any, ClassVar

import pytest
import torch
from refusals import refused
from tiny import configure, make_experiment

from raylt.contract.case import Case
from raylt.contract.checks import believes_no_wrong_count, fault_of
from raylt.core.client import Reply
from raylt.core.fleet import schema
from raylt.core.fleet.reductions import each, mean, total
from raylt.core.fleet.schema import Schema
from raylt.errors import Diverged
from raylt.methods.classifiers.ccvr import CCVR
from raylt.methods.classifiers.fed3r import Fed3R
from raylt.methods.classifiers.fedncm import FedNCM
from raylt.methods.classifiers.posthoc import PostHoc
from raylt.methods.fedavg import FedAvg
from raylt.methods.fednh import FedNH
from raylt.methods.fednova import FedNova
from raylt.methods.fedproto import FedProto
from raylt.methods.fedsm.method import FedSM
from raylt.methods.qfedavg import step_fault
from raylt.methods.rucr import RUCR

COUNTS_LIKE = torch.empty(3, dtype=torch.int64, device="meta")


def fault(part, value, samples=5, labels=1, **others):
    checks = Schema({"part": part} | dict.fromkeys(others, total), {7: samples}, labels=labels)
    return checks.fault(7, Reply(samples, {"part": value} | others))


@pytest.mark.parametrize(
    ("counts", "code"),
    [
        ([3, 2, 0], None),
        ([0, 0, 0], "reply.wrong-sums"),
        ([5, 1, 0], "reply.wrong-sums"),
        ([6, -1, 0], "reply.wrong-sums"),
        ([2**53, 0, 0], "reply.wrong-sums"),
        ([2**62, 2**62, 2**62], "reply.wrong-integer"),
    ],
)
def test_counts_add_up_to_the_samples(counts, code):
    found = fault(total.like(COUNTS_LIKE).counting(), torch.tensor(counts))
    assert (found and found.code) == code


@pytest.mark.parametrize("part", [total, total.like(COUNTS_LIKE)])
def test_an_undeclared_total_counts_no_more_than_the_samples(part):
    assert fault(part, torch.tensor([4, 0, 0])) is None
    for counts in ([4, 2, 0], [-1, 0, 0], [2**53, 0, 0]):
        assert fault(part, torch.tensor(counts)).code == "reply.wrong-sums"
    assert fault(part.up_to(1e9), torch.tensor([4, 2, 0])) is None


def test_a_client_with_label_maps_counts_up_to_all_of_its_pixels():
    assert fault(total, torch.tensor([5 * 64, 0, 0]), labels=64) is None
    assert fault(total, torch.tensor([5 * 64, 1, 0]), labels=64).code == "reply.wrong-sums"
    unlabelled = torch.tensor([5 * 64 - 3, 0, 0])
    assert fault(total.like(COUNTS_LIKE).counting(), unlabelled, labels=64) is None


def test_a_call_counts_the_pixels_of_label_maps(tmp_path):
    case = Case(FedAvg(), "segmentation", tmp_path)
    fleet = case.experiment(case.config()).fleet
    got = fleet.ask(lambda client, message: client.reply(counts=client.counts), fleet.everyone, {}, counts=total)
    assert fleet.round_stats.rejected == {}
    assert got["counts"].sum() > sum(fleet.sizes.values())


def test_counts_of_entries_are_added_up_over_the_classes():
    undeclared = total.within({c: {"n": 1, "z": torch.empty(1, device="meta")} for c in range(4)})
    declared = undeclared.counting("n")
    z = torch.ones(1)
    for part, few in ((undeclared, None), (declared, "reply.wrong-sums")):
        assert fault(part, {0: {"n": 2, "z": z}, 3: {"n": 3, "z": z}}) is None
        assert fault(part, {0: {"n": 3, "z": z}, 3: {"n": 3, "z": z}}).code == "reply.wrong-sums"
        less = fault(part, {0: {"n": 2, "z": z}})
        assert (less and less.code) == few
    assert fault(declared, {}).code == "reply.wrong-sums"


def test_sums_of_floats_are_bounded_by_the_samples():
    for value in (torch.tensor([5e8]), 5e8):
        assert fault(total, value) is None
    for value in (torch.tensor([6e8]), torch.tensor([-6e8, 0.0]), -6e8):
        assert fault(total, value).code == "reply.out-of-range"
    assert fault(total, torch.tensor([6e8]), labels=64) is None  # counts of pixels
    assert fault(total.up_to(1), torch.tensor([2.0])).code == "reply.out-of-range"


def test_a_sum_of_counts_that_64_bits_cannot_hold_is_refused():
    assert fault(total, torch.full((2**11,), 2**53)).code == "reply.wrong-sums"  # 2**64 in all, which wraps to zero


def test_a_whole_number_in_the_place_of_any_number_is_no_count():
    assert fault(total.like(0.0), 7) is None
    assert fault(total.like(0), 7).code == "reply.wrong-sums"


def test_a_part_with_fewer_rows_has_the_columns_and_the_type_of_its_template():
    part = each.like(torch.zeros(3, 2)).or_shorter()
    for value in (torch.zeros(3, 2), torch.zeros(1, 2), torch.zeros(0, 2)):
        assert fault(part, value) is None
    for value in (torch.zeros(4, 2), torch.zeros(1, 3), torch.zeros(1), torch.zeros(1, 2).double()):
        assert fault(part, value).code == "reply.wrong-shape"


def test_a_part_without_a_template_has_a_limit_of_its_own(monkeypatch):
    monkeypatch.setattr(schema, "MAX_BYTES_WITHOUT_TEMPLATE", 40)
    assert fault(each, {"a": torch.zeros(5), "b": torch.zeros(5)}) is None
    assert fault(each, {"a": torch.zeros(5), "b": torch.zeros(6)}).code == "reply.too-large"
    assert fault(each.like(torch.zeros(11)), torch.zeros(11)) is None


def test_the_length_of_a_sum_over_pixels_is_per_pixel():
    part = total.like(torch.zeros(2))
    lengths = Schema({"sums": part}, {7: 5}, labels=64).lengths_of(7, Reply(5, {"sums": torch.tensor([960.0, 1280.0])}))
    assert lengths == {"sums": 5.0}


def test_values_by_client_count_only_where_they_are_declared_to():
    like = {0: {"n": 1}, 1: {"n": 1}}
    assert fault(each.within(like), {0: {"n": 2**53}}) is None
    for labels in (1, 64):
        assert fault(each.within(like).counting("n"), {0: {"n": 2**53}}, labels=labels).code == "reply.wrong-sums"


def test_a_condition_that_raises_is_not_met():
    assert fault(total.where(lambda value: value.absent), torch.zeros(1)).code == "reply.condition"
    assert fault(total.over_samples(lambda n, parts: 1 / 0), torch.zeros(1)).code == "reply.wrong-sums"


class Forgetful(FedAvg):
    """FedAvg that sums counts of classes without declaring that they cover all samples."""

    name: ClassVar[str] = "forgetful"
    declared: ClassVar[bool] = False

    def join(self, client, message):
        return client.reply(counts=client.counts)

    def start(self, server, fleet):
        counts = total.like(torch.empty(4, dtype=torch.int64, device="meta"))
        fleet.ask(self.join, fleet.everyone, {}, counts=counts.counting() if self.declared else counts)


class Mindful(Forgetful):
    name: ClassVar[str] = "mindful"
    declared: ClassVar[bool] = True


def test_the_contract_finds_counts_that_are_not_declared(tmp_path):
    assert fault_of(believes_no_wrong_count, Case(Mindful(), "classification", tmp_path)) is None
    assert "join accepts the part counts" in fault_of(
        believes_no_wrong_count, Case(Forgetful(), "classification", tmp_path)
    )


def lying(method, change):
    """Return a method whose client 0 changes its reply of the last phase."""

    class Lying(type(method)):
        def statistics(self, client, message):
            reply = super().statistics(client, message)
            return client.reply(**change(reply.tree)) if client.id == 0 else reply

    return Lying(**method.model_dump())


def of_class(name, value):
    def change(parts):
        classes = dict(parts["classes"])
        c = next(iter(classes))
        classes[c] = classes[c] | {name: value(classes[c][name])}
        return {"classes": classes}

    return change


def exchanged(parts):
    """Fed3R's sums with the features of other classes, while the counts of classes and the sum of all features stay."""
    b = parts["b"].clone()
    held = b[-1].nonzero().flatten()
    b[:-1, held] = b[:-1, held].flip(1)
    return parts | {"b": b}


def moved(parts):
    """Change the labels in Fed3R's sums of a reply, so that they contradict the features in A."""
    b = parts["b"].clone()
    b[:-1] += 1
    return parts | {"b": b}


QUICK = {"virtual": 20, "retrain_epochs": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "change"),
    [
        (CCVR(**QUICK), of_class("n", lambda n: n + 1)),
        (CCVR(**QUICK), of_class("n", lambda n: 2**53)),
        (CCVR(**QUICK), of_class("z", lambda z: 1e9 * z)),
        (CCVR(**QUICK), of_class("zz", lambda zz: 1e9 + zz)),
        (PostHoc(), lambda parts: {"counts": torch.tensor([2**53, 0, 0, 0])}),
        (PostHoc(), lambda parts: {"counts": -parts["counts"]}),
        (Fed3R(), lambda parts: {"a": 2 * parts["a"], "b": 2 * parts["b"]}),
        (Fed3R(), lambda parts: {"a": -parts["a"], "b": parts["b"]}),
        (Fed3R(), moved),
        (Fed3R(), exchanged),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else None,
)
def test_a_lie_about_samples_costs_the_liar_alone(tiny_task, tmp_path, method, change):
    config = configure(federation={"rounds": 1, "quorum": 0.5})
    experiment = make_experiment(config, tiny_task, tmp_path, lying(method, change))
    reports = []
    while not experiment.done:
        reports.append(experiment.step())
    assert [list(report.rejected) for report in reports] == [[], [0]]
    assert not any(report.lost for report in reports)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "method",
    [FedProto(), FedNH(), RUCR(), FedSM(teacher="none", retrain_epochs=1)],
    ids=lambda method: method.name,
)
def test_sums_of_negative_features_behind_a_relu_are_refused(tiny_task, tmp_path, method):
    assert rejected_for(tiny_task, tmp_path, method, -1, model="resnet8") == [0]


@pytest.mark.parametrize(
    "method",
    [FedNH(), RUCR(retrain_epochs=1), FedSM(teacher="none", norm="l2", retrain_epochs=1)],
    ids=lambda method: method.name,
)
def test_means_that_are_longer_than_their_unit_features_are_refused(tiny_task, tmp_path, method):
    assert rejected_for(tiny_task, tmp_path, method, 2) == [0]
    assert rejected_for(tiny_task, tmp_path, method, 1) == []


def rejected_for(task, folder, method, factor, **settings):
    """Return the clients that are rejected in a round in which client 0 multiplies its sums of features."""
    config = configure(federation={"rounds": 1, "quorum": 0.5}, **settings)
    experiment = make_experiment(config, task, folder, method)
    host = experiment.fleet._host
    honest = host.run

    def run(fn, message, round, id, shard, private):
        reply, after = honest(fn, message, round, id, shard, private)
        if id == 0 and "classes" in reply.tree:
            classes = {c: of_class | {"z": factor * of_class["z"]} for c, of_class in reply.tree["classes"].items()}
            reply = Reply(reply.weight, reply.tree | {"classes": classes})
        return reply, after

    host.run = run
    return list(experiment.step().rejected)


class Counting(FedAvg):
    """One client says that its model has seen as many batches as a number can count."""

    name: ClassVar[str] = "counting"

    def train(self, client, message):
        reply = super().train(client, message)
        if client.id != 0:
            return reply
        most = {
            name: value if value.is_floating_point() else torch.full_like(value, 2**53)
            for name, value in reply.tree["model"].items()
        }
        return client.reply(model=most, loss=reply.tree["loss"])


@pytest.mark.slow
def test_no_client_can_bring_the_counters_of_the_others_to_their_limit(tiny_task, tmp_path):
    config = configure(federation={"rounds": 2, "quorum": 0.5}, model="resnet8")
    experiment = make_experiment(config, tiny_task, tmp_path, Counting())
    for _ in range(2):
        assert list(experiment.step().rejected) == [0]


def test_a_process_of_clients_knows_the_limit_of_counters_too():
    batches = {"batches": torch.tensor(7), "weight": torch.zeros(3)}
    checks = Schema({"model": mean.like(batches)}, {7: 5}).restricted_to([7])
    for count, code in ((8, None), (2**40, "reply.wrong-integer")):
        found = checks.fault(7, Reply(5, {"model": batches | {"batches": torch.tensor(count)}}))
        assert (found and found.code) == code


class Stepping(FedNova):
    """FedNova in which client 0 claims more steps than its samples allow."""

    name: ClassVar[str] = "stepping"

    def train(self, client, message):
        reply = super().train(client, message)
        more = 1e30 if client.id == 0 else 1
        return client.reply(**reply.tree | {"mass": more * reply.tree["mass"]})


def test_steps_follow_from_the_samples(tiny_task, tmp_path):
    report = make_experiment(configure(federation={"quorum": 0.5}), tiny_task, tmp_path, Stepping()).step()
    assert list(report.rejected) == [0]


@pytest.mark.parametrize("q", [0.0, 0.1, 1.0, 5.0])
def test_the_denominator_of_q_fedavg_belongs_to_its_step(q):
    lipschitz, dw = 20.0, 0.3
    for f in (1e-10, 0.01, 1.0, 3.0):
        h = q * f ** (q - 1) * dw**2 + lipschitz * f**q
        parts = {"delta": {"w": torch.tensor([f**q * dw], dtype=torch.float64)}}
        assert step_fault(5, parts | {"h": h}, q, lipschitz) is None
    assert step_fault(5, {"delta": {"w": torch.tensor([1e6])}, "h": 1e-9}, q, lipschitz)
    # the smallest h of a Delta of length 2, over all losses F
    least = min(q * 4 / f ** (q + 1) + lipschitz * f**q for f in torch.logspace(-4, 2, 4001).tolist())
    delta = {"w": torch.tensor([2.0], dtype=torch.float64)}
    assert step_fault(5, {"delta": delta, "h": least}, q, lipschitz) is None
    assert step_fault(5, {"delta": delta, "h": 0.98 * least}, q, lipschitz)


class Other(FedAvg):
    """FedAvg in which one client's model has another shape; the part has no template."""

    name: ClassVar[str] = "other"
    change: ClassVar[Any] = None

    def train(self, client, message):
        reply = super().train(client, message)
        if client.id != 0:
            return reply
        return client.reply(model=type(self).change(reply.tree["model"]), loss=0.5)

    def round(self, server, fleet):
        got = fleet.ask(self.train, fleet.everyone, self.message(server), model=mean, loss=mean)
        server.step(got["model"])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: {name: value[:1] if value.dim() else value for name, value in model.items()},
        lambda model: {"additional": torch.zeros(3)},
        lambda model: {name: value for name, value in model.items() if not value.is_floating_point()},
    ],
)
def test_noise_on_updates_survives_a_model_of_another_shape(tiny_task, tmp_path, change):
    pytest.importorskip("opacus")
    Other.change = staticmethod(change)
    config = configure(
        federation={"quorum": 0.5}, privacy={"update_epsilon": 500.0, "noise_multiplier": 1.0, "delta": 1e-3}
    )
    report = make_experiment(config, tiny_task, tmp_path, Other()).step()
    assert list(report.rejected) == [0]


# divergence


class Diverging(FedAvg):
    """FedAvg whose client 0 sends too large models from the first round on, and the other clients from the second."""

    name: ClassVar[str] = "diverging"

    def train(self, client, message):
        reply = super().train(client, message)
        if client.round == 1 and client.id != 0:
            return reply
        large = {
            name: value + 1e12 if value.is_floating_point() else value for name, value in reply.tree["model"].items()
        }
        return client.reply(model=large, loss=reply.tree["loss"])


def test_divergence_is_an_error_of_its_own_with_round_size_and_remedy(tiny_task, tmp_path):
    experiment = make_experiment(configure(), tiny_task, tmp_path, Diverging())
    assert list(experiment.step().rejected) == [0]
    details = {"round": 1, "key": "local.lr", "value": 0.05, "client": 0, "function": "train"}
    with refused("training.diverged", Diverged, **details) as caught:
        experiment.step()
    assert caught.value.details["size"] == pytest.approx(1e12, rel=1e-3)
    assert "up_to" not in str(caught.value)


def test_features_that_are_too_long_may_be_the_first_sign_of_divergence(tiny_task, tmp_path):
    method = lying(FedNCM(), of_class("z", lambda z: 1e9 * z))
    experiment = make_experiment(configure(federation={"rounds": 1, "quorum": 1.0}), tiny_task, tmp_path, method)
    experiment.step()
    with refused("reply.too-few", cause="reply.wrong-sums") as caught:
        experiment.step()
    assert "lower local.lr (0.05)" in str(caught.value)


class Broken(FedAvg):
    """FedAvg whose server writes NaN to the place that `where` names."""

    name: ClassVar[str] = "broken"
    where: str = "model"

    def round(self, server, fleet):
        super().round(server, fleet)
        match self.where:
            case "model":
                server.model.classifier.weight.data[0, 0] = math.nan
            case "infinite":
                server.model.classifier.weight.data[0, 0] = math.inf
            case "figure":
                server.log(drift={"of": math.nan})

    def message(self, server):
        more = {"more": torch.tensor([math.nan])} if self.where == "message" else {}
        return super().message(server) | more


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("model", "server.not-finite"),
        ("infinite", "server.not-finite"),
        ("figure", "server.not-finite"),
        ("message", "server.not-finite"),
    ],
)
def test_the_result_of_a_step_is_finite(tiny_task, tmp_path, where, code):
    with refused(code, key="local.lr"):
        make_experiment(configure(), tiny_task, tmp_path, Broken(where=where)).step()


class Raising(FedAvg):
    """FedAvg whose client function raises because its model is no longer finite."""

    name: ClassVar[str] = "raising"

    def train(self, client, message):
        reply = super().train(client, message)
        next(client.model.parameters()).data.fill_(math.nan)
        torch.multinomial(next(client.model.parameters()).flatten()[:3], 1)
        return reply


def test_an_exception_of_a_diverged_model_counts_as_divergence(tiny_task, tmp_path):
    with refused("training.diverged", Diverged, cause="reply.not-finite"):
        make_experiment(configure(federation={"retries": 0}), tiny_task, tmp_path, Raising()).step()
