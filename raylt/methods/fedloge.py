"""FedLoGe: an encoder trained against a fixed sparse frame, with a global and a personal classifier (Xiao et al., ICLR
2024).

Departures from the text, and from the authors' code for details that the text does not state (ZackZikaiXiao/FedLoGe at
01ae080, `realignment.py` with `update_weights_norm_init`, then `localtest` with `p_mode = 1`):
[1] The server makes the frame as the code does, by 10,000 steps of Adam, and sends it once. It has no bias; the code
    has a random bias that is never trained. If a client is lost at that time, messages of rounds have the frame too.
[2] Both classifiers are trained on detached features, in the same steps as the encoder.
[3] For use, the global classifier's rows are scaled to one length, 1.7 as in the code; its bias is not changed.
[4] A client uses the sum of its own classifier and the global one, each of whose rows is multiplied by the length of
    the client's row, as in the code; rows are not normalised first. A client's missing class is never predicted.
    The own classifier of a client that never took part has its initial random weights.
`global_accuracy` is the accuracy of the global classifier of [3]; clients are evaluated with the classifier of [4].
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.training.sgd import Objective, sgd
from raylt.data.samples import Batch
from raylt.data.task import Task, TaskSpec
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, hp
from raylt.models.layers import check_linear_classifier
from raylt.models.split import SplitModel, StateDict, with_classifier
from raylt.ops.etf import sparse_etf
from raylt.ops.moments import NEVER

FRAME, HEAD = "frame", "personal"


class FedLoGe(Method):
    """FedAvg of a model with a fixed frame, a global classifier and a personal classifier for each client.

    They are the modules `frame`, `classifier` and `personal`.
    """

    name: ClassVar[str] = "fedloge"
    paper: ClassVar[str] = "Xiao et al., ICLR 2024"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2401.08977"
    personal: ClassVar[bool] = True
    encoder_fields: ClassVar[tuple[str, ...]] = ("beta", "steps")

    beta: float = hp(
        0.6, Choice(0.4, 0.6), "share of the frame's entries that are 0; SFD tunes it in {0.4, 0.6}", ge=0, lt=1
    )
    steps: int = hp(10000, Choice(1000, 10000), "Adam steps on the frame; from the code", ge=0)
    length: float = hp(1.7, LogUniform(0.5, 5), "length of the global classifier's rows in use; from the code", gt=0)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_linear_classifier(self.name, config, model)
        if model.dim < task.classes:
            raise ConfigError(
                f"model: the features have fewer dimensions than there are classes ({config.model}: d = {model.dim}, "
                f"C = {task.classes}). The frame of fedloge needs one per class: use a wider model.",
                code="model.too-narrow",
                key="model",
                value=config.model,
                dim=model.dim,
                needed=task.classes,
            )

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        base.add_module(FRAME, Fixed(spec.classes, base.dim))
        base.add_module(HEAD, nn.Linear(base.dim, spec.classes))
        return base

    def shared(self, model: SplitModel) -> StateDict:
        private = (f"{FRAME}.", f"{HEAD}.")
        return {name: value for name, value in model.entries().items() if not name.startswith(private)}

    def join(self, client: Client, message: Message) -> Reply:
        client.receive(message["frame"])
        return client.reply()

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the sum of the cross-entropies of the frame and of both classifiers [2].

        Only the frame's cross-entropy trains the encoder.
        """
        model = client.model
        client.receive(message.get("frame", {}))
        frame, personal = model.get_submodule(FRAME), model.get_submodule(HEAD)

        def loss(batch: Batch) -> Tensor:
            z = model.encoder(batch.x)  # [B, d]
            fixed = z.detach()
            return (
                F.cross_entropy(frame(z), batch.y)
                + F.cross_entropy(model.classifier(fixed), batch.y)
                + F.cross_entropy(personal(fixed), batch.y)
            )

        return loss

    def settle(self, client: Client, message: Message) -> None:
        """Train only the personal classifier of a new client on the final encoder. The frame is no longer needed."""
        client.receive(message["model"])
        encoder, personal = client.model.encoder, client.model.get_submodule(HEAD)
        sgd(
            client,
            lambda batch: F.cross_entropy(personal(encoder(batch.x).detach()), batch.y),
            personal.parameters(),
        )

    def start(self, server: Server, fleet: Fleet) -> None:
        generator = torch.Generator().manual_seed(server.seed("frame"))
        with server.timings.time("frame"):
            e = sparse_etf(server.model.classes, server.model.dim, self.beta, self.steps, generator)  # [1]
        frame = {f"{FRAME}.weight": e}
        server.receive(frame)
        joined = fleet.ask(self.join, fleet.everyone, {"frame": frame})
        if len(joined.weights) < len(fleet.ids):
            server.state["late_frame"] = frame

    def message(self, server: Server) -> Message:
        late = {"frame": server.state["late_frame"]} if "late_frame" in server.state else {}
        return super().message(server) | late

    # evaluated models

    def global_model(self, server: Server) -> SplitModel:
        own = server.model.state_dict()
        return with_classifier(
            server.model, self.length * F.normalize(own["classifier.weight"], dim=1), own["classifier.bias"]
        )  # [3]

    def client_model(self, client: Client) -> SplitModel:
        entries = client.model.state_dict()
        own, own_bias = (entries[f"{HEAD}.{name}"] for name in ("weight", "bias"))
        weight = own.norm(dim=1, keepdim=True) * entries["classifier.weight"] + own  # [C, d]
        bias = (entries["classifier.bias"] + own_bias).masked_fill(client.counts == 0, NEVER)
        return with_classifier(client.model, weight, bias)  # [4]


class Fixed(nn.Module):
    """Fixed linear layer without a bias. Its weight is zero until the client receives the frame."""

    weight: Tensor

    def __init__(self, classes: int, dim: int):
        super().__init__()
        self.register_buffer("weight", torch.zeros(classes, dim))

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weight)
