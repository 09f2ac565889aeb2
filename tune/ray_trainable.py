"""A federated run as a trainable class for `ray.tune.Tuner`, with any of Tune's schedulers and searchers.

One iteration of Tune takes the rounds up to the next evaluation (`evaluation.every`) and reports figures on validation
samples. A method with a last phase reports a rehearsal of it. The last iteration ends with the model that is deployed.

A trial's configuration is a flat or nested mapping of settings, as in {"local.lr": 0.1}. A checkpoint of Tune holds
raylt's own checkpoint and the settings that it was written with. So a trial may continue from another trial's
checkpoint, as population-based training does, if the settings in which they differ act in rounds only (changes.py).
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
from raylt.core.encoding import encode
from raylt.core.evaluation.evaluator import validate
from raylt.core.experiment import Experiment
from raylt.core.report import RoundReport
from raylt.data.task import build_task
from raylt.errors import CheckpointError
from raylt.own_code.shipment import Shipment
from raylt.registry import Plugin, adopt, resolve
from raylt.runs.export.trained_model import TrainedModel, global_model
from raylt.runs.in_process import on_any_device, open_in_process
from raylt.runs.start import check_setup
from raylt.studies.settings import flat
from raylt.typed_json import as_json
from tune.changes import check_changes
from tune.loop import holders, task_of
from tune.placement import bundles_of, check_fit, most_on_gpu, place_trial
from tune.plan import with_validation
from tune.search import plugins_for
from tune.space import configure

SETTINGS = "settings.json"  # in a checkpoint of Tune: the settings that it was written with
_TREE = TypeAdapter(dict[str, Any])
CHECKPOINTS = "checkpoints"  # in a checkpoint of Tune: raylt's own


@dataclass(frozen=True)
class TrainableJob:
    """The configuration, folder and plugins that all trials share.

    Args:
        cwd: folder that relative paths of the configuration start from.
        plugins: the plugins that the configurations of trials may name.
    """

    config: Config
    cwd: str
    plugins: tuple[Plugin, ...]


def trainable(config: Config, parallel: int | None = None) -> Any:
    """Return a trainable class for `ray.tune.Tuner` that runs a configuration with the settings of each trial.

    It reserves a placement group for each trial: its server, which is the trial's own process, and its client actors.
    Ray is started if it is not.

    Args:
        config: the settings that all trials share. Without `data.validation` a fifth of the training samples is set
            aside.
        parallel: trials at once, between which the cluster's resources are divided; by default as many as fit.

    Raises:
        ConfigError: the settings do not fit together, or a trial does not fit into the cluster.
    """
    config = with_validation(config)
    setup = resolve(config)
    task = task_of(config)
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

    A trial whose settings changed on its way, as in population-based training, has no single configuration that gives
    the same model again.

    Raises:
        ConfigError: each client keeps its own running statistics, so there is no global model.
    """
    with saved.as_directory() as folder, one_thread():
        config = _settings_in(Path(folder))
        setup = on_any_device(resolve(config))
        checkpointed = _checkpoint_in(Path(folder))
        return global_model(open_in_process(setup, task_of(config), Path(folder), checkpointed), None)


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
            The figures of `raylt.core.evaluation.evaluator.validate` that there are, in [0, 1], the mean `loss` of the
            last round where the method logs one, and `round`.
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
            ConfigError: the other trial has settings that act before the first round, see changes.py.
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
        torch.set_num_threads(1)  # weights computed here must not depend on the machine's cores
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
        setup = resolve(self._config)
        model = setup.new_model(task.spec)
        setup.check(task.spec, model)
        setup, task = encode(setup, task)
        setup.method.prepare(task, self._config, model)
        # the actors of a process that has just died, or that were just killed here, may still have their names
        self._openings += 1
        name = f"{self.trial_id}~{os.getpid()}~{self._openings}"
        # without a scheduling strategy Ray puts the actors into the trial's placement group
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
            f"{folder}: holds no checkpoint of raylt. Give one that a trial has saved.",
            code="checkpoint.not-found",
            path=str(folder),
        )
    return saved
