"""FedETF: a fixed classifier whose classes are equally far apart, and features that learn to lie there (Li et al., ICCV
2023).

Departures from the text, and from the authors' code where the text is silent:
[1] The frame is of as many dimensions as there are classes, to which a linear layer brings the features, as in the
    code; both travel but the frame, which every participant draws from the run's seed.
[2] The temperature that is learnt starts at 1 and is trained and averaged with the weights, as in the code.
[3] Classes that a client lacks have log 0 as their shift: the balanced loss leaves them out.
[4] After the last round every client trains the global model once more as in a round, then in turns the frame, which is
    free to move now, and the projection, by cross-entropy that is not balanced; of all else only BatchNorm's running
    statistics move. Turns, epochs and rates as in the code, where the frame is trained without momentum and does not
    keep its rows' lengths. Without turns there is no such phase, and clients have the global model.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.optimisers import SGD
from raylt.core.reductions import mean
from raylt.core.server import Server
from raylt.core.training import Objective, autocast, sgd, take_statistics
from raylt.data.task import Facts
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.split import Params, SplitModel, load_entries
from raylt.ops.etf import simplex_etf
from raylt.recordable import recordable

FRAME = "classifier.weight"


class FedETF(Method):
    """FedAvg of what is in front of the frame, with the balanced softmax; then each client's own frame."""

    name: ClassVar[str] = "fedetf"
    paper: ClassVar[str] = "Li et al., ICCV 2023"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2303.10058"
    personal: ClassVar[bool] = True
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": ("turns", "turn_epochs", "frame_lr", "projection_lr")}

    gamma: float = hp(1.0, Uniform(0.0, 2.0), "strength of the balanced loss, Eq. 6; 0: cross-entropy", ge=0, le=10)
    temperature: float = hp(1.0, LogUniform(0.5, 20), "beta, what the learnt one starts from; from the code", gt=0)
    turns: int = hp(20, Choice(0, 5, 20), "of personal tuning, frame and projection each; from the code [4]", ge=0)
    turn_epochs: int = hp(3, Choice(1, 3), "of each half of a turn; from the code", ge=0)
    frame_lr: float = hp(0.1, LogUniform(0.01, 0.5), "learning rate of the frame's tuning; from the code", gt=0)
    projection_lr: float = hp(0.05, LogUniform(0.005, 0.2), "learning rate of the projection's; from the code", gt=0)

    def build(self, task: Facts, base: SplitModel) -> SplitModel:
        draw = torch.Generator().manual_seed(int(torch.randint(2**31, ())))     # of the seeded global generator [1]
        projection = nn.Linear(base.dim, task.classes)
        encoder = nn.Sequential(OrderedDict(base=base.encoder, projection=projection, unit=Unit()))
        model = type(base)(encoder, task.classes, task.classes)
        model.classifier = Frame(simplex_etf(task.classes, task.classes, draw), self.temperature)
        model.stays = base.stays
        return model

    def shared(self, model: SplitModel) -> Params:
        return {name: value for name, value in model.entries().items() if name != FRAME}

    def objective(self, client: Client, message: Message) -> Objective:
        """CE of beta v_c mu + gamma log n_c, Eq. 6 [3]."""
        shift = client.counts.double().pow(self.gamma).log().float()            # [C]; 0^0 = 1: with gamma = 0 none
        return recordable(lambda batch: F.cross_entropy(client.model(batch.x) + shift, batch.y))

    # each client's own frame

    @property
    def finishes(self) -> bool:
        return self.turns > 0

    def finish(self, server: Server, fleet: Fleet) -> None:
        got = fleet.ask(self.personalise, fleet.everyone, self.message(server), loss=mean.like(0.0))
        server.log(tuning_loss=got["loss"])

    def personalise(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        model, local, loss = client.model, client.config.local, 0.0
        frame = model.classifier.get_buffer("weight")
        fixed = frame.clone()
        sgd(client, self.objective(client, message))
        for _ in range(self.turns):
            tune(client, [frame.requires_grad_()], self.turn_epochs, self.frame_lr)
            frame.requires_grad_(False)
            loss = tune(client, model.encoder.get_submodule("projection").parameters(), self.turn_epochs,
                        self.projection_lr, local.momentum, local.weight_decay)
        client.state["tuned"] = tree.snapshot(model.state_dict())
        client.receive({FRAME: fixed})
        return client.reply(loss=loss)

    def settle(self, client: Client, message: Message) -> None:
        client.receive(message["model"])
        if self.finishes:
            self.personalise(client, message)
        else:
            take_statistics(client)

    def client_model(self, client: Client) -> SplitModel:
        tuned = copy.deepcopy(client.model)
        load_entries(tuned, client.state.get("tuned", {}))
        return tuned


def tune(client: Client, params: Iterable[Tensor], epochs: int, lr: float, momentum: float = 0.0,
         weight_decay: float = 0.0) -> float:
    """Trains frame or projection behind the features as they are, by cross-entropy; the last batch's loss."""
    model, value = client.model.train(), torch.zeros(())
    optimiser = SGD(params, lr, momentum, weight_decay)
    base, projection, unit = (model.encoder.get_submodule(name) for name in ("base", "projection", "unit"))
    for batch in client.batches(epochs, client.config.local.batch):
        with autocast(client):
            with torch.no_grad():
                h = base(batch.x)
            value = F.cross_entropy(model.classifier(unit(projection(h))), batch.y)
        optimiser.step(value)
    return value.item()


@recordable
class Unit(nn.Module):
    """Features of length 1."""

    def forward(self, z: Tensor) -> Tensor:
        return F.normalize(z, dim=1)


@recordable
class Frame(nn.Module):
    """The fixed classifier, times a temperature that is learnt [2]; `weight` is no parameter.

    Args:
        weight: [C, d].
    """

    weight: Tensor

    def __init__(self, weight: Tensor, temperature: float):
        super().__init__()
        self.register_buffer("weight", weight)
        self.temperature = nn.Parameter(torch.tensor(temperature))

    def forward(self, z: Tensor) -> Tensor:
        return self.temperature * F.linear(z, self.weight)
