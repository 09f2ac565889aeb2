"""`Run`: a run folder as an object. All other code reads run folders through this class."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raylt.config import Config, differences, load, located, located_data, settled
from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.checkpoint import Checkpoint
from raylt.core.evaluation.counts import Matrices
from raylt.core.experiment import Experiment
from raylt.core.method import Method
from raylt.core.report import SHARES, ReportDict, best_validated, shown_figure
from raylt.core.setup import Setup
from raylt.data.task import Split, Task, build_task, task_from
from raylt.disk import exists, folder_path
from raylt.errors import CheckpointError, ConfigError, DataError, spoken
from raylt.formatting import percent
from raylt.notebook import html_of, html_table, later
from raylt.own_code.commands import resume_call
from raylt.registry import IN_SETUP, IN_TASK, TABLES, PluginKind, check_origins, resolve, resolve_setup, seek
from raylt.runs.callbacks.base import Callback, Callbacks, checked
from raylt.runs.callbacks.notebook_progress import progress_display
from raylt.runs.export import trained_model
from raylt.runs.export.artefact import choose_client
from raylt.runs.folder import provenance
from raylt.runs.folder.identity import PluginRecord
from raylt.runs.folder.reader import Files, RunState
from raylt.runs.folder.summary import table_of
from raylt.runs.folder.writer import Journal
from raylt.runs.in_process import on_any_device, open_in_process
from raylt.runs.runner import FleetKind, carry_out

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

PictureKind = Literal["curves", "data", "clients", "classes", "confusion", "features", "clusters", "predictions"]
WHOLE = "all"  # the group of a figure that covers everything


class Run:
    """A run folder: its settings, its results, and the operations on it.

    `state`, `reports`, `summary`, `metrics` and `clients` can change while a run is in progress and are read on every
    access; everything else is read once. Every read refuses files that were changed or that belong to another run: a
    CheckpointError names the file and the difference.

    Args:
        folder: The run's folder. `Run.open` refuses a folder that is not a run; with this
            constructor, only its `state` can be read.
    """

    def __init__(self, folder: Path | str):
        self.folder = folder_path(folder, "folder")
        self._files = Files(self.folder)

    @classmethod
    def open(cls, folder: Path | str) -> "Run":
        """Open the run in a folder.

        Raises:
            CheckpointError: It is not a run folder.
            ConfigError: It is not a path.
        """
        run = cls(folder)
        if run.state == "missing":
            raise CheckpointError(
                f"{folder}: not a run folder (it has no config.yaml). Give one that a run made.",
                code="run.not-found",
                path=str(folder),
            )
        return run

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.state})"

    def _repr_html_(self) -> str:
        """Return the summary as an HTML table; for an unfinished run, the state and the last step's figures."""
        if self.state == "done":
            return f"{html_of(table_of(self.summary))}<div>run folder: {escape(str(self.folder))}</div>"
        rows = [("run folder", str(self.folder)), ("state", self.state)]
        if self.state != "missing":
            reports = self.reports
            rows += [
                ("method", self.config.method["name"]),
                ("data", str(self.config.data.source)),
                ("steps", f"{len(reports)} of {self.config.federation.rounds} rounds"),
                ("accuracy, last", percent(shown_figure(reports[-1])[1] if reports else None)),
            ]
        return html_table((), rows)

    def plot(self, kind: PictureKind = "curves", path: Path | str | None = None) -> "Figure":
        """Draw the run, and return a figure that a notebook can show.

        Args:
            kind: "curves" (accuracy and groups over rounds), "data" (the split), "clients" (the accuracy of each),
                "classes" (recall, precision and F1 of each), "confusion"; "features" (of sfd), "clusters" (of mupfl) or
                "predictions" (of segmentation).
            path: File that the picture is written to as well, .png, .pdf or .svg.

        Raises:
            CheckpointError: The run is not finished, or was changed.
            ConfigError: Nothing was judged that could be drawn, or the file cannot be written.
        """
        return later("raylt.plots.objects", "draw_run")(self, kind, path)

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.folder.resolve().name

    @property
    def state(self) -> RunState:
        """Return whether the run is missing, running, stopped or done.

        "missing": there is no such run; "running": a process works at it; "stopped": it can be resumed; "done".
        """
        return self._files.state

    # settings

    @cached_property
    def config(self) -> Config:
        """The configuration of the run, with all fields of the method."""
        return self._files.config()

    @property
    def sha256(self) -> str:
        """The SHA-256 over everything that determines the result, see raylt/runs/folder/identity.py."""
        return self._files.identity["sha256"]

    @property
    def origins(self) -> list[PluginRecord]:
        """The records of the plugins that the run was made with, see raylt/registry.py."""
        return self._files.plugins()

    @cached_property
    def setup(self) -> Setup:
        """The method, model and augmentation that the configuration names, as values.

        A plugin that only makes the task, such as a data source, may be missing.

        Raises:
            ConfigError: Another plugin is missing, or has changed since.
        """
        self._check_plugins(self.config, IN_SETUP)
        return resolve_setup(located(self.config, self._start))

    @property
    def method(self) -> Method:
        """Return the method with its fields."""
        return self.setup.method

    @cached_property
    def split(self) -> Split:
        """Return the training samples of each client."""
        return self._files.split()

    @cached_property
    def task(self) -> Task:
        """The data with the run's split. The data must not have moved.

        Raises:
            CheckpointError: The data are not the data of the run.
            ConfigError: A plugin that makes the task is missing, or has changed since.
            DataError: They are not where they were.
        """
        self._check_plugins(self.config, IN_TASK)
        try:
            task = build_task(self.config.data, self.split, self._start)
        except DataError as error:
            kind, _, address = located_data(self.config.data, self._start).source.partition(":")
            if error.code != "data.not-found" or kind not in ("folder", "npz") or Path(address).exists():
                raise
            raise DataError(
                f"{self.folder}: the run's data has moved ({Path(address).absolute()}). Put it back there, or a "
                "link to it.",
                code=error.code,
                **error.details | {"run": str(self.folder)},
            ) from None
        self._files.check_data(task)
        return task

    @cached_property
    def outline(self) -> Task:
        """The task without its data, which is enough to load models.

        For a plugin's method, which may look at images, it is the whole task with its data.
        """
        outline = None if any(plugin["kind"] == "method" for plugin in self.origins) else self._files.outline()
        return self.task if outline is None else task_from(outline, self.split)

    # results

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, one per committed step, oldest first."""
        return self._files.lines().reports

    @property
    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json.

        Raises:
            CheckpointError: The run is not finished.
        """
        if not self._files.ended:
            raise CheckpointError(
                f"{self.folder}: the run is not finished. Continue it with {resume_call(self.folder)}.",
                code="run.not-finished",
                path=str(self.folder),
            )
        _ = self.config  # checks it
        return self._files.summary()

    @property
    def metrics(self) -> "DataFrame":
        """Return the figures of every step, one value per row.

        Columns step, phase ("round" or "finish"), metric, group, value (float). A step has rows only for what was
        judged in it. By metric, the groups are

        - accuracy: all, many, medium, few; global_accuracy, macro, miou, global_macro, global_miou: all. In [0, 1]
        - owned, matched, long_tailed, global, client_miou, and local where clients have test images: mean and
          worst_decile over the clients
        - bytes_up, bytes_down: the client function of the messages and replies
        - seconds: training, evaluation; stage_seconds: the stage
        - participants, lost, retried, rejected: all. A number of clients
        - each number that the method reports: method; for several numbers with names, the names ("shares", "mmd")
        - new_clients: count, and owned, matched, long_tailed, global, miou and worst_decile of those that join after
          training
        - validation: accuracy, many, medium, few, owned, matched, miou, local and worst_decile on the validation part,
          where there is one
        """
        from pandas import DataFrame

        rows = [
            (report["step"], report["phase"], metric, group, float(value))
            for report in self.reports
            for metric, group, value in _figures(report)
            if value is not None
        ]
        return DataFrame(rows, columns=["step", "phase", "metric", "group", "value"])

    @property
    def clients(self) -> "DataFrame":
        """Return each client's figures, for all steps in which clients were evaluated.

        Columns step, phase, metric, client, value (float, in [0, 1]). The metrics are owned (accuracy over the owned
        classes), matched (over the client's own class mix), long_tailed (over the class mix of all clients together),
        global (over all classes), miou, and local (on the client's own test images, where it has any). Clients that are
        not judged have no rows.
        """
        from pandas import DataFrame

        rows = [
            (report["step"], report["phase"], metric, client, float(value))
            for report in self.reports
            for metric, values in (report["by_client"] or {}).items()
            for client, value in enumerate(values)
            if value is not None
        ]
        return DataFrame(rows, columns=["step", "phase", "metric", "client", "value"])

    def matrices(self, step: int | None = None) -> Matrices:
        """Return the confusion matrices of the evaluation after a step, by default the last.

        Raises:
            CheckpointError: Nothing was judged after this step, or the matrices were changed.
        """
        return self._files.matrices(step)

    def finished(self) -> "Run":
        """Return this run if it is finished; otherwise raise CheckpointError.

        Raises:
            CheckpointError: It is not finished, or its files were changed since.
        """
        _ = self.summary
        return self

    def checkpoint(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, or None if the run has none."""
        return self._files.checkpoint()

    def checkpoint_after(self, step: int) -> Checkpoint:
        """Return the checkpoint that was saved after a step.

        Raises:
            CheckpointError: It is damaged.
        """
        return self._files.checkpoint_after(step)

    def best_step(self) -> int:
        """Return the step with the highest accuracy on validation images, among the steps with a checkpoint.

        The first counts where several have it.

        Raises:
            ConfigError: The run has no validation images, or none was judged.
        """
        kept = checkpoint.steps(self.folder / "checkpoints")
        best = best_validated(self.reports, kept)
        if best is None:
            raise ConfigError(
                f"{spoken('--round', 'step')}: {self.folder} has no evaluation on validation images, so no round is "
                "the best. Train with data.validation=0.1, or give the number of a round.",
                code="run.not-judged",
                key="data.validation",
                value=self.config.data.validation,
            )
        return best["step"]

    def _saved_after(self, step: int) -> Checkpoint:
        """Return the checkpoint after a step, or raise CheckpointError if the run did not keep it."""
        kept = checkpoint.steps(self.folder / "checkpoints")
        if step not in kept:
            raise CheckpointError(
                f"{self.folder}: no checkpoint of this step was kept ({step}). Choose one of "
                f"{', '.join(map(str, kept))}; output.keep sets how many are kept.",
                code="checkpoint.not-kept",
                path=str(self.folder),
                step=step,
            )
        return self.checkpoint_after(step)

    def experiment(self, task: Task | None = None, step: int | None = None, clients: bool = True) -> Experiment:
        """Restore the experiment from a checkpoint, in this process.

        Args:
            task: Replaces the run's own task, as with other test images.
            step: After which the checkpoint was written; by default the last.
            clients: Whether to restore the clients' private states, which the global model does not need.

        Raises:
            CheckpointError: The checkpoint does not exist, or the last checkpoint of a finished run is damaged.
        """
        if step is not None:
            return self._restored(self._saved_after(step), task, clients)
        saved = self.checkpoint()
        if saved is None:
            raise CheckpointError(
                f"{self.folder}: the run has no checkpoint that can be read. Run it again.",
                code="checkpoint.not-found",
                path=str(self.folder),
            )
        step, last = saved.facts["step"], len(self.reports)
        if self.state == "done" and step != last:
            raise CheckpointError(
                f"{self.folder}: the checkpoint after the last step ({last}) is damaged; the newest that can be read "
                f"is that of step {step}. Run raylt verify to see which files are whole.",
                code="checkpoint.damaged",
                path=str(self.folder),
                step=last,
                newest=step,
            )
        return self._restored(saved, task, clients)

    def _restored(self, saved: Checkpoint, task: Task | None, clients: bool) -> Experiment:
        self.check_weights()
        return open_in_process(on_any_device(self.setup), task or self.task, self.folder, saved, clients=clients)

    # operations

    def resume(
        self,
        overrides: Sequence[str] = (),
        *,
        fleet: FleetKind = "ray",
        address: str | None = None,
        quiet: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> "Run":
        """Continue the run after its last committed step. The result equals that of an uninterrupted run.

        Args:
            overrides: `key=value`, of `resources` and `output` only.
            fleet: See `raylt.run`.
            address: See `raylt.run`.
            quiet: See `raylt.run`.
            callbacks: See `raylt.run`.

        Raises:
            CheckpointError: Other settings, another process runs it, or no usable checkpoint. For a finished run, its
                model is missing or was changed.
        """
        callbacks = checked(callbacks)
        before, config = self.config, load(self.folder / "config.yaml", overrides)
        changed = list(differences(settled(before), settled(config)))
        if changed:
            more = spoken("raylt resume RUN federation.rounds=N", "raylt.resume(RUN, ['federation.rounds=N'])")
            # more rounds alone would make a longer run, see `raylt.resume`
            kept = [each for each in changed if each[0] != "federation.rounds"] or changed
            settings = "; ".join(f"{key}: {old!r} -> {new!r}" for key, old, new in kept)
            raise CheckpointError(
                f"{self.folder}: a resumed run keeps its settings ({settings}). Change only resources.* and output.*, "
                f"give it more rounds alone ({more}), or start a new run.",
                code="run.changed",
                path=str(self.folder),
                keys=[key for key, *_ in changed],
            )
        setup = self.resolve(config)
        if self.state == "done":  # nothing is left to do or to write
            self._files.model()
            return self
        self._files.check_version()
        self.check_weights()
        screen = [] if quiet else [progress_display()]
        carry_out(setup, self.task, Journal(self.folder), fleet, address, Callbacks([*screen, *callbacks]))
        return self

    def model(self, step: int | None = None) -> trained_model.TrainedModel:
        """Return the global model, ready to predict.

        For a run in progress, this is the model in the last checkpoint.

        Args:
            step: Step of the model, as `best_step()` gives it; by default the last.

        Raises:
            CheckpointError: Nothing was committed yet, or no checkpoint of the step was kept.
            ConfigError: With federation.batchnorm=local there are only clients' models.
        """
        tensors = self._files.model() if step is None and self._files.ended else None
        return trained_model.global_model(self.experiment(self.outline, step, clients=False), tensors)

    def client_model(self, client: int | str, step: int | None = None) -> trained_model.TrainedModel:
        """Return a client's own model, ready to predict, or the global model if clients have none of their own.

        Args:
            client: Id or name.
            step: See `model`.

        Raises:
            CheckpointError: Nothing was committed yet, or no checkpoint of the step was kept.
            ConfigError: The client is unknown, it holds no samples, or it joins after training.
        """
        if isinstance(client, str | bool):  # True is no id, although it equals 1
            joining = [(id, self.outline.client_names[id]) for id in self.outline.new_clients]
            client = choose_client(client, trained_model.trained_clients(self.outline), str(self.folder), joining)
        return next(self.client_models([client], step))[1]

    def client_models(
        self, ids: Iterable[int] | None = None, step: int | None = None
    ) -> Iterator[tuple[int, trained_model.TrainedModel]]:
        """Yield the id and model of several clients, by default of all clients with samples.

        The run's data are read only for clients that keep BatchNorm's running statistics and never took part: they
        compute them now.

        Args:
            step: See `model`.
        """
        chosen = None if ids is None else list(ids)
        saved = self.checkpoint() if step is None else self._saved_after(step)
        # the states of the chosen clients alone are read, one at a time
        experiment = self.experiment(self.outline, step, clients=False)
        if trained_model.needs_images(experiment, saved, chosen):
            experiment = self.experiment(self.task, step, clients=False)
        return trained_model.client_models(experiment, self.setup, saved, chosen)

    def check_weights(self) -> None:
        """Check that the file with the encoder's weights, which no run folder holds, is where it was.

        Raises:
            ConfigError: It is not.
        """
        weights = located(self.config, self._start).weights
        if weights in (None, "imagenet") or exists(Path(weights).expanduser()):
            return
        raise ConfigError(
            f"{self.folder}: the file with its encoder's weights has moved ({weights}). Put it back "
            "there, or a link to it.",
            code="model.weights-unavailable",
            key="weights",
            value=weights,
            run=str(self.folder),
        )

    def resolve(self, config: Config) -> Setup:
        """Resolve the names in a configuration to values; paths are relative to the same folder as in the run.

        Raises:
            ConfigError: A plugin is missing, or has changed since the run was made.
        """
        self._check_plugins(config)
        return resolve(located(config, self._start))

    @cached_property
    def _start(self) -> Path | None:
        return provenance.start_of(self.folder)

    def _check_plugins(self, config: Config, kinds: Collection[PluginKind] = frozenset(TABLES)) -> None:
        """Load the run's plugins of these kinds, by default all, and check that they have not changed."""
        seek(config, kinds)
        check_origins([{**plugin} for plugin in self.origins if plugin["kind"] in kinds], self.folder)


def _figures(report: ReportDict) -> Iterator[tuple[str, str, Any]]:
    """Yield the metric, group and value of each figure in a step's report."""
    yield "accuracy", WHOLE, report["accuracy"]
    for group, value in (report["groups"] or {}).items():
        yield "accuracy", group, value
    for name in SHARES:
        if name != "accuracy":
            yield name, WHOLE, report[name]
    for name, spread in (report["clients"] or {}).items():
        for kind, value in spread.items():
            yield "client_miou" if name == "miou" else name, kind, value
    for call, traffic in report["traffic"].items():
        yield "bytes_up", call, traffic["up"]
        yield "bytes_down", call, traffic["down"]
    yield "seconds", "training", report["seconds"]
    yield "seconds", "evaluation", report["evaluation_seconds"]
    for stage, seconds in report["stages"].items():
        yield "stage_seconds", stage, seconds
    for name in ("participants", "lost", "retried", "rejected"):
        yield name, WHOLE, len(report[name])
    for name, value in report["figures"].items():
        for group, number in value.items() if isinstance(value, dict) else [("method", value)]:
            if isinstance(number, int | float):
                yield name, group, number
