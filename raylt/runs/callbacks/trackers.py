"""`--track mlflow|wandb`: send a run's settings, figures and picture of predictions to MLflow or Weights & Biases.

Figures have the same names as in TensorBoard. The tools' environment variables set the destination
(MLFLOW_TRACKING_URI, WANDB_MODE, WANDB_DIR and others). Without them, MLflow writes mlflow.db next to the run folder,
so that all runs in that folder are in one table, and W&B sends to its server and writes into the run folder. A resumed
run continues its entry.
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
from raylt.core.report import RoundReport
from raylt.errors import ConfigError, RayltError, one_line, spoken
from raylt.runs.callbacks.base import Callback
from raylt.runs.callbacks.tensorboard import figures_of, settings_of
from raylt.runs.folder import metrics_log

if TYPE_CHECKING:
    from PIL import Image

    from raylt.runs.callbacks.prediction_grid import Picture

PARAMS_PER_CALL = 100  # maximum number of parameters in one call of MLflow
TAG = "raylt.id"
NOT_IN_NAMES = re.compile(r"[^\w\-. /]")  # characters that MLflow does not allow in names of metrics


def trackers(names: Sequence[str]) -> list[Callback]:
    """Return the callbacks that log a run to the named trackers.

    Args:
        names: Names of trackers: "mlflow", "wandb".

    Raises:
        ConfigError: A name is unknown, or its package is not installed.
    """
    check_trackers(names)
    return [TRACKERS[name]() for name in dict.fromkeys(names)]


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if a tracker's name is unknown or its package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(
                f"{spoken('--track', 'trackers')}: must be {' or '.join(TRACKERS)} ({name}). Give one of these.",
                code="config.unknown-name",
                key="--track",
                value=name,
            )
        if find_spec(name) is None:
            raise ConfigError(
                f"{spoken('--track', 'trackers')}: the package is not installed ({name}). Run "
                "pip install '.[track]' in the clone.",
                code="config.missing-package",
                key="--track",
                name=name,
            )


class _Tracker(Callback):
    """Base class of both trackers: logs each step, and turns every failure of the tool into a `RayltError`."""

    name: str

    def on_start(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        folder = folder.resolve()
        id = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]  # stays the same when the run is resumed
        with self._errors():
            is_new = self._open(folder, id, settings_of(config.model_dump(mode="json")))
            for report in reports if is_new else []:
                self._log(dict(figures_of(report)), report["step"])

    def on_step(self, report: RoundReport) -> None:
        with self._errors():
            self._log(dict(figures_of(metrics_log.as_record(report))), report.step)

    def on_picture(self, picture: "Picture") -> None:
        from PIL import Image

        with self._errors():
            self._show(Image.open(io.BytesIO(picture.png)), picture.model)

    def on_end(self, summary: dict[str, Any] | None) -> None:
        with self._errors():
            self._close(None if summary is None else summary["model_sha256"])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn any exception inside the block into a `RayltError` that names the tracking tool."""
        try:
            yield
        except Exception as error:  # these tools raise many types of exceptions
            reason = one_line(error)
            raise RayltError(
                f"{spoken('--track', 'trackers')}: {self.name} failed ({reason}). The run folder is intact: "
                f"{spoken('raylt resume', 'raylt.resume')} continues the run, with or without this tracker.",
                code="run.tracker-failed",
                name=self.name,
                reason=reason,
            ) from None

    def _open(self, folder: Path, id: str, settings: dict[str, Any]) -> bool:
        """Open or continue the tracker's entry for a run, and return whether the entry is new."""
        raise NotImplementedError

    def _log(self, figures: dict[str, float], step: int) -> None:
        """Log the figures of a step."""
        raise NotImplementedError

    def _show(self, image: "Image.Image", model: str) -> None:
        """Log a picture of a model's predictions."""
        raise NotImplementedError

    def _close(self, model_sha256: str | None) -> None:
        """Close the tracker's entry for the run; `model_sha256` is None if the run was interrupted or failed."""
        raise NotImplementedError


class Wandb(_Tracker):
    """Logs to a run in the project `raylt` of Weights & Biases."""

    name = "wandb"
    _run: Any = None

    def _open(self, folder: Path, id: str, settings: dict[str, Any]) -> bool:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project="raylt",
            id=id,
            resume="allow",
            name=folder.name,
            config=settings,
            dir=os.environ.get("WANDB_DIR") or str(folder),
        )
        return not self._run.resumed

    def _log(self, figures: dict[str, float], step: int) -> None:
        self._run.log(figures, step=step)

    def _show(self, image: "Image.Image", model: str) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        # no step, because W&B drops figures of earlier steps, for example after a resumption
        self._run.log({"predictions": wandb.Image(image, caption=model)})

    def _close(self, model_sha256: str | None) -> None:
        if self._run is not None:
            self._run.summary["model_sha256"] = model_sha256
            self._run.finish(exit_code=int(model_sha256 is None))


class MLflow(_Tracker):
    """Logs to an MLflow experiment that is named after the parent of the run folder."""

    name = "mlflow"
    _client: Any = None
    _run = ""

    def _open(self, folder: Path, id: str, settings: dict[str, Any]) -> bool:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}")
        experiment = self._experiment_id(client, folder.parent)
        earlier = client.search_runs([experiment], f"tags.`{TAG}` = '{id}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            client.update_run(self._run, "RUNNING")
        else:
            self._run = client.create_run(experiment, run_name=folder.name, tags={TAG: id}).info.run_id
            params = [Param(key, str(value)) for key, value in settings.items()]
            for start in range(0, len(params), PARAMS_PER_CALL):
                client.log_batch(self._run, params=params[start : start + PARAMS_PER_CALL])
        self._client = client
        return not earlier

    def _experiment_id(self, client: Any, folder: Path) -> str:
        """Return the id of the MLflow experiment for a folder of run folders; create the experiment if necessary."""
        experiment = client.get_experiment_by_name(folder.name)
        if experiment:
            return experiment.experiment_id
        return client.create_experiment(folder.name, artifact_location=(folder / "mlartifacts").as_uri())

    def _log(self, figures: dict[str, float], step: int) -> None:
        from time import time

        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(1000 * time())
        self._client.log_batch(
            self._run, metrics=[Metric(NOT_IN_NAMES.sub("", name), value, now, step) for name, value in figures.items()]
        )

    def _show(self, image: "Image.Image", model: str) -> None:
        self._client.log_image(self._run, image, "predictions.png")
        self._client.set_tag(self._run, "raylt.predictions", model)

    def _close(self, model_sha256: str | None) -> None:
        if self._client is not None:
            if model_sha256 is not None:
                self._client.set_tag(self._run, "raylt.model_sha256", model_sha256)
            self._client.set_terminated(self._run, "FINISHED" if model_sha256 is not None else "FAILED")


TRACKERS: dict[str, Callable[[], Callback]] = {"mlflow": MLflow, "wandb": Wandb}
