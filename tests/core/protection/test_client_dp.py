"""Client-level privacy: the accountant against an exact composition, clipping, noise, and the end of the budget."""

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from refusals import refused
from rounds import run, start
from small_runs import make_run
from tiny import configure, make_experiment

from raylt.config import load
from raylt.core.client import Reply
from raylt.core.fleet.aggregation import Plain
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import each, mean, total
from raylt.core.method import train_clients
from raylt.core.protection.accounting import delta_of, epsilon_of, rate_of
from raylt.core.protection.client_dp import ClientDP, ClientNoise
from raylt.core.protection.protection import check_delta
from raylt.core.server import Server
from raylt.errors import BudgetSpent, ConfigError
from raylt.methods.classifiers.ccvr import CCVR
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedetf import FedETF
from raylt.methods.flea import FLea
from raylt.methods.local import Local
from raylt.methods.scaffold import Scaffold

pytest.importorskip("opacus")
BUDGET = {"update_epsilon": 500.0, "noise_multiplier": 1.0, "delta": 1e-3}


def floats(model):
    return torch.cat([value.double().flatten() for value in model.values() if value.is_floating_point()])


def one_round(task, folder, message=None, **privacy):
    """Run one round; return the model's step from the one that was sent, the reduced replies and the message."""
    experiment = start(task, folder, FedAvg(), privacy=BUDGET | privacy)
    fleet, message = experiment.fleet, experiment.method.message(experiment.server)
    got = fleet.ask(
        experiment.method.train, fleet.everyone, message, model=mean.like(message["model"]), loss=mean.like(0.0)
    )
    return floats(got["model"]) - floats(message["model"]), got, message


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (2.0, 10), (8.0, 300)])
def test_without_sampling_the_accountant_bounds_the_exact_composition_and_nearly_reaches_it(noise, rounds):
    # T Gaussian mechanisms with deviation z equal one with deviation z / sqrt(T)
    spent = epsilon_of(noise, 1.0, rounds, 1e-5)
    exact = noise / math.sqrt(rounds)
    assert delta_of(exact, spent) <= 1e-5
    assert delta_of(exact, 0.85 * spent) > 1e-5


@pytest.mark.filterwarnings("error")
def test_much_noise_spends_little():
    # the exact epsilon of one Gaussian mechanism with sigma = 100 and delta = 1e-5 is 0.0272
    spent = epsilon_of(100.0, 1.0, 1, 1e-5)
    assert delta_of(100.0, spent) <= 1e-5
    assert spent < 0.05
    assert epsilon_of(1e6, 1.0, 1, 1e-5) < 0.01
    assert epsilon_of(1e6, 1.0, 1, 1e-2) == 0


def test_a_multiplier_that_no_budget_pays_for_is_refused_by_its_name():
    assert epsilon_of(0.01, 1.0, 1, 1e-5) > 1000
    with refused("config.out-of-range", ConfigError, key="privacy.noise_multiplier", value=1e-200):
        load(None, ["method=fedavg", "privacy.update_epsilon=8", "privacy.noise_multiplier=1e-200"])


def test_sampling_counts_and_less_of_it_costs_less():
    assert epsilon_of(1.0, 0.1, 20, 1e-5) < 0.5 * epsilon_of(1.0, 1.0, 20, 1e-5)


def test_updates_are_cut_to_their_length_and_count_once_over_the_expected_number():
    # q K = 0.5 * 6; updates of lengths 5 and 0.5 in (a, b), clipped to 1: (0.6, 0.8) and (0.3, 0.4)
    start = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0]), "batches": torch.tensor(7)}
    config = configure(federation={"participation": 0.5}, privacy=BUDGET | {"update_clip": 1.0})
    quiet = config.privacy.model_copy(update={"noise_multiplier": 1e-12})
    noise = ClientNoise(config.model_copy(update={"privacy": quiet}), start, 1)
    aggregator = ClientDP(Plain({"model": mean, "loss": mean}, (0, 1)), noise)
    for id, scale, samples in ((0, 1.0, 900.0), (1, 0.1, 3.0)):
        model = {"a": start["a"] + 3 * scale, "b": start["b"] + 4 * scale, "batches": torch.tensor(50)}
        aggregator.accept(id, Reply(samples, {"model": model, "loss": 2.5}))
    got = aggregator.result()
    assert got["model"]["a"].item() == pytest.approx(1 + 0.9 / 3)
    assert got["model"]["b"].item() == pytest.approx(2 + 1.2 / 3)
    assert (got["model"]["batches"].item(), got["loss"]) == (7, None)


def test_replies_of_another_layout_are_not_added_to_those_of_the_first():
    noise = ClientNoise(configure(privacy=BUDGET), {"a": torch.zeros(1)}, 1)
    aggregator = ClientDP(Plain({"model": mean}, (0, 1)), noise)
    aggregator.accept(0, Reply(1.0, {"model": {"a": torch.ones(1)}}))
    assert (aggregator.weights, aggregator.empty().weights) == ({0: 1.0}, {})


def test_the_noise_has_the_stated_deviation_and_is_never_that_of_the_seed(tiny_task, tmp_path):
    (one, *_), (two, *_) = (one_round(tiny_task, tmp_path, update_clip=0.3, noise_multiplier=1.0) for _ in range(2))
    # z S / (q K) = 0.3 / 6; the difference of two draws is sqrt(2) as wide
    assert (one - two).std().item() == pytest.approx(math.sqrt(2) * 0.05, rel=0.05)


def test_variances_stay_positive(tiny_task, tmp_path):
    _, got, _ = one_round(tiny_task, tmp_path, update_clip=100.0)
    variances = torch.cat([value for name, value in got["model"].items() if name.endswith("running_var")])
    assert variances.min() > 0
    assert torch.isfinite(floats(got["model"])).all()


def test_a_run_that_would_exceed_its_budget_does_not_start(tiny_task, tmp_path):
    with refused("config.conflict", key="privacy.update_epsilon", excludes="federation.rounds"):
        make_experiment(configure(privacy={"update_epsilon": 1.0, "noise_multiplier": 1.0}), tiny_task, tmp_path)


def test_a_round_beyond_the_budget_asks_no_client(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, FedAvg(), privacy=BUDGET)
    message = experiment.method.message(experiment.server)
    with refused("privacy.budget-spent", BudgetSpent, round=10_000, value=500.0):
        ClientNoise.of({"model": mean}, message, experiment.config, 10_000)


def test_the_budget_ends_with_the_last_round_that_it_pays_for():
    config = configure(privacy=BUDGET | {"update_epsilon": epsilon_of(1.0, 1.0, 5, 1e-3)})
    assert ClientNoise.of({"model": mean}, {"model": {}}, config, 5) is not None
    with refused("privacy.budget-spent", BudgetSpent, round=6):
        ClientNoise.of({"model": mean}, {"model": {}}, config, 6)


@pytest.mark.parametrize("reduction", [total, each], ids=["total", "each"])
def test_models_that_are_not_averaged_are_not_covered(reduction):
    with refused("privacy.not-covered", ConfigError, part="model"):
        ClientNoise.of({"model": reduction}, {"model": {}}, configure(privacy=BUDGET), 1)


class Boasting(Scaffold):
    """SCAFFOLD declared as a plugin that uploads no more than a model, which is false."""

    name: ClassVar[str] = "boasting"

    @property
    def uploads_more(self) -> bool:
        return False


def test_whoever_uploads_more_than_a_model_is_refused_by_the_parts_name(tiny_task, tmp_path):
    with refused("config.conflict", key="privacy.update_epsilon", excludes="method"):
        make_experiment(configure(privacy=BUDGET), tiny_task, tmp_path, Scaffold())
    experiment = make_experiment(configure(privacy=BUDGET), tiny_task, tmp_path, Boasting())
    with refused("privacy.not-covered", ConfigError, part="control"):
        experiment.step()


class Uncounted(FedAvg):
    """FedAvg that uploads models with noise once more, earlier, later, or from clients of its own choice."""

    name: ClassVar[str] = "uncounted"
    where: str = "sample"

    @property
    def uploads_more(self) -> bool:
        return False

    def start(self, server: Server, fleet: Fleet) -> None:
        if self.where == "start":
            train_clients(self, server, fleet, fleet.everyone)

    def sample(self, server: Server, fleet: Fleet) -> Cohort | list[int]:
        drawn = super().sample(server, fleet)
        return {"sample": Cohort(fleet.ids), "list": list(drawn), "everyone": fleet.everyone}.get(self.where, drawn)

    def round(self, server: Server, fleet: Fleet) -> None:
        for _ in range(1 + (self.where == "twice")):
            train_clients(self, server, fleet)
        if self.where == "nothing more":
            fleet.ask(self.join, fleet.everyone, {})

    def finish(self, server: Server, fleet: Fleet) -> None:
        if self.where == "finish":
            train_clients(self, server, fleet, fleet.everyone)


def run_uncounted(task, folder, where, sampling="fixed", participation=1.0):
    federation = {"sampling": sampling, "participation": participation}
    run(task, folder, Uncounted(where=where), 1, privacy=BUDGET, federation=federation)


@pytest.mark.parametrize("where", ["start", "finish", "sample", "list"])
def test_an_upload_of_models_that_the_accountant_does_not_count_is_refused(tiny_task, tmp_path, where):
    with refused("privacy.not-covered", ConfigError, key="privacy.update_epsilon", value=500.0):
        run_uncounted(tiny_task, tmp_path, where)


def test_a_second_upload_of_models_in_a_round_is_refused(tiny_task, tmp_path):
    with refused("privacy.budget-spent", BudgetSpent, round=1, value=500.0):
        run_uncounted(tiny_task, tmp_path, "twice")


def test_a_call_without_an_upload_leaves_what_the_round_says_of_its_noise(tiny_task, tmp_path):
    report = make_experiment(configure(privacy=BUDGET), tiny_task, tmp_path, Uncounted(where="nothing more")).step()
    assert report.figures["privacy"]["covers"] == "the models of 1 round"


def test_everyone_may_be_asked_only_where_sampling_earns_no_credit(tiny_task, tmp_path):
    run_uncounted(tiny_task, tmp_path, "everyone")
    with refused("privacy.not-covered", ConfigError, key="privacy.update_epsilon"):
        run_uncounted(tiny_task, tmp_path, "everyone", "poisson", 0.8)


def test_draws_of_a_fixed_number_are_refused_under_a_budget(tiny_task, tmp_path):
    """With a fixed number of clients, adding one replaces another: the sum moves by 2 S, but the noise is for S."""
    with refused("config.conflict", key="privacy.update_epsilon", excludes="federation.sampling"):
        make_experiment(configure(privacy=BUDGET, federation={"participation": 0.5}), tiny_task, tmp_path)


@pytest.mark.parametrize("method", [CCVR(), FedETF(), FLea(), Local()], ids=lambda method: method.name)
def test_methods_that_upload_more_later_are_refused_before_the_first_round(tiny_task, tmp_path, method):
    with refused("config.conflict", ConfigError, key="privacy.update_epsilon", excludes="method"):
        make_experiment(configure(privacy=BUDGET), tiny_task, tmp_path, method)


def test_clients_that_join_after_training_are_none_of_those_that_a_round_asks():
    config = configure(privacy=BUDGET, data={"clients": 10, "new_clients": 4})
    assert ClientNoise(config, {}, 1)._expected_clients == 6


def test_a_delta_is_small_enough_for_the_clients_that_train(tiny_task, tmp_path):
    # of the five clients with samples three train: 1 / 5 < 1 / 4 < 1 / 3
    task = replace(tiny_task, new_clients=(0, 2))
    make_experiment(configure(privacy=BUDGET | {"delta": 1 / 4}), task, tmp_path)
    with refused("config.out-of-range", ConfigError, key="privacy.delta", count=3):
        make_experiment(configure(privacy=BUDGET | {"delta": 1 / 3}), task, tmp_path)


def test_a_client_without_samples_is_none_that_a_delta_hides():
    check_delta(configure(privacy=BUDGET | {"delta": 0.4}), [5, 0, 3, 0])
    with refused("config.out-of-range", ConfigError, key="privacy.delta", count=2):
        check_delta(configure(privacy=BUDGET | {"delta": 0.5}), [5, 0, 3, 0])


def test_robust_rules_and_two_budgets_are_refused(tiny_task, tmp_path):
    with refused("config.conflict", key="privacy.update_epsilon", excludes="federation.robust"):
        make_experiment(configure(privacy=BUDGET, federation={"robust": "median"}), tiny_task, tmp_path)
    with refused("config.conflict", key="privacy.epsilon", excludes="privacy.update_epsilon"):
        make_experiment(configure(privacy=BUDGET | {"epsilon": 1.0}), tiny_task, tmp_path)


@pytest.mark.parametrize("secure", [False, True])
def test_a_run_says_what_it_has_spent(tmp_path, secure):
    summary = make_run(
        tmp_path,
        "run",
        "method=fedavg",
        "privacy.update_epsilon=100",
        "privacy.noise_multiplier=2",
        "federation.rounds=2",
        f"federation.secure={str(secure).lower()}",
    ).summary
    assert summary["privacy"]["epsilon"] == pytest.approx(epsilon_of(2.0, 1.0, 2, 1e-5))
    assert summary["privacy"]["unit"] == "one client, added or removed"
    assert summary["privacy"]["covers"] == "the models of 2 rounds"


def test_poisson_sampling_lowers_what_a_run_says_it_has_spent():
    config = configure(privacy=BUDGET, federation={"sampling": "poisson", "participation": 0.5})
    assert ClientNoise(config, {}, 3).statement["epsilon"] == epsilon_of(1.0, 0.5, 3, 1e-3)


@pytest.mark.parametrize(("sampling", "listed"), [("fixed", False), ("poisson", True)])
def test_a_run_says_that_credit_for_sampling_needs_secret_participants(sampling, listed):
    config = configure(privacy=BUDGET, federation={"sampling": sampling, "participation": 0.5})
    uncovered = ClientNoise(config, {}, 3).statement["not_covered"]
    assert uncovered.startswith("evaluations and participants:" if listed else "evaluations:")
    assert ("metrics.jsonl lists them" in uncovered) == listed


def test_draws_of_a_fixed_number_of_clients_earn_no_credit():
    assert rate_of(configure(federation={"participation": 0.5})) == 1.0
    assert rate_of(configure(federation={"participation": 0.5, "sampling": "poisson"})) == 0.5


def test_poisson_rounds_have_clients_by_chance_and_repeat(tiny_task, tmp_path):
    config = configure(federation={"sampling": "poisson", "participation": 0.6, "rounds": 2})
    sizes, models = set(), []
    for _ in range(2):
        experiment = make_experiment(config, tiny_task, tmp_path)
        experiment.fleet.ids = list(range(200))
        rounds = []
        for number in range(20):
            experiment.server.round = number
            rounds.append(tuple(experiment.method.sample(experiment.server, experiment.fleet)))
        models.append(rounds)
        sizes = {len(ids) for ids in rounds}
    assert models[0] == models[1]
    assert len(sizes) > 5
    assert sum(map(len, models[0])) / 20 == pytest.approx(120, abs=6)


def test_poisson_under_a_budget_is_drawn_from_no_seed(tiny_task, tmp_path):
    config = configure(federation={"sampling": "poisson", "participation": 0.6, "rounds": 2}, privacy=BUDGET)
    experiment = make_experiment(config, tiny_task, tmp_path)
    experiment.fleet.ids = list(range(200))
    assert len({tuple(experiment.method.sample(experiment.server, experiment.fleet)) for _ in range(3)}) == 3


def test_rounds_that_may_be_empty_are_refused(tiny_task, tmp_path):
    with refused("config.conflict", key="federation.sampling", excludes="federation.participation"):
        make_experiment(configure(federation={"sampling": "poisson", "participation": 0.1}), tiny_task, tmp_path)
