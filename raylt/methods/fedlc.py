"""FedLC: FedAvg with logits calibrated by each client's class counts (Zhang et al., ICML 2022).

Departures from the text:
[1] The softmax is over all classes. The text's denominator omits the target, with which training diverges; the public
    re-implementations use all classes too.
[2] n^(-1/4) of a client's missing class is infinite: the class is left out. `missing=eps` counts 1e-8 samples for it,
    as re-implementations do, and `missing=one` one sample.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message
from raylt.core.method import Method
from raylt.core.training.sgd import Objective
from raylt.hyper import Choice, LogUniform, hp


class FedLC(Method):
    """FedAvg with a logit margin for each class of a client. Rare classes have large margins."""

    name: ClassVar[str] = "fedlc"
    paper: ClassVar[str] = "Zhang et al., ICML 2022"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2209.00189"
    stackable: ClassVar[bool] = True

    tau: float = hp(1.0, LogUniform(0.01, 1.0), "strength of the calibration; SFD tunes it in {1, 0.1}", ge=0)
    missing: Literal["mask", "eps", "one"] = hp(
        "mask",
        Choice("mask", "eps", "one"),
        "treatment of a client's missing classes: left out, or counted as 1e-8 or 1 sample",
    )

    def objective(self, client: Client, message: Message) -> Objective:
        margin = self.margin(client.counts)
        return lambda batch: F.cross_entropy(client.model(batch.x) - margin, batch.y)  # [1]

    def margin(self, counts: Tensor) -> Tensor:
        """Return the margin tau n^(-1/4) of each class with n samples, float32 [C]; infinity if excluded [2]."""
        margin = self.tau * counts.float().clamp(min=1e-8 if self.missing == "eps" else 1).pow(-0.25)
        return margin.masked_fill(counts == 0, torch.inf) if self.missing == "mask" else margin
