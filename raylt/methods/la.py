"""Logit adjustment: FedAvg with class margins that favour rare classes during training (Menon et al., ICLR 2021, Eq.
10).

Departures from the text, which has no clients:
[1] pi is the distribution of a client's own samples, because the client sees no others. `prior=global` is the
    distribution over all samples, for which clients send their counts when they join.
[2] A class without samples has pi = 0: the softmax leaves it out (but not with tau = 0, as 0^0 = 1). `missing=one`
    counts it as one sample, so that the margin acts without this mask.
tau = 0 is FedAvg; tau = 1 is the balanced softmax of Ren et al., NeurIPS 2020. `posthoc` adjusts after training.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import total
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.training.sgd import Objective
from raylt.hyper import Choice, Uniform, hp


class LogitAdjustment(Method):
    """FedAvg with the logit-adjusted softmax cross-entropy."""

    name: ClassVar[str] = "la"
    paper: ClassVar[str] = "Menon et al., ICLR 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2007.07314"
    stackable: ClassVar[bool] = True

    tau: float = hp(1.0, Uniform(0.0, 2.0), "strength of the adjustment, Eq. 10", ge=0, le=10)
    prior: Literal["local", "global"] = hp(
        "local", Choice("local", "global"), "samples counted in pi: each client's own, or all clients' [1]"
    )
    missing: Literal["mask", "one"] = hp(
        "mask",
        Choice("mask", "one"),
        "treatment of classes without samples: left out of the softmax, or counted as one sample [2]",
    )

    @property
    def uploads_more(self) -> bool:
        return self.prior == "global"

    def join(self, client: Client, message: Message) -> Reply:
        return client.reply(counts=client.counts) if self.prior == "global" else client.reply()

    def objective(self, client: Client, message: Message) -> Objective:
        counts = client.counts
        if self.prior == "global":
            counts = counts.maximum(message["counts"])  # only fewer if this client was lost when the others joined
        shift = self.shift(counts)
        return lambda batch: F.cross_entropy(client.model(batch.x) + shift, batch.y)

    def shift(self, counts: Tensor) -> Tensor:
        """Return the logit shift tau log pi per class, up to a constant, float32 [C]; -inf for excluded classes [2]."""
        counts = counts.clamp(min=1) if self.missing == "one" else counts
        return counts.double().pow(self.tau).log().float()

    def start(self, server: Server, fleet: Fleet) -> None:
        if self.prior == "local":
            super().start(server, fleet)
            return
        like = torch.empty(server.model.classes, dtype=torch.int64, device="meta")
        counts = total.like(like).counting()
        server.state["counts"] = fleet.ask(self.join, fleet.everyone, {}, counts=counts)["counts"]

    def message(self, server: Server) -> Message:
        return super().message(server) | ({"counts": server.state["counts"]} if self.prior == "global" else {})
