"""FedYoYo: a client's strongly augmented images learn from its weakly augmented ones, under logits that are adjusted to
its own and the federation's classes (Yan et al., ICCV 2025).

After the authors' public run; the text could be had in part. Decisions:
[1] The federation's classes are told by effective samples, not by counts: of a class's features in a batch, centred by
    the client's mean of that class, 1 / |mean of their directions|^2, which is the batch's number of them where they
    are uncorrelated; sums over batches and clients, of images as they are.
[2] Two samples of a class have opposite directions and would count without bound: 1e6, as in the code, and as there the
    first round gives classes above 1e4 the mean of the others, a later one leaves a class as it was that would have
    grown by more than a hundredfold. Where all are above, all count alike.
[3] The client's prior is mixed with its own classes once. The code does it again in every step, so that after some tens
    of them the federation's is gone; `mixed=each_step` is that.
[4] The weak view is what `data.augment` makes (the code's crops, flips and rotates by 15 degrees), the strong one goes
    on from there with AutoAugment and Cutout. Both pass the network in one batch, and cross-entropy is of both.
[5] Only samples whose weak view is classified as labelled, under adjusted logits, teach; the divergence is without the
    square of the temperature, as in the code.
lambda = 0 and tau = 0 is FedAvg on two views of each image.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.reductions import mean, total
from raylt.core.server import Server
from raylt.core.terms import Terms, asked_for, figure_of
from raylt.core.training import Objective
from raylt.data.augment import cutout
from raylt.data.samples import Batch
from raylt.data.transforms import InTurn, auto_augment
from raylt.hyper import Choice, LogUniform, Uniform, hp

STRONG = InTurn((auto_augment, cutout))
LEAST, ODD, LEAP, KEPT = 1e-6, 1e4, 100, 0.9        # of [2], from the code; of the old estimate in the new one


class FedYoYo(Method):
    """Augmented self-bootstrap distillation and distribution-aware logit adjustment."""

    name: ClassVar[str] = "fedyoyo"
    paper: ClassVar[str] = "Yan et al., ICCV 2025"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2503.06916"

    kd: float = hp(4.0, LogUniform(0.5, 10), "lambda, weight of the distillation; from the code's CIFAR-10 run", ge=0)
    warm_up: int = hp(50, Choice(10, 25, 50, 100), "rounds in which that weight grows to lambda; from the code", ge=1)
    temperature: float = hp(1.5, Choice(1.0, 1.5, 2.0, 4.0), "T of the distillation; from the code", gt=0)
    tau: float = hp(1.5, Uniform(0.0, 2.0), "strength of the logit adjustment; from the code", ge=0, le=10)
    gamma: float = hp(0.1, Uniform(0.0, 1.0), "share of the client's own classes in its prior; from the code", ge=0,
                      le=1)
    mixed: Literal["once", "each_step"] = hp("once", Choice("once", "each_step"), "when the prior is mixed [3]")

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "distillation")

    # at a client

    def count(self, client: Client, message: Message) -> Reply:
        """Effective samples of each class under the received model, [C] [1]."""
        client.receive(message["model"])
        z, y = features(client)
        means = torch.stack([z[y == c].mean(0) if n else z.new_zeros(z.shape[1])
                             for c, n in enumerate(client.counts.tolist())])    # [C, d]
        order, effective = torch.randperm(len(y), generator=client.order).to(z.device), z.new_zeros(len(means))
        for rows in order.split(client.config.local.batch):
            effective += effective_samples(z[rows] - means[y[rows]], y[rows], len(means))
        return client.reply(effective=effective)

    def objective(self, client: Client, message: Message) -> Objective:
        model, own = client.model, client.counts / client.counts.sum()
        prior = torch.lerp(message["prior"], own, self.gamma)                   # [C]
        weight = self.kd * min(client.round / self.warm_up, 1)

        def terms(batch: Batch) -> dict[str, Tensor]:
            nonlocal prior
            logits = model(torch.cat([batch.x, client.batch(batch.rows, STRONG).x])).float()            # [2 B, C] [4]
            logits = logits + (prior.pow(self.tau) + 1e-9).log()
            if self.mixed == "each_step":
                prior = torch.lerp(prior, own, self.gamma)
            weak, strong = logits.chunk(2)
            told = distillation(weak, strong, batch.y, self.temperature)
            return {"cross_entropy": F.cross_entropy(logits, batch.y.repeat(2)), "distillation": weight * told}

        return Terms(client, terms)

    # at the server

    def message(self, server: Server) -> Message:
        effective = server.state.get("effective")
        return super().message(server) | ({} if effective is None else {"prior": effective / effective.sum()})

    def round(self, server: Server, fleet: Fleet) -> None:
        plain = {"model": self.message(server)["model"]}
        like = torch.empty(server.model.classes, device="meta")
        counted = fleet.ask(self.count, self.sample(server, fleet), plain, effective=total.like(like).up_to(1e12).where(
            lambda e: None if (e >= 0).all() else "has negative numbers of samples"))
        server.state["effective"] = steadied(1 + counted["effective"].float(), server.state.get("effective"))
        message = self.message(server)
        got = fleet.ask(self.train, list(counted.weights), message, model=mean.like(message["model"]),
                        loss=mean.like(0.0), **asked_for(self.terms))
        server.step(got["model"])
        server.log(loss=got["loss"], **figure_of(got))


def effective_samples(centred: Tensor, y: Tensor, classes: int) -> Tensor:
    """1 / |mean of the directions|^2 of each class of a batch, at most 1e6; 0 of one that it lacks [1] [2].

    Args:
        centred: features without the mean of their class, [B, d].
        y: int64 [B].
    """
    held = F.one_hot(y, classes).float()                                        # [B, C]
    sums = held.T @ F.normalize(centred.float(), dim=1)                         # [C, d]
    n = held.sum(0)
    squares = (sums / n.clamp(min=1)[:, None]).square().sum(1)
    return torch.where(n == 1, 1.0, 1 / squares.clamp(min=LEAST)).where(n > 0, 0.0)


def steadied(effective: Tensor, before: Tensor | None) -> Tensor:
    """The estimate [C] that stands after a round: without what is out of all proportion [2].

    Args:
        before: that of the round before, None in the first.
    """
    if before is None:
        odd = effective > ODD
        return effective.masked_fill(odd, effective[~odd].mean().item() if not odd.all() else 1.0)
    now = KEPT * before + (1 - KEPT) * effective
    return torch.where((now - before).abs() > LEAP * before, before, now)


def distillation(weak: Tensor, strong: Tensor, y: Tensor, temperature: float) -> Tensor:
    """KL of the strong views' predictions from the weak ones', which no gradient moves; the mean over those that the
    weak view classifies as labelled, 0 without any [5].

    Args:
        weak, strong: logits [B, C].
        y: int64 [B].
    """
    told = (weak.detach() / temperature).log_softmax(1)
    apart = F.kl_div((strong / temperature).log_softmax(1), told, reduction="none", log_target=True).sum(1)
    right = weak.argmax(1) == y
    return (apart * right).sum() / right.sum().clamp(min=1)
