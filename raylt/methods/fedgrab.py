"""Fed-GraB: each class's positive gradients are weighed by a controller that balances them with its negative ones (Xiao
et al., NeurIPS 2023).

The self-adjusting gradient balancer as the authors' public run has it; section 3.2. Decisions:
[1] Every class has a controller, as in that run. The direct prior analyzer, which keeps those of frequent classes
    shut, is in the code's other runs alone and comes with `shut`: after each round the lengths of the global
    classifier's rows, less their mean and over their deviation, are moved to begin at 0 and taken as shares; their mean
    over the rounds estimates the classes' shares of all samples. The most frequent classes that hold `shut` of these
    together, the code's head (0.75) and middle (0.95), the last of them whole, are shut. In the first round none is.
[2] Negative gradients keep the weight 1, as in the code; the text weighs them too.
[3] What a controller has summed up stays at its client from round to round and never travels.
[4] A controller that is shut gives the weight 1 and forgets its errors and output, as in the code; the difference of
    its gradients goes on.
[5] The bounds that the code means to put on a controller's output have no effect there, and are left out.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.training import sgd
from raylt.data.samples import Batch
from raylt.hyper import Choice, LogUniform, hp


class FedGraB(Method):
    """FedAvg with a binary cross-entropy for each class. kp = ki = kd = 0: without the balancer."""

    name: ClassVar[str] = "fedgrab"
    paper: ClassVar[str] = "Xiao et al., NeurIPS 2023"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2310.07587"

    kp: float = hp(10.0, LogUniform(0.1, 100), "proportional gain; from the code", ge=0)
    ki: float = hp(0.01, LogUniform(1e-4, 1), "integral gain; from the code", ge=0)
    kd: float = hp(0.1, LogUniform(1e-3, 10), "derivative gain; from the code", ge=0)
    shut: float = hp(0.0, Choice(0.0, 0.75, 0.95), "share of the samples, as the prior analyzer estimates them, whose "
                     "classes keep their controllers shut; 0: none, as in the code's main run [1]", ge=0, le=1)

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        balancer = Balancer(client, self, message.get("shut"))
        loss = sgd(client, balancer)
        client.state["balancer"] = balancer.state                              # [3]
        return client.reply(model=self.shared(client.model), loss=loss)

    # the direct prior analyzer [1]

    def message(self, server: Server) -> Message:
        shares = server.state.get("shares")
        return super().message(server) | ({} if shares is None else {"shut": most_frequent(shares, self.shut)})

    def round(self, server: Server, fleet: Fleet) -> None:
        super().round(server, fleet)
        if self.shut > 0:
            seen = shares_of(server.model.classifier.get_parameter("weight").detach())
            before = server.state.get("shares", torch.zeros_like(seen))
            server.state["shares"] = before + (seen - before) / server.round    # the mean over the rounds
            server.log(shut=int(most_frequent(server.state["shares"], self.shut).sum()))


def shares_of(weight: Tensor) -> Tensor:
    """The classes' shares of all samples, as a classifier's weight [C, d] tells them; float64 [C] on the CPU."""
    lengths = weight.double().cpu().norm(dim=1)
    above = (lengths - lengths.mean()) / lengths.std(correction=0).clamp(min=1e-12)
    above = above - above.min()
    return above / above.sum() if above.sum() > 0 else torch.full_like(above, 1 / len(above))


def most_frequent(shares: Tensor, share: float) -> Tensor:
    """The fewest classes, most frequent first, that hold this share of all together, bool [C]."""
    order = shares.argsort(descending=True, stable=True)
    before = shares[order].cumsum(0) - shares[order]
    chosen = torch.zeros(len(shares), dtype=torch.bool)
    chosen[order] = before < share - 1e-12
    return chosen


class Balancer:
    """The loss of a batch; every call moves the controllers on, in place.

    Attributes:
        state: of each class the sum of what its positive gradients are above its negative ones, `difference`, the last
            two of these, and the controller's output; [C] each.
    """

    recordable = True

    def __init__(self, client: Client, method: FedGraB, shut: Tensor | None = None):
        zeros = torch.zeros(client.model.classes)
        before = client.state.get("balancer", dict.fromkeys(("difference", "last", "before_last", "output"), zeros))
        self.state = {name: value.to(client.device).clone() for name, value in before.items()}
        self._model, self._method = client.model, method
        self._open = torch.ones_like(zeros, device=client.device) if shut is None else 1 - shut.float()

    def __call__(self, batch: Batch) -> Tensor:
        logits, c = self._model(batch.x), len(self.state["output"])
        target = F.one_hot(batch.y, c).float()
        weight = torch.where(target > 0, boost(self.control()), 1.0)            # [B, C] [2]
        with torch.no_grad():
            gradient = (weight * (logits.float().sigmoid() - target)).abs() / len(batch.y)
            self.state["difference"].add_((gradient * (2 * target - 1)).sum(0))
        return F.binary_cross_entropy_with_logits(logits.float(), target, weight, reduction="sum") / len(batch.y)

    def control(self) -> Tensor:
        """The controllers' outputs [C] after one more step: that of an incremental PID towards a difference of 0; 0 of
        those that are shut [4]."""
        m, s = self._method, self.state
        error, last, before_last = -s["difference"], s["last"], s["before_last"]
        output = s["output"] + m.kp * (error - last) + m.ki * error + m.kd * (error - 2 * last + before_last)
        for name, value in ("before_last", last), ("last", error), ("output", output):       # the oldest first
            s[name].copy_(value * self._open)
        return s["output"]


def boost(output: Tensor) -> Tensor:
    """A controller's output as a weight: 1 at 0, at most 10, at least 0."""
    return (10 / 9) / (1 / 9 + (-0.05 * output).exp())
