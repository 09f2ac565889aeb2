"""FedAdam and FedYogi: FedAvg with an adaptive optimiser at the server (Reddi et al., ICLR 2021, Algorithm 2).

Departures from the text:
[1] Delta is weighted by samples, as in the paper's experiments; its Algorithm 2 has 1/|S|.
[2] Entries without gradients (BatchNorm's statistics) are averaged as in FedAvg; the paper's networks have none.
"""

from typing import ClassVar

from raylt.core.method import Group, Method
from raylt.core.server import ServerAdam, ServerYogi
from raylt.data.sources.sources import ProblemKind
from raylt.hyper import Choice, LogUniform, hp


class FedAdam(Method):
    """FedAvg with Adam at the server, which keeps the moments m and v. Clients train as in FedAvg."""

    name: ClassVar[str] = "fedadam"
    paper: ClassVar[str] = "Reddi et al., ICLR 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2003.00295"
    group: ClassVar[Group | None] = "aggregation"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    stackable: ClassVar[bool] = True

    server_lr: float = hp(0.1, LogUniform(1e-3, 10), "eta, line 12; tuned for each task in the paper", gt=0)
    beta1: float = hp(0.9, Choice(0.0, 0.9), "decay rate of the first moment, line 9", ge=0, lt=1)
    beta2: float = hp(0.99, Choice(0.9, 0.99, 0.999), "decay rate of the second moment, lines 10, 11", ge=0, lt=1)
    tau: float = hp(1e-3, LogUniform(1e-5, 0.1), "adaptivity, line 12; 1e-3 in the paper's main results", gt=0)

    def server_optimiser(self) -> ServerAdam:
        return ServerAdam(self.server_lr, self.beta1, self.beta2, self.tau)  # [1] [2]


class FedYogi(FedAdam):
    """FedAdam with Yogi's second moment v, which rises and falls by (1 - beta2) Delta^2 per round."""

    name: ClassVar[str] = "fedyogi"

    def server_optimiser(self) -> ServerYogi:
        return ServerYogi(self.server_lr, self.beta1, self.beta2, self.tau)
