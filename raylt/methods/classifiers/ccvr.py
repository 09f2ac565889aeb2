"""CCVR: the classifier is calibrated on virtual features, one Gaussian for each class (Luo et al., NeurIPS 2021).

Departures from the text:
[1] Clients upload sums, not their means and covariances: the pooled mean and covariance of Eq. 3 to 5 follow exactly,
    and nobody sees a client's.
[2] Every class gets the same number of virtual features; one that nobody holds gets none.
[3] Calibration is that of SFD's comparison: epochs, batch, momentum, decay and cosine rate; the text states none.
"""

from typing import ClassVar

import torch
from torch import Tensor

from raylt.core.fleet import Fleet
from raylt.core.server import Server
from raylt.methods.classifiers.family import Calibrated
from raylt.ops.moments import moments, perturb
from raylt.tree import Tree


class CCVR(Calibrated):
    """FedAvg, then one pass over all clients."""

    name: ClassVar[str] = "ccvr"
    paper: ClassVar[str] = "Luo et al., NeurIPS 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2106.05001"
    sums_samples: ClassVar[bool] = True

    def draw(self, server: Server, fleet: Fleet, generator: torch.Generator) -> dict[int, Tensor]:
        return {c: self.gaussian(sums, generator) for c, sums in self.class_moments(server, fleet).items()}   # [1] [2]

    def gaussian(self, sums: Tree, generator: torch.Generator) -> Tensor:
        """M_c draws from N(mu_c, Sigma_c), float32 [M_c, d]; Sigma_c is unbiased, as Eq. 5 has it."""
        n, mean, covariance = moments(sums)
        return (mean + perturb(covariance * n / max(n - 1, 1), self.virtual, generator)).float()
