"""Runs the trials of a search on Ray.

Ray Tune starts the processes, reserves their resources and continues failed trials.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # Tune reads it on import.
import ray
import torch
from ray import tune as ray_tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher as RaySearcher

from actors.by_value import pack
from actors.capacity import Placement
from actors.fleet import RayFleet
from actors.shards import Shards
from raylt.config import Config
from raylt.core.fleet.fleet import Fleet
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import describe_error
from raylt.own_code.shipment import Shipment
from raylt.store import Folder, folder_for
from tune.loop import ERROR, SearchLoop
from tune.placement import bundles_of
from tune.plan import OVER
from tune.ray_tune.waiting import WaitingNotice
from tune.records import Score, TrialRecord
from tune.trial import Trial, TrialJob


def run_trials(
    loop: SearchLoop, job: TrialJob, placement: Placement, at_once: int, retries: int, track: Sequence[str]
) -> None:
    """Run the trials of a search on Ray until the search is over.

    Args:
        loop: The search.
        job: Settings that all trials share.
        placement: The client actors of one trial.
        at_once: Number of trials that run at the same time.
        retries: Number of times that a failed trial is continued.
        track: Trackers to which Ray logs trials, "mlflow" or "wandb".
    """
    for name in ("ray.tune", "ray.air", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    adapter = RaySearchAdapter(loop, at_once)
    trainable = ray_tune.with_resources(
        ray_tune.with_parameters(TrialActor, shipped=pack(job), folder=job.folder, placement=placement),
        ray_tune.PlacementGroupFactory(bundles_of(placement), strategy="PACK"),
    )
    with Folder.open(job.folder) as folder:
        folder.remove("tune")  # Tune's state from an earlier start; the search restores its trials without it
    ray_tune.Tuner(
        trainable,
        tune_config=ray_tune.TuneConfig(
            search_alg=_TrialSuggester(adapter),
            scheduler=_TrialStopper(adapter),
            num_samples=-1,
            reuse_actors=True,
            trial_name_creator=lambda trial: trial.config["trial"],
            trial_dirname_creator=lambda trial: trial.config["trial"],
        ),
        run_config=ray_tune.RunConfig(
            name="tune",
            storage_path=str(job.folder),
            verbose=0,
            # trials write their own checkpoints
            checkpoint_config=ray_tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            failure_config=ray_tune.FailureConfig(max_failures=retries),
            callbacks=[WaitingNotice(adapter.note), *_callbacks(track, job.folder)],
        ),
    ).fit()


class TrialActor(ray_tune.Trainable):
    """Ray actor that hosts a `Trial` and starts the trial's client actors.

    The client actors end with this actor. They run in the trial's placement group.
    """

    def setup(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, config: dict[str, Any], shipped: Shipment, folder: Path, placement: Placement
    ) -> None:
        self._config = config
        self._shipped = shipped
        self._folder = folder
        self._placement = placement
        self._trial: Trial | None = None

    def step(self) -> dict[str, Any]:
        """Run one step of the trial; return its new scores as JSON, and metrics for Ray's loggers."""
        folder = self._folder / "trials" / self._config["trial"]
        try:
            if self._trial is None:  # not in `setup`, because Tune does not continue a trial that failed there
                self._trial = self._open()
            scores = self._trial.step()
        except Exception as error:
            with folder_for(folder) as trial_folder:
                trial_folder.write(ERROR, describe_error(error) + "\n")
            raise
        with Folder.open(folder) as trial_folder:
            trial_folder.remove(ERROR)
        figures = {}
        if scores:
            last = scores[-1]
            figures = {
                "round": last.step,
                "score": last.value,
                "client_steps": last.client_steps,
                "validation": _numbers(last.validation),
                "test": _numbers(last.test),
            }
        return {**figures, "scores": json.dumps([score.to_json() for score in scores]), "done": self._trial.done}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Switch to another trial in the same process."""
        self.cleanup()
        self._config = new_config
        return True

    def cleanup(self) -> None:
        """Stop the trial's client actors and release its folder."""
        if self._trial is not None:
            self._trial.close()
            self._trial = None

    def _open(self) -> Trial:
        job: TrialJob = self._shipped.open()
        if Path(job.cwd).is_dir():
            os.chdir(job.cwd)
        config = Config.model_validate_json(self._config["config"])
        return Trial(
            job, self._config["trial"], config, self._config["cost"], self._fleet, leased=bool(ray.get_gpu_ids())
        )

    def _fleet(self, setup: Setup, task: Task, name: str, device: torch.device, folder: Path) -> Fleet:
        # without a scheduling strategy, Ray places the actors in the trial's placement group
        return RayFleet(setup, task, Shards.put(task.shards), ray.put(task.test), self._placement, name, folder)


class RaySearchAdapter:
    """Holder of the search loop, shared by Tune's searcher and scheduler.

    Tune copies and pickles its searcher and scheduler. Copies share one adapter, and a pickled adapter has no loop.

    Args:
        loop: The search.
        at_once: Number of trials that run at the same time.

    Attributes:
        running: Ids of the running trials, by Tune's ids.
    """

    def __init__(self, loop: Any, at_once: int):
        self.loop = loop
        self.at_once = at_once
        self.running: dict[str, str] = {}

    def note(self, text: str) -> None:
        """Show a line to the user."""
        self.loop.callback.on_message(text)

    def __deepcopy__(self, memo: Any) -> "RaySearchAdapter":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return RaySearchAdapter, (None, 0)


class _TrialSuggester(RaySearcher):
    """Tune searcher that suggests the trials that the search loop starts."""

    def __init__(self, adapter: RaySearchAdapter):
        super().__init__()
        self._adapter = adapter

    def suggest(self, trial_id: str) -> Any:
        adapter = self._adapter
        if len(adapter.running) >= adapter.at_once:
            return None
        record = adapter.loop.next()
        if not isinstance(record, TrialRecord):
            return self.FINISHED if record == OVER and not adapter.running else None
        adapter.running[trial_id] = record.id
        # the values are for Ray's loggers, the configuration for the trial
        return {
            "trial": record.id,
            "method": record.method,
            "cost": record.cost,
            "config": record.config.model_dump_json(),
            "values": {key.replace(".", "_"): value for key, value in record.values.items()},
        }

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        del self._adapter.running[trial_id]

    def save(self, checkpoint_path: str) -> None:
        """Do nothing, because the trials' records hold all state."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a search is resumed from its own records")


class _TrialStopper(FIFOScheduler):
    """Tune scheduler that passes scores to the search loop and ends the trials that the loop stops."""

    def __init__(self, adapter: RaySearchAdapter):
        super().__init__()
        self._adapter = adapter

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        continues = self._adapter.loop.add_scores(trial.config["trial"], _scores_of(result))
        return TrialScheduler.CONTINUE if continues else TrialScheduler.STOP

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if "scores" in result:  # Tune passes the last result of a trial that was not stopped only to this method
            self._adapter.loop.add_scores(trial.config["trial"], _scores_of(result))
        self._adapter.loop.close_trial(trial.config["trial"], None)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        self._adapter.loop.close_trial(trial.config["trial"], "its process died")

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self._adapter.loop.close_trial(trial.config["trial"], "it could not be started")


def _scores_of(result: Mapping[str, Any]) -> list[Score]:
    """Return the scores in a result of `TrialActor.step`."""
    return [Score.from_json(content) for content in json.loads(result["scores"])]


def _numbers(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in figures.items() if value is not None}


def _callbacks(track: Sequence[str], folder: Path) -> list[Any]:
    """Return Ray's logger callbacks for MLflow and W&B."""
    callbacks: list[Any] = []
    for name in track:
        if name == "mlflow":
            from ray.air.integrations.mlflow import MLflowLoggerCallback

            uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
            callbacks.append(MLflowLoggerCallback(tracking_uri=uri, experiment_name=folder.name))
        else:
            from ray.air.integrations.wandb import WandbLoggerCallback

            callbacks.append(WandbLoggerCallback(project="raylt", group=folder.name))
    return callbacks
