"""FedLC: logits calibrated by what a client holds (Zhang et al., ICML 2022).

Departures from the text:
[1] The softmax is over all classes; the text's denominator leaves the target out, with which training diverges, and the
    public re-implementations do as here.
[2] n^(-1/4) of a class that the client lacks is infinite: the class is left out. `missing=eps` takes 1e-8 samples for
    it, as re-implementations do, `missing=one` a single one.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message
from raylt.core.method import Method
from raylt.core.training import Objective
from raylt.hyper import Choice, LogUniform, hp
from raylt.recordable import recordable


class FedLC(Method):
    """FedAvg with a margin for each class of a client, larger for rarer ones."""

    name: ClassVar[str] = "fedlc"
    paper: ClassVar[str] = "Zhang et al., ICML 2022"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2209.00189"

    tau: float = hp(1.0, LogUniform(0.01, 1.0), "strength of the calibration; SFD tunes it in {1, 0.1}", ge=0)
    missing: Literal["mask", "eps", "one"] = hp("mask", Choice("mask", "eps", "one"), "a class that a client lacks: "
                                                "left out, or counted as 1e-8 or 1 sample")

    def objective(self, client: Client, message: Message) -> Objective:
        margin = self.margin(client.counts)
        return recordable(lambda batch: F.cross_entropy(client.model(batch.x) - margin, batch.y))          # [1]

    def margin(self, counts: Tensor) -> Tensor:
        """tau n^(-1/4) of each class, float32 [C]; infinite for one that is left out [2]."""
        margin = self.tau * counts.float().clamp(min=1e-8 if self.missing == "eps" else 1).pow(-0.25)
        return margin.masked_fill(counts == 0, torch.inf) if self.missing == "mask" else margin
