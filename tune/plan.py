"""The settings of a search, and the state that determines the next trial from the trials so far.

Each method has a sequence of numbered trials. Trial k is a function of (seed, method, k) and, for TPE, of the outcomes
of trials 0 .. k - lag, for which it waits. `lag` is the number of parallel trials that was given when the search was
started, or otherwise the number that fit on the cluster. So a search has no further state to save: the records of its
trials restore it.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raylt.config import Config, check
from raylt.errors import CheckpointError
from raylt.hyper import Choice, LogUniform, Range
from raylt.methods import METHODS
from raylt.seeds import seed_for
from raylt.studies.running.tuning import UNITS, Count
from raylt.typed_json import as_json, hash_json
from tune.asha import TrialProgress, outcomes, rungs
from tune.records import SEARCH_PLAN_JSON, Metric, Scheduler, Searcher, TrialRecord
from tune.report.pareto import pareto_front
from tune.space import Grid, Space, combinations, configure, draw, parse, readable, to_text

DEFAULT_SAMPLES = 20
VALIDATION = 0.2  # share of the training samples for validation where data.validation is 0
OVER = "over"  # No more trials will start.
WAIT = "wait"  # The next trial depends on trials that are running.


@dataclass(frozen=True)
class TaskSize:
    """The sizes on which the cost of a trial depends.

    Attributes:
        clients: Number of samples of each client that trains, including 0 for clients without samples.
        shape: Height, width and channels of an image.
        classes: Number of classes.
    """

    clients: Sequence[int]
    shape: tuple[int, int, int]
    classes: int


TaskSizes = Callable[[Config], TaskSize]


@dataclass(frozen=True)
class SearchPlan:
    """The settings of a search, which are the content of search.json.

    Args:
        base: Settings that all trials share.
        spaces: Search space of each method.
        samples: Number of trials of each method, or of draws if a setting is a grid; None for no limit but the budget.
        budget: Cost that each method may spend, in the unit `count`.
        count: Unit of the budget; see `cost_of`.
        searcher: Rule that chooses values.
        scheduler: Rule that stops trials early.
        grace: The first rung, in rounds.
        metric: The metric by which ASHA stops trials, TPE proposes values, and the best trial is chosen.
        other_metrics: Further metrics that are shown and used for the Pareto front.
        seed: Seed of the search.
        lag: See the module's docstring.
        retries: Number of times that a failed trial is continued.
        splits: Number of splits on which a trial runs; its final score is the worst of them.
        start: Folder to which relative paths of the settings are relative; None until the search has a folder.
    """

    base: Config
    spaces: dict[str, Space]
    samples: int | None = DEFAULT_SAMPLES
    budget: int | None = None
    count: Count = "steps"
    searcher: Searcher = "tpe"
    scheduler: Scheduler = "asha"
    grace: int | None = None
    metric: Metric = "accuracy"
    other_metrics: tuple[Metric, ...] = ()
    seed: int = 0
    lag: int = 1
    retries: int = 2
    splits: int = 1
    start: str | None = None

    @property
    def methods(self) -> list[str]:
        return list(self.spaces)

    @property
    def unit(self) -> str:
        """Return the unit of costs and of the budget, in words."""
        return UNITS[self.count]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (self.metric, *self.other_metrics)

    def to_json(self) -> dict[str, Any]:
        """Return the content of search.json."""
        spaces = {method: {key: to_text(axis) for key, axis in space.items()} for method, space in self.spaces.items()}
        rest = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("base", "spaces")}
        if self.other_metrics:
            rest["other_metrics"] = list(self.other_metrics)
        else:
            del rest["other_metrics"]  # keep the hash of searches with one metric
        if self.count == "steps":
            del rest["count"]
        if self.splits == 1:
            del rest["splits"]
        content = {**rest, "spaces": spaces, "base": self.base.model_dump(mode="json")}
        return {**content, "sha256": hash_json(content)}

    @classmethod
    def from_json(cls, content: bytes, name: str) -> "SearchPlan":
        """Read a plan from the content of search.json.

        Args:
            content: The content.
            name: Name of the file in errors.

        Raises:
            CheckpointError: The content is malformed, or was changed.
            ConfigError: A setting is invalid.
        """
        tree: dict[str, Any] = {**as_json(content, SEARCH_PLAN_JSON, name)}
        sha256 = tree.pop("sha256")
        if sha256 != hash_json(tree):
            raise CheckpointError(
                f"{name}: the file was changed after the search began. Put the original back, or start a new search.",
                code="search.changed",
                path=name,
            )
        spaces: dict[str, Space] = {method: {} for method in tree["spaces"]}
        for method, space in tree["spaces"].items():
            for key, text in space.items():
                axis = parse(text)
                if axis is None:
                    raise CheckpointError(
                        f"{name}: has a value that is not a range ({text!r}). Put the original back.",
                        code="search.changed",
                        path=name,
                        value=text,
                    )
                spaces[method][key] = axis
        base = check(Config, tree["base"], f"{name}: ")
        other_metrics = tuple(tree.get("other_metrics", ()))
        return cls(**tree | {"base": base, "spaces": spaces, "other_metrics": other_metrics})


class SearchState:
    """The trials of a search so far, as one sequence per method.

    Args:
        plan: Settings of the search.
        size_of: Function that returns the sizes of a configuration's task.
    """

    def __init__(self, plan: SearchPlan, size_of: TaskSizes):
        self.plan = plan
        self.sequences = {method: TrialSequence(plan, method, space, size_of) for method, space in plan.spaces.items()}

    @property
    def trials(self) -> list[TrialRecord]:
        """Return the trials that have started, grouped by method."""
        return [record for sequence in self.sequences.values() for record in sequence.records]

    def next(self) -> TrialRecord | str:
        """Start a trial of the method with the fewest trials and return it; return WAIT or OVER if there is none."""
        answers = []
        for sequence in sorted(self.sequences.values(), key=lambda sequence: len(sequence.records)):
            answer = sequence.next()
            if isinstance(answer, TrialRecord):
                return answer
            answers.append(answer)
        return WAIT if WAIT in answers else OVER

    def update(self, record: TrialRecord) -> None:
        """Update the outcomes of trials after a new score or the end of a trial."""
        self.sequences[record.method].update_outcomes()

    def best(self, method: str | None = None) -> TrialRecord | None:
        """Return the finished trial with the best score, the first one if several are equal.

        Args:
            method: Method whose trials to consider; None for all methods.
        """
        done = [r for r in self.trials if r.outcome and r.outcome.state == "done" and method in (None, r.method)]
        return max(
            done,
            key=lambda r: r.outcome.score if r.outcome and r.outcome.score is not None else -math.inf,
            default=None,
        )


def front_of(plan: SearchPlan, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the finished trials that no other finished trial dominates by the search's metrics.

    Stopped trials are left out, because their metrics are of an earlier round.

    Returns:
        The trials, by descending first metric.
    """
    done = [record for record in trials if record.outcome is not None and record.outcome.state == "done"]
    return [done[index] for index in pareto_front([record.figures for record in done], plan.metrics)]


class TrialSequence:
    """The trials of one method in a search, in order."""

    def __init__(self, plan: SearchPlan, method: str, space: Space, size_of: TaskSizes):
        self.plan = plan
        self.method = method
        self.space = space
        self._size_of = size_of
        self.records: list[TrialRecord] = []

    @cached_property
    def total(self) -> float:
        """Return the maximum number of trials of the method."""
        if not self.space:
            return 1
        if self.plan.searcher == "grid":
            return len(self._combinations)
        grids = math.prod(len(axis.values) for axis in self.space.values() if isinstance(axis, Grid))
        return math.inf if self.plan.samples is None else self.plan.samples * grids

    @cached_property
    def _combinations(self) -> list[dict[str, Any]]:
        return combinations(self.space)

    def next(self) -> TrialRecord | str:
        """Start the next trial and return it; return WAIT or OVER if there is none."""
        number = len(self.records)
        if number >= self.total:
            return OVER
        earlier = self.records[: max(0, number + 1 - self.plan.lag)] if self.plan.searcher == "tpe" else []
        if any(record.outcome is None for record in earlier):
            return WAIT
        values = self._values(number, earlier)
        config = configure(self.plan.base, self.method, values)
        cost = cost_of(config, self._size_of(config), self.plan.count)
        record = TrialRecord(f"{self.method}-{number:03d}", self.method, values, config, cost, splits=self.plan.splits)
        spent = sum(earlier.spent for earlier in self.records)
        if self.plan.budget is not None and spent + record.whole_cost > self.plan.budget:
            return WAIT if any(earlier.outcome is None for earlier in self.records) else OVER
        self.records.append(record)
        return record

    def update_outcomes(self) -> None:
        """Compute the outcomes of the trials from their scores.

        Rungs depend on the number of rounds, so only trials with the same number of rounds are compared.
        """
        asha = self.plan.scheduler == "asha"
        for rounds in {record.config.federation.rounds for record in self.records}:
            records = [record for record in self.records if record.config.federation.rounds == rounds]
            steps = rungs(rounds, self.plan.grace) if asha else []
            results = outcomes([_progress(record) for record in records], steps, rounds)
            for record, outcome in zip(records, results, strict=True):
                record.outcome = outcome

    def _values(self, number: int, earlier: list[TrialRecord]) -> dict[str, Any]:
        """Return the settings' values for a new trial.

        Args:
            number: Number of the trial.
            earlier: Trials from which TPE learns.
        """
        if self.plan.searcher == "grid":
            return self._combinations[number] if self.space else {}
        drawn = draw(self.space, self.plan.seed, self.method, number)
        free = {key: axis for key, axis in self.space.items() if not isinstance(axis, Grid)}
        if self.plan.searcher == "random" or len(earlier) < self._startup or not free:
            return drawn
        return drawn | _propose(free, earlier, seed_for(self.plan.seed, "tpe", self.method, number) % 2**32)

    @property
    def _startup(self) -> int:
        """Return the number of random trials before TPE proposes values."""
        return 10 if self.plan.samples is None else min(10, max(4, self.plan.samples // 3))


def cost_of(config: Config, size: TaskSize, count: Count) -> int:
    """Return the cost of a trial in a unit of budgets.

    Args:
        config: Settings of the trial.
        size: Sizes of its task.
        count: The unit. "steps" are client-steps. "passes" are client-steps times the passes that the method makes in
            a round with these settings, on average over the run, as a multiple of FedAvg's, see `relative_cost`; and
            the server's own work as a number of FedAvg's steps, see `server_steps`.
    """
    steps = client_steps(config, size.clients)
    if count == "steps" or not steps:
        return steps
    # Imports torch, which `raylt tune --help` does not need.
    from raylt.contract.costs import passes_of_settings, server_steps

    local, federation = config.local, config.federation
    epochs = local.epochs
    if local.steps is not None:
        steps_per_epoch = [local.step_count(n, epochs=1) for n in size.clients if n]
        epochs = local.steps * len(steps_per_epoch) / sum(steps_per_epoch)
    at_clients = steps * passes_of_settings(config.method, epochs, federation.rounds)
    return round(at_clients + server_steps(config, size.shape, size.classes))


def client_steps(config: Config, sizes: Sequence[int]) -> int:
    """Return the cost of a trial: the number of SGD steps of all clients in all rounds.

    With partial participation it is the expected number.

    Args:
        config: Settings of the trial.
        sizes: Number of samples of each client that trains. Clients without samples are never asked.
    """
    federation = config.federation
    steps_per_round = [config.local.step_count(n) for n in sizes if n]  # of each client
    asked = min(len(steps_per_round), math.ceil(federation.participation * len(sizes) - 1e-9))
    return round(federation.rounds * asked * sum(steps_per_round) / len(steps_per_round))


def _progress(record: TrialRecord) -> TrialProgress:
    compared = {score.step: score.value for score in record.scores.values() if score.kind in ("round", "rehearsal")}
    end = next((score.value for score in record.scores.values() if score.kind == "final"), None)
    return TrialProgress(
        compared, end, record.failed is not None, record.closed and record.failed is None and end is None
    )


def distributions_of(space: Mapping[str, Range]) -> dict[str, Any]:
    """Return the ranges as Optuna distributions, with choices by index.

    Optuna accepts only some types of choices.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    return {
        key: CategoricalDistribution(range(len(axis.values)))
        if isinstance(axis, Choice)
        else FloatDistribution(axis.low, axis.high, log=isinstance(axis, LogUniform))
        for key, axis in space.items()
    }


def as_params(space: Mapping[str, Range], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's values as Optuna parameters of `distributions_of`."""
    return {
        key: axis.values.index(values[key]) if isinstance(axis, Choice) else values[key] for key, axis in space.items()
    }


def _propose(space: dict[str, Range], earlier: list[TrialRecord], seed: int) -> dict[str, Any]:
    """Return the values that Optuna's TPE sampler proposes after the given earlier trials."""
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions = distributions_of(space)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=1))
    for record in earlier:
        assert record.outcome is not None
        done = record.outcome.state == "done"
        score = record.outcome.score
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if done else TrialState.PRUNED,
                value=score if done else None,
                params=as_params(space, record.values),
                distributions=distributions,
                intermediate_values={} if done or score is None else {record.outcome.step: score},
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proposed = study.ask(distributions).params
    return {
        key: axis.values[proposed[key]] if isinstance(axis, Choice) else readable(axis, proposed[key])
        for key, axis in space.items()
    }


def with_validation(config: Config) -> Config:
    """Return the configuration, with the default validation share if its share is 0.

    A share of 0 that the user wrote cannot be told from the default, because files of runs contain all settings.
    """
    if config.data.validation:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"validation": VALIDATION})})


def default_metric(config: Config, methods: Iterable[str]) -> Metric:
    """Return the default metric of a search: accuracy, or "local" if clients have models of their own."""
    personal = all(method in METHODS and METHODS[method].personal for method in methods)
    return "local" if personal or config.federation.batchnorm == "local" else "accuracy"
