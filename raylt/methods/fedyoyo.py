"""FedYoYo: self-distillation from weakly to strongly augmented images, with adjusted logits (Yan et al., ICCV 2025).

Logits are adjusted to the class distributions of the client and of the federation. This follows the authors' public
run; only part of the text was available. Decisions:
[1] The federation's class distribution is estimated by effective samples, not by counts: 1 / |mean of the
    directions|^2 of a class's features in a batch, centred by the client's mean of that class. If the features are
    uncorrelated, this is their number in the batch. The estimates are summed over batches and clients, for images
    without augmentation.
[2] Two samples of a class have opposite directions and would have an unbounded estimate: the bound is 1e6, as in the
    code. As in the code, the first round sets classes above 1e4 to the mean of the other classes. A later round keeps
    the old value of a class that would change by more than a hundredfold. If all classes are above, all count equally.
[3] The client's prior is mixed with its own class distribution once. The code repeats this in every step, so that after
    some tens of steps the federation's prior has no effect; `mixed=each_step` does the same.
[4] `data.augment` makes the weak view (the code crops, flips and rotates by 15 degrees). The strong view adds
    AutoAugment and Cutout. Both pass through the network in one batch, and the cross-entropy is over both.
[5] The distillation uses only samples whose weak view is classified as labelled, with adjusted logits. The divergence
    has no factor T^2, as in the code.
lambda = 0 and tau = 0 is FedAvg on two views of each image.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import total
from raylt.core.method import Method, train_clients
from raylt.core.server import Server
from raylt.core.training.features import features
from raylt.core.training.loss_terms import Terms
from raylt.core.training.sgd import Objective
from raylt.data.augment import InTurn, cutout
from raylt.data.image_policies import auto_augment
from raylt.data.samples import Batch
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.recordability import not_recordable
from raylt.tree import Tree

STRONG = InTurn((auto_augment, cutout))
# Constants of [2], from the code.
MIN_SQUARE = 1e-6  # Minimum squared length of a mean direction.
MAX_FIRST_COUNT = 1e4  # Maximum plausible number of effective samples in the first round.
MAX_CHANGE = 100  # Maximum plausible relative change in later rounds.
OLD_SHARE = 0.9  # Share of the old estimate in the new one.


class FedYoYo(Method):
    """FedAvg with self-distillation between augmentations, and with logits adjusted to the class distribution."""

    name: ClassVar[str] = "fedyoyo"
    paper: ClassVar[str] = "Yan et al., ICCV 2025"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2503.06916"

    kd: float = hp(4.0, LogUniform(0.5, 10), "lambda, weight of the distillation; from the code's CIFAR-10 run", ge=0)
    warm_up: int = hp(
        50, Choice(10, 25, 50, 100), "rounds in which the distillation's weight grows to lambda; from the code", ge=1
    )
    temperature: float = hp(1.5, Choice(1.0, 1.5, 2.0, 4.0), "temperature T of the distillation; from the code", gt=0)
    tau: float = hp(1.5, Uniform(0.0, 2.0), "strength of the logit adjustment; from the code", ge=0, le=10)
    gamma: float = hp(
        0.1, Uniform(0.0, 1.0), "share of the client's own classes in its prior; from the code", ge=0, le=1
    )
    mixed: Literal["once", "each_step"] = hp(
        "once", Choice("once", "each_step"), "mixing of the prior: once, or in each step [3]"
    )

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "distillation")

    @property
    def augments(self) -> bool:
        return True

    # at a client

    def count(self, client: Client, message: Message) -> Reply:
        """Report the effective number of samples of each class under the received model, [C] [1]."""
        client.receive(message["model"])
        z, y = features(client)
        means = torch.stack(
            [z[y == c].mean(0) if n else z.new_zeros(z.shape[1]) for c, n in enumerate(client.counts.tolist())]
        )  # [C, d]
        order = torch.randperm(len(y), generator=client.order).to(z.device)
        effective = z.new_zeros(len(means))
        for rows in order.split(client.config.local.batch):
            effective += effective_samples(z[rows] - means[y[rows]], y[rows], len(means))
        return client.reply(effective=effective)

    def objective(self, client: Client, message: Message) -> Objective:
        model, own = client.model, client.counts / client.counts.sum()
        prior = torch.lerp(message["prior"], own, self.gamma)  # [C]
        weight = self.kd * min(client.round / self.warm_up, 1)

        @not_recordable  # the strong augmentation draws on the host, and `prior` may change
        def terms(batch: Batch) -> dict[str, Tensor]:
            nonlocal prior
            logits = model(torch.cat([batch.x, client.batch(batch.rows, STRONG).x])).float()  # [2 B, C] [4]
            logits = logits + (prior.pow(self.tau) + 1e-9).log()
            if self.mixed == "each_step":
                prior = torch.lerp(prior, own, self.gamma)
            weak, strong = logits.chunk(2)
            taught = distillation(strong, teacher=weak, y=batch.y, temperature=self.temperature)
            return {"cross_entropy": F.cross_entropy(logits, batch.y.repeat(2)), "distillation": weight * taught}

        return Terms(client, terms)

    # at the server

    def message(self, server: Server) -> Message:
        effective = server.state.get("effective")
        return super().message(server) | ({} if effective is None else {"prior": effective / effective.sum()})

    def round(self, server: Server, fleet: Fleet) -> None:
        plain = {"model": self.message(server)["model"]}
        like = torch.empty(server.model.classes, device="meta")
        counted = fleet.ask(
            self.count,
            self.sample(server, fleet),
            plain,
            effective=total.like(like).over_samples(effective_fault),
        )
        server.state["effective"] = smoothed(1 + counted["effective"].float(), server.state.get("effective"))
        train_clients(self, server, fleet, list(counted.weights))


def effective_samples(centred: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return the effective number of samples of each class in a batch; 0 for absent classes [1] [2].

    It is 1 / |mean direction|^2 of the class's features, at most 1e6.

    Args:
        centred: Features minus the mean of their class, [B, d].
        y: Labels, int64 [B].
        classes: Number of classes, C.
    """
    one_hot = F.one_hot(y, classes).float()  # [B, C]
    sums = one_hot.T @ F.normalize(centred.float(), dim=1)  # [C, d]
    n = one_hot.sum(0)
    squares = (sums / n.clamp(min=1)[:, None]).square().sum(1)
    return torch.where(n == 1, 1.0, 1 / squares.clamp(min=MIN_SQUARE)).where(n > 0, 0.0)


def effective_fault(n: int, parts: Tree) -> str | None:
    """Return the reason why the effective sample numbers of a client with n samples are impossible, or None.

    A batch has at most 1 / MIN_SQUARE effective samples.
    """
    effective = parts["effective"]
    return None if ((effective >= 0) & (effective <= n / MIN_SQUARE)).all() else "has impossible numbers of samples"


def smoothed(effective: Tensor, before: Tensor | None) -> Tensor:
    """Return each class's effective number of samples, smoothed over rounds, with outliers replaced, [C] [2].

    Args:
        effective: Estimate of this round, [C].
        before: Estimate after the previous round, [C]; None in the first round.
    """
    if before is None:
        odd = effective > MAX_FIRST_COUNT
        return effective.masked_fill(odd, effective[~odd].mean().item() if not odd.all() else 1.0)
    now = OLD_SHARE * before + (1 - OLD_SHARE) * effective
    return torch.where((now - before).abs() > MAX_CHANGE * before, before, now)


def distillation(strong: Tensor, *, teacher: Tensor, y: Tensor, temperature: float) -> Tensor:
    """Return the KL divergence between predictions for weakly and strongly augmented views, a scalar [5].

    It is the mean over the samples whose weak view is classified as labelled, or 0 if there are none. The predictions
    for weak views have no gradient.

    Args:
        strong: Logits of the strong views, [B, C].
        teacher: Logits of the weak views, [B, C].
        y: Labels, int64 [B].
        temperature: Temperature T.
    """
    target = (teacher.detach() / temperature).log_softmax(1)
    apart = F.kl_div((strong / temperature).log_softmax(1), target, reduction="none", log_target=True).sum(1)
    right = teacher.argmax(1) == y
    return (apart * right).sum() / right.sum().clamp(min=1)
