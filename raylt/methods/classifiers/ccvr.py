"""CCVR: a classifier calibrated on virtual features drawn from one Gaussian per class (Luo et al., NeurIPS 2021).

Departures from the text:
[1] Clients upload sums, not their means and covariances. The pooled mean and covariance of Eq. 3 to 5 follow exactly,
    and with federation.secure=true no party sees the sums of a client.
[2] Every class gets the same number of virtual features; a class without samples at any client gets none.
[3] Calibration uses the settings of SFD's comparison: epochs, batch, momentum, decay and cosine schedule. The text
    states none.
"""

from typing import ClassVar

import torch
from torch import Tensor

from raylt.config import Config
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.upload_limit import check_class_uploads
from raylt.core.server import Server
from raylt.data.task import Task
from raylt.methods.classifiers.family import Calibrated
from raylt.models.split import SplitModel
from raylt.ops.moments import moments_from_sums, perturb
from raylt.tree import Tree


class CCVR(Calibrated):
    """FedAvg, then calibration of the classifier on features drawn from a Gaussian per class [3]."""

    name: ClassVar[str] = "ccvr"
    paper: ClassVar[str] = "Luo et al., NeurIPS 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2106.05001"
    sums_samples: ClassVar[bool] = True

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        super().prepare(task, config, model)
        check_class_uploads(task, model, self.sums_like(model.dim))

    def draw(self, server: Server, fleet: Fleet, generator: torch.Generator) -> dict[int, Tensor]:
        return {c: self.gaussian(sums, generator) for c, sums in self.class_moments(server, fleet).items()}  # [1] [2]

    def gaussian(self, sums: Tree, generator: torch.Generator) -> Tensor:
        """Draw features of one class from the Gaussian N(mu_c, Sigma_c), float32 [M_c, d].

        Sigma_c is the unbiased covariance, as in Eq. 5.
        """
        n, mean, covariance = moments_from_sums(sums)
        return (mean + perturb(covariance * n / max(n - 1, 1), self.virtual, generator)).float()
