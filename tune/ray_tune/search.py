"""Searches with Ray Tune's own schedulers (`raylt tune --scheduler pbt|hyperband|median`).

These schedulers stop and copy trials depending on the speed of processes, so a search is not reproducible from its
seed. Searches with the default, raylt's own ASHA (tune/asha.py), are reproducible.

The search's folder is Tune's folder with some more files:

    ray_search.json  the settings of the search and the records of its plugins, for `raylt tune --resume`
    trials.csv       one row for each trial
    pareto.png       the trials and their Pareto front, for several metrics
    best.yaml        the best trial's configuration; under pbt, which changes settings between rounds, its last one
"""

import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired

import optuna
from pydantic import TypeAdapter
from ray import tune as ray_tune
from ray.tune.schedulers import HyperBandScheduler, MedianStoppingRule, PopulationBasedTraining, TrialScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch
from typing_extensions import TypedDict

from raylt.config import Config, check, yaml_text
from raylt.disk import file_errors, make
from raylt.errors import CheckpointError, on_one_line
from raylt.formatting import percent
from raylt.hyper import Choice
from raylt.registry import check_origins, origins
from raylt.runs.folder.identity import PluginRecord
from raylt.signals import handling_stops
from raylt.store import Folder
from raylt.typed_json import as_json, closed
from tune.plan import with_validation
from tune.ray_tune.space import param_space
from tune.ray_tune.trainable import trainable
from tune.ray_tune.waiting import WaitingNotice
from tune.records import Metric, Searcher
from tune.report.drawing import draw_pareto, value_text
from tune.report.pareto import pareto_front
from tune.report.results import csv_table
from tune.search import already_exists, lock_search, no_result
from tune.space import Grid, Space, configure, parse

RayScheduler = Literal["pbt", "hyperband", "median"]
PLAN = "ray_search.json"


@dataclass(frozen=True)
class RaySearchPlan:
    """The settings of a search with one of Ray's schedulers.

    Args:
        config: Settings that all trials share, as JSON values.
        space: Ranges as texts, by setting.
        samples: Number of trials.
        metric: The metric by which trials are compared.
        searcher: Rule that chooses values.
        scheduler: Ray's scheduler.
        grace: Rounds before trials are first compared and, for pbt, between two exchanges.
        seed: Seed of the searcher.
        parallel: Maximum number of parallel trials; None for as many as fit.
        retries: Number of times that a failed trial is continued from its last checkpoint.
        other_metrics: Further metrics that are shown and used for the Pareto front.
    """

    config: dict[str, Any]
    space: dict[str, str]
    samples: int
    metric: Metric
    searcher: Searcher
    scheduler: RayScheduler
    grace: int | None
    seed: int
    parallel: int | None
    retries: int
    other_metrics: tuple[Metric, ...] = ()

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (self.metric, *self.other_metrics)


@closed
class RaySearchPlanJson(TypedDict):
    """The content of ray_search.json: the fields of a `RaySearchPlan`, and the records of the plugins that it names."""

    config: dict[str, Any]
    space: dict[str, str]
    samples: int
    metric: Metric
    searcher: Searcher
    scheduler: RayScheduler
    grace: int | None
    seed: int
    parallel: int | None
    retries: int
    other_metrics: NotRequired[list[Metric]]
    plugins: NotRequired[list[PluginRecord]]


_PLAN_JSON = TypeAdapter(RaySearchPlanJson)


@dataclass(frozen=True)
class RaySearchResult:
    """The result of a search with one of Ray's schedulers.

    Args:
        folder: The search's folder.
        rows: One mapping for each trial, best first, as in trials.csv.
        metrics: The metrics, which are columns of the rows. The first one decides.
        exchanged: Whether trials took over models of other trials, so that a row has only the last settings of its
            trial.
        results: Tune's result; `model_of` (trainable.py) opens its checkpoints.
    """

    folder: Path
    rows: list[dict[str, Any]]
    metrics: tuple[Metric, ...]
    exchanged: bool
    results: ray_tune.ResultGrid


def ray_search(folder: Path, plan: RaySearchPlan, on_start: Callable[[], None] | None = None) -> RaySearchResult:
    """Run a search with a Ray scheduler in a new folder, in this process's Ray session.

    Args:
        folder: The search's folder.
        plan: Settings of the search.
        on_start: Function that is called when the search's folder is complete, so that the search can be resumed.

    Raises:
        CheckpointError: The folder exists.
        ConfigError: A trial does not fit into the cluster.
        KeyboardInterrupt: A signal stopped the search.
        RayltError: No trial finished.
    """
    config, space = _opened(plan)
    trial = trainable(config, plan.parallel)
    _make(folder)  # before the tuner, which would make it or write to another search
    with Folder.open(folder) as search_folder, lock_search(search_folder):
        tuner = _new_tuner(folder, plan, trial, config, space)
        search_folder.write(PLAN, json.dumps({**asdict(plan), "plugins": origins(config)}, indent=1) + "\n")
        if on_start is not None:
            on_start()
        return _conclude(folder, plan, _fit(tuner))


def _new_tuner(folder: Path, plan: RaySearchPlan, trial: Any, config: Config, space: Space) -> ray_tune.Tuner:
    searcher = _searcher(plan)
    return ray_tune.Tuner(
        trial,
        param_space=param_space(space, grid=plan.searcher == "grid"),
        tune_config=ray_tune.TuneConfig(
            metric=plan.metric,
            mode="max",
            num_samples=1 if plan.searcher == "grid" else plan.samples,
            search_alg=searcher,
            scheduler=_scheduler(plan, config, space),
            # BasicVariantGenerator limits parallel trials by its own argument
            max_concurrent_trials=plan.parallel if isinstance(searcher, OptunaSearch) else None,
            reuse_actors=True,
        ),
        run_config=ray_tune.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            verbose=0,
            checkpoint_config=_checkpoints(plan, config),
            failure_config=ray_tune.FailureConfig(max_failures=plan.retries),
            callbacks=[_EndedTrials(plan.metrics), WaitingNotice(_print)],
        ),
    )


def _fit(tuner: ray_tune.Tuner) -> ray_tune.ResultGrid:
    """Run the trials of a search until they have ended.

    Raises:
        KeyboardInterrupt: A signal stopped the search, after Tune saved the state from which the search continues.
    """
    interrupted = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        save = signal.getsignal(signal.SIGUSR1)  # Tune's handler, which ends the search after its current step
        if interrupted.is_set() or not callable(save):
            raise KeyboardInterrupt
        interrupted.set()
        save(number, frame)

    with handling_stops(interrupt):
        results = tuner.fit()
    if interrupted.is_set():
        raise KeyboardInterrupt
    return results


def _make(folder: Path) -> None:
    """Make the folder of a new search, which must not exist."""
    with file_errors(folder):
        try:
            make(folder)
        except FileExistsError:
            raise already_exists(folder) from None


def resume_ray_search(folder: Path) -> RaySearchResult:
    """Continue an interrupted search, and run failed trials again.

    Raises:
        CheckpointError: The search's settings cannot be read, or another process runs the search.
        ConfigError: A plugin of the search is not registered, or is another version.
        KeyboardInterrupt: A signal stopped the search.
        RayltError: No trial finished.
    """
    with Folder.open(folder) as search_folder, lock_search(search_folder):
        tree = as_json(search_folder.read(PLAN), _PLAN_JSON, str(folder / PLAN))
        check_origins([{**plugin} for plugin in tree.pop("plugins", [])], folder)
        plan = RaySearchPlan(**{**tree, "other_metrics": tuple(tree.get("other_metrics", ()))})
        config, _ = _opened(plan)
        tuner = ray_tune.Tuner.restore(str(folder), trainable(config, plan.parallel), resume_errored=True)
        return _conclude(folder, plan, _fit(tuner))


def _checkpoints(plan: RaySearchPlan, config: Config) -> ray_tune.CheckpointConfig:
    """Return Ray's settings for checkpoints of trials.

    Under pbt all checkpoints are kept, because slower trials may need old ones.
    """
    if plan.scheduler == "pbt":
        return ray_tune.CheckpointConfig(checkpoint_frequency=_first_comparison(plan, config), checkpoint_at_end=True)
    return ray_tune.CheckpointConfig(num_to_keep=2, checkpoint_frequency=1, checkpoint_at_end=True)


def _first_comparison(plan: RaySearchPlan, config: Config) -> int:
    """Return the number of evaluations of a trial before trials are first compared."""
    grace = plan.grace or max(1, config.federation.rounds // 9)
    return math.ceil(grace / config.evaluation.every)


def _searcher(plan: RaySearchPlan) -> OptunaSearch | BasicVariantGenerator:
    """Return Ray's searcher with the search's seed; pbt starts all trials with random values.

    The later changes by pbt are not seeded, because they depend on timing as well.
    """
    if plan.searcher != "tpe" or plan.scheduler == "pbt":
        return BasicVariantGenerator(random_state=plan.seed, max_concurrent=plan.parallel or 0)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return OptunaSearch(seed=plan.seed)


class _EndedTrials(ray_tune.Callback):
    """Callback that prints a line to standard error for each trial that has ended."""

    def __init__(self, metrics: Sequence[Metric]):
        self._metrics = metrics

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        figures = trial.last_result
        first, *others = (percent(figures.get(name)) for name in self._metrics)
        scores = "".join([first, *(f"  {name} {text}" for name, text in zip(self._metrics[1:], others, strict=True))])
        values = " ".join(f"{key}={value_text(value)}" for key, value in trial.config.items())
        _print(f"{trial.trial_id}  ended after round {figures.get('round', 0)}  {scores}  {values}")

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        _print(f"{trial.trial_id}  failed")


def _print(line: str) -> None:
    print(line, file=sys.stderr)


def _opened(plan: RaySearchPlan) -> tuple[Config, Space]:
    space: Space = {}
    for key, text in plan.space.items():
        axis = parse(text)
        if axis is None:
            raise CheckpointError(
                f"{PLAN}: {key} is not a range ({text}). Restore the original file, or start a new search.",
                code="search.changed",
                key=key,
                value=text,
            )
        space[key] = axis
    return with_validation(check(Config, plan.config)), space


def _scheduler(plan: RaySearchPlan, config: Config, space: Space) -> TrialScheduler:
    """Return Ray's scheduler for a search, with rounds converted to evaluations, which are Ray's unit."""
    evaluations = math.ceil(config.federation.rounds / config.evaluation.every)
    first = _first_comparison(plan, config)
    if plan.scheduler == "pbt":
        mutations = {
            key: list(axis.values) if isinstance(axis, Choice | Grid) else domain
            for (key, axis), domain in zip(space.items(), param_space(space).values(), strict=True)
        }
        return PopulationBasedTraining(perturbation_interval=first, hyperparam_mutations=mutations)
    if plan.scheduler == "hyperband":
        return HyperBandScheduler(max_t=evaluations)
    return MedianStoppingRule(grace_period=first)


def _conclude(folder: Path, plan: RaySearchPlan, results: ray_tune.ResultGrid) -> RaySearchResult:
    rows = sorted(
        (_row(result, plan) for result in results),
        key=lambda row: (
            row["failed"] is not None,  # the metric of a failed trial is of an earlier round
            row[plan.metric] is None,
            -(row[plan.metric] or 0),
            row["trial"] or "",
        ),
    )
    if not rows or rows[0]["failed"] is not None or rows[0][plan.metric] is None:
        raise no_result(folder, len(rows), [row["failed"] for row in rows if row["failed"] is not None])
    if plan.other_metrics:
        rows = _with_front(rows, plan.metrics)
    config, _ = _opened(plan)
    best = configure(config, config.method["name"], {key: rows[0][key] for key in plan.space})
    with Folder.open(folder) as search_folder:
        if plan.other_metrics:
            search_folder.write("pareto.png", draw_pareto(rows, plan.metrics, [row["trial"] for row in rows]))
        search_folder.write("trials.csv", csv_table(rows))
        search_folder.write("best.yaml", yaml_text.write(best.model_dump(mode="json")))
    return RaySearchResult(folder, rows, plan.metrics, (folder / "pbt_global.txt").is_file(), results)


def _with_front(rows: list[dict[str, Any]], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Add to each row whether its trial is on the Pareto front, as `front`.

    Metrics of a trial that failed or was stopped are of an earlier round, so such a trial is never on the front.
    """
    last = max(row["round"] or 0 for row in rows)
    finished = [row for row in rows if row["failed"] is None and row["round"] == last]
    front = [finished[index] for index in pareto_front(finished, metrics)]
    return [{**row, "front": row in front} for row in rows]


def _row(result: ray_tune.Result, plan: RaySearchPlan) -> dict[str, Any]:
    figures: Mapping[str, Any] = result.metrics or {}
    config: Mapping[str, Any] = result.config or {}
    return {
        "trial": figures.get("trial_id"),
        "round": figures.get("round"),
        **{name: figures.get(name) for name in plan.metrics},
        **{key: config.get(key) for key in plan.space},
        "failed": None if result.error is None else _last_line(result.error),
    }


def _last_line(error: Exception) -> str:
    """Return the message of a Tune error without its traceback."""
    return on_one_line(str(error).strip().splitlines()[-1])
