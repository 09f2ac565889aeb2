"""An oracle, no method of federated learning: the classifier is calibrated on real features of all clients, balanced.

It says how much of what is lost the encoder has lost: no classifier from statistics should be above it by more than
chance. Clients hand over features of their images, which any method of the family avoids.
[1] Each class's features are drawn with replacement from those of all clients together. A client draws as many as are
    wanted; of each place in the result one client's is taken, in proportion to how many samples of the class it holds.
[2] A class that nobody holds gets no features.
"""

from typing import ClassVar

import torch
from torch import Tensor

from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fleet import Fleet
from raylt.core.reductions import each
from raylt.core.server import Server
from raylt.methods.classifiers.family import Calibrated
from raylt.ops.bootstrap import bootstrap_of_clients, class_bootstrap


class Oracle(Calibrated):
    """FedAvg, then what a balanced re-training on everybody's features gives."""

    name: ClassVar[str] = "oracle"
    paper: ClassVar[str] = "a control of raylt"
    privileged: ClassVar[str | None] = "features of all clients' images at the server"

    @property
    def sees_each(self) -> tuple[str, ...]:
        return ("classes",)

    def statistics(self, client: Client, message: Message) -> Reply:
        """Of each class that the client holds: its count, and M_c of its features with replacement [1]."""
        client.receive(message["model"])
        return client.reply(classes=class_bootstrap(*features(client), self.virtual, client.order))

    def draw(self, server: Server, fleet: Fleet, generator: torch.Generator) -> dict[int, Tensor]:
        of_class = {"n": 1, "z": torch.empty(self.virtual, server.model.dim, device="meta")}
        like = dict.fromkeys(range(server.model.classes), of_class)
        replies = self.gather(server, fleet, classes=each.within(like))["classes"]
        return bootstrap_of_clients(list(replies.values()), generator)
