"""The contract of every registered method: the checks of `raylt check`, on each kind of problem that the method
claims."""

import functools
import itertools
import math
import random
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ConfigDict, ValidationError
from refusals import refused
from small_runs import QUICK

from raylt.contract.case import SOME, Case
from raylt.contract.checks import (
    CHECKS,
    fault_of,
    predicts_what_was_judged,
    resumed_after_every_step,
    run_checks,
    trains_in_stacks_as_alone,
)
from raylt.contract.fields import acts_from_its_stage_on
from raylt.contract.hosts import _difference
from raylt.core.client import Reply
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.reductions import each, mean, total
from raylt.core.method import Method
from raylt.core.training.sgd import sgd
from raylt.errors import ConfigError
from raylt.hyper import Uniform, hp
from raylt.methods import METHODS

CASES = [(name, kind) for name, method in METHODS.items() for kind in method.problems]
# the other methods run with the slow tests, and on segmentation with the soak tests but for the checks of ALWAYS
QUICKLY = ("fedavg", "scaffold", "sfd", "fedsm", "mupfl")
ALWAYS = (resumed_after_every_step, predicts_what_was_judged)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    """Return `case_of(name, kind)`, which makes each case once so that tests share its runs."""

    @functools.cache
    def make(name: str, kind: Any) -> Case:
        return Case(METHODS[name](**QUICK.get(name, {})), kind, tmp_path_factory.mktemp(f"{name}-{kind}"))

    return make


def marks_of(name: str, kind: str, quickly: Collection[str] = QUICKLY) -> list[pytest.MarkDecorator]:
    """Return the marks of a method's tests: those of `quickly` are fast, and slow on segmentation.

    Those of other methods are slow, and soak tests on segmentation.
    """
    if kind == "classification":
        return [] if name in quickly else [pytest.mark.slow]
    return [pytest.mark.slow] if name in quickly else [pytest.mark.slow, pytest.mark.soak]


def checks_of_methods() -> Iterator[Any]:
    for (name, kind), check in itertools.product(CASES, CHECKS):
        always = check in ALWAYS and kind == "segmentation"
        marks = [pytest.mark.slow] if always else marks_of(name, kind)
        if check is acts_from_its_stage_on:
            marks = [*marks, pytest.mark.slow]
        yield pytest.param(name, kind, check, marks=marks, id=f"{name}-{kind}-{check.__name__}")


@pytest.mark.parametrize(("name", "kind", "check"), list(checks_of_methods()))
def test_method_keeps_the_contract(case_of, name, kind, check):
    assert fault_of(check, case_of(name, kind)) is None


@pytest.mark.parametrize("name", METHODS)
def test_fields_cannot_be_set(name):
    method = METHODS[name]()
    for field in ["unknown", *METHODS[name].model_fields]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(method, field, 0)


@pytest.mark.parametrize("name", METHODS)
def test_problems_that_a_method_does_not_claim_are_refused_before_anything_starts(case_of, name):
    for kind in ("classification", "segmentation"):
        if kind not in METHODS[name].problems:
            case = case_of(name, kind)
            with refused("config.conflict", ConfigError, key="method", value=name):
                case.experiment(case.config())


def test_some_client_is_never_sampled_at_low_participation(case_of):
    run = case_of("fedavg", "classification").partial
    asked = {id for function, _, id, _ in run.experiment.fleet._host.replies if function == "train"}
    assert SOME < 1
    assert asked < set(run.experiment.fleet.ids) == {0, 1, 2, 3, 5}


# methods that break the contract: a check must fail for each


class Base(Method):
    """FedAvg under another name."""

    name: ClassVar[str] = "base"
    paper: ClassVar[str] = "for tests"


class LateReply(Base):
    """Method that continues training after its reply, like Ditto in the literal order of its Algorithm 1."""

    def train(self, client, message):
        reply = super().train(client, message)
        sgd(client, self.objective(client, message))
        return reply


class AliasedState(Base):
    """Method that stores the model itself instead of a copy, and continues to train it."""

    def train(self, client, message):
        client.receive(message["model"])
        client.state["own"] = client.model.state_dict()
        return super().train(client, message)


class ForgetsState(Base):
    """Method that keeps state in the process instead of in the client's state."""

    def train(self, client, message):
        reply = super().train(client, message)
        client.cache["calls"] = client.cache.get("calls", 0) + 1
        client.state["calls"] = client.cache["calls"]
        return reply


class GlobalGenerator(Base):
    """Method that draws from the process's own generator."""

    def objective(self, client, message):
        weight = random.random()
        own = super().objective(client, message)
        return lambda batch: weight * own(batch)


class NeedsACohort(Base):
    """Method that assumes that `sample` returns a `Cohort`."""

    def round(self, server, fleet):
        cohort = self.sample(server, fleet)
        assert isinstance(cohort, Cohort), "a list is no cohort"
        super().round(server, fleet)


class FinishesUnsaid(Base):
    finishes: ClassVar[bool] = False

    def finish(self, server, fleet):
        with torch.no_grad():
            server.model.classifier.weight.zero_()


class PlainSums(Base):
    """Method whose sums over samples have no bound, although it declares that noise can hide samples in them."""

    sums_samples: ClassVar[bool] = True

    def count(self, client, message):
        return client.reply(n=len(client))

    def finish(self, server, fleet):
        fleet.ask(self.count, fleet.everyone, {}, n=total.like(0))


class Undeclared(Base):
    strength: float = 1.0


class DefaultOutside(Base):
    strength: float | None = hp(None, Uniform(0.0, 1.0), "of the loss")


class UnknownStage(Base):
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"ending": ()}


class UnknownEncoderField(Base):
    encoder_fields = ("weight",)


class UnknownField(Base):
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": ("weight",)}


class TextOfAField(Base):
    later: ClassVar[Mapping[str, Any]] = {"finish": "weight"}


class UnknownMethod(Base):
    trains_as: ClassVar[str | None] = "fedavgg"


class CountsOnClient(Base):
    """Method that keeps a number in an attribute of the client, which changes no result."""

    def train(self, client, message):
        client.calls = getattr(client, "calls", 0) + 1
        return super().train(client, message)


class CountsOnModule(Base):
    """Method that keeps a tensor in a buffer of a layer."""

    def train(self, client, message):
        client.model.classifier.register_buffer("calls", torch.zeros(1), persistent=False)
        return super().train(client, message)


class ActsEarly(Base):
    """Method with a field of the last phase that acts in every round."""

    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": ("weight",)}
    weight: float = hp(1.0, Uniform(0.5, 1.0), "of the loss")

    def objective(self, client, message):
        own = super().objective(client, message)
        return lambda batch: self.weight * own(batch)


class SeesUnsaid(Base):
    """Method whose server sees the loss of each client."""

    def round(self, server, fleet):
        message = self.message(server)
        got = fleet.ask(self.train, fleet.everyone, message, model=mean.like(message["model"]), loss=each.like(0.0))
        server.step(got["model"])


class SaysMore(Base):
    sees_each: ClassVar = ("loss",)


class WritesMessage(Base):
    def train(self, client, message):
        reply = super().train(client, message)
        for value in message["model"].values():
            value.zero_()
        return reply


class WritesMessageUncounted(Base):
    def train(self, client, message):
        reply = super().train(client, message)
        for value in message["model"].values():
            value.data.zero_()  # torch does not count these changes
        return reply


class NoPaper(Method):
    name: ClassVar[str] = "no_paper"


class AcceptsAnything(Base):
    model_config = ConfigDict(extra="allow")


class IgnoresSeed(Base):
    """Method whose model is the same after every run."""

    def round(self, server, fleet):
        super().round(server, fleet)
        with torch.no_grad():
            for value in server.model.state_dict().values():
                value.zero_()


class ChangesItself(Base):
    weight: float = hp(1.0, Uniform(0.5, 2.0), "of the loss")

    def round(self, server, fleet):
        super().round(server, fleet)
        object.__setattr__(self, "weight", 2.0)


class OtherModelEachTime(Base):
    """Method whose global model has another classifier in each call."""

    def global_model(self, server):
        from raylt.models.split import with_classifier

        weight = torch.rand_like(server.model.classifier.weight)
        return with_classifier(server.model, weight, torch.zeros(4))


class AsksEverybody(Base):
    def sample(self, server, fleet):
        return list(fleet.ids)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("method", "check", "violation"),
    [
        (LateReply, "hands_over_values", "reply.model.encoder.* was changed after it was handed over"),
        (AliasedState, "hands_over_values", "state.own.encoder.* was changed after it was handed over"),
        (ForgetsState, "spread_over_processes", "the bits differ: client"),
        (GlobalGenerator, "same_seed_same_bits", "the bits differ"),
        (NeedsACohort, "plain_list_of_clients", "a list is no cohort"),
        (FinishesUnsaid, "says_whether_it_finishes", "`finish` does something"),
        (Undeclared, "declares_its_fields", "strength is not declared by hp"),
        (DefaultOutside, "declares_its_fields", "the default None is outside its range"),
        (PlainSums, "hides_samples_in_noise", "the part n of the last phase is not such a sum"),
        (UnknownStage, "names_stages_and_methods", "no stage 'ending'"),
        (UnknownField, "names_stages_and_methods", "'weight', which is not a field"),
        (UnknownEncoderField, "names_stages_and_methods", "`encoder_fields` names 'weight', which is not a field"),
        (TextOfAField, "names_stages_and_methods", "not a tuple of names"),
        (UnknownMethod, "names_stages_and_methods", "names no method: 'fedavgg'"),
        (CountsOnClient, "sets_no_attributes", "train sets client.calls"),
        (CountsOnModule, "sets_no_attributes", "train sets client.model.classifier.calls"),
        (ActsEarly, "acts_from_its_stage_on", "weight = 0.5 acts before the stage 'finish' of `later`"),
        (SeesUnsaid, "declares_what_it_sees", "`sees_each` names no part, and `fleet.ask` asks for loss by client"),
        (SaysMore, "declares_what_it_sees", "`sees_each` names loss, and `fleet.ask` asks for no part by client"),
        (WritesMessage, "leaves_messages_alone", "message.model.encoder.* was changed in place"),
        (WritesMessageUncounted, "leaves_messages_alone", "train changed its message"),
        (NoPaper, "has_a_name_and_a_paper", "`paper` is missing"),
        (AcceptsAnything, "is_a_value", "model_config was changed"),
        (IgnoresSeed, "other_seed_other_bits", "the seed has no effect"),
        (ChangesItself, "is_left_as_it_was", "a field has changed"),
        (OtherModelEachTime, "predicts_what_was_judged", "the exported entries differ from `global_model`"),
        (AsksEverybody, "over_selection", "rounds had .5. participants instead of 2"),
        (PlainSums, "believes_no_wrong_count", "count accepts the part n with"),
        (GlobalGenerator, "order_of_clients", "the bits differ"),
        (GlobalGenerator, "retried_calls", "the bits differ"),
        (GlobalGenerator, "judging_changes_nothing", "the bits differ"),
        (GlobalGenerator, "resumed_after_every_step", "the bits differ"),
        (GlobalGenerator, "joining_late", "the bits differ"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_method_that_breaks_the_contract_fails_the_check(tmp_path, method, check, violation):
    fault = fault_of(next(c for c in CHECKS if c.__name__ == check), Case(method(), "classification", tmp_path))
    assert fault is not None
    assert re.search(violation, fault), fault


class Unstackable(Base):
    """Method that declares itself stackable, although it draws from torch's generator."""

    stackable = True

    def objective(self, client, message):
        plain = super().objective(client, message)
        return lambda batch: plain(batch) + (client.model(batch.x) * torch.randn(4)).mean()


@pytest.mark.parametrize("has_avx512", [True, False])
def test_a_wrong_declaration_fails_the_check_on_every_processor(tmp_path, monkeypatch, has_avx512):
    monkeypatch.setattr("raylt.core.training.stacked_sgd.has_avx512", lambda: has_avx512)
    fault = fault_of(trains_in_stacks_as_alone, Case(Unstackable(), "classification", tmp_path))
    assert fault is not None
    assert "training in a stack and alone differ by" in fault


def test_the_difference_of_a_stack_is_the_largest_of_the_reply_and_the_state():
    def outcome(reply: float, state: float) -> Any:
        return Reply(1, {"a": torch.tensor([reply])}), {"b": torch.tensor([state])}

    alone = outcome(4.0, 0.5)
    for other, expected in (
        (outcome(4.0, 0.5), 0.0),
        (outcome(2.0, 0.5), 0.5),  # relative to 4
        (outcome(4.0, 0.25), 0.25),  # numbers below 1 have absolute differences
        (outcome(4.0, math.nan), math.inf),
        ((Reply(1, {}), {}), math.inf),
    ):
        assert _difference(other, alone) == expected


@pytest.mark.slow
def test_a_method_that_keeps_the_contract_passes_every_check():
    results = list(run_checks(Base()))
    assert len(results) == len(CHECKS)
    assert all(result.fault is None for result in results)
    assert results[0].what == "The method has a name and a paper."


class OtherHead(Base):
    """Method that deploys another classifier than the one that clients train."""

    def global_model(self, server):
        from raylt.models.split import with_classifier

        weight = torch.zeros_like(server.model.classifier.weight)
        return with_classifier(server.model, weight, torch.tensor([0.0, 1.0, 0.0, 0.0]))


class Headless(OtherHead):
    """`OtherHead` whose trained classifier has no bias."""

    def build(self, spec, base):
        base.classifier.register_parameter("bias", None)
        return base


@pytest.mark.parametrize("method", [OtherHead, Headless])
def test_under_local_statistics_clients_are_judged_by_the_model_that_the_method_deploys(tmp_path, method):
    case = Case(method(), "classification", tmp_path)
    run = case.run(case.config(federation={"batchnorm": "local"}))
    # all predictions are class 1: a quarter of the balanced test set, all samples of client 2, none of client 3
    assert run.reports[-1].accuracy == 0.25
    assert run.reports[-1].by_client["global"] == [0.25, 0.25, 0.25, 0.25, None, 0.25]
    assert run.reports[-1].by_client["matched"][2:4] == [1.0, 0.0]


class JudgedInPlace(Base):
    """Method whose `client_model` changes the entries that a client keeps, in place."""

    personal: ClassVar[bool] = True

    def client_model(self, client):
        with torch.no_grad():
            for name in client.model.local_buffers:
                client.model.state_dict()[name].add_(1)
        return client.model


def test_what_a_judgement_does_to_a_client_is_forgotten(tmp_path):
    check = next(c for c in CHECKS if c.__name__ == "local_running_statistics")
    assert fault_of(check, Case(JudgedInPlace(), "classification", tmp_path)) is None
