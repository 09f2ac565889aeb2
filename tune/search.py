"""A search: trials of one or more methods, the best of them, and the folder that tells of it.

    search.json      what was asked for
    trials.jsonl     one line per trial that ended; what a resumed search goes by
    trials/<trial>/  each a run folder (raylt/runs/journal.py) with its judgements on the validation set
    best.yaml        the best configuration, for raylt run
    trials.csv, trials.json, search.png
    tune/            Ray Tune's own notes; nothing reads them
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from raylt.config import Config
from raylt.errors import CheckpointError, RayltError, one_line
from raylt.registry import Guest, guests
from raylt.store import Folder, folder_for
from tune import report
from tune.checks import check_asked, check_plan, check_tracked
from tune.desk import Desk, Watcher, sizes
from tune.kinds import Metric
from tune.plan import SAMPLES, Plan, Scheduler, Searcher, State
from tune.record import Record
from tune.space import Space

FleetKind = Literal["ray", "local"]
VALIDATION = 0.2                # share of the training samples that a search judges on, unless data.validation says
# Tune's own habits, read when its processes start
QUIET = {"RAY_CHDIR_TO_TRIAL_DIR": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "TUNE_DISABLE_SIGINT_HANDLER": "1",
         "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0"}


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Args:
        config: the best configuration, as in best.yaml.
        best: its trial.
        trials: all of them.
        folder: of the search.
    """

    config: Config
    best: Record
    trials: list[Record]
    folder: Path


def search(config: Config, spaces: Space | Mapping[str, Space], samples: int | None = None, *,
           out: Path | str = "runs", name: str | None = None, metric: Metric = "accuracy", searcher: Searcher = "tpe",
           scheduler: Scheduler = "asha", grace: int | None = None, budget: int | None = None, seed: int = 0,
           parallel: int | None = None, retries: int = 2, fleet: FleetKind = "ray", address: str | None = None,
           track: Sequence[str] = (), watcher: Watcher | None = None) -> Found:
    """Searches for the configuration whose final model is best on validation samples.

    Args:
        config: what all trials share.
        spaces: from `space`, of the method that `config` names, or by method.
        samples: trials per method; 20, or as many as the budget allows, by default.
        out, name: the search's folder is `out/name`.
        metric: on the validation set: accuracy, many, medium, few, owned, matched or miou.
        grace: rounds before trials are compared for the first time.
        budget: client-steps that each method may spend, see `client_steps`.
        parallel: trials at once at most; as many as the cluster holds by default. It is a part of what a search with
            TPE comes to, see plan.py.
        fleet: "local" runs the trials one after another in this process, to the same end.
        retries: times that a failed trial is taken up again from its own checkpoint.
        track: "mlflow", "wandb".

    Raises:
        ConfigError: nothing to search, or a trial does not fit into the cluster.
        RayltError: no trial came to its end.
    """
    check_tracked(track, fleet)
    if config.data.validation == 0:
        config = config.model_copy(update={"data": config.data.model_copy(update={"validation": VALIDATION})})
    by_method: dict[str, Space] = {}
    for key, value in spaces.items():
        if isinstance(value, Mapping):
            by_method[key] = dict(value)
        else:
            by_method.setdefault(config.method["name"], {})[key] = value
    if samples is None and budget is None:
        samples = SAMPLES
    plan = Plan(config, by_method, samples, budget, searcher, scheduler, grace, metric, seed, 0, retries)
    check_asked(plan, parallel, fleet)
    name = name or f"search-{'-'.join(by_method)}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(out).resolve() / name
    if (folder / "search.json").exists():
        raise CheckpointError(f"{folder}: exists already; give another --name, or continue it with raylt tune "
                              f"--resume {folder}")
    check_plan(plan)
    return _run(folder, plan, parallel, fleet, address, track, watcher or Watcher())


def resume(folder: Path | str, *, parallel: int | None = None, fleet: FleetKind = "ray", address: str | None = None,
           track: Sequence[str] = (), watcher: Watcher | None = None) -> Found:
    """Goes on with a search that was interrupted; trials that ended are not run again, failed ones are.

    Raises:
        CheckpointError: the folder is not one of a search.
    """
    check_tracked(track, fleet)
    folder = Path(folder).resolve()
    if not (folder / "search.json").exists():
        raise CheckpointError(f"{folder}: not the folder of a search (it has no search.json)")
    with Folder.open(folder) as here:
        plan = Plan.from_json(here.read("search.json"), str(folder / "search.json"))
    return _run(folder, plan, parallel, fleet, address, track, watcher or Watcher())


def _run(folder: Path, plan: Plan, parallel: int | None, fleet: FleetKind, address: str | None, track: Sequence[str],
         watcher: Watcher) -> Found:
    with _open_cluster(fleet, address) as nodes:
        placement, at_once = None, parallel or 1
        if nodes is not None:
            placement, at_once = _place(plan, nodes, parallel)
        if plan.lag == 0:           # a new search; one that is resumed keeps what it was started with
            plan = replace(plan, lag=at_once)
            _create(folder, plan)
        with _held(folder):
            desk = Desk(folder, plan, watcher)
            from tune.trial import Job  # torch: not for those who only ask for help
            job = Job(folder, os.getcwd(), plan.metric, plan.scheduler == "asha", plan.grace, _guests_of(plan))
            try:
                watcher.on_start(folder, plan, desk.state, at_once)
                if placement is None:
                    _run_here(desk, job, plan.retries)
                else:
                    from tune.cluster import run_trials
                    run_trials(desk, job, placement, at_once, plan.retries, track)
            finally:
                watcher.on_end()
            return _conclude(folder, plan, desk.state)


def _run_here(desk: Desk, job: Any, retries: int) -> None:
    """One trial after another, in this process."""
    from tune.trial import Trial, local_fleet

    while isinstance(record := desk.next(), Record):
        failed = None
        for left in range(retries, -1, -1):
            trial = None
            try:
                trial = Trial(job, record.id, record.config, record.cost, local_fleet)
                while desk.told(record.id, trial.step()) and not trial.done:
                    pass
                break
            except Exception as error:
                said = str(error) if isinstance(error, RayltError) else one_line(error)
                failed = None if left else said
            finally:
                if trial is not None:
                    trial.close()
        desk.closed(record.id, failed)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder of a search, for one process at a time."""
    with Folder.open(folder) as here:
        if (lock := here.lock(".lock")) is None:
            raise CheckpointError(f"{folder}: another process is running this search; wait for it or stop it")
        try:
            yield
        finally:
            os.close(lock)


@contextmanager
def _open_cluster(fleet: FleetKind, address: str | None) -> Iterator[list[dict[str, float]] | None]:
    """The nodes' resources of the cluster that the trials run on, until the block ends; None for this process."""
    if fleet == "local":
        yield None
        return
    from actors.cluster import environment, session
    with environment({key: os.environ.get(key, value) for key, value in QUIET.items()}), session(address):
        import ray
        yield [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _place(plan: Plan, nodes: Sequence[Mapping[str, float]], parallel: int | None) -> tuple[Any, int]:
    from tune.placement import bundles_of, check_fit, most_on_gpu, place_trial
    have = {key: sum(node.get(key, 0.0) for node in nodes) for key in ("CPU", "GPU")}
    total = sum(track.total for track in State(plan, sizes).tracks.values())
    most = int(min(total, parallel or 1000))
    placement = place_trial(plan.base, len(sizes(plan.base)), most, have)
    if plan.base.resources.gpu_share == "auto" and 0 < placement.gpus < 0.5:
        # several would share a GPU: so many as its memory holds
        from tune.needs import need_of
        if (need := need_of(plan, _guests_of(plan))) is not None:
            placement = place_trial(plan.base, len(sizes(plan.base)), most, have, most_on_gpu(nodes, need))
    return placement, check_fit(bundles_of(placement), nodes, most)


def _create(folder: Path, plan: Plan) -> None:
    try:
        with folder_for(folder) as here:
            here.write("search.json", json.dumps(plan.to_json(), indent=2) + "\n")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; give another --out") from None


def _guests_of(plan: Plan) -> tuple[Guest, ...]:
    """What trials may name beside raylt's own: the methods of the search, and whatever else there is to choose from."""
    return tuple(guest for guest in guests() if guest.kind != "method" or guest.name in plan.methods)


def _conclude(folder: Path, plan: Plan, state: State) -> Found:
    best = state.best()
    report.write(folder, plan, state)
    if best is None:
        reasons = [record.failed for record in state.trials if record.failed]
        raise RayltError(f"no trial came to its end ({len(state.trials)} begun); the first failure: "
                         f"{reasons[0] if reasons else 'none'}")
    return Found(best.config, best, state.trials, folder)
