"""Models of a run as users get them: with their preprocessing and the names of their classes."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raylt.core.checkpoint import Checkpoint
from raylt.core.client import Client, Message, Reply
from raylt.core.experiment import Experiment
from raylt.core.host import Host
from raylt.core.judging import judged_entries, judged_model
from raylt.core.method import Method
from raylt.core.setup import Setup
from raylt.core.states import SavedStates
from raylt.data.augment import normalise
from raylt.data.decoding import Fit
from raylt.data.task import Facts
from raylt.errors import ConfigError, DataError
from raylt.tree import Tree, view


@dataclass(frozen=True)
class Prediction:
    """What a model says of n images.

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
        """The name of each image's class; of label maps there is none."""
        return [self.class_names[label] for label in self.labels.tolist()]


class TrainedModel(nn.Module):
    """A trained model, in evaluation mode.

    Attributes:
        network: the bare model; what it takes is what `preprocess` gives.
        class_names: C names.
        shape: height, width and channels of an image.
        fit: how image files are brought to that size.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, method: Method, network: nn.Module, facts: Facts, batch: int, fit: Fit = "crop"):
        super().__init__()
        self.network, self.class_names, self.shape = network, facts.class_names, facts.shape
        self._method, self._batch = method, batch
        self.fit: Fit = fit
        self.register_buffer("mean", torch.tensor(facts.mean), persistent=False)
        self.register_buffer("std", torch.tensor(facts.std), persistent=False)
        self.eval()

    def preprocess(self, images: Any) -> Tensor:
        """Images as the network takes them, float32 [n, channels, H, W].

        Args:
            images: uint8 [n, H, W, channels], an array or a tensor.

        Raises:
            DataError: another type or shape.
        """
        return normalise(uint8_images(images, self.shape).to(self.mean.device), self.mean, self.std)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, C], or [n, C, H, W], of preprocessed images."""
        return self._method.predict(self.network, x)

    @torch.no_grad()
    def predict(self, images: Any) -> Prediction:
        """What is on images, uint8 [n, H, W, channels]; see `preprocess`."""
        return predict_in_parts(lambda part: self(self.preprocess(part)).cpu(), images, self._batch, self.class_names)


def predict_in_parts(logits_of: Callable[[Any], Tensor], images: Any, size: int,
                     class_names: tuple[str, ...]) -> Prediction:
    """What a model says of images, so many of them at a time.

    Args:
        logits_of: images to float32 [n, C, ...], on the CPU.
    """
    logits = torch.cat([logits_of(images[start:start + size]) for start in range(0, max(1, len(images)), size)])
    # not of the probabilities: two logits may be closer than what softmax tells apart
    return Prediction(logits.argmax(1), logits.softmax(1), class_names)


def uint8_images(images: Any, shape: tuple[int, int, int]) -> Tensor:
    """Images as a tensor, uint8 [n, H, W, channels].

    Args:
        shape: height, width and channels of those that the model was trained on.

    Raises:
        DataError: another type or number of channels.
    """
    x = images if isinstance(images, Tensor) else view(images) if hasattr(images, "dtype") else torch.as_tensor(images)
    if x.dtype != torch.uint8 or x.ndim != 4 or x.shape[3] != shape[2]:
        raise DataError(f"images: {str(x.dtype).removeprefix('torch.')} {list(x.shape)}; must be uint8 [n, H, W, "
                        f"{shape[2]}], as those that the model was trained on ({shape[0]}x{shape[1]})")
    return x


def global_model(experiment: Experiment, trained: dict[str, Tensor] | None) -> TrainedModel:
    """The model that a run's users get.

    Args:
        trained: the entries that a finished run ended with.

    Raises:
        ConfigError: there is none, since each client keeps its own running statistics.
    """
    if experiment.server.model.stays:
        raise ConfigError("federation.batchnorm = local: each client keeps its own running statistics, so there is no "
                          "global model to use; take client_model(id)")
    network = experiment.method.global_model(experiment.server)
    if trained is not None:
        network.load_state_dict(trained)
    return _ready(experiment, network)


def client_models(experiment: Experiment, setup: Setup, saved: Checkpoint | None,
                  ids: Iterable[int] | None) -> Iterator[tuple[int, TrainedModel]]:
    """Clients' own models by id, one after the other.

    Args:
        saved: the checkpoint that the experiment was taken up from.
        ids: by default of all that hold samples.
    """
    kept = None if saved is None else SavedStates(saved)
    for id in experiment.fleet.ids if ids is None else ids:
        yield id, client_model(experiment, setup, id, None if kept is None else kept.read(id))


def client_model(experiment: Experiment, setup: Setup, id: int, private: Tree | None) -> TrainedModel:
    """A client's own model, as it would be judged now.

    Args:
        private: what the client keeps; None before its first call.

    Raises:
        ConfigError: no such client, or it holds no samples.
    """
    fleet, method, task = experiment.fleet, experiment.method, experiment.task
    if id in fleet.newcomers:
        raise ConfigError(f"client {id}: joins after training (data.new_clients), and what it tunes then is not kept; "
                          "take one of those that train")
    if id not in fleet.ids:
        raise ConfigError(f"client {id}: holds no samples; those that do: {', '.join(map(str, fleet.ids))}")
    kept: list[nn.Module] = []

    def keep(client: Client, message: Message) -> Reply:
        kept.append(copy.deepcopy(judged_model(method, client, message["model"])))
        return client.reply()

    host = Host(setup, task.facts, task.test, experiment.server.device)
    message = {"model": judged_entries(experiment.server, method)}
    host.run(keep, message, experiment.server.round, id, task.shards[id], private)
    return _ready(experiment, kept[0])


def _ready(experiment: Experiment, network: nn.Module) -> TrainedModel:
    config = experiment.config
    model = TrainedModel(experiment.method, network, experiment.task.facts, config.evaluation.batch, config.data.fit)
    return model.to(experiment.server.device).requires_grad_(False)

