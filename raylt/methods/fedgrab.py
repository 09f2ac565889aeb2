"""Fed-GraB: FedAvg in which a controller per class balances positive against negative gradients (Xiao et al., NeurIPS
2023).

This is the self-adjusting gradient balancer of section 3.2 (from memory), as released: ZackZikaiXiao/FedGraB, main at
7394da6. Decisions:
[1] Every class has a controller, as in the release's main run, `fed_grab.py`. The direct prior analyzer, which shuts
    the controllers of frequent classes, is only in the code's other runs and is used with `shut`. After each round the
    lengths of the global classifier's rows are standardised, shifted to start at 0, and normalised to shares. Their
    mean over the rounds estimates the classes' shares of all samples. The most frequent classes that together have at
    least the share `shut` are shut: 0.75 is the code's head, 0.95 its middle. In the first round no class is shut.
[2] Negative gradients have the weight of the output with the opposite sign, as in the release and the text. In each
    step classes are exempt at random, as in the release: their weights are 1 and their gradients are not summed. A
    class is exempt with probability 0.1^(e / (C - 1)), where e of the classes before it are exempt. Classes are ordered
    by their index, which in long-tailed data sorts them from frequent to rare; the first class is always exempt.
[3] The sums of a controller stay at its client from round to round and are never sent.
[4] A shut controller has the weight 1 and resets its errors and output, as in the code; the difference of its
    gradients is still summed.
[5] The bounds that the code intends for a controller's output have no effect in the code, and are left out.
[6] In the release the classifier is not in the optimiser, so it keeps its initial weights. Here it is trained.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.training.sgd import sgd
from raylt.data.samples import Batch
from raylt.hyper import Choice, LogUniform, hp


class FedGraB(Method):
    """FedAvg with a binary cross-entropy for each class, each balanced by its own controller.

    kp = ki = kd = 0 switches the balancer off.
    """

    name: ClassVar[str] = "fedgrab"
    paper: ClassVar[str] = "Xiao et al., NeurIPS 2023"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2310.07587"

    kp: float = hp(10.0, LogUniform(0.1, 100), "proportional gain; from the code", ge=0)
    ki: float = hp(0.01, LogUniform(1e-4, 1), "integral gain; from the code", ge=0)
    kd: float = hp(0.1, LogUniform(1e-3, 10), "derivative gain; from the code", ge=0)
    shut: float = hp(
        0.0,
        Choice(0.0, 0.75, 0.95),
        "share of the samples, estimated by the prior analyzer, in the classes whose controllers are shut; 0: none, "
        "as in the code's main run [1]",
        ge=0,
        le=1,
    )

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        balancer = Balancer(client, self, message.get("shut"))
        loss = sgd(client, balancer)  # trains the classifier as well [6]
        client.state["balancer"] = balancer.state  # [3]
        return client.reply(model=self.shared(client.model), loss=loss)

    # the direct prior analyzer [1]

    def message(self, server: Server) -> Message:
        shares = server.state.get("shares")
        return super().message(server) | ({} if shares is None else {"shut": most_frequent(shares, self.shut)})

    def round(self, server: Server, fleet: Fleet) -> None:
        super().round(server, fleet)
        if self.shut > 0:
            shares = estimated_shares(server.model.classifier.get_parameter("weight").detach())
            before = server.state.get("shares", torch.zeros_like(shares))
            server.state["shares"] = before + (shares - before) / server.round  # the mean over the rounds
            server.log(shut=int(most_frequent(server.state["shares"], self.shut).sum()))


def estimated_shares(weight: Tensor) -> Tensor:
    """Estimate each class's share of all samples from a classifier weight [C, d]; return float64 [C] on the CPU."""
    lengths = weight.double().cpu().norm(dim=1)
    above = (lengths - lengths.mean()) / lengths.std(correction=0).clamp(min=1e-12)
    above = above - above.min()
    return above / above.sum() if above.sum() > 0 else torch.full_like(above, 1 / len(above))


def most_frequent(shares: Tensor, share: float) -> Tensor:
    """Return a mask, bool [C], of the smallest set of frequent classes that covers `share` of all samples.

    Args:
        shares: Share of each class, [C].
        share: Share to cover.
    """
    order = shares.argsort(descending=True, stable=True)
    before = shares[order].cumsum(0) - shares[order]
    chosen = torch.zeros(len(shares), dtype=torch.bool)
    chosen[order] = before < share - 1e-12
    return chosen


class Balancer:
    """Training objective that updates the class controllers in place at every call.

    The exempt classes are drawn on the host.

    Args:
        client: The client.
        method: The method.
        shut: Mask of classes whose controllers are shut, bool [C]; None for none.

    Attributes:
        state: Tensors [C] by name. `difference` is the sum of each class's positive minus its negative gradients.
            `last` and `before_last` are the last two errors, and `output` is the controller's output.
    """

    recordable = False

    def __init__(self, client: Client, method: FedGraB, shut: Tensor | None = None):
        zeros = torch.zeros(client.model.classes)
        before = client.state.get("balancer", dict.fromkeys(("difference", "last", "before_last", "output"), zeros))
        self.state = {name: value.to(client.device).clone() for name, value in before.items()}
        self._model, self._method, self._order = client.model, method, client.order
        self._open = torch.ones_like(zeros, device=client.device) if shut is None else 1 - shut.float()

    def __call__(self, batch: Batch) -> Tensor:
        logits = self._model(batch.x)
        target = F.one_hot(batch.y, len(self.state["output"])).float()
        output = self.control()
        exempt = exempt_classes(len(output), self._order).to(target.device, non_blocking=True)  # [2]
        weight = torch.where(target > 0, boost(output), boost(-output)).masked_fill(exempt, 1.0)  # [B, C]
        with torch.no_grad():
            gradient = (weight * (logits.float().sigmoid() - target)).abs() / len(batch.y)
            gradient = gradient.masked_fill(exempt, 0.0)
            self.state["difference"].add_((gradient * (2 * target - 1)).sum(0))
        return F.binary_cross_entropy_with_logits(logits.float(), target, weight, reduction="sum") / len(batch.y)

    def control(self) -> Tensor:
        """Advance the PID controllers by one step towards a gradient difference of 0; return their outputs [C].

        The output of a shut controller is 0 [4], and other outputs have no bounds [5].
        """
        m, s = self._method, self.state
        error, last, before_last = -s["difference"], s["last"], s["before_last"]
        output = s["output"] + m.kp * (error - last) + m.ki * error + m.kd * (error - 2 * last + before_last)
        for name, value in ("before_last", last), ("last", error), ("output", output):  # the oldest first
            s[name].copy_(value * self._open)
        return s["output"]


def boost(output: Tensor) -> Tensor:
    """Map a controller's output to a loss weight in [0, 10]; output 0 gives weight 1."""
    return (10 / 9) / (1 / 9 + (-0.5 * output).exp())


def exempt_classes(classes: int, generator: torch.Generator) -> Tensor:
    """Draw a mask, bool [C] on the CPU, of the classes that a training step does not reweight [2]."""
    chosen: list[bool] = []
    count = 0
    for uniform in torch.rand(classes, generator=generator).tolist():
        chosen.append(uniform < 0.1 ** (count / max(classes - 1, 1)))
        count += chosen[-1]
    return torch.tensor(chosen)
