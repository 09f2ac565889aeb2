"""FedBN: FedAvg in which each client keeps its own BatchNorm layers (Li et al., ICLR 2021).

Each client keeps scale, shift and running statistics of every BatchNorm layer, as in the authors' code (med-air/FedBN
at 0927bb8). `federation.batchnorm=local` is another algorithm, SiloBN, in which clients keep only the statistics.
Decisions:
[1] Clients are weighted by their samples, as in all methods of raylt; the code weighs them equally.
[2] A client that never took part has the initial scale and shift, and takes statistics from its own samples.
`global_accuracy` is the accuracy of the shared weights with the initial BatchNorm layers; only the clients' models are
intended for use.
"""

from typing import ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raylt.config import Config
from raylt.core.client import Client
from raylt.core.method import Method
from raylt.core.training.sgd import take_statistics
from raylt.data.sources.sources import ProblemKind
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.models.split import SplitModel, StateDict, running_statistics


class FedBN(Method):
    """FedAvg of all model entries except the entries of BatchNorm layers [1]."""

    name: ClassVar[str] = "fedbn"
    paper: ClassVar[str] = "Li et al., ICLR 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2102.07623"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True
    stackable: ClassVar[bool] = True

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        if not batchnorm_entries(model) & model.entries().keys():  # frozen layers have no entries
            layer = "no BatchNorm layer" if config.trainable == "all" else "no BatchNorm layer that is trained"
            raise ConfigError(
                f"model: {config.model} has {layer}, so method = fedbn would be FedAvg. Use small, resnet8 or another "
                "model with BatchNorm, and trainable=all or norm.",
                code="model.lacks-layer",
                key="model",
                value=config.model,
            )

    def shared(self, model: SplitModel) -> StateDict:
        own = batchnorm_entries(model)
        return {name: value for name, value in model.entries().items() if name not in own}

    def client_model(self, client: Client) -> SplitModel:
        take_statistics(client, running_statistics(client.model))  # [2]
        return client.model


def batchnorm_entries(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers of every BatchNorm layer."""
    layers = [(prefix, layer) for prefix, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    return frozenset(f"{prefix}.{name}" for prefix, layer in layers for name in layer.state_dict())
