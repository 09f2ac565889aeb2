"""Checks of a search before it starts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from raylt.config import Config
from raylt.config.sections import LAST_SEED
from raylt.data.label_maps import class_counts
from raylt.data.task import Task
from raylt.errors import ConfigError, RayltError, spoken
from raylt.hyper import Choice, Range
from raylt.metrics import GROUPS
from raylt.runs.callbacks.trackers import check_trackers
from raylt.runs.start import preview_run
from tune.asha import rungs
from tune.loop import size_of, task_of
from tune.plan import SearchPlan, SearchState
from tune.records import SEARCH_PLAN_JSON, TrialRecord, on_split
from tune.space import Grid, Space, configure, draw

CHECKED = 8  # configurations that are checked before a search starts, see `check_trials`


def check_tracked(track: Sequence[str], fleet: str) -> None:
    """Raise ConfigError if the trackers cannot log trials.

    Raises:
        ConfigError: A tracker is unknown or not installed, or the trials do not run on Ray.
    """
    check_trackers(track)
    if track and fleet == "local":
        raise ConfigError(
            f"{spoken('--track', 'track')}: Ray Tune logs the trials, and they do not run on Ray ({track[0]}). "
            f"Leave out {spoken('--fleet local', 'fleet=' + repr('local'))}.",
            code="config.conflict",
            key="--track",
            value=track[0],
        )


def check_arguments(plan: SearchPlan, parallel: int | None) -> None:
    """Raise ConfigError if arguments of `search` have a wrong type or value.

    Raises:
        ConfigError: An argument has a wrong type or value.
    """
    try:
        SEARCH_PLAN_JSON.validate_python(plan.to_json())
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{key}: {first['msg']} ({first['input']!r}). Give another value.",
            code="config.wrong-type",
            key=key,
            value=first["input"],
        ) from None
    if parallel is not None and parallel < 1:
        raise ConfigError(
            f"parallel: below 1 ({parallel}). Give at least 1.",
            code="config.out-of-range",
            key="parallel",
            value=parallel,
        )


def check_spaces(config: Any, spaces: Any) -> None:
    """Raise ConfigError if `search` is not given a configuration and spaces, as from `space` or `spaces_of`.

    Raises:
        ConfigError: An argument has another type, or no setting has a range.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"config: is not a configuration ({config!r}). Give the result of raylt.load_config.",
            code="config.wrong-type",
            key="config",
            value=repr(config),
        )
    if not isinstance(spaces, Mapping):
        raise ConfigError(
            f"spaces: is not a mapping ({spaces!r}). Give the result of tune.space.",
            code="config.wrong-type",
            key="spaces",
            value=repr(spaces),
        )
    axes = [
        axis
        for key, value in spaces.items()
        for axis in (value.items() if isinstance(value, Mapping) else [(key, value)])
    ]
    for key, axis in axes:
        if not isinstance(axis, Range | Grid):
            raise ConfigError(
                f"{key}: is not a range ({axis!r}). Give the result of tune.space, which reads ranges from texts.",
                code="search.bad-range",
                key=key,
                value=repr(axis),
            )
    if not axes:
        raise ConfigError(
            f"spaces: there is nothing to search, because no setting has a range ({spaces!r}). Give the result of "
            "tune.space.",
            code="search.nothing-to-search",
            key="spaces",
        )


def check_metrics(metrics: Sequence[str]) -> None:
    """Raise ConfigError if there is no metric, or one is given twice."""
    if not metrics:
        raise ConfigError(
            "metric: names no metric ([]). Give one, or leave it out.",
            code="config.out-of-range",
            key="metric",
            value=[],
        )
    for metric in metrics:
        if metrics.count(metric) > 1:
            raise ConfigError(
                f"{spoken('--metric', 'metric')}: given twice ({metric}). Give each metric once.",
                code="config.conflict",
                key="--metric",
                value=metric,
            )


def check_plan(plan: SearchPlan) -> None:
    """Raise ConfigError if a search with this plan cannot start.

    Raises:
        ConfigError: A method cannot do the task or refuses the settings, a metric has no class to judge, or the budget
            or the number of rounds is too small.
    """
    if plan.base.federation.patience is not None:
        raise ConfigError(
            f"federation.patience: the scheduler of a search ends trials early ({plan.base.federation.patience}). "
            "Leave it out.",
            code="search.not-searchable",
            key="federation.patience",
            value=plan.base.federation.patience,
        )
    for name, space in plan.spaces.items():
        check_trials(plan.base, name, space, plan.seed)
    check_judged(plan.metrics, plan.base)
    _check_splits(plan)
    _check_rungs(plan)
    for method, sequence in SearchState(plan, size_of).sequences.items():
        first = sequence.next()
        if not isinstance(first, TrialRecord):
            unlimited = replace(plan, budget=None)
            record = SearchState(unlimited, size_of).sequences[method].next()
            assert isinstance(record, TrialRecord)
            raise ConfigError(
                f"{spoken('--budget', 'budget')}: one trial of {method} takes {record.whole_cost} {plan.unit}, more "
                f"than the budget ({plan.budget}). Raise it, or lower federation.rounds.",
                code="search.budget-too-small",
                key="--budget",
                value=plan.budget,
                cost=record.whole_cost,
            )
        if not first.whole_cost and plan.samples is None:
            raise ConfigError(
                f"{spoken('--budget', 'budget')}: a trial of {method} without rounds takes no {plan.unit}, so a budget "
                f"sets no limit ({plan.budget}). Give a number of trials, {spoken('--samples', 'samples')}.",
                code="search.not-searchable",
                key="--budget",
                value=plan.budget,
            )


def check_judged(metrics: Iterable[str], base: Config) -> None:
    """Raise ConfigError if a metric is the accuracy on a class group without validation samples.

    Args:
        base: Settings of all trials, with `data.validation`.
    """
    for metric in metrics:
        if metric in GROUPS and metric not in _judged_groups(task_of(base)):
            raise ConfigError(
                f"{spoken('--metric', 'metric')}: no {metric}-shot class has a validation sample ({metric}). "
                f"Choose another metric, or set data.groups or data.validation.",
                code="search.no-class",
                key="--metric",
                value=metric,
            )


def _check_rungs(plan: SearchPlan) -> None:
    """Raise ConfigError if ASHA could compare no trials, or if a search without ASHA has a first rung."""
    rounds, grace = plan.base.federation.rounds, plan.grace
    without = spoken("--scheduler none", "scheduler=" + repr("none"))
    if plan.scheduler == "none" and grace is not None:
        raise ConfigError(
            f"{spoken('--grace', 'grace')}: no trial is compared with {without} ({grace}). Leave it out, or use asha.",
            code="config.conflict",
            key="--grace",
            value=grace,
        )
    if plan.scheduler != "asha" or rungs(rounds, grace):
        return
    if grace is not None and rounds >= 2:
        raise ConfigError(
            f"{spoken('--grace', 'grace')}: asha compares trials in the first half of their rounds ({grace} of "
            f"{rounds}). Give at most {rounds // 2}, use {without}, or more rounds.",
            code="search.no-rungs",
            key="--grace",
            value=grace,
            rounds=rounds,
        )
    raise ConfigError(
        f"{spoken('--scheduler', 'scheduler')}: asha compares no trials in so few rounds (federation.rounds = "
        f"{rounds}). Use {without}, or more rounds.",
        code="search.no-rungs",
        key="--scheduler",
        value="asha",
        rounds=rounds,
    )


def _check_splits(plan: SearchPlan) -> None:
    """Raise ConfigError if the seeds of a search's splits are too large, or give one split twice."""
    last = plan.base.data.seed + plan.splits - 1
    if last > LAST_SEED:
        raise ConfigError(
            f"data.seed: the seed of the last split is above {LAST_SEED} ({last}). Give a smaller one.",
            code="config.out-of-range",
            key="data.seed",
            value=last,
        )
    hashes = {task_of(on_split(plan.base, split)).split.sha256 for split in range(plan.splits)}
    if len(hashes) < plan.splits:
        raise ConfigError(
            f"{spoken('--splits', 'splits')}: data.seed does not change the split of this data ({plan.splits}). Use 1.",
            code="config.conflict",
            key="--splits",
            value=plan.splits,
        )


def check_trials(base: Config, method: str, space: Space, seed: int) -> None:
    """Check trials of a search as `run` checks a configuration before its first round.

    Each value of a choice or grid must go with some values of the other settings, of which `CHECKED` draws are tried.
    Values of `data` are checked only as drawn, because each one takes another split.

    Raises:
        RayltError: The method, the model or the data refuses all these configurations; this is the first error.
    """
    options: list[dict[str, Any]] = [{}]
    for key, axis in space.items():
        if isinstance(axis, Choice | Grid) and not key.startswith("data."):
            options += [{key: value} for value in axis.values]
    for option in options:
        first = None
        for index in range(CHECKED):
            config = configure(base, method, draw(space, seed, method, index) | option)
            try:
                preview_run(config, task_of(config))
                break
            except RayltError as error:
                first = first or error
        else:
            assert first is not None
            raise first


def _judged_groups(task: Task) -> set[str]:
    """Return the class groups that have validation samples."""
    assert task.validation is not None
    counts = class_counts(task.validation.labels(), task.classes)
    return {group for count, group in zip(counts, task.groups, strict=True) if count}
