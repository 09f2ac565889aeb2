"""The Ray actor that hosts the experiment: aggregation, server-side synthesis, evaluation and checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import ray
import torch

from actors.capacity import Placement
from actors.client import fault_of, own_device
from actors.fleet import RayFleet
from actors.prometheus import RunMetrics
from actors.shards import Shards
from raylt.core.checkpoint.checkpoint import Seal, latest
from raylt.core.experiment import Experiment
from raylt.core.fleet.item_progress import ItemsProgress
from raylt.core.report import RoundReport
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import RayltError, spoken
from raylt.own_code.shipment import Shipment
from raylt.runs.callbacks.progress import progress_writer, remove_progress


@ray.remote
class ServerActor:
    """Hosts an `Experiment` on a `RayFleet`. The client actors end with the server actor.

    Args:
        method: Name of the method, for Ray's dashboard.
    """

    def __init__(self, method: str):
        self.method = method
        self.device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"server · {self.method}"

    def open(
        self,
        shipped: Shipment,
        task: Task,
        shards: Shards,
        test: list[Any],
        placement: Placement,
        name: str,
        folder: Path,
    ) -> Any:
        """Start the client actors of a run, and continue the run from its last checkpoint if there is one.

        Args:
            shipped: The `Setup`.
            task: Data of the experiment, without samples.
            shards: References to the clients' data.
            test: A list with a reference to the test set.
            placement: Number, resources and node labels of the client actors.
            name: Name of the run, the prefix of the actors' names.
            folder: The run folder.

        Returns:
            Ray's placement group of the client actors, which outlives this process: see `RemoteExperiment.close`.
        """
        torch.set_num_threads(1)  # so that weights computed here do not depend on the number of cores
        with self._as_one_line():
            setup: Setup = shipped.open()
            self.device = own_device(setup.config)
            self.fleet = RayFleet(setup, task, shards, test[0], placement, name, folder)
            try:
                self.metrics = RunMetrics(folder.name)
                self._write_progress = progress_writer(folder)
                self.fleet.on_progress = self._show_progress
                self.fleet.on_items = self._show_items
                self.experiment = Experiment(setup, task, self.fleet, self.device, folder)
                saved, _ = latest(folder / "checkpoints")
                if saved is not None:
                    self.experiment.load(saved)
            except BaseException:
                self.fleet.close()  # the driver does not have the placement group yet
                raise
            return self.fleet.slots.group

    def describe(self) -> dict[str, str | None]:
        """Return the result of `Experiment.describe()`."""
        return self.experiment.describe()

    def done(self) -> bool:
        """Return whether the run has finished its last step."""
        return self.experiment.done

    def advance(self, seal: Seal | None) -> tuple[RoundReport, bool]:
        """Run one step; return its report, and whether it was the last step."""
        with self._as_one_line():
            report = self.experiment.advance(seal)
            self.metrics.show(report, self.fleet.seconds)
            return report, self.experiment.done

    def export_model(self) -> dict[str, str]:
        """Return the result of `Experiment.export_model()`."""
        with self._as_one_line():
            remove_progress(self.experiment.folder)
            return self.experiment.export_model()

    def _show_progress(self, stage: str, done: int, total: int) -> None:
        """Show the progress within a step at the driver's terminal and in the metrics."""
        self._write_progress(stage, done, total)
        self.metrics.show_progress(stage, done, total)

    def _show_items(self, progress: ItemsProgress) -> None:
        """Show the progress of `Fleet.map` items; see `_show_progress`."""
        self._write_progress(*astuple(progress))
        self.metrics.show_progress(progress.stage, progress.share, 1)

    @contextmanager
    def _as_one_line(self) -> Iterator[None]:
        """Convert an unexpected exception to a one-line RayltError with its source line, which Ray's exception omits.

        If this process can no longer use its device, it exits, and another process continues from the last checkpoint.
        """
        try:
            yield
        except RayltError:
            raise
        except Exception as error:
            cause = fault_of(error, self.device).text
            raise RayltError(
                f"server: {cause}.{spoken(' Show the traceback with --debug.', '')}", code="server.failed", cause=cause
            ) from error
