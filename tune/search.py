"""Searches over the hyper-parameters of one or more methods, and their continuation.

A search has a folder:

    search.json      the plan
    trials.jsonl     one line per trial that has ended; a resumed search restores its trials from it
    trials/<trial>/  the run folder of each trial (raylt/runs/folder/writer.py), with its scores on the validation set;
                     <trial>-split-1 for the next split
    best.yaml        the best configuration, for raylt run
    trials.csv, trials.json, search.png, and pareto.png for several metrics
    tune/            Ray Tune's own state, which raylt does not read
"""

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, Literal, get_args

from raylt.config import Config
from raylt.disk import check_name, continuable, exists
from raylt.errors import CheckpointError, RayltError, count_of, describe_error, spoken, without_remedy
from raylt.own_code.commands import own_command
from raylt.registry import Plugin, plugins
from raylt.runs.callbacks.base import Callback
from raylt.runs.callbacks.notebook_progress import observer
from raylt.runs.runner import check_fleet
from raylt.store import Folder, folder_for, resolved_path
from raylt.studies.running.tuning import Count
from tune.checks import check_arguments, check_metrics, check_plan, check_spaces, check_tracked
from tune.loop import SearchLoop, forget_tasks, holders, size_of
from tune.plan import (
    DEFAULT_SAMPLES,
    Scheduler,
    Searcher,
    SearchPlan,
    SearchState,
    default_metric,
    front_of,
    with_validation,
)
from tune.records import PLAN, Metric, TrialRecord
from tune.report import results
from tune.space import Space

SearchFleet = Literal["ray", "local"]
# environment variables that Tune reads when its processes start
QUIET = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


@dataclass(frozen=True, repr=False)
class SearchResult:
    """The result of a hyper-parameter search.

    Args:
        config: The best configuration, as in best.yaml.
        best: The trial with the best configuration.
        trials: All trials.
        folder: The search's folder.
        plan, state: The search itself, for its table.
    """

    config: Config
    best: TrialRecord
    trials: list[TrialRecord]
    folder: Path
    plan: SearchPlan
    state: SearchState

    @property
    def front(self) -> list[TrialRecord]:
        """Return the finished trials on the Pareto front of the search's metrics, best by the first metric first."""
        return front_of(self.plan, self.trials)

    def __repr__(self) -> str:
        return f"SearchResult({str(self.folder)!r}, best {self.best.id} of {count_of(len(self.trials), 'trial')})"

    def _repr_html_(self) -> str:
        """Return an HTML table of the trials, and the best settings."""
        best = ", ".join(f"{key} = {value}" for key, value in self.best.values.items())
        return f"{results.table_of(self.plan, self.state).html()}<div>best: {escape(f'{self.best.id}, {best}')}</div>"


@dataclass(frozen=True)
class Execution:
    """Options of `search` that decide where its trials run."""

    parallel: int | None
    fleet: SearchFleet
    address: str | None
    track: Sequence[str]
    callback: Callback


def search(
    config: Config,
    spaces: Space | Mapping[str, Space],
    samples: int | None = None,
    *,
    out: Path | str = "runs",
    name: str | None = None,
    metric: Metric | Sequence[Metric] | None = None,
    searcher: Searcher = "tpe",
    scheduler: Scheduler = "asha",
    grace: int | None = None,
    budget: int | None = None,
    count: Count = "steps",
    seed: int = 0,
    parallel: int | None = None,
    retries: int = 2,
    splits: int = 1,
    fleet: SearchFleet = "ray",
    address: str | None = None,
    track: Sequence[str] = (),
    callbacks: Sequence[Callback] | None = None,
) -> SearchResult:
    """Search for the configuration whose final model is best on validation samples.

    Args:
        config: The settings that all trials share. If `data.validation` is 0, a fifth of the training samples is for
            validation.
        spaces: The space of the method that `config` names, from `space`; or spaces by method, from `spaces_of`.
        samples: Trials per method; by default 20, or as many as the budget allows.
        out, name: The search's folder is `out/name`.
        metric: On the validation set: accuracy, many, medium, few, owned, matched, miou, local, which is the mean over
            the clients on the images taken from them, or worst_decile, that of the worst tenth of the clients. By
            default accuracy, or local for clients' own models. Of several metrics the first decides; the others are
            shown, and the Pareto front is that of all.
        searcher: Rule that chooses values: tpe, random or grid.
        scheduler: Rule that stops trials early: asha or none.
        grace: Rounds before trials are compared for the first time.
        budget: Client-steps that each method may spend.
        count: "steps", or "passes" for a budget in which a step costs the passes over samples that its method makes,
            as a multiple of FedAvg's, and the server's own work costs as many steps as have its multiplications.
        seed: Seed of the draws of values.
        parallel: Trials at once at most; by default as many as the cluster holds. TPE learns from the trials that are
            this many back, so a search with TPE gives the same result elsewhere only with the same number.
        retries: Number of times that a failed trial is continued from its own checkpoint.
        splits: Number of splits on which a trial runs, with `data.seed` and the seeds that follow it. The score of a
            finished trial is the worst of them; a trial that fails on one has failed. Trials are stopped early by the
            first split alone.
        fleet: "local" runs the trials one after another in this process; with TPE, `parallel` is then 1 by default.
        address: Address of a Ray cluster, see `actors.cluster.access.cluster_to_join`.
        track: Trackers that Ray logs trials to: "mlflow", "wandb".
        callbacks: Observers of the search; by default a progress bar in a notebook, and none elsewhere.

    Raises:
        ConfigError: Nothing to search, or a trial does not fit into the cluster.
        CheckpointError: The folder exists.
        RayltError: No trial reached its end.
    """
    check_tracked(track, fleet)
    check_spaces(config, spaces)
    config = with_validation(config)
    by_method = _spaces_by_method(config, spaces)
    if samples is None and budget is None:
        samples = DEFAULT_SAMPLES
    if metric is None:
        metric = default_metric(config, by_method)
    metrics: tuple[Any, ...] = (metric,) if isinstance(metric, str) else tuple(metric)
    check_metrics(metrics)
    plan = SearchPlan(
        config,
        by_method,
        samples,
        budget,
        count,
        searcher,
        scheduler,
        grace,
        metrics[0],
        metrics[1:],
        seed,
        retries=retries,
        splits=splits,
        lag=0,
    )
    check_arguments(plan, parallel)
    check_fleet(fleet, address, get_args(SearchFleet))
    folder = _new_folder(Path(out), name, by_method)
    forget_tasks()
    check_plan(plan)
    return _run(folder, plan, Execution(parallel, fleet, address, track, observer(callbacks)))


def resume(
    folder: Path | str,
    *,
    parallel: int | None = None,
    fleet: SearchFleet = "ray",
    address: str | None = None,
    track: Sequence[str] = (),
    callbacks: Sequence[Callback] | None = None,
) -> SearchResult:
    """Continue an interrupted search. Failed trials run again; trials that ended without an error do not.

    Args:
        folder: The search's folder. The other arguments are the same as in `search`.

    Raises:
        CheckpointError: The folder does not hold a search, or its files were changed.
        RayltError: No trial reached its end.
    """
    check_tracked(track, fleet)
    folder = resolved_path(Path(folder))
    if not exists(folder / PLAN):
        raise CheckpointError(
            f"{folder}: not the folder of a search (it has no search.json). Give the folder that raylt tune made.",
            code="search.not-found",
            path=str(folder),
        )
    check_fleet(fleet, address, get_args(SearchFleet))
    with Folder.open(folder) as search_folder:
        plan = SearchPlan.from_json(search_folder.read(PLAN), str(folder / PLAN))
    forget_tasks()
    with _in_folder(plan.start):
        return _run(folder, plan, Execution(parallel, fleet, address, track, observer(callbacks)))


def _spaces_by_method(config: Config, spaces: Space | Mapping[str, Space]) -> dict[str, Space]:
    """Return the spaces by method; a single space belongs to the method of the configuration."""
    by_method: dict[str, Space] = {}
    for key, value in spaces.items():
        if isinstance(value, Mapping):
            by_method[key] = dict(value)
        else:
            by_method.setdefault(config.method["name"], {})[key] = value
    return by_method


def _new_folder(out: Path, name: str | None, methods: Iterable[str]) -> Path:
    """Return the folder of a new search, by default named after its methods and the time, or raise CheckpointError."""
    if name is not None:
        check_name(name, spoken("--name", "name"))
    folder = resolved_path(out) / (name or f"search-{'-'.join(methods)}-{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3])
    if (folder / PLAN).exists():
        raise already_exists(folder)
    return folder


def already_exists(folder: Path) -> CheckpointError:
    """Return the error for a new search whose folder is taken."""
    return CheckpointError(
        f"{folder}: exists already. Give another {spoken('--name', 'name')}, or continue it with "
        f"{_resume_call(folder)}.",
        code="search.exists",
        path=str(folder),
    )


@contextmanager
def _in_folder(start: str | None) -> Iterator[None]:
    """Run the block in the folder in which the search began, so that relative paths in its settings are valid.

    On a machine without this folder, the block runs in the working directory.
    """
    before = os.getcwd()
    if start is not None and os.path.isdir(start):
        os.chdir(start)
    try:
        yield
    finally:
        os.chdir(before)


def _resume_call(folder: Path) -> str:
    """Return the shell command or Python call that continues a search, for messages."""
    return spoken(own_command("tune", "--resume", folder), f"tune.resume({str(folder)!r})")


def _run(folder: Path, plan: SearchPlan, execution: Execution) -> SearchResult:
    """Run the remaining trials of a search, whose folder is made if the search is new."""
    callback = execution.callback
    with _open_cluster(execution.fleet, execution.address) as nodes:
        placement = None
        at_once = execution.parallel or 1
        if nodes is not None:
            placement, at_once = _place(plan, nodes, execution.parallel)
        new = plan.lag == 0  # a resumed search keeps its lag
        if new:
            # not `at_once`, which is smaller if the cluster is, so that `parallel` gives one search on all clusters
            plan = replace(plan, lag=execution.parallel or at_once, start=os.getcwd())
        with _locked(folder, plan if new else None), continuable(folder, _resume_call(folder)):
            loop = SearchLoop(folder, plan, callback)
            from tune.trial import TrialJob  # it imports torch, which `raylt tune --help` does not need

            job = TrialJob(
                folder,
                os.getcwd(),
                plan.metric,
                plan.scheduler == "asha",
                plan.grace,
                plugins_for(plan.methods),
                plan.splits,
            )
            try:
                callback.on_search_start(folder, list(plan.methods), _trials_in_all(loop.state), at_once)
                if placement is None:
                    _run_in_this_process(loop, job, plan.retries)
                else:
                    from tune.ray_tune.backend import run_trials

                    run_trials(loop, job, placement, at_once, plan.retries, execution.track)
            finally:
                callback.on_search_end()
            return _conclude(folder, plan, loop.state)


def _run_in_this_process(loop: SearchLoop, job: Any, retries: int) -> None:
    """Run the trials one after another in this process."""
    while True:
        record = loop.next()
        if not isinstance(record, TrialRecord):
            return
        failed = None
        for _ in range(retries + 1):
            failed = _run_trial(loop, job, record)
            if failed is None:
                break
        loop.close_trial(record.id, failed)


def _run_trial(loop: SearchLoop, job: Any, record: TrialRecord) -> str | None:
    """Run or continue a trial; return its error in one line, or None if it has none."""
    from tune.trial import Trial, local_fleet

    trial = None
    try:
        trial = Trial(job, record.id, record.config, record.cost, local_fleet)
        while loop.add_scores(record.id, trial.step()) and not trial.done:
            pass
        return None
    except Exception as error:
        return describe_error(error)
    finally:
        if trial is not None:
            trial.close()


def _trials_in_all(state: SearchState) -> int | None:
    """Return the total number of trials of a search; None if the budget decides it."""
    total = sum(sequence.total for sequence in state.sequences.values())
    return None if total == math.inf else int(total)


@contextmanager
def _locked(folder: Path, new: SearchPlan | None) -> Iterator[None]:
    """Lock the folder of a search, see `lock_search`.

    Args:
        folder: The search's folder.
        new: Plan of a new search, whose folder is made and whose plan is written; None for a resumed search.

    Raises:
        CheckpointError: Another process uses the folder, or another search has taken it since it was checked.
    """
    with Folder.open(folder) if new is None else _make(folder) as search_folder, lock_search(search_folder):
        if new is not None:
            if search_folder.has(PLAN):
                raise already_exists(folder)
            search_folder.write(PLAN, json.dumps(new.to_json(), indent=2) + "\n")
        yield


@contextmanager
def lock_search(folder: Folder) -> Iterator[None]:
    """Lock the folder of a search for the duration of the block, so that one process at a time uses it.

    Raises:
        CheckpointError: Another process uses the folder.
    """
    lock = folder.lock(".lock")
    if lock is None:
        raise CheckpointError(
            f"{folder.path}: another process is running this search. Wait for it or stop it.",
            code="search.busy",
            path=str(folder.path),
        )
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def _open_cluster(fleet: SearchFleet, address: str | None) -> Iterator[list[dict[str, float]] | None]:
    """Join or start the cluster for the trials; yield the resources of its nodes, or None for "local"."""
    if fleet == "local":
        yield None
        return
    from actors.cluster.session import environment, session

    with environment({key: os.environ.get(key, value) for key, value in QUIET.items()}), session(address):
        import ray

        yield [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _place(plan: SearchPlan, nodes: Sequence[Mapping[str, float]], parallel: int | None) -> tuple[Any, int]:
    """Return the placement of one trial, and the number of parallel trials."""
    from tune.placement import bundles_of, check_fit, most_on_gpu, need_of, place_trial

    have = {key: sum(node.get(key, 0.0) for node in nodes) for key in ("CPU", "GPU")}
    total = sum(sequence.total for sequence in SearchState(plan, size_of).sequences.values())
    most = int(min(total, parallel or 1000))
    placement = place_trial(plan.base, holders(plan.base), most, have)
    if plan.base.resources.gpu_share == "auto" and 0 < placement.gpus < 0.5:
        # several processes would share a GPU, so probe how many its memory holds
        need = need_of(plan)
        if need is not None:
            placement = place_trial(plan.base, holders(plan.base), most, have, most_on_gpu(nodes, need))
    return placement, check_fit(bundles_of(placement), nodes, most)


def _make(folder: Path) -> Folder:
    """Make the folder of a new search, and open it."""
    try:
        return folder_for(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{without_remedy(error)}. Give another {spoken('--out', 'out')}.", code=error.code, **error.details
        ) from None


def plugins_for(methods: Collection[str]) -> tuple[Plugin, ...]:
    """Return the plugins that trials may use: the given methods, and all models, sources and augmentations."""
    return tuple(plugin for plugin in plugins() if plugin.kind != "method" or plugin.name in methods)


def _conclude(folder: Path, plan: SearchPlan, state: SearchState) -> SearchResult:
    """Write the tables of a finished search and return its result."""
    best = state.best()
    results.write(folder, plan, state)
    if best is None:
        raise no_result(folder, len(state.trials), [record.failed for record in state.trials if record.failed])
    return SearchResult(best.config, best, state.trials, folder, plan, state)


def no_result(folder: Path, trials: int, failures: Sequence[str]) -> RayltError:
    """Return the error for a search without a finished trial.

    Args:
        folder: The search's folder.
        trials: Number of trials that started.
        failures: Errors of the failed trials.
    """
    first = failures[0] if failures else "none"
    return RayltError(
        f"{folder}: no trial finished ({trials} started; first failure: {first}). Correct the failure, and continue "
        f"with {_resume_call(folder)}, which runs failed trials again.",
        code="search.no-result",
        path=str(folder),
        trials=trials,
        cause=first,
    )
