"""Logit adjustment: frequent classes have to win by a margin in training (Menon et al., ICLR 2021, Eq. 10).

Departures from the text, which knows no clients:
[1] pi is that of a client's own samples, as it sees no others'; `prior=global` has that of all, for which clients tell
    the server their counts when they join.
[2] A class without samples has pi = 0: it is left out of the softmax (0^tau, so with tau = 0 it is not).
tau = 0 is FedAvg; with tau = 1 this is the balanced softmax of Ren et al., NeurIPS 2020. `posthoc` adjusts after
training.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.reductions import total
from raylt.core.server import Server
from raylt.core.training import Objective
from raylt.hyper import Choice, Uniform, hp
from raylt.recordable import recordable


class LogitAdjustment(Method):
    """FedAvg with the adjusted softmax cross-entropy."""

    name: ClassVar[str] = "la"
    paper: ClassVar[str] = "Menon et al., ICLR 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2007.07314"

    tau: float = hp(1.0, Uniform(0.0, 2.0), "strength of the adjustment, Eq. 10", ge=0, le=10)
    prior: Literal["local", "global"] = hp("local", Choice("local", "global"), "whose samples pi counts [1]")

    def join(self, client: Client, message: Message) -> Reply:
        return client.reply(counts=client.counts) if self.prior == "global" else client.reply()

    def objective(self, client: Client, message: Message) -> Objective:
        shift = self.shift(message["counts"] if self.prior == "global" else client.counts)
        return recordable(lambda batch: F.cross_entropy(client.model(batch.x) + shift, batch.y))

    def shift(self, counts: Tensor) -> Tensor:
        """tau log pi of each class up to a constant, float32 [C]; -inf for one that is left out [2]."""
        return counts.double().pow(self.tau).log().float()

    def start(self, server: Server, fleet: Fleet) -> None:
        if self.prior == "local":
            super().start(server, fleet)
            return
        like = torch.empty(server.model.classes, dtype=torch.int64, device="meta")
        server.state["counts"] = fleet.ask(self.join, fleet.everyone, {}, counts=total.like(like))["counts"]

    def message(self, server: Server) -> Message:
        return super().message(server) | ({"counts": server.state["counts"]} if self.prior == "global" else {})
