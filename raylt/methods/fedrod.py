"""FedRoD: a generic classifier that is balanced, and a personal one on top of it (Chen and Chao, ICLR 2022).

Departures from the text:
[1] The personal classifier starts at 0, so that a client that never took part answers as the generic one does. It has a
    linear layer's own weights; the paper's hypernetwork, which makes them of a client's class counts, is left out.
[2] Classes that a client lacks have log 0 as their shift: the generic loss leaves them out.
`global_accuracy` is the generic classifier's; clients are judged by the sum of both.
"""

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from raylt.core.client import Client, Message
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.training import Objective
from raylt.data.samples import Batch
from raylt.data.task import Facts
from raylt.models.split import Params, SplitModel, with_classifier
from raylt.recordable import recordable

HEAD = "personal"


class FedRoD(Method):
    """G is `classifier`, P is `personal`, which stays at the client."""

    name: ClassVar[str] = "fedrod"
    paper: ClassVar[str] = "Chen and Chao, ICLR 2022"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2107.00778"
    personal: ClassVar[bool] = True

    def build(self, task: Facts, base: SplitModel) -> SplitModel:
        head = nn.Linear(base.dim, task.classes)
        nn.init.zeros_(head.weight)                             # [1]
        nn.init.zeros_(head.bias)
        base.add_module(HEAD, head)
        return base

    def shared(self, model: SplitModel) -> Params:
        return {name: value for name, value in model.entries().items() if not name.startswith(f"{HEAD}.")}

    def objective(self, client: Client, message: Message) -> Objective:
        """Balanced risk of G and the encoder, and empirical risk of G + P, which moves P alone."""
        model, shift, head = client.model, client.counts.log(), client.model.get_submodule(HEAD)       # [2]

        @recordable
        def loss(batch: Batch) -> Tensor:
            z = model.encoder(batch.x)                                          # [B, d]
            generic = model.classifier(z)
            balanced = F.cross_entropy(generic + shift, batch.y)                # balanced softmax
            return balanced + F.cross_entropy(generic.detach() + head(z.detach()), batch.y)

        return loss

    # what is judged

    def global_model(self, server: Server) -> SplitModel:
        own = server.model.state_dict()
        return with_classifier(server.model, own["classifier.weight"], own["classifier.bias"])

    def client_model(self, client: Client) -> SplitModel:
        own = client.model.state_dict()                         # two linear classifiers of the same features are one
        weight, bias = (own[f"classifier.{name}"] + own[f"{HEAD}.{name}"] for name in ("weight", "bias"))
        return with_classifier(client.model, weight, bias)
