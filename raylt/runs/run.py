"""`Run`: a run folder as an object. Whoever reads a run folder does it through this."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raylt.config import Config, differences, load, settled
from raylt.core.checkpoint import Checkpoint
from raylt.core.confusions import Matrices
from raylt.core.experiment import Experiment
from raylt.core.method import Method
from raylt.core.setup import Setup
from raylt.data.outline import task_from
from raylt.data.task import Split, Task, build_task
from raylt.errors import CheckpointError
from raylt.registry import check_origins, resolve, seek
from raylt.runs import export, frames
from raylt.runs.callbacks import Callback, Callbacks
from raylt.runs.files import Files, State
from raylt.runs.here import anywhere, open_here
from raylt.runs.identity import Guest
from raylt.runs.journal import Journal
from raylt.runs.runner import FleetKind, carry_out
from raylt.runs.screen import Screen

if TYPE_CHECKING:
    from pandas import DataFrame


class Run:
    """A run folder: what was asked for, what came of it, and what can be done with it.

    What can change while a run goes on (`state`, `reports`, `summary`, `metrics`, `clients`) is read whenever it is
    asked for; the rest is read once. Files that are not of one run, or were changed, are refused wherever they are
    read: a CheckpointError says which and how.

    Args:
        folder: of a run; `Run.open` refuses one that is none, and here only `state` can be asked of it.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self._files = Files(self.folder)

    @classmethod
    def open(cls, folder: Path | str) -> "Run":
        """The run in a folder.

        Raises:
            CheckpointError: it is not a run folder.
        """
        run = cls(folder)
        if run.state == "missing":
            raise CheckpointError(f"{folder}: not a run folder (it has no config.yaml); give one that raylt run made")
        return run

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.state})"

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.folder.resolve().name

    @property
    def state(self) -> State:
        """missing: there is no such run; running: a process is at it; stopped: it can be resumed; done."""
        return self._files.state

    # what was asked for

    @cached_property
    def config(self) -> Config:
        """The configuration, with all fields of the method."""
        return self._files.config()

    @property
    def sha256(self) -> str:
        """Of everything that its result follows from, see raylt/runs/identity.py."""
        return self._files.identity["sha256"]

    @property
    def origins(self) -> list[Guest]:
        """Records of the guests that the run was made with, see raylt/registry.py."""
        return self._files.guests()

    @cached_property
    def setup(self) -> Setup:
        """What the configuration names: method, model and augmentation, as values.

        Raises:
            ConfigError: what was not raylt's own is not here, or has changed since.
        """
        return self._resolve(self.config)

    @property
    def method(self) -> Method:
        """The method with its fields."""
        return self.setup.method

    @cached_property
    def split(self) -> Split:
        """Who holds which training sample."""
        return self._files.split()

    @cached_property
    def task(self) -> Task:
        """The data, split as they were; they must be where they were."""
        self._welcome(self.config)
        task = build_task(self.config.data, self.split)
        self._files.check_data(task)
        return task

    @cached_property
    def outline(self) -> Task:
        """The task without its data, to open models with; whole where an older raylt made the run, or the method is
        one's own and may look at images."""
        known = None if any(guest["kind"] == "method" for guest in self.origins) else self._files.outline()
        return self.task if known is None else task_from(known, self.split)

    # what came of it

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one per committed step, oldest first."""
        return self._files.lines().reports

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json.

        Raises:
            CheckpointError: the run is not finished.
        """
        if not self._files.ended:
            raise CheckpointError(f"{self.folder}: this run is not finished; continue it with raylt resume "
                                  f"{self.folder}")
        _ = self.config
        return self._files.summary()

    @property
    def metrics(self) -> "DataFrame":
        """The figures of every step, see `frames.metrics`: columns step, phase, metric, group, value."""
        return frames.metrics(self.reports)

    @property
    def clients(self) -> "DataFrame":
        """The figures of every judged client, see `frames.clients`: columns step, phase, metric, client, value."""
        return frames.clients(self.reports)

    def matrices(self, step: int | None = None) -> Matrices:
        """The confusion matrices of the evaluation after a step; by default of the last.

        Raises:
            CheckpointError: nothing was judged then, or they were changed.
        """
        return self._files.matrices(step)

    def finished(self) -> "Run":
        """This run.

        Raises:
            CheckpointError: it is not finished, or its files were changed since.
        """
        _ = self.summary
        return self

    def checkpoint(self) -> Checkpoint | None:
        """The last one that is undamaged; None where none was committed, or none was kept."""
        return self._files.checkpoint()

    def checkpoint_after(self, step: int) -> Checkpoint:
        """The one after a step; a CheckpointError where it is damaged."""
        return self._files.checkpoint_after(step)

    def experiment(self, task: Task | None = None) -> Experiment:
        """The experiment in this process, where the last checkpoint left it.

        Args:
            task: instead of the run's own, as with other test images.

        Raises:
            CheckpointError: no step was committed, no checkpoint was kept, or that of a finished run's end is damaged.
        """
        saved = self.checkpoint()
        if saved is None:
            raise CheckpointError(f"{self.folder}: has no checkpoint that can be read; run it again")
        if self.state == "done" and (step := saved.facts["step"]) != (last := len(self.reports)):
            raise CheckpointError(f"{self.folder}: the checkpoint after its last step, {last}, is damaged; the newest "
                                  f"that can be read is of step {step}; raylt verify says what is whole")
        return open_here(anywhere(self.setup), task or self.task, self.folder, saved)

    # what can be done with it

    def resume(self, overrides: Sequence[str] = (), *, fleet: FleetKind = "ray", address: str | None = None,
               quiet: bool = False, callbacks: Sequence[Callback] = ()) -> "Run":
        """Continues after the last committed step, to the end; the result is that of an undisturbed run.

        Args:
            overrides: `key=value`, of `resources` and `output` only.
            fleet, address, quiet, callbacks: as `raylt.run` has them.

        Raises:
            CheckpointError: other settings, another process is at it, or no usable checkpoint.
        """
        before, config = self.config, load(self.folder / "config.yaml", overrides)
        if other := [f"{key}: {then!r} -> {now!r}" for key, then, now in differences(settled(before), settled(config))]:
            raise CheckpointError(f"{self.folder}: a resumed run keeps its settings ({'; '.join(other)}); only "
                                  "resources.* and output.* may change; start a new run for others")
        setup = self._resolve(config)
        if self.state == "done":            # there is nothing left to do, nor to write again
            _ = self.summary
            return self
        self._files.check_version()
        screen = [] if quiet else [Screen()]
        carry_out(setup, self.task, Journal(self.folder), fleet, address, Callbacks([*screen, *callbacks]))
        return self

    def model(self) -> export.TrainedModel:
        """The global model as the run left it, ready to predict; of a run that goes on, as of its last checkpoint.

        Raises:
            CheckpointError: nothing was committed yet.
            ConfigError: with federation.batchnorm=local there are only clients' models.
        """
        return export.global_model(self.experiment(self.outline), self._files.model() if self._files.ended else None)

    def client_model(self, id: int) -> export.TrainedModel:
        """A client's own model, ready to predict; of a method without such, the global one.

        Raises:
            CheckpointError: nothing was committed yet.
            ConfigError: no such client, or it holds no samples.
        """
        return next(self.client_models([id]))[1]

    def client_models(self, ids: Iterable[int] | None = None) -> Iterator[tuple[int, export.TrainedModel]]:
        """Those of several clients, by id, one after the other; by default of all that hold samples."""
        return export.client_models(self.experiment(self.outline), self.setup, self.checkpoint(), ids)

    def _resolve(self, config: Config) -> Setup:
        self._welcome(config)
        return resolve(config)

    def _welcome(self, config: Config) -> None:
        """What is not raylt's own must be here, as it was."""
        seek(config)
        check_origins([{**guest} for guest in self.origins], self.folder)
