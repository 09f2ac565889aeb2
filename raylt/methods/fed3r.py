"""Fed3R: the classifier is the ridge regression of labels on features, exact from sums (Fani et al., ICML 2024).

Departures from the text:
[1] The encoder is trained by FedAvg first; the paper's is pre-trained.
[2] As in the authors' code, features have a constant 1 that is regularised as they are, and each class's weights are
    brought to length 1, its bias divided alike; `normalise=false` leaves the regression as it is.
[3] Sums travel in float64, A packed: the regression is that of the pooled features to ten digits.
[4] A class that nobody holds is never predicted.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.reductions import total
from raylt.core.server import Server
from raylt.hyper import Choice, LogUniform, hp
from raylt.models.split import SplitModel, with_classifier
from raylt.ops.moments import NEVER, pack, unpack


class Fed3R(Method):
    """One pass over all clients after the last round; nothing is trained in it."""

    name: ClassVar[str] = "fed3r"
    paper: ClassVar[str] = "Fani et al., ICML 2024"
    trains_as: ClassVar[str | None] = "fedavg"
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": ("ridge", "normalise")}

    ridge: float = hp(0.01, LogUniform(1e-4, 100), "lambda; from the code", gt=0)
    normalise: bool = hp(True, Choice(True, False), "each class's weights to length 1; from the code")

    @property
    def finishes(self) -> bool:
        return True

    def statistics(self, client: Client, message: Message) -> Reply:
        """A = Z^T Z packed and B = Z^T Y [d + 1, C], float64, of features with a constant 1 [2] [3]."""
        client.receive(message["model"])
        z, y = features(client)
        z = F.pad(z.double(), (0, 1), value=1.0)                                # [n, d + 1]
        return client.reply(a=pack(z.T @ z), b=z.T @ F.one_hot(y, client.model.classes).double())

    def finish(self, server: Server, fleet: Fleet) -> None:
        d, classes = server.model.dim + 1, server.model.classes
        a, b = (torch.empty(shape, dtype=torch.float64, device="meta") for shape in ([d * (d + 1) // 2], [d, classes]))
        message = {"model": tree.snapshot(server.model.entries("encoder."))}                    # [1]
        got = fleet.ask(self.statistics, fleet.everyone, message, a=total.like(a), b=total.like(b))
        solution = ridge_regression(unpack(got["a"], d), got["b"], self.ridge)
        if self.normalise:
            solution = solution / solution[:-1].norm(dim=0).clamp(min=1e-12)
        bias = solution[-1].masked_fill(got["b"][-1] == 0, NEVER)               # the constant's row of B: samples [4]
        server.state["classifier"] = {"weight": solution[:-1].T.float().contiguous(), "bias": bias.float()}

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return server.model
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device))


def ridge_regression(a: Tensor, b: Tensor, ridge: float) -> Tensor:
    """W [d, C] of (A + lambda I) W = B, A [d, d], B [d, C], float64."""
    return torch.linalg.solve(a + ridge * torch.eye(len(a), dtype=a.dtype, device=a.device), b)
