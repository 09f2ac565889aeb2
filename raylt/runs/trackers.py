"""`--track mlflow|wandb`: a run's settings and figures for MLflow or W&B, under the names that TensorBoard shows, and
its picture of predictions.

Where they go is said by these tools' own environment variables (MLFLOW_TRACKING_URI, WANDB_MODE, WANDB_DIR and others).
Without them MLflow writes mlflow.db beside the run folder, so that all runs there stand in one table, and W&B sends to
its server and writes into the run folder. A run that is resumed goes on where it was.
"""

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raylt.config import Config
from raylt.core.report import Report
from raylt.errors import ConfigError, RayltError, one_line
from raylt.runs import lines
from raylt.runs.board import figures_of, settings_of
from raylt.runs.callbacks import Callback

if TYPE_CHECKING:
    from PIL import Image

    from raylt.runs.grid import Picture

AT_ONCE = 100               # settings that MLflow takes in one call
TAG = "raylt.id"
NOT_IN_NAMES = re.compile(r"[^\w\-. /]")        # of MLflow's metrics


def check_trackers(names: Sequence[str]) -> None:
    """Raises a ConfigError where one is none, or is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"--track {name}: must be {' or '.join(TRACKERS)}")
        if find_spec(name) is None:
            raise ConfigError(f"--track {name}: not installed; pip install 'raylt[track]'")


def trackers(names: Sequence[str]) -> list[Callback]:
    """Callbacks that log a run.

    Args:
        names: "mlflow", "wandb".

    Raises:
        ConfigError: one is none, or is not installed.
    """
    check_trackers(names)
    return [TRACKERS[name]() for name in dict.fromkeys(names)]


class _Tracker(Callback):
    """What both do: steps under their numbers, and each failure as one line that names the tool."""

    name: str

    def on_start(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        folder = folder.resolve()
        id = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]       # the same when it is resumed
        with self._told():
            if self._open(folder, id, settings_of(config.model_dump(mode="json"))):
                for report in reports:
                    self._log(dict(figures_of(report)), report["step"])

    def on_step(self, report: Report) -> None:
        with self._told():
            self._log(dict(figures_of(lines.plain(report))), report.step)

    def on_picture(self, picture: "Picture") -> None:
        from PIL import Image

        with self._told():
            self._show(Image.open(io.BytesIO(picture.png)), picture.whose)

    def on_end(self, summary: dict[str, Any] | None) -> None:
        with self._told():
            self._close(None if summary is None else summary["model_sha256"])

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:      # these tools raise whatever they trip over
            raise RayltError(f"--track {self.name}: {one_line(error)}; the run folder is whole, and raylt resume goes "
                             "on, with or without it") from None

    def _open(self, folder: Path, id: str, settings: dict[str, Any]) -> bool:
        """Begins, or goes on; whether the steps so far are not there yet."""
        raise NotImplementedError

    def _log(self, figures: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _show(self, image: "Image.Image", whose: str) -> None:
        """A picture of predictions, and of which model they are."""
        raise NotImplementedError

    def _close(self, model_sha256: str | None) -> None:
        """At the end; None where the run did not come to its own."""
        raise NotImplementedError


class Wandb(_Tracker):
    """A run of W&B's project raylt."""

    name = "wandb"
    _run: Any = None

    def _open(self, folder: Path, id: str, settings: dict[str, Any]) -> bool:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(project="raylt", id=id, resume="allow", name=folder.name, config=settings,
                               dir=os.environ.get("WANDB_DIR") or str(folder))
        return not self._run.resumed

    def _log(self, figures: dict[str, float], step: int) -> None:
        self._run.log(figures, step=step)

    def _show(self, image: "Image.Image", whose: str) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        # at the step where W&B is: it drops what is for an earlier one, as after a resumption
        self._run.log({"predictions": wandb.Image(image, caption=whose)})

    def _close(self, model_sha256: str | None) -> None:
        if self._run is not None:
            self._run.summary["model_sha256"] = model_sha256
            self._run.finish(exit_code=int(model_sha256 is None))


class MLflow(_Tracker):
    """A run of an MLflow experiment that is called as the folder of run folders."""

    name = "mlflow"
    _client: Any = None
    _run = ""

    def _open(self, folder: Path, id: str, settings: dict[str, Any]) -> bool:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}")
        known = client.get_experiment_by_name(folder.parent.name)
        place = known.experiment_id if known else client.create_experiment(
            folder.parent.name, artifact_location=(folder.parent / "mlartifacts").as_uri())
        before = client.search_runs([place], f"tags.`{TAG}` = '{id}'", max_results=1)
        if before:
            self._run = before[0].info.run_id
            client.update_run(self._run, "RUNNING")
        else:
            self._run = client.create_run(place, run_name=folder.name, tags={TAG: id}).info.run_id
            settings_list = [Param(key, str(value)) for key, value in settings.items()]
            for start in range(0, len(settings_list), AT_ONCE):
                client.log_batch(self._run, params=settings_list[start:start + AT_ONCE])
        self._client = client
        return not before

    def _log(self, figures: dict[str, float], step: int) -> None:
        from time import time

        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(1000 * time())
        self._client.log_batch(self._run, metrics=[Metric(NOT_IN_NAMES.sub("", name), value, now, step)
                                                   for name, value in figures.items()])

    def _show(self, image: "Image.Image", whose: str) -> None:
        self._client.log_image(self._run, image, "predictions.png")
        self._client.set_tag(self._run, "raylt.predictions", whose)

    def _close(self, model_sha256: str | None) -> None:
        if self._client is not None:
            if model_sha256 is not None:
                self._client.set_tag(self._run, "raylt.model_sha256", model_sha256)
            self._client.set_terminated(self._run, "FINISHED" if model_sha256 is not None else "FAILED")


TRACKERS: dict[str, Callable[[], Callback]] = {"mlflow": MLflow, "wandb": Wandb}
