"""A federated run as a trainable class for `ray.tune.Tuner`, with any of Tune's schedulers and searchers.

A Tune iteration runs the rounds up to the next evaluation (`evaluation.every`) and reports metrics on validation
samples. For a method with a last phase, the metrics are of a rehearsal of that phase. The last iteration ends with the
deployed model.

A trial's configuration is a flat or nested mapping of settings, as in {"local.lr": 0.1}. A Tune checkpoint holds a
raylt checkpoint and the settings with which it was written. So a trial may continue from another trial's checkpoint, as
in population-based training, if they differ only in settings that act in rounds (tune/changes.py).
"""

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from pydantic import TypeAdapter
from ray import tune as ray_tune

from actors.by_value import pack
from actors.capacity import Placement
from actors.fleet import RayFleet
from actors.probe import probe
from actors.shards import Shards
from raylt import store
from raylt.config import Config, check
from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.checkpoint import Checkpoint
from raylt.core.device import one_thread, open_device
from raylt.core.evaluation.evaluator import validate
from raylt.core.experiment import Experiment
from raylt.core.report import RoundReport
from raylt.data.task import build_task
from raylt.errors import CheckpointError
from raylt.own_code.shipment import Shipment
from raylt.registry import Plugin, adopt, resolve
from raylt.runs.export.trained_model import TrainedModel, global_model
from raylt.runs.in_process import on_any_device, open_in_process
from raylt.runs.preparation import prepare
from raylt.runs.start import check_setup
from raylt.studies.settings import flat
from raylt.typed_json import as_json
from tune.changes import check_changes
from tune.loop import completed_for, forget_tasks, holders, task_of
from tune.placement import bundles_of, check_fit, most_on_gpu, place_trial
from tune.plan import with_validation
from tune.search import plugins_for
from tune.space import configure

SETTINGS = "settings.json"  # File in a Tune checkpoint with the settings with which it was written.
_TREE = TypeAdapter(dict[str, Any])
CHECKPOINTS = "checkpoints"  # Folder in a Tune checkpoint with raylt's checkpoint.


@dataclass(frozen=True)
class TrainableJob:
    """The configuration, folder and plugins that all trials share.

    Args:
        config: Settings that all trials share.
        cwd: Folder to which relative paths of the configuration are relative.
        plugins: Plugins that the configurations of trials may name.
    """

    config: Config
    cwd: str
    plugins: tuple[Plugin, ...]


def trainable(config: Config, parallel: int | None = None) -> Any:
    """Return a trainable class for `ray.tune.Tuner` that runs a configuration with the settings of each trial.

    Each trial reserves a placement group for its server, which runs in the trial's process, and for its client actors.
    The function starts Ray if it is not running.

    Args:
        config: Settings that all trials share. Without `data.validation`, a fifth of the training samples is used for
            validation.
        parallel: Number of parallel trials, which share the cluster's resources evenly; None for as many as fit.

    Raises:
        ConfigError: Settings are in conflict, or a trial does not fit into the cluster.
    """
    config = with_validation(config)
    forget_tasks()
    task = task_of(config)
    setup = resolve(completed_for(config, task))
    check_setup(setup, task.spec)
    if not ray.is_initialized():
        ray.init()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    have = {key: sum(node.get(key, 0.0) for node in nodes) for key in ("CPU", "GPU")}
    trials = parallel or math.inf
    clients = holders(config)
    placement = place_trial(config, clients, trials, have)
    if config.resources.gpu_share == "auto" and 0 < placement.gpus < 0.5:
        need = probe(setup, task, 1)
        if need is not None:
            placement = place_trial(config, clients, trials, have, most_on_gpu(nodes, need))
    check_fit(bundles_of(placement), nodes, 1)
    job = TrainableJob(config, os.getcwd(), plugins_for([config.method["name"]]))
    return ray_tune.with_resources(
        ray_tune.with_parameters(FederatedRun, shipped=pack(job), placement=placement),
        ray_tune.PlacementGroupFactory(bundles_of(placement), strategy="PACK"),
    )


def model_of(saved: ray_tune.Checkpoint) -> TrainedModel:
    """Return the global model in a trial's checkpoint, as in `model_of(results.get_best_result().checkpoint)`.

    If settings changed during the trial, as in population-based training, no single configuration reproduces the model.

    Raises:
        ConfigError: Each client keeps its own running statistics, so there is no global model.
    """
    with saved.as_directory() as folder, one_thread():
        config = _settings_in(Path(folder))
        setup = on_any_device(resolve(config))
        checkpointed = _checkpoint_in(Path(folder))
        experiment = open_in_process(setup, task_of(config), Path(folder), checkpointed, clients=False)
        return global_model(experiment, None)


class FederatedRun(ray_tune.Trainable):
    """A federated run that Ray Tune advances, saves and loads. Its process is the server."""

    def setup(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, config: dict[str, Any], shipped: Shipment, placement: Placement
    ) -> None:
        self._values = flat(config)
        self._shipped = shipped
        self._placement = placement
        self._openings = 0
        self._experiment: Experiment | None = None
        self._report: RoundReport | None = None

    def step(self) -> dict[str, Any]:
        """Run the rounds up to and including the next evaluation.

        Returns:
            The metrics of `raylt.core.evaluation.evaluator.validate` that have a value, in [0, 1], the mean `loss` of
            the last round if the method logs one, and `round`.
        """
        experiment = self._experiment or self._open()
        every = self._config.evaluation.every
        rounds = self._config.federation.rounds
        while True:
            self._report = experiment.step()
            if experiment.done:
                figures = self._validate(experiment)
                break
            if self._report.step < rounds and self._report.step % every == 0:
                figures = self._judge_as_deployed(experiment)
                break
        loss = self._report.figures.get("loss")
        return {
            **{key: value for key, value in figures.items() if value is not None},
            **({} if loss is None else {"loss": loss}),
            "round": min(self._report.step, rounds),
            "done": experiment.done,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write raylt's checkpoint of the latest step, and the settings of this trial."""
        assert self._experiment is not None
        assert self._report is not None
        self._experiment.save(self._report)
        name = f"{self._report.step:06d}"
        shutil.copytree(self._folder / CHECKPOINTS / name, Path(checkpoint_dir) / CHECKPOINTS / name)
        (Path(checkpoint_dir) / SETTINGS).write_text(self._config.model_dump_json())

    def load_checkpoint(self, checkpoint: str | None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Continue from a checkpoint of this trial or of another trial.

        Raises:
            ConfigError: The other trial differs in settings that act before the first round; see changes.py.
        """
        assert checkpoint is not None
        self._load(Path(checkpoint))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Switch to another trial in the same process, for Tune's option `reuse_actors=True`."""
        self.cleanup()
        self._values = flat(new_config)
        return True

    def cleanup(self) -> None:
        """Release the client actors of the trial."""
        if self._experiment is not None:
            self._experiment.fleet.close()
            self._experiment = None

    def _load(self, saved_in: Path) -> None:
        experiment = self._open()
        check_changes(_settings_in(saved_in), self._config)
        shutil.copytree(saved_in / CHECKPOINTS, self._folder / CHECKPOINTS)
        saved = _checkpoint_in(self._folder)
        experiment.load(saved)
        self._report = RoundReport(**saved.facts["report"])

    def _open(self) -> Experiment:
        """Start the client actors and return a new experiment, in an empty folder."""
        self.cleanup()
        torch.set_num_threads(1)  # so that weights computed here do not depend on the number of cores
        job: TrainableJob = self._shipped.open()
        if Path(job.cwd).is_dir():
            os.chdir(job.cwd)
        adopt(job.plugins)
        self._config = configure(job.config, job.config.method["name"], self._values)
        assert self.logdir is not None
        self._folder = Path(self.logdir) / f"run-{os.getpid()}"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        task = build_task(self._config.data)
        self._config = completed_for(self._config, task)
        setup, task, _ = prepare(resolve(self._config), task)
        # actors of a process that has just died, or that were just killed here, may still hold their names
        self._openings += 1
        name = f"{self.trial_id}~{os.getpid()}~{self._openings}"
        # without a scheduling strategy, Ray places the actors in the trial's placement group
        fleet = RayFleet(setup, task, Shards.put(task.shards), ray.put(task.test), self._placement, name, self._folder)
        try:
            device = open_device(self._config, leased=bool(ray.get_gpu_ids()))
            self._experiment = Experiment(setup, task, fleet, device, self._folder)
        except BaseException:
            fleet.close()
            raise
        return self._experiment

    def _judge_as_deployed(self, experiment: Experiment) -> dict[str, float | None]:
        """Evaluate the model that would be deployed if training ended after this round."""
        if not experiment.method.finishes:
            return self._validate(experiment)
        with experiment.rehearsal():
            return validate(experiment.method, experiment.server, experiment.fleet, experiment.task)

    def _validate(self, experiment: Experiment) -> dict[str, float | None]:
        assert self._report is not None
        judged = self._report.figures.get("validation")
        return judged or validate(experiment.method, experiment.server, experiment.fleet, experiment.task)


def _settings_in(folder: Path) -> Config:
    file = folder / SETTINGS
    return check(Config, as_json(store.read(file), _TREE, str(file)))


def _checkpoint_in(folder: Path) -> Checkpoint:
    """Return the raylt checkpoint below a folder."""
    saved, _ = checkpoint.latest(folder / CHECKPOINTS)
    if saved is None:
        raise CheckpointError(
            f"{folder}: has no checkpoint of raylt. Give a checkpoint that a trial has saved.",
            code="checkpoint.not-found",
            path=str(folder),
        )
    return saved
