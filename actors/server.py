"""`ServerActor`: a Ray actor that hosts the experiment: aggregation, server-side synthesis, evaluation, checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch

from actors.client import device_here
from actors.figures import Figures
from actors.fleet import RayFleet
from actors.placement import Placement
from raylt.core.checkpoint import Seal, latest
from raylt.core.experiment import Experiment
from raylt.core.report import Report
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import RayltError, one_line


@contextmanager
def _one_line() -> Iterator[None]:
    """Ray would bring an unforeseen exception without the place where it was raised."""
    try:
        yield
    except RayltError:
        raise
    except Exception as error:
        raise RayltError(f"{one_line(error)}; --debug shows the traceback") from error


@ray.remote
class ServerActor:
    """Hosts an `Experiment` over a `RayFleet`; the client actors are its own and end with it."""

    def __init__(self, method: str):
        self.method = method

    def __repr__(self) -> str:
        return f"server · {self.method}"            # what the dashboard shows

    def open(self, setup: Setup, task: Task, shards: list[Any], test: list[Any], placement: Placement,
             folder: Path) -> None:
        """Starts the client actors, and takes up the run where its last checkpoint left it."""
        torch.set_num_threads(1)        # weights computed here must not depend on the machine's cores
        device = device_here()
        with _one_line():
            self.fleet = RayFleet(setup, task, shards, test[0], placement, folder.name, folder)
            self.experiment = Experiment(setup, task, self.fleet, device, folder)
            self.figures = Figures(folder.name)
            saved, _ = latest(folder / "checkpoints")
            if saved is not None:
                self.experiment.load(saved)

    def done(self) -> bool:
        """Whether the last step has been taken."""
        return self.experiment.done

    def advance(self, seal: Seal | None) -> tuple[Report, bool]:
        """`Experiment.advance`, and whether that was the last step."""
        with _one_line():
            report = self.experiment.advance(seal)
            self.figures.show(report, self.fleet.seconds)
            return report, self.experiment.done

    def conclude(self) -> dict[str, str]:
        """`Experiment.conclude`."""
        with _one_line():
            return self.experiment.conclude()
