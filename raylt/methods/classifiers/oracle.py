"""Oracle: a classifier calibrated on all clients' real features, balanced by class. It is a control experiment of
raylt, not a federated method.

It shows how much of a loss in accuracy is due to the encoder: no classifier from statistics should exceed it by more
than chance. Clients upload features of their images, which every other method of the family avoids.
[1] Each class's features are drawn with replacement from the features of all clients together. Each client draws M_c
    features, and each of the M_c results is taken from one client, chosen in proportion to its samples of the class.
[2] A class without samples at any client gets no features.
"""

from typing import ClassVar

import torch
from torch import Tensor

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import each
from raylt.core.server import Server
from raylt.core.training.features import features
from raylt.methods.classifiers.family import Calibrated
from raylt.ops.bootstrap import bootstrap_of_clients, class_bootstrap
from raylt.ops.moments import LONGEST_FEATURE


class Oracle(Calibrated):
    """FedAvg, then re-training of the classifier on all clients' real features, balanced by class."""

    name: ClassVar[str] = "oracle"
    paper: ClassVar[str] = "a control of raylt"
    privileged: ClassVar[str | None] = "features of all clients' images at the server"

    @property
    def sees_each(self) -> tuple[str, ...]:
        return ("classes",)

    def statistics(self, client: Client, message: Message) -> Reply:
        """Report, for each class of the client, the sample count and M_c features drawn with replacement [1]."""
        client.receive(message["model"])
        return client.reply(classes=class_bootstrap(*features(client), self.virtual, client.order))

    def draw(self, server: Server, fleet: Fleet, generator: torch.Generator) -> dict[int, Tensor]:
        of_class = {"n": 1, "z": torch.empty(self.virtual, server.model.dim, device="meta")}
        like = dict.fromkeys(range(server.model.classes), of_class)
        replies = self.gather(server, fleet, classes=each.within(like).counting("n").up_to(LONGEST_FEATURE))["classes"]
        return bootstrap_of_clients(list(replies.values()), generator)  # [2]
