"""FedRoD: a balanced generic classifier, and a personal classifier that adds to its logits (Chen and Chao, ICLR 2022).

Departures from the text:
[1] The personal classifier starts at 0, so that a client that never took part predicts as the generic classifier does.
    It is a linear layer; the paper's hypernetwork, which computes its weights from a client's class counts, is left
    out.
[2] The shift of a client's missing class is log 0: the generic loss leaves the class out. `missing=one` counts it as
    one sample, so that the balanced softmax acts without this mask.
`global_accuracy` is the accuracy of the generic classifier; clients are evaluated with the sum of both.
"""

from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from raylt.config import Config
from raylt.core.client import Client, Message
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.training.sgd import Objective
from raylt.data.samples import Batch
from raylt.data.task import Task, TaskSpec
from raylt.hyper import Choice, hp
from raylt.models.layers import check_linear_classifier
from raylt.models.split import SplitModel, StateDict, with_classifier

HEAD = "personal"


class FedRoD(Method):
    """FedAvg with a shared generic classifier G and a personal classifier P, which stays at the client.

    They are the modules `classifier` and `personal`.
    """

    name: ClassVar[str] = "fedrod"
    paper: ClassVar[str] = "Chen and Chao, ICLR 2022"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2107.00778"
    personal: ClassVar[bool] = True

    missing: Literal["mask", "one"] = hp(
        "mask",
        Choice("mask", "one"),
        "treatment of a client's missing classes: left out of G's softmax, or counted as one sample",
    )

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_linear_classifier(self.name, config, model)

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        head = nn.Linear(base.dim, spec.classes)
        nn.init.zeros_(head.weight)  # [1]
        nn.init.zeros_(head.bias)
        base.add_module(HEAD, head)
        return base

    def shared(self, model: SplitModel) -> StateDict:
        return {name: value for name, value in model.entries().items() if not name.startswith(f"{HEAD}.")}

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the balanced risk of the generic classifier G plus the empirical risk of G + P.

        The second term trains only the personal classifier P.
        """
        model, head = client.model, client.model.get_submodule(HEAD)
        shift = client.counts.clamp(min=0 if self.missing == "mask" else 1).log()  # [2]

        def loss(batch: Batch) -> Tensor:
            z = model.encoder(batch.x)  # [B, d]
            generic = model.classifier(z)
            balanced = F.cross_entropy(generic + shift, batch.y)  # balanced softmax
            return balanced + F.cross_entropy(generic.detach() + head(z.detach()), batch.y)

        return loss

    # evaluated models

    def global_model(self, server: Server) -> SplitModel:
        own = server.model.state_dict()
        return with_classifier(server.model, own["classifier.weight"], own["classifier.bias"])

    def client_model(self, client: Client) -> SplitModel:
        own = client.model.state_dict()  # the sum of two linear classifiers of the same features is a linear classifier
        weight, bias = (own[f"classifier.{name}"] + own[f"{HEAD}.{name}"] for name in ("weight", "bias"))
        return with_classifier(client.model, weight, bias)
