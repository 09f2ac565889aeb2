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
from raylt.data.augment import normalise
from raylt.data.images.decoding import Fit
from raylt.data.task import Task, TaskSpec
from raylt.errors import CheckpointError, ConfigError, DataError, one_line
from raylt.models.trainable import whole_model
from raylt.tree import view

MOST = 12  # clients that an error names


@dataclass(frozen=True)
class Prediction:
    """The predictions of a model for n images.

    Attributes:
        labels: the likeliest class of each image, int64 [n], or of each pixel [n, H, W].
        probabilities: float32 [n, C], or [n, C, H, W].
        class_names: C names.
    """

    labels: Tensor
    probabilities: Tensor
    class_names: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The name of each image's predicted class. Label maps have no such names."""
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
        network: the bare model; it takes the output of `preprocess`.
        class_names: C names.
        shape: height, width and channels of an image.
        fit: how image files are brought to that size.
        depth: bits of grey image files; None for those of their type.
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
            images: uint8 [n, H, W, channels], an array or a tensor.

        Raises:
            DataError: the images have another type or shape.
        """
        return normalise(uint8_images(images, self.shape).to(self.mean.device), self.mean, self.std)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, C], or [n, C, H, W], of preprocessed images."""
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
        logits_of: maps images to float32 [n, C, ...] on the CPU.
        images: uint8 [n, H, W, channels].
        shape: height, width and channels of the images that the model was trained on.

    Raises:
        DataError: the model does not take images of this size.
        CheckpointError: the probabilities are not finite, or not one for each class.
    """
    n = len(images)
    if n == 0:  # not every network takes an empty batch
        images = torch.zeros(1, *shape, dtype=torch.uint8)
    try:
        logits = torch.cat([logits_of(part) for part in images.split(size)])[:n]
    except Exception as error:  # torch and onnxruntime raise many types for another size than that of training
        if tuple(images.shape[1:]) == shape:
            raise
        raise DataError(
            f"images: the model does not take images of {images.shape[1]}x{images.shape[2]} "
            f"({one_line(error)}). Give images of {shape[0]}x{shape[1]}, like those that it was trained on.",
            code="data.wrong-shape",
            value=list(images.shape),
        ) from None
    if logits.ndim < 2 or logits.shape[1] != len(class_names):
        raise CheckpointError(
            f"model: gives logits {list(logits.shape)} for {len(class_names)} classes. Give a file of raylt export.",
            code="export.malformed",
            shape=list(logits.shape),
            classes=len(class_names),
        )
    probabilities = logits.softmax(1)  # a class may be excluded by a logit of minus infinity
    if not probabilities.isfinite().all():
        raise CheckpointError(
            "model: its predictions are infinite or not a number. Use a model that did not diverge.",
            code="model.not-finite",
        )
    # argmax of logits, since softmax may make two different logits equal
    return Prediction(logits.argmax(1), probabilities, class_names)


def uint8_images(images: Any, shape: tuple[int, int, int]) -> Tensor:
    """Return images as a tensor, uint8 [n, H, W, channels].

    Args:
        shape: height, width and channels of the images that the model was trained on.

    Raises:
        DataError: the images have another type or number of channels.
    """
    if not isinstance(images, Tensor):
        try:
            images = np.ascontiguousarray(images)
        except ValueError:  # images of several sizes
            images = np.array(None)
    if not str(images.dtype).endswith("uint8") or images.ndim != 4 or images.shape[3] != shape[2]:
        given = f"{str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
        raise DataError(
            f"images: have the wrong type or shape ({given}). Give uint8 [n, H, W, {shape[2]}], like the images that "
            f"the model was trained on ({shape[0]}x{shape[1]}); image files are for raylt predict.",
            code="data.wrong-shape",
            value=given,
            channels=shape[2],
        )
    return images if isinstance(images, Tensor) else view(images)


def global_model(experiment: Experiment, trained: dict[str, Tensor] | None) -> TrainedModel:
    """Return the global model of a run, ready to predict.

    Args:
        trained: the final entries of a finished run.

    Raises:
        ConfigError: each client keeps its own running statistics, so there is no global model.
    """
    if experiment.server.model.local_buffers:
        raise ConfigError(
            "federation.batchnorm: each client keeps its own running statistics, so there is no global model (local). "
            "Take client_model(id).",
            code="model.none-global",
            key="federation.batchnorm",
            value="local",
        )
    network = whole_model(experiment.method.global_model(experiment.server))
    if trained is not None:
        network.load_state_dict(trained)
    return _ready(experiment, network)


def client_models(
    experiment: Experiment, setup: Setup, saved: Checkpoint | None, ids: Iterable[int] | None
) -> Iterator[tuple[int, TrainedModel]]:
    """Yield clients' own models with their ids, as an evaluation at this point would use them.

    Args:
        saved: the checkpoint that the experiment continues from; None before the first.
        ids: ids of the clients; by default of all that hold samples.

    Raises:
        ConfigError: a client does not exist, holds no samples or joins after training.
    """
    method, task, server = experiment.method, experiment.task, experiment.server
    states = None if saved is None else SavedStates(saved)
    # room=0: the samples of one client at a time
    host = ClientHost(setup, task.spec, task.test, server.device, room=0)
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
    """Return id and name of each client that trains: it holds samples, and does not join after training."""
    late = set(task.new_clients)
    return [(id, name) for id, name in enumerate(task.client_names) if task.sizes[id] and id not in late]


def joins_later(where: str, name: str, choices: str) -> ConfigError:
    """Return the error for a client that joins after training.

    Args:
        where: the run or file.
        choices: names of clients that train.
    """
    return ConfigError(
        f"{where}: the client joins after training, and the model that it tunes then is not kept ({name}). Take one "
        f"that trains: {choices}.",
        code="client.unknown",
        client=name,
    )


def names_of(clients: Sequence[tuple[int, str]]) -> str:
    """Return the names of the first clients for an error, and the number of the others."""
    shown = ", ".join(name for _, name in clients[:MOST])
    return shown + (f" and {len(clients) - MOST} more" if len(clients) > MOST else "")


def _check_trains(task: Task, id: int) -> None:
    """Raise ConfigError if a client has no model of its own."""
    exists = 0 <= id < len(task.client_names)
    if exists and id in task.new_clients:
        raise joins_later("client", task.client_names[id], names_of(trained_clients(task)))
    if not exists or not task.sizes[id]:
        name = task.client_names[id] if exists else id
        raise ConfigError(
            f"client: holds no samples ({name}). Take one of {names_of(trained_clients(task))}.",
            code="client.unknown",
            client=id,
        )


def _ready(experiment: Experiment, network: nn.Module) -> TrainedModel:
    config = experiment.config
    batch = config.evaluation.batch
    model = TrainedModel(experiment.method, network, experiment.task.spec, batch, config.data.fit, config.data.depth)
    return model.to(experiment.server.device).requires_grad_(False)
