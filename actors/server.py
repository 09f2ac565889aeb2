"""`ServerActor`: a Ray actor that hosts the experiment: aggregation, server-side synthesis, evaluation, checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch

from actors.client import device_here
from actors.faults import told
from actors.figures import Figures
from actors.fleet import RayFleet
from actors.placement import Placement
from actors.shards import Shards
from raylt.core.checkpoint import Seal, latest
from raylt.core.experiment import Experiment
from raylt.core.report import Report
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import RayltError
from raylt.runs.progress import forget, note_in


@ray.remote
class ServerActor:
    """Hosts an `Experiment` over a `RayFleet`; the client actors are its own and end with it."""

    def __init__(self, method: str):
        self.method = method
        self.device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"server · {self.method}"            # what the dashboard shows

    def open(self, setup: Setup, task: Task, shards: Shards, test: list[Any], placement: Placement,
             name: str, folder: Path) -> Any:
        """Starts the client actors under the run's name, and takes it up where its last checkpoint left it.

        Returns:
            Ray's placement group of the client actors, which outlives this process: see `RemoteExperiment.close`.
        """
        torch.set_num_threads(1)        # weights computed here must not depend on the machine's cores
        with self._one_line():
            self.device = device_here(setup.config)
            self.fleet = RayFleet(setup, task, shards, test[0], placement, name, folder)
            try:
                self.fleet.watch = note_in(folder)
                self.experiment = Experiment(setup, task, self.fleet, self.device, folder)
                self.figures = Figures(folder.name)
                saved, _ = latest(folder / "checkpoints")
                if saved is not None:
                    self.experiment.load(saved)
            except BaseException:
                self.fleet.close()          # nobody else knows of its places yet
                raise
            return self.fleet.slots.group

    def describe(self) -> dict[str, str | None]:
        """`Experiment.describe`."""
        return self.experiment.describe()

    def done(self) -> bool:
        """Whether the last step has been taken."""
        return self.experiment.done

    def advance(self, seal: Seal | None) -> tuple[Report, bool]:
        """`Experiment.advance`, and whether that was the last step."""
        with self._one_line():
            report = self.experiment.advance(seal)
            self.figures.show(report, self.fleet.seconds)
            return report, self.experiment.done

    def conclude(self) -> dict[str, str]:
        """`Experiment.conclude`."""
        with self._one_line():
            forget(self.experiment.folder)
            return self.experiment.conclude()

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """Ray would bring an unforeseen exception without the place where it was raised. Where this process has lost
        its device it ends, and another takes the run up from its last checkpoint."""
        try:
            yield
        except RayltError:
            raise
        except Exception as error:
            raise RayltError(f"{told(error, self.device)}; --debug shows the traceback") from error
