"""FedNCM: a classifier whose weights are the class means (Legate et al., NeurIPS 2023).

Departures from the text:
[1] The encoder is trained by FedAvg first, unless it is frozen and federation.rounds = 0; the paper's is pre-trained.
[2] A class without samples at any client is never predicted.
"""

from functools import partial
from typing import ClassVar

import torch

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import total
from raylt.core.server import Server
from raylt.core.training.features import features
from raylt.methods.classifiers.family import AfterTraining
from raylt.ops.closed_form import nearest_mean_classifier
from raylt.ops.moments import nearest_moments, pooled_means, sums_fault, weighted_class_means


class FedNCM(AfterTraining):
    """FedAvg, then a classifier of class means, in one pass over all clients without training."""

    name: ClassVar[str] = "fedncm"
    paper: ClassVar[str] = "Legate et al., NeurIPS 2023"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2306.03937"
    sums_samples: ClassVar[bool] = True

    def statistics(self, client: Client, message: Message) -> Reply:
        """Report, for each class of the client, the sample count and the sum of the features."""
        client.receive(message["model"])
        return client.reply(classes=weighted_class_means(*features(client)))

    def finish(self, server: Server, fleet: Fleet) -> None:
        """Set each class's classifier weight to the normalised class mean mu_c / ||mu_c||, and the bias to 0."""
        of_class = {"n": 1, "z": torch.empty(server.model.dim, device="meta")}
        like = dict.fromkeys(range(server.model.classes), of_class)
        privacy = server.config.privacy
        sums = total.within(like).counting("n").over_samples(partial(sums_fault, **server.feature_limits))
        lengths = {"n": 1.0, "z": privacy.clip}
        got = self.gather(server, fleet, classes=sums.bounded(lengths, nearest_moments))  # [1]
        pooled = pooled_means(got["classes"], server.model.classes)
        server.state["classifier"] = nearest_mean_classifier(**pooled)  # [2]
