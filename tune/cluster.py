"""The trials of a search on Ray: Tune starts their processes, reserves their places and takes up those that fail."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["RAY_AIR_NEW_OUTPUT"] = "0"                      # read by Tune when it is imported
import ray
import torch
from ray import tune as ray_tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher as RaySearcher

from actors.fleet import RayFleet
from actors.guests import send_by_value
from actors.placement import Placement
from actors.shards import Shards
from raylt.config import Config
from raylt.core.fleet import Fleet
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import RayltError, one_line
from raylt.store import Folder, folder_for
from tune.desk import ERROR, Desk
from tune.placement import bundles_of
from tune.plan import OVER
from tune.record import Point, Record
from tune.trial import Job, Trial


def run_trials(desk: Desk, job: Job, placement: Placement, at_once: int, retries: int, track: Sequence[str]) -> None:
    """Runs what the desk gives out until it is over."""
    send_by_value(job.guests)
    for name in ("ray.tune", "ray.air", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    office = _Office(desk, at_once)
    trainable = ray_tune.with_resources(
        ray_tune.with_parameters(TrialActor, job=job, placement=placement),
        ray_tune.PlacementGroupFactory(bundles_of(placement), strategy="PACK"))
    with Folder.open(job.folder) as here:
        here.remove("tune")         # Tune's own notes of an earlier start: ours decide
    ray_tune.Tuner(
        trainable,
        tune_config=ray_tune.TuneConfig(
            search_alg=_Suggest(office), scheduler=_Stop(office), num_samples=-1, reuse_actors=True,
            trial_name_creator=lambda trial: trial.config["trial"],
            trial_dirname_creator=lambda trial: trial.config["trial"]),
        run_config=ray_tune.RunConfig(
            name="tune", storage_path=str(job.folder), verbose=0,
            # trials keep their own checkpoints
            checkpoint_config=ray_tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            failure_config=ray_tune.FailureConfig(max_failures=retries), callbacks=_callbacks(track, job.folder)),
    ).fit()


class TrialActor(ray_tune.Trainable):
    """Hosts a `Trial`; its client actors live in the trial's placement group and end with it."""

    def setup(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, config: dict[str, Any], job: Job, placement: Placement) -> None:
        self._config, self._job, self._placement = config, job, placement
        self._trial: Trial | None = None

    def step(self) -> dict[str, Any]:
        folder = self._job.folder / "trials" / self._config["trial"]
        try:
            if self._trial is None:     # here, not in setup: Tune takes up a failed trial only once it has begun
                self._trial = self._open()
            points = self._trial.step()
        except Exception as error:
            with folder_for(folder) as here:
                here.write(ERROR, f"{error if isinstance(error, RayltError) else one_line(error)}\n")
            raise
        with Folder.open(folder) as here:
            here.remove(ERROR)
        figures = {}
        if points:
            last = points[-1]
            figures = {"round": last.step, "score": last.score, "client_steps": last.steps,
                       "validation": _numbers(last.validation), "test": _numbers(last.test)}
        return {**figures, "points": json.dumps([asdict(point) for point in points]), "done": self._trial.done}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._config = new_config
        return True

    def cleanup(self) -> None:
        if self._trial is not None:
            self._trial.close()
            self._trial = None

    def _open(self) -> Trial:
        if Path(self._job.cwd).is_dir():
            os.chdir(self._job.cwd)
        config = Config.model_validate_json(self._config["config"])
        return Trial(self._job, self._config["trial"], config, self._config["cost"], self._fleet,
                     leased=bool(ray.get_gpu_ids()))

    def _fleet(self, setup: Setup, task: Task, name: str, device: torch.device) -> Fleet:
        # no scheduling strategy: so Ray puts the actors into the trial's placement group
        folder = self._job.folder / "trials" / self._config["trial"]
        return RayFleet(setup, task, Shards.put(task.shards), ray.put(task.test), self._placement, name, folder)


class _Office:
    """Between Tune's names for trials and ours. Tune copies and pickles what it is given: of this there is one."""

    def __init__(self, desk: Any, at_once: int):
        self.desk, self.at_once = desk, at_once
        self.names: dict[str, str] = {}             # of the trials under way, by Tune's name

    def __deepcopy__(self, memo: Any) -> "_Office":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Office, (None, 0)


class _Suggest(RaySearcher):
    """Gives Tune the trials that the plan wants begun."""

    def __init__(self, office: _Office):
        super().__init__()
        self._office = office

    def suggest(self, trial_id: str) -> Any:
        office = self._office
        if len(office.names) >= office.at_once:
            return None
        found = office.desk.next()
        if not isinstance(found, Record):
            return self.FINISHED if found == OVER and not office.names else None
        office.names[trial_id] = found.id
        # the values for loggers, the whole configuration for the trial
        return {"trial": found.id, "method": found.method, "cost": found.cost, "config": found.config.model_dump_json(),
                "values": {key.replace(".", "_"): value for key, value in found.values.items()}}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        del self._office.names[trial_id]

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the trials' records are the state."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a search is resumed from its own records")


class _Stop(FIFOScheduler):
    """Ends the trials that the plan has stopped."""

    def __init__(self, office: _Office):
        super().__init__()
        self._office = office

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        points = [Point(**point) for point in json.loads(result["points"])]
        goes_on = self._office.desk.told(trial.config["trial"], points)
        return TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if "points" in result:          # of a trial that ended by itself the last result comes here only
            self._office.desk.told(trial.config["trial"], [Point(**point) for point in json.loads(result["points"])])
        self._office.desk.closed(trial.config["trial"], None)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        self._office.desk.closed(trial.config["trial"], "its process died")

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self._office.desk.closed(trial.config["trial"], "it could not be started")


def _numbers(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in figures.items() if value is not None}


def _callbacks(track: Sequence[str], folder: Path) -> list[Any]:
    """Ray's callbacks for MLflow and W&B."""
    found: list[Any] = []
    for name in track:
        if name == "mlflow":
            from ray.air.integrations.mlflow import MLflowLoggerCallback
            uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
            found.append(MLflowLoggerCallback(tracking_uri=uri, experiment_name=folder.name))
        else:
            from ray.air.integrations.wandb import WandbLoggerCallback
            found.append(WandbLoggerCallback(project="raylt", group=folder.name))
    return found
