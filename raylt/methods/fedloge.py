"""FedLoGe: an encoder trained against a fixed sparse frame, a global and a personal classifier beside it (Xiao et al.,
ICLR 2024).

Departures from the text, and from the authors' code where the text is silent:
[1] The frame is made at the server as the code makes it, by 10,000 steps of Adam, and sent once; it has no bias, where
    the code has a random one that nothing trains.
[2] Both classifiers learn from features that their losses do not move, each step of each together with the encoder's.
[3] The global classifier's rows are brought to one length to be used, 1.7 as in the code; its bias stays as it is.
[4] A client uses the global classifier with the lengths of its own one's rows; a class that it lacks is never
    predicted.
`global_accuracy` is the global classifier's of [3]; clients are judged by that of [4].
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.training import Objective, sgd
from raylt.data.samples import Batch
from raylt.data.task import Facts, Task
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, hp
from raylt.models.split import Params, SplitModel, with_classifier
from raylt.ops.etf import sparse_etf
from raylt.ops.moments import NEVER
from raylt.recordable import recordable

FRAME, HEAD = "frame", "personal"


class FedLoGe(Method):
    """The frame is `frame`, the global classifier `classifier`, the client's own `personal`."""

    name: ClassVar[str] = "fedloge"
    paper: ClassVar[str] = "Xiao et al., ICLR 2024"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2401.08977"
    personal: ClassVar[bool] = True

    beta: float = hp(0.6, Choice(0.4, 0.6), "share of the frame's entries that are 0; SFD tunes it in {0.4, 0.6}", ge=0,
                     lt=1)
    steps: int = hp(10000, Choice(1000, 10000), "of Adam on the frame; from the code", ge=0)
    length: float = hp(1.7, LogUniform(0.5, 5), "of the global classifier's rows when used; from the code", gt=0)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        if model.dim < task.classes:
            raise ConfigError(f"model = {config.model}: its features have d = {model.dim}, and the frame of "
                              f"method = fedloge needs at least one dimension for each of {task.classes} classes; "
                              "take a wider model")

    def build(self, task: Facts, base: SplitModel) -> SplitModel:
        base.add_module(FRAME, Fixed(task.classes, base.dim))
        base.add_module(HEAD, nn.Linear(base.dim, task.classes))
        return base

    def shared(self, model: SplitModel) -> Params:
        private = (f"{FRAME}.", f"{HEAD}.")
        return {name: value for name, value in model.entries().items() if not name.startswith(private)}

    def join(self, client: Client, message: Message) -> Reply:
        client.receive(message["frame"])
        return client.reply()

    def objective(self, client: Client, message: Message) -> Objective:
        """Cross-entropy of the frame, which moves the encoder, and of both classifiers, which moves these [2]."""
        model = client.model
        frame, personal = model.get_submodule(FRAME), model.get_submodule(HEAD)
        if not frame.get_buffer("weight").any():
            raise RuntimeError("this client did not take part in FedLoGe.join, so it has no frame")

        @recordable
        def loss(batch: Batch) -> Tensor:
            z = model.encoder(batch.x)                                          # [B, d]
            held = z.detach()
            return (F.cross_entropy(frame(z), batch.y) + F.cross_entropy(model.classifier(held), batch.y)
                    + F.cross_entropy(personal(held), batch.y))

        return loss

    def settle(self, client: Client, message: Message) -> None:
        """The personal classifier alone, under the final encoder: the frame has done its work."""
        client.receive(message["model"])
        encoder, personal = client.model.encoder, client.model.get_submodule(HEAD)
        sgd(client, recordable(lambda batch: F.cross_entropy(personal(encoder(batch.x).detach()), batch.y)),
            personal.parameters())

    def start(self, server: Server, fleet: Fleet) -> None:
        generator = torch.Generator().manual_seed(server.seed("frame"))
        with server.stages.time("frame"):
            e = sparse_etf(server.model.classes, server.model.dim, self.beta, self.steps, generator)        # [1]
        server.receive({f"{FRAME}.weight": e})
        fleet.ask(self.join, fleet.everyone, {"frame": {f"{FRAME}.weight": e}})

    # what is judged

    def global_model(self, server: Server) -> SplitModel:
        own = server.model.state_dict()
        return with_classifier(server.model, self.length * F.normalize(own["classifier.weight"], dim=1),
                               own["classifier.bias"])                          # [3]

    def client_model(self, client: Client) -> SplitModel:
        own = client.model.state_dict()
        lengths = own[f"{HEAD}.weight"].norm(dim=1, keepdim=True)               # [C, 1]
        bias = own["classifier.bias"].masked_fill(client.counts == 0, NEVER)
        return with_classifier(client.model, lengths * F.normalize(own["classifier.weight"], dim=1), bias)      # [4]


@recordable
class Fixed(nn.Module):
    """A linear layer without a bias that is not trained; zeros until it is received."""

    weight: Tensor

    def __init__(self, classes: int, dim: int):
        super().__init__()
        self.register_buffer("weight", torch.zeros(classes, dim))

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weight)
