"""FedNCM: a classifier made of the classes' means (Legate et al., NeurIPS 2023).

Departures from the text:
[1] The encoder is trained by FedAvg first; the paper's is pre-trained.
[2] A class that nobody holds is never predicted.
"""

from typing import ClassVar

import torch
from torch.nn import functional as F

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.reductions import total
from raylt.core.server import Server
from raylt.models.split import SplitModel, with_classifier
from raylt.ops.moments import NEVER, class_means, pooled_means


class FedNCM(Method):
    """One pass over all clients after the last round; nothing is trained in it."""

    name: ClassVar[str] = "fedncm"
    paper: ClassVar[str] = "Legate et al., NeurIPS 2023"
    trains_as: ClassVar[str | None] = "fedavg"

    @property
    def finishes(self) -> bool:
        return True

    def statistics(self, client: Client, message: Message) -> Reply:
        """Of each class that the client holds: its count and the sum of its features."""
        client.receive(message["model"])
        return client.reply(classes=class_means(*features(client)))

    def finish(self, server: Server, fleet: Fleet) -> None:
        """W_c = mu_c / ||mu_c||, b = 0."""
        of_class = {"n": 1, "z": torch.empty(server.model.dim, device="meta")}
        message = {"model": tree.snapshot(server.model.entries("encoder."))}                    # [1]
        got = fleet.ask(self.statistics, fleet.everyone, message,
                        classes=total.within(dict.fromkeys(range(server.model.classes), of_class)))
        pooled = pooled_means(got["classes"], server.model.classes)
        server.state["classifier"] = {"weight": F.normalize(pooled["means"], dim=1),
                                      "bias": torch.where(pooled["present"], 0.0, NEVER)}       # [2]

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return server.model
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device))
