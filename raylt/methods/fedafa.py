"""FedAFA: FedAvg, after which each client fine-tunes the upper layers with adversarial features of its rare classes (Lu
et al., ICASSP 2023).

Stage 2 and its values follow the authors' code, which has only this stage. Departures from the code:
[1] Layers up to the cut are frozen, including their running statistics; in the code BatchNorm updates them.
[2] A batch without a sample to replace is used unchanged. The code draws again, in an infinite loop for a client with
    one class.
[3] Momentum is plain, not Nesterov's, as in all methods of raylt.
[4] Noise is the code's: values of U(0, 1) minus the middle of the activations' range, each channel of the batch with
    norm at most 1. Features are bounded by the maximum of their seeds; the code's descent does not bound them.
c = 0 is class-balanced fine-tuning of the upper layers, except for BatchNorm's running statistics, which generated
features change.
"""

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import mean
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.training.optimisers import SGD
from raylt.core.training.sgd import autocast, balanced, take_statistics
from raylt.data.task import Task
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.layers import check_cut, halves
from raylt.models.split import SplitModel, load_entries


class FedAFA(Method):
    """FedAvg, then training of personal upper layers, which each client keeps."""

    name: ClassVar[str] = "fedafa"
    paper: ClassVar[str] = "Lu et al., ICASSP 2023"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2303.15168"
    personal: ClassVar[bool] = True
    stackable: ClassVar[bool] = True
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "finish": (
            "cut",
            "c",
            "accept",
            "steps",
            "step",
            "tune_epochs",
            "tune_batch",
            "tune_lr",
            "tune_momentum",
            "tune_weight_decay",
        )
    }

    cut: str = hp("stage2", Choice("stage1", "stage2"), "the last layer of the encoder that is frozen; from the code")
    c: float = hp(0.6, Uniform(0.0, 1.0), "weight of the batch with generated features; from the code", ge=0, le=1)
    accept: float = hp(
        0.5,
        Uniform(0.0, 1.0),
        "p, minimum probability of its class for which a generated feature is used; from the code",
        ge=0,
        le=1,
    )
    steps: int = hp(10, Choice(5, 10, 20), "descent steps that generate a feature; from the code", ge=0)
    step: float = hp(0.5, LogUniform(0.05, 5.0), "length of a descent step; from the code", gt=0)
    tune_epochs: int = hp(1, Choice(1, 5, 10), "tuning epochs; from the code", ge=0)
    tune_batch: int = hp(64, Choice(32, 64, 128), "tuning batch size; from the code", ge=2)
    tune_lr: float = hp(0.005, LogUniform(1e-4, 0.1), "tuning learning rate; from the code", gt=0)
    tune_momentum: float = hp(0.9, Uniform(0, 0.99), "tuning momentum; from the code", ge=0, lt=1)
    tune_weight_decay: float = hp(5e-4, LogUniform(1e-5, 1e-2), "tuning weight decay; from the code", ge=0)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_cut("method.cut", self.cut, config, model)

    def finish(self, server: Server, fleet: Fleet) -> None:
        got = fleet.ask(
            self.personalise, fleet.everyone, self.message(server), loss=mean.like(0.0), generated=mean.like(0.0)
        )
        server.log(loss=got["loss"], generated=got["generated"])

    def personalise(self, client: Client, message: Message) -> Reply:
        """Train the client's personal upper layers (stage 2).

        Report the share of samples that were replaced by generated features of a rarer class.
        """
        client.receive(message["model"])
        take_statistics(client)
        lower, upper = self.lower_and_upper(client.model)
        received = copy.deepcopy(upper).requires_grad_(False).eval()
        client.model.eval()
        upper.train()  # [1]
        optimiser = SGD(upper.parameters(), self.tune_lr, self.tune_momentum, self.tune_weight_decay)  # [3]
        total = 0.0
        replaced = 0
        seen = 0
        for places in balanced(client, self.tune_epochs, self.tune_batch):
            batch = client.batch(places)
            with torch.no_grad():
                a = lower(batch.x)  # [B, C', H', W']
            rows, made = self.generate(client, received, a, batch.y)
            with autocast(client):
                loss = F.cross_entropy(upper(a), batch.y)
                if len(rows):
                    mixed = a.index_copy(0, rows, made)
                    loss = self.c * F.cross_entropy(upper(mixed), batch.y) + (1 - self.c) * loss
            optimiser.step(loss)
            total += loss.item() * len(a)
            replaced += len(rows)
            seen += len(a)
        client.state["personal"] = tree.snapshot(upper.state_dict())
        return client.reply(loss=total / max(seen, 1), generated=replaced / max(seen, 1))

    def lower_and_upper(self, model: SplitModel) -> tuple[nn.Module, nn.Module]:
        """Return a model's frozen lower layers, and its personal upper layers with the classifier.

        Both share the memory of the model.
        """
        lower, upper = halves(model, self.cut)
        return lower, nn.Sequential(*upper, model.classifier)

    def settle(self, client: Client, message: Message) -> None:
        self.personalise(client, message)

    def generate(self, client: Client, received: nn.Module, a: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Choose samples of a batch to replace; return their positions and the activations that replace them.

        Args:
            client: The client.
            received: Upper layers of the global model.
            a: Activations at the cut, [B, C', H', W'].
            y: Labels, int64 [B].
        """
        n = client.counts.double().cpu()
        draws = client.order
        class_sizes = n[y.cpu()]  # [B]
        uniform = torch.rand(len(y), generator=draws)
        chosen = torch.nonzero(uniform >= class_sizes / n.max()).flatten()  # with probability 1 - n_y / n_max
        if not len(chosen):  # [2]
            return chosen.to(y.device), a[:0]
        fit = 1 - (class_sizes[None] - class_sizes[chosen, None]).relu() / n.max()  # [G, B], weight of each seed j
        seeds = torch.multinomial(fit, 1, generator=draws).flatten().to(y.device)
        chosen = chosen.to(y.device)
        noise = torch.rand(a[seeds].shape, generator=draws).to(a.device)
        made, probability = adversarial(received, a[seeds], y[chosen], noise, self.steps, self.step)
        kept = probability >= self.accept
        return chosen[kept], made[kept]

    def client_model(self, client: Client) -> SplitModel:
        if "personal" not in client.state:
            return client.model
        own = copy.deepcopy(client.model)
        load_entries(self.lower_and_upper(own)[1], client.state["personal"])
        return own


def adversarial(
    upper: nn.Module, a: Tensor, target: Tensor, noise: Tensor, steps: int, step: float
) -> tuple[Tensor, Tensor]:
    """Perturb activations so that `upper` classifies them as the target classes.

    Return the new activations and their probabilities of the target class.

    Args:
        upper: Layers that map activations to logits; they are not changed.
        a: Activations, [G, C', H', W'].
        target: Target classes, int64 [G].
        noise: Uniform in [0, 1), of the shape of `a`.
        steps: Number of descent steps on the cross-entropy.
        step: Length of a step for each activation.
    """
    highest = a.max()
    middle = (a.max() + a.min()) / 2
    a = (a + (noise - middle).renorm(2, 1, 1.0)).clamp(min=0).minimum(highest)  # [4]
    for _ in range(steps):
        a = a.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(upper(a), target, reduction="sum"), a)
        length = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1) + 1e-10
        a = (a.detach() - step * gradient / length).clamp(min=0).minimum(highest)
    with torch.no_grad():
        return a, upper(a).softmax(1).gather(1, target[:, None]).flatten()
