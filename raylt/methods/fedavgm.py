"""FedAvgM: FedAvg with momentum at the server (Hsu, Qi and Brown, arXiv 2019).

Departure from the text: entries without gradients (BatchNorm's statistics) are averaged without momentum.
"""

from typing import ClassVar

from raylt.core.method import Group, Method
from raylt.core.server import ServerMomentum
from raylt.data.sources.sources import ProblemKind
from raylt.hyper import Choice, LogUniform, hp


class FedAvgM(Method):
    """FedAvg with momentum at the server. beta = 0 with server_lr = 1 is FedAvg.

    v <- beta v + Delta, then w <- w + lr v, where Delta is the clients' mean model minus w.
    """

    name: ClassVar[str] = "fedavgm"
    paper: ClassVar[str] = "Hsu et al., arXiv 2019"
    link: ClassVar[str | None] = "https://arxiv.org/abs/1909.06335"
    group: ClassVar[Group | None] = "aggregation"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    stackable: ClassVar[bool] = True

    beta: float = hp(0.9, Choice(0.0, 0.5, 0.7, 0.9, 0.97), "server momentum; CReFF's options have 0.97", ge=0, lt=1)
    server_lr: float = hp(1.0, LogUniform(0.01, 10), "server learning rate; 1 in the text", gt=0)

    def server_optimiser(self) -> ServerMomentum:
        return ServerMomentum(self.beta, self.server_lr)
