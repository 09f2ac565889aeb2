"""What a search does next, as a function of its plan and of what its trials came to: nothing else is remembered.

Each method has a track of numbered trials. Trial k of a track is a function of (seed, method, k) and, for TPE, of the
outcomes of trials 0 .. k - lag, which it waits for; `lag` is the number of trials that could run at once when the
search was started. So no search has a state to save: the trials' records bring it back.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raylt.config import Config, check
from raylt.errors import CheckpointError
from raylt.hyper import Choice, LogUniform, Range
from raylt.seeds import seed_for
from raylt.typed import as_json, hash_json
from tune.axes import Grid, parse, readable, written
from tune.halving import Course, outcomes, rungs
from tune.kinds import PLAN, Metric, Scheduler, Searcher
from tune.record import Record
from tune.space import Space, combinations, configure, draw

SAMPLES = 20
OVER, WAIT = "over", "wait"
Sizes = Callable[[Config], list[int]]


@dataclass(frozen=True)
class Plan:
    """What was asked for: the content of search.json.

    Args:
        base: settings that all trials share.
        spaces: by method.
        samples: trials of each method (draws, when some setting is given as a grid); None for no limit but the budget.
        budget: client-steps that each method may spend.
        grace: rounds before the first rung.
        lag: see the module's docstring.
        retries: times that a failed trial is taken up again.
    """

    base: Config
    spaces: dict[str, Space]
    samples: int | None = SAMPLES
    budget: int | None = None
    searcher: Searcher = "tpe"
    scheduler: Scheduler = "asha"
    grace: int | None = None
    metric: Metric = "accuracy"
    seed: int = 0
    lag: int = 1
    retries: int = 2

    @property
    def methods(self) -> list[str]:
        return list(self.spaces)

    def to_json(self) -> dict[str, Any]:
        spaces = {method: {key: written(axis) for key, axis in its.items()} for method, its in self.spaces.items()}
        rest = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("base", "spaces")}
        content = {**rest, "spaces": spaces, "base": self.base.model_dump(mode="json")}
        return {**content, "sha256": hash_json(content)}

    @classmethod
    def from_json(cls, content: bytes, what: str) -> "Plan":
        """The inverse of `to_json`, from its text.

        Args:
            what: what errors call it.

        Raises:
            CheckpointError: it is none, or was changed.
            ConfigError: a setting in it cannot be.
        """
        tree: dict[str, Any] = {**as_json(content, PLAN, what)}
        sha256 = tree.pop("sha256")
        if sha256 != hash_json(tree):
            raise CheckpointError(f"{what}: was changed after the search began; put the original back, or start a new "
                                  "search")
        spaces: dict[str, Space] = {method: {} for method in tree["spaces"]}
        for method, space in tree["spaces"].items():
            for key, text in space.items():
                if (axis := parse(text)) is None:
                    raise CheckpointError(f"{what}: {text!r} is no range; put the original back")
                spaces[method][key] = axis
        return cls(**tree | {"base": check(Config, tree["base"], f"{what}: "), "spaces": spaces})


class State:
    """The tracks of a search and what their trials came to.

    Args:
        sizes: samples of each client that holds any, for a configuration.
    """

    def __init__(self, plan: Plan, sizes: Sizes):
        self.plan = plan
        self.tracks = {method: Track(plan, method, space, sizes) for method, space in plan.spaces.items()}

    @property
    def trials(self) -> list[Record]:
        """Those that were begun, method by method."""
        return [record for track in self.tracks.values() for record in track.records]

    def next(self) -> Record | str:
        """The trial to begin now; WAIT until more is known; OVER when no more will come."""
        said = OVER
        for track in sorted(self.tracks.values(), key=lambda track: len(track.records)):
            found = track.next()
            if isinstance(found, Record):
                return found
            said = WAIT if found == WAIT else said
        return said

    def update(self, record: Record) -> None:
        """Draws the conclusions from a trial's new points, or its end."""
        self.tracks[record.method].conclude()

    def best(self, method: str | None = None) -> Record | None:
        """Of the trials that went to their end, the one with the best score; the first of equals."""
        ended = [r for r in self.trials if r.outcome and r.outcome.state == "done" and method in (None, r.method)]
        return max(ended, key=lambda r: r.outcome.score if r.outcome and r.outcome.score is not None else -math.inf,
                   default=None)


class Track:
    """The trials of one method, in order."""

    def __init__(self, plan: Plan, method: str, space: Space, sizes: Sizes):
        self.plan, self.method, self.space, self._sizes = plan, method, space, sizes
        self.records: list[Record] = []

    @cached_property
    def total(self) -> float:
        """Trials at most."""
        if not self.space:
            return 1
        if self.plan.searcher == "grid":
            return len(self._combinations)
        grids = math.prod(len(axis.values) for axis in self.space.values() if isinstance(axis, Grid))
        return math.inf if self.plan.samples is None else self.plan.samples * grids

    @cached_property
    def _combinations(self) -> list[dict[str, Any]]:
        return combinations(self.space)

    def next(self) -> Record | str:
        number = len(self.records)
        if number >= self.total:
            return OVER
        needed = self.records[:max(0, number + 1 - self.plan.lag)] if self.plan.searcher == "tpe" else []
        if any(record.outcome is None for record in needed):
            return WAIT
        values = self._values(number, needed)
        config = configure(self.plan.base, self.method, values)
        cost = client_steps(config, self._sizes(config))
        if self.plan.budget is not None and sum(record.spent for record in self.records) + cost > self.plan.budget:
            return WAIT if any(record.outcome is None for record in self.records) else OVER
        self.records.append(Record(f"{self.method}-{number:03d}", self.method, values, config, cost))
        return self.records[-1]

    def conclude(self) -> None:
        """Outcomes from points. Each number of rounds has its own rungs, so trials are compared with their like."""
        asha = self.plan.scheduler == "asha"
        for rounds in {record.config.federation.rounds for record in self.records}:
            mine = [record for record in self.records if record.config.federation.rounds == rounds]
            steps = rungs(rounds, self.plan.grace) if asha else []
            for record, outcome in zip(mine, outcomes([_course(r) for r in mine], steps, rounds), strict=True):
                record.outcome = outcome

    def _values(self, number: int, known: list[Record]) -> dict[str, Any]:
        if self.plan.searcher == "grid":
            return self._combinations[number] if self.space else {}
        drawn = draw(self.space, self.plan.seed, self.method, number)
        free = {key: axis for key, axis in self.space.items() if not isinstance(axis, Grid)}
        if self.plan.searcher == "random" or len(known) < self._startup or not free:
            return drawn
        return drawn | _propose(free, known, seed_for(self.plan.seed, "tpe", self.method, number) % 2**32)

    @property
    def _startup(self) -> int:
        """Trials that TPE wants to know before it proposes."""
        return 10 if self.plan.samples is None else min(10, max(4, self.plan.samples // 3))


def client_steps(config: Config, sizes: list[int]) -> int:
    """SGD steps of local training over all rounds and clients: the cost of a trial.

    With partial participation their expectation. What a method computes on top of local training is not in it.

    Args:
        sizes: samples of each client that holds any.
    """
    federation, each = config.federation, [config.local.steps(n) for n in sizes]
    clients = (config.data.clients or len(sizes)) - config.data.new_clients
    asked = min(len(sizes), math.ceil(federation.participation * clients - 1e-9))
    return round(federation.rounds * asked * sum(each) / len(each))


def _course(record: Record) -> Course:
    compared = {p.step: p.score for p in record.points.values() if p.kind in ("round", "rehearsal")}
    end = next((p.score for p in record.points.values() if p.kind == "final"), None)
    return Course(compared, end, record.failed is not None, record.closed and record.failed is None and end is None)


def _propose(space: dict[str, Range], known: list[Record], seed: int) -> dict[str, Any]:
    """The values that Optuna's TPE proposes after these trials, told in their order."""
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # choices by their place: Optuna takes only some types for values
    distributions: dict[str, BaseDistribution] = {
        key: CategoricalDistribution(range(len(axis.values))) if isinstance(axis, Choice)
        else FloatDistribution(axis.low, axis.high, log=isinstance(axis, LogUniform)) for key, axis in space.items()}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=1))
    for record in known:
        assert record.outcome is not None
        done, score = record.outcome.state == "done", record.outcome.score
        params = {key: axis.values.index(record.values[key]) if isinstance(axis, Choice) else record.values[key]
                  for key, axis in space.items()}
        study.add_trial(create_trial(
            state=TrialState.COMPLETE if done else TrialState.PRUNED, value=score if done else None, params=params,
            distributions=distributions,
            intermediate_values={} if done or score is None else {record.outcome.step: score}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = study.ask(distributions).params
    return {key: axis.values[asked[key]] if isinstance(axis, Choice) else readable(axis, asked[key])
            for key, axis in space.items()}
