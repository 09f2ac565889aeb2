"""FedReLa: FedAvg in which clients relabel samples as rarer classes late in training (Hu et al., ICML 2026).

A sample gets the label of a rare or absent class that the global model assigns to it. The implementation follows the
authors' public code, with these decisions:
[1] The paper's module can extend other methods; this one extends FedAvg's cross-entropy, without the fixed frames of
    the code's two examples.
[2] A client re-labels once, with the model that it has received, when it is first asked after the share `after` of all
    rounds. In the code all clients take part in every round.
[3] Predictions are of images without augmentation, in evaluation mode; the code has means over five epochs of augmented
    images.
[4] A class with a single value has a standard deviation of 1e-6, as in the code; a client's classes are compared by its
    own counts.
[5] From its re-labelling on, a client trains with a tenth of the learning rate, as in the code.
The new labels stay at their client and are only used for training.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.core.training.features import features
from raylt.core.training.sgd import Objective, learning_rate, sgd
from raylt.hyper import Choice, Uniform, hp

LATE_RATE = 0.1  # Factor of the learning rate after re-labelling; from the code [5].


class FedReLa(Method):
    """FedAvg whose clients train on new labels after the fraction `after` of all rounds."""

    name: ClassVar[str] = "fedrela"
    paper: ClassVar[str] = "Hu et al., ICML 2026"
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"relabelling": ("after", "share")}

    after: float = hp(
        0.9, Choice(0.6, 0.8, 0.9), "share of the rounds after which clients re-label; from the code", ge=0, le=1
    )
    share: float = hp(
        0.05,
        Uniform(0.0, 0.2),
        "maximum share of a client's samples that a class may get; from the code",
        ge=0,
        lt=1,
    )

    def stages(self, rounds: int) -> dict[str, int]:
        return super().stages(rounds) | {"relabelling": int(self.after * rounds)}

    def train(self, client: Client, message: Message) -> Reply:
        late = client.round > self.after * client.config.federation.rounds
        if late and "labels" not in client.state:
            client.receive(message["model"])
            z, y = features(client)
            with torch.no_grad():
                p = client.model.classifier(z).float().softmax(1)
            counts = client.counts.cpu()
            client.state["labels"] = relabel(p.cpu(), y.cpu(), counts, self.share, client.order)  # [2] [3]
        client.receive(message["model"])
        rate = LATE_RATE if "labels" in client.state else 1.0  # [5]
        loss = sgd(client, self.objective(client, message), lr=rate * learning_rate(client))
        return client.reply(model=self.shared(client.model), loss=loss)

    def objective(self, client: Client, message: Message) -> Objective:
        if "labels" not in client.state:
            return super().objective(client, message)
        labels = client.state["labels"].to(client.device)
        return lambda batch: F.cross_entropy(client.model(batch.x), labels[batch.rows])  # [1]


def relabel(p: Tensor, y: Tensor, counts: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return new labels, int64 [n], in which some samples move to a rarer class that the model finds probable.

    Sample i of class y becomes class c with probability tanh(s_ic - t_c) (r_c - r_y).

    s_ic is p_ic minus the mean over the samples of class y, in units of their standard deviation. t_c is the value that
    the share `share` of all samples exceed. r_c is 1 for the client's rarest class and 0 for its most frequent one. If
    several classes would take a sample, the most probable one does.

    Args:
        p: Predicted probabilities, [n, C].
        y: Labels, int64 [n].
        counts: Number of samples per class at the client, int64 [C].
        share: Maximum share of the samples that a class may get.
        generator: Generator of the random draws.
    """
    scores = torch.zeros_like(p)
    for c in y.unique():
        own = p[y == c]
        scores[y == c] = (own - own.mean(0)) / own.std(0, correction=0).clamp(min=1e-6)  # [4]
    threshold = scores.sort(0, descending=True).values[min(int(share * len(p)), len(p) - 1)]  # [C]
    low, high = counts.min(), counts.max()
    rarity = torch.ones(len(counts)) if low == high else 1 - (counts - low) / (high - low)  # [C]
    chance = (scores - threshold).tanh() * (rarity - rarity[y][:, None]).clamp(min=0)  # [n, C]
    taken = chance > torch.rand(p.shape, generator=generator)
    best = chance.masked_fill(~taken, -1).argmax(1)
    return torch.where(taken.any(1), best, y)
