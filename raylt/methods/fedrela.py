"""FedReLa: late in training, samples that the global model takes for a class that is rarer at their client, or absent
there, are given its label (Hu et al., ICML 2026).

As in the authors' public code. Decisions:
[1] It is a module that other methods can have; here it stands on FedAvg's cross-entropy, without the fixed frames of
    the code's two examples.
[2] A client re-labels once, when it is first asked in a round after a share `after` of them, under the model that it
    has received; in the code all clients take part in every round.
[3] Predictions are of images as they are, in evaluation mode; the code has means over five epochs of augmented ones.
[4] A class of one value has a deviation of 1e-6, as in the code; classes of the client are compared by its own counts.
Labels that were changed stay at their client, and only training sees them.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.method import Method
from raylt.core.training import Objective
from raylt.hyper import Choice, Uniform, hp
from raylt.recordable import recordable


class FedReLa(Method):
    """FedAvg until then."""

    name: ClassVar[str] = "fedrela"
    paper: ClassVar[str] = "Hu et al., ICML 2026"

    after: float = hp(0.9, Choice(0.6, 0.8, 0.9), "share of the rounds after which clients re-label; from the code",
                      ge=0, le=1)
    share: float = hp(0.05, Uniform(0.0, 0.2), "of a client's samples, that each class may be given; from the code",
                      ge=0, lt=1)

    def train(self, client: Client, message: Message) -> Reply:
        late = client.round > self.after * client.config.federation.rounds
        if late and "labels" not in client.state:
            client.receive(message["model"])
            z, y = features(client)
            with torch.no_grad():
                p = client.model.classifier(z).float().softmax(1)
            counts = client.counts.cpu()
            client.state["labels"] = relabel(p.cpu(), y.cpu(), counts, self.share, client.order)        # [2] [3]
        return super().train(client, message)

    def objective(self, client: Client, message: Message) -> Objective:
        if "labels" not in client.state:
            return super().objective(client, message)
        labels = client.state["labels"].to(client.device)
        return recordable(lambda batch: F.cross_entropy(client.model(batch.x), labels[batch.rows]))


def relabel(p: Tensor, y: Tensor, counts: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """New labels, int64 [n]: sample i of class y becomes one of class c with probability tanh(s_ic - t_c) (r_c - r_y).

    s_ic is how far p_ic lies above the mean of the samples of class y, in their deviations; t_c is the value that a
    share of all samples exceed; r_c is 1 for the client's rarest class, 0 for its most frequent one. Where several
    classes would take a sample, the likeliest does.

    Args:
        p: predicted probabilities [n, C].
        y: int64 [n].
        counts: int64 [C], the client's.
    """
    scores = torch.zeros_like(p)
    for c in y.unique():
        own = p[y == c]
        scores[y == c] = (own - own.mean(0)) / own.std(0, correction=0).clamp(min=1e-6)         # [4]
    threshold = scores.sort(0, descending=True).values[min(int(share * len(p)), len(p) - 1)]   # [C]
    low, high = counts.min(), counts.max()
    rarity = torch.ones(len(counts)) if low == high else 1 - (counts - low) / (high - low)     # [C]
    chance = (scores - threshold).tanh() * (rarity - rarity[y][:, None]).clamp(min=0)          # [n, C]
    taken = chance > torch.rand(p.shape, generator=generator)
    best = chance.masked_fill(~taken, -1).argmax(1)
    return torch.where(taken.any(1), best, y)
