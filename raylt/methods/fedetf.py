"""FedETF: features trained towards a fixed equiangular classifier, which each client fine-tunes afterwards (Li et al.,
ICCV 2023).

Departures from the text, and from the authors' code for details that the text does not state:
[1] The frame has as many dimensions as classes, and a linear layer maps the features to them, as in the code. The
    linear layer is sent, but not the frame, which every participant draws from the run's seed.
[2] The learnt temperature starts at 1 and is trained and averaged with the weights, as in the code.
[3] The shift of a client's missing class is log 0: the balanced loss leaves the class out. `missing=one` counts such a
    class as if the client had one sample of it.
[4] After the last round every client trains the global model once more as in a round. Then it alternately trains the
    frame, which is no longer fixed, and the projection, by plain, unbalanced cross-entropy. Of all other entries, only
    BatchNorm's running statistics change. Turns, epochs and learning rates are the code's, where the frame is trained
    without momentum and its rows do not keep their lengths. With `turns=0` this phase is left out, and clients use the
    global model.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fine_tuning import FineTuned
from raylt.core.method import check_last_rate
from raylt.core.training.optimisers import SGD
from raylt.core.training.sgd import Objective, autocast, sgd
from raylt.data.task import Task, TaskSpec
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.split import SplitModel, StateDict, with_encoder
from raylt.ops.etf import simplex_etf

FRAME = "classifier.weight"


class FedETF(FineTuned):
    """FedAvg with balanced softmax under a fixed classifier frame, then a fine-tuned personal frame for each client."""

    name: ClassVar[str] = "fedetf"
    paper: ClassVar[str] = "Li et al., ICCV 2023"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2303.10058"
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": ("turns", "turn_epochs", "frame_lr", "projection_lr")}

    gamma: float = hp(1.0, Uniform(0.0, 2.0), "strength of the balanced loss, Eq. 6; 0: cross-entropy", ge=0, le=10)
    missing: Literal["mask", "one"] = hp(
        "mask",
        Choice("mask", "one"),
        "treatment of a client's missing classes: left out of the softmax, or counted as one sample",
    )
    temperature: float = hp(
        1.0, LogUniform(0.5, 20), "beta, initial value of the learnt temperature; from the code", gt=0
    )
    turns: int = hp(20, Choice(0, 5, 20), "turns of personal tuning, of frame then projection; from the code [4]", ge=0)
    turn_epochs: int = hp(3, Choice(1, 3), "epochs for each half of a turn; from the code", ge=0)
    frame_lr: float = hp(0.1, LogUniform(0.01, 0.5), "learning rate for the frame; from the code", gt=0)
    projection_lr: float = hp(0.05, LogUniform(0.005, 0.2), "learning rate for the projection; from the code", gt=0)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_last_rate(self, config, "method.turns=0")

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        draw = torch.Generator().manual_seed(int(torch.randint(2**31, ())))  # from the seeded global generator [1]
        projection = nn.Linear(base.dim, spec.classes)
        encoder = nn.Sequential(OrderedDict(base=base.encoder, projection=projection, unit=Unit()))
        model = with_encoder(base, encoder)
        model.dim = spec.classes
        model.classifier = Frame(simplex_etf(spec.classes, spec.classes, draw), self.temperature)
        return model

    def shared(self, model: SplitModel) -> StateDict:
        return {name: value for name, value in model.entries().items() if name != FRAME}

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the balanced-softmax loss: the cross-entropy of the logits beta v_c mu plus gamma log n_c, Eq. 6 [3].

        Class c has n_c samples at the client.
        """
        counts = client.counts.clamp(min=0 if self.missing == "mask" else 1)
        shift = counts.double().pow(self.gamma).log().float()  # [C]; 0^0 = 1: no shift with gamma = 0
        return lambda batch: F.cross_entropy(client.model(batch.x) + shift, batch.y)

    # personal frames

    @property
    def finishes(self) -> bool:
        return self.turns > 0

    def personalise(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        model = client.model
        local = client.config.local
        loss = 0.0
        frame = model.classifier.get_buffer("weight")
        fixed = frame.clone()
        sgd(client, self.objective(client, message))
        for _ in range(self.turns):
            tune(client, [frame.requires_grad_()], self.turn_epochs, self.frame_lr)
            frame.requires_grad_(False)
            loss = tune(
                client,
                model.encoder.get_submodule("projection").parameters(),
                self.turn_epochs,
                self.projection_lr,
                local.momentum,
                local.weight_decay,
            )
        client.state["tuned"] = tree.snapshot(model.state_dict())
        client.receive({FRAME: fixed})
        return client.reply(loss=loss)


def tune(
    client: Client, params: Iterable[Tensor], epochs: int, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> float:
    """Train the frame or the projection by cross-entropy on fixed base features; return the loss of the last batch.

    Args:
        client: The client.
        params: Parameters of the frame or the projection.
        epochs: Number of epochs.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay.
    """
    model = client.model.train()
    value = torch.zeros(())
    optimiser = SGD(params, lr, momentum, weight_decay)
    base, projection, unit = (model.encoder.get_submodule(name) for name in ("base", "projection", "unit"))
    for batch in client.batches(epochs, client.config.local.batch):
        with autocast(client):
            with torch.no_grad():
                h = base(batch.x)
            value = F.cross_entropy(model.classifier(unit(projection(h))), batch.y)
        optimiser.step(value)
    return value.item()


class Unit(nn.Module):
    """Layer that scales features to length 1."""

    def forward(self, z: Tensor) -> Tensor:
        return F.normalize(z, dim=1)


class Frame(nn.Module):
    """Fixed classifier with a learnt temperature [2]. Its `weight` is a buffer, not a parameter.

    Args:
        weight: The frame, [C, d].
        temperature: Initial temperature.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, temperature: float):
        super().__init__()
        self.register_buffer("weight", weight)
        self.temperature = nn.Parameter(torch.tensor(temperature))

    def forward(self, z: Tensor) -> Tensor:
        return self.temperature * F.linear(z, self.weight)
