"""FedNCM: a classifier made of the classes' means (Legate et al., NeurIPS 2023).

Departures from the text:
[1] The encoder is trained by FedAvg first; the paper's is pre-trained.
[2] A class that nobody holds is never predicted.
"""

from typing import ClassVar

import torch

from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fleet import Fleet
from raylt.core.reductions import total
from raylt.core.server import Server
from raylt.methods.classifiers.family import AfterTraining
from raylt.ops.closed_form import nearest_mean_classifier
from raylt.ops.moments import class_means, nearest_moments, pooled_means


class FedNCM(AfterTraining):
    """One pass over all clients after the last round; nothing is trained in it."""

    name: ClassVar[str] = "fedncm"
    paper: ClassVar[str] = "Legate et al., NeurIPS 2023"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2306.03937"
    sums_samples: ClassVar[bool] = True

    def statistics(self, client: Client, message: Message) -> Reply:
        """Of each class that the client holds: its count and the sum of its features."""
        client.receive(message["model"])
        return client.reply(classes=class_means(*features(client)))

    def finish(self, server: Server, fleet: Fleet) -> None:
        """W_c = mu_c / ||mu_c||, b = 0."""
        of_class = {"n": 1, "z": torch.empty(server.model.dim, device="meta")}
        like = dict.fromkeys(range(server.model.classes), of_class)
        lengths = {"n": 1.0, "z": server.config.privacy.clip}
        got = self.gather(server, fleet, classes=total.within(like).bounded(lengths, nearest_moments))         # [1]
        pooled = pooled_means(got["classes"], server.model.classes)
        server.state["classifier"] = nearest_mean_classifier(**pooled)                          # [2]
