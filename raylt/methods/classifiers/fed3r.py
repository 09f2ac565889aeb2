"""Fed3R: a classifier by ridge regression of labels on features, computed exactly from sums (Fani et al., ICML 2024).

Departures from the text:
[1] The encoder is trained by FedAvg first, unless it is frozen and federation.rounds = 0; the paper's is pre-trained.
[2] As in the authors' code, features have a constant 1 that is regularised like them, and each class's weights are
    scaled to length 1, with its bias divided by the same number. `normalise=false` does not scale them.
[3] Sums are sent in float64, A packed: the result agrees with regression on the pooled features to ten digits.
[4] A class without samples at any client is never predicted.
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import total
from raylt.core.server import Server
from raylt.core.training.features import features
from raylt.hyper import Choice, LogUniform, hp
from raylt.methods.classifiers.family import AfterTraining
from raylt.ops.closed_form import ridge_classifier, ridge_sums_fault
from raylt.ops.moments import pack, unpack, without_negative


class Fed3R(AfterTraining):
    """FedAvg, then a classifier by ridge regression, in one pass over all clients without training."""

    name: ClassVar[str] = "fed3r"
    paper: ClassVar[str] = "Fani et al., ICML 2024"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2406.01116"
    sums_samples: ClassVar[bool] = True
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": ("ridge", "normalise")}

    ridge: float = hp(0.01, LogUniform(1e-4, 100), "lambda of the ridge regression; from the code", gt=0)
    normalise: bool = hp(True, Choice(True, False), "scaling of each class's weights to length 1; from the code")

    def statistics(self, client: Client, message: Message) -> Reply:
        """Report the sums that ridge regression needs, float64: A = Z^T Z (packed) and B = Z^T Y [d + 1, C].

        Z holds the client's features with a constant 1 appended [2] [3].
        """
        client.receive(message["model"])
        z, y = features(client)
        z = F.pad(z.double(), (0, 1), value=1.0)  # [n, d + 1]
        return client.reply(a=pack(z.T @ z), b=z.T @ F.one_hot(y, client.model.classes).double())

    def finish(self, server: Server, fleet: Fleet) -> None:
        d, classes = server.model.dim + 1, server.model.classes
        a = torch.empty(d * (d + 1) // 2, dtype=torch.float64, device="meta")
        b = torch.empty(d, classes, dtype=torch.float64, device="meta")
        privacy = server.config.privacy
        longest = privacy.clip**2 + 1  # squared length of a feature with the constant 1
        got = self.gather(
            server,
            fleet,
            b=total.like(b)
            .by_column()
            .over_samples(partial(ridge_sums_fault, **server.feature_limits))
            .bounded(longest**0.5),  # [1]
            a=total.like(a).bounded(longest, lambda a: pack(without_negative(unpack(a, d)))),
        )
        server.state["classifier"] = ridge_classifier(  # [4]
            unpack(got["a"], d), got["b"], self.ridge, self.normalise
        )
