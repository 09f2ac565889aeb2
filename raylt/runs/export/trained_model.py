"""A run's models for users, with preprocessing and class names."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raylt.core.checkpoint.checkpoint import Checkpoint
from raylt.core.checkpoint.client_states import SavedStates
from raylt.core.client import Client, Message, Reply
from raylt.core.evaluation.client_models import judged_entries, judged_model
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.method import Method
from raylt.core.setup import Setup
from raylt.core.training.sgd import COUNTER, has_statistics
from raylt.data.augment import normalise
from raylt.data.images.decoding import Fit
from raylt.data.task import Task, TaskSpec
from raylt.errors import CheckpointError, ConfigError, DataError, one_line
from raylt.models.trainable import whole_model
from raylt.tree import view

MAX_NAMES = 12  # number of clients that an error lists


@dataclass(frozen=True)
class Prediction:
    """The predictions of a model for n images.

    Attributes:
        labels: Most likely class of each image, int64 [n], or of each pixel, [n, H, W].
        probabilities: Class probabilities, float32 [n, C] or [n, C, H, W].
        class_names: Names of the C classes.
    """

    labels: Tensor
    probabilities: Tensor
    class_names: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The name of each image's predicted class; not available for label maps."""
        return [self.class_names[label] for label in self.labels.tolist()]

    @property
    def shares(self) -> list[dict[str, float]]:
        """Each image's class probabilities, by class name; for label maps, each class's share of the pixels."""
        values = self.probabilities
        if self.labels.ndim > 1:
            classes = torch.arange(values.shape[1]).view(1, -1, 1, 1)
            values = (self.labels[:, None] == classes).flatten(2).double().mean(2)
        return [dict(zip(self.class_names, row, strict=True)) for row in values.tolist()]


class TrainedModel(nn.Module):
    """A trained model, in evaluation mode.

    Attributes:
        network: The bare model, which takes the output of `preprocess`.
        class_names: Names of the C classes.
        shape: Height, width and channels of an image.
        fit: Rule by which image files are resized to that shape.
        depth: Bits of grey image files; None for the bits of their pixel type.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        method: Method,
        network: nn.Module,
        spec: TaskSpec,
        batch: int,
        fit: Fit = "crop",
        depth: int | None = None,
    ):
        super().__init__()
        self.network = network
        self.class_names = spec.class_names
        self.shape = spec.shape
        self.fit: Fit = fit
        self.depth = depth
        self._method = method
        self._batch = batch
        self.register_buffer("mean", torch.tensor(spec.mean), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std), persistent=False)
        self.eval()

    def preprocess(self, images: Any) -> Tensor:
        """Convert uint8 images to the network's input, float32 [n, channels, H, W].

        Args:
            images: Array or tensor, uint8 [n, H, W, channels].

        Raises:
            DataError: The images have another type or shape.
        """
        return normalise(uint8_images(images, self.shape).to(self.mean.device), self.mean, self.std)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, C] or [n, C, H, W] for preprocessed images, float32 [n, channels, H, W]."""
        return self._method.predict(self.network, x)

    @torch.no_grad()
    def predict(self, images: Any) -> Prediction:
        """Predict the classes of images, uint8 [n, H, W, channels]; see `preprocess`."""
        return predict_in_parts(
            lambda part: self(self.preprocess(part)).cpu(),
            uint8_images(images, self.shape),
            self._batch,
            self.class_names,
            self.shape,
        )


def predict_in_parts(
    logits_of: Callable[[Tensor], Tensor],
    images: Tensor,
    size: int,
    class_names: tuple[str, ...],
    shape: tuple[int, int, int],
) -> Prediction:
    """Predict the classes of images, in batches of `size` images.

    Args:
        logits_of: Function that maps images to logits, float32 [n, C, ...] on the CPU.
        images: Images, uint8 [n, H, W, channels].
        size: Number of images in a batch.
        class_names: Names of the C classes.
        shape: Height, width and channels of the training images.

    Raises:
        DataError: The model does not take images of this size.
        CheckpointError: The probabilities are not finite, or their number differs from the number of classes.
    """
    n = len(images)
    if n == 0:  # not all networks support an empty batch
        images = torch.zeros(1, *shape, dtype=torch.uint8)
    try:
        logits = torch.cat([logits_of(part) for part in images.split(size)])[:n]
    except Exception as error:  # torch and onnxruntime raise many types of errors for wrong image sizes
        if tuple(images.shape[1:]) == shape:
            raise
        raise DataError(
            f"images: the model does not take images of {images.shape[1]}x{images.shape[2]} "
            f"({one_line(error)}). Give images of {shape[0]}x{shape[1]}, the size of the training images.",
            code="data.wrong-shape",
            value=list(images.shape),
        ) from None
    if logits.ndim < 2 or logits.shape[1] != len(class_names):
        raise CheckpointError(
            f"model: gives logits {list(logits.shape)} for {len(class_names)} classes. Give a file that raylt export "
            "wrote.",
            code="export.malformed",
            shape=list(logits.shape),
            classes=len(class_names),
        )
    probabilities = logits.softmax(1)  # a logit of minus infinity is allowed, and excludes a class
    if not probabilities.isfinite().all():
        raise CheckpointError(
            "model: its predictions are infinite or not a number. Use a model that did not diverge.",
            code="model.not-finite",
        )
    # argmax of logits, since softmax may map different logits to equal probabilities
    return Prediction(logits.argmax(1), probabilities, class_names)


def uint8_images(images: Any, shape: tuple[int, int, int]) -> Tensor:
    """Return images as a tensor, uint8 [n, H, W, channels].

    Args:
        images: Array or tensor.
        shape: Height, width and channels of the training images.

    Raises:
        DataError: The images have another type or number of channels.
    """
    if not isinstance(images, Tensor):
        try:
            images = np.ascontiguousarray(images)
        except ValueError:  # images of several sizes
            images = np.array(None)
    if not str(images.dtype).endswith("uint8") or images.ndim != 4 or images.shape[3] != shape[2]:
        given = f"{str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
        raise DataError(
            f"images: have the wrong type or shape ({given}). Give uint8 [n, H, W, {shape[2]}], like the training "
            f"images ({shape[0]}x{shape[1]}); for image files use raylt predict.",
            code="data.wrong-shape",
            value=given,
            channels=shape[2],
        )
    return images if isinstance(images, Tensor) else view(images)


def global_model(experiment: Experiment, trained: dict[str, Tensor] | None) -> TrainedModel:
    """Return the global model of a run, ready to predict.

    Args:
        experiment: The experiment of the run.
        trained: Final entries of a finished run, by name; None to use the experiment's entries.

    Raises:
        ConfigError: Each client keeps its own running statistics, so there is no global model.
    """
    if experiment.server.model.local_buffers:
        raise ConfigError(
            "federation.batchnorm: each client keeps its own running statistics, so there is no global model (local). "
            "Use client_model(id).",
            code="model.none-global",
            key="federation.batchnorm",
            value="local",
        )
    network = whole_model(experiment.method.global_model(experiment.server))
    if trained is not None:
        network.load_state_dict(trained)
    return _ready(experiment, network)


def needs_images(experiment: Experiment, saved: Checkpoint | None, ids: Iterable[int] | None) -> bool:
    """Return whether a client's model needs its images: it keeps running statistics, and has not computed any yet.

    Args:
        experiment, saved, ids: As in `client_models`.
    """
    model = experiment.server.model
    shared = experiment.method.shared(model) if experiment.method.personal else model.entries()
    kept = frozenset(name for name in model.state_dict() if name.endswith(COUNTER) and name not in shared)
    if not kept or saved is None:
        return bool(kept)
    states = SavedStates(saved)
    private = (states.read(id) for id in (experiment.fleet.ids if ids is None else ids))
    return any(state is None or not has_statistics(state["model"], kept) for state in private)


def client_models(
    experiment: Experiment, setup: Setup, saved: Checkpoint | None, ids: Iterable[int] | None
) -> Iterator[tuple[int, TrainedModel]]:
    """Yield clients' own models with their ids, as an evaluation at this point would use them.

    Args:
        experiment: The experiment.
        setup: Values that the configuration names.
        saved: Checkpoint from which the experiment continues; None before the first.
        ids: Ids of the clients; by default all clients with samples.

    Raises:
        ConfigError: A client is unknown, has no samples or joins after training.
    """
    method, task, server = experiment.method, experiment.task, experiment.server
    states = None if saved is None else SavedStates(saved)
    # samples_room=0 keeps the samples of only one client in memory
    host = ClientHost(setup, task.spec, task.test, server.device, samples_room=0)
    message = {"model": judged_entries(server, method)}
    models: list[nn.Module] = []

    def keep_model(client: Client, message: Message) -> Reply:
        models.append(copy.deepcopy(whole_model(judged_model(method, client, message["model"]))))
        return client.reply()

    for id in experiment.fleet.ids if ids is None else ids:
        _check_trains(experiment.task, id)
        private = None if states is None else states.read(id)
        host.run(keep_model, message, server.round, id, task.shards[id], private)
        yield id, _ready(experiment, models.pop())


def trained_clients(task: Task) -> list[tuple[int, str]]:
    """Return id and name of each client that has samples and does not join after training."""
    late = set(task.new_clients)
    return [(id, name) for id, name in enumerate(task.client_names) if task.sizes[id] and id not in late]


def joins_later(where: str, name: str, choices: str) -> ConfigError:
    """Return the error for a client that joins after training.

    Args:
        where: The run or file.
        name: Name of the client.
        choices: Names of clients that train.
    """
    return ConfigError(
        f"{where}: the client joins after training, so its model is not kept ({name}). Choose one that trains: "
        f"{choices}.",
        code="client.unknown",
        client=name,
    )


def names_of(clients: Sequence[tuple[int, str]]) -> str:
    """Return the names of the first clients for an error, and the number of the others."""
    shown = ", ".join(name for _, name in clients[:MAX_NAMES])
    return shown + (f" and {len(clients) - MAX_NAMES} more" if len(clients) > MAX_NAMES else "")


def _check_trains(task: Task, id: int) -> None:
    """Raise ConfigError if a client has no model of its own."""
    exists = 0 <= id < len(task.client_names)
    if exists and id in task.new_clients:
        raise joins_later("client", task.client_names[id], names_of(trained_clients(task)))
    if not exists or not task.sizes[id]:
        name = task.client_names[id] if exists else id
        raise ConfigError(
            f"client: has no samples ({name}). Choose one of {names_of(trained_clients(task))}.",
            code="client.unknown",
            client=id,
        )


def _ready(experiment: Experiment, network: nn.Module) -> TrainedModel:
    config = experiment.config
    batch = config.evaluation.batch
    model = TrainedModel(experiment.method, network, experiment.task.spec, batch, config.data.fit, config.data.depth)
    return model.to(experiment.server.device).requires_grad_(False)
