"""FLea: clients share activations of a few samples, and train on mixtures with those (Xia et al., KDD 2024).

SFD's reading of it, and the authors' code where both are silent. Decisions:
[1] The activations are those behind `layer`, SFD's behind the fifth convolution of ResNet-18: its first stage.
[2] The first round has no buffer: three times the epochs of cross-entropy, half the divergence from the received model
    on the client's own images, and the distance correlation.
[3] Which samples a client shares is drawn once, when it joins; it shares them, not augmented, under the averaged
    encoder after each round that it took part in, and the buffer holds those of the last round alone.
[4] The weights of the divergence and of the distance correlation are constant; the code lowers the latter.
[5] Beta(2, 2), of which the shares in a mixture are drawn, is the distribution of the median of three even draws.
Activations of images leave the clients: a replay of the run sees them, and so does every client.
"""

import copy
import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.reductions import each, mean
from raylt.core.server import Server
from raylt.core.terms import Terms, asked_for, figure_of, reply_of
from raylt.core.training import Objective, autocast, sgd
from raylt.data.samples import Batch
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.split import SplitModel
from raylt.recordable import recordable


class FLea(Method):
    """Sections are the paper's."""

    name: ClassVar[str] = "flea"
    paper: ClassVar[str] = "Xia et al., KDD 2024"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2312.02327"

    layer: str = hp("stage1", Choice("stage1", "stage2"), "of the encoder, behind which activations are shared [1]")
    share: float = hp(0.1, Uniform(0.05, 0.5), "of its samples that a client shares", gt=0, le=1)
    kd: float = hp(1.0, LogUniform(0.1, 10), "lambda_1, weight of the divergence from the received model", ge=0)
    dcor: float = hp(3.0, LogUniform(0.1, 10), "lambda_2, weight of the distance correlation", ge=0)
    warm_up: int = hp(3, Choice(1, 3), "times the epochs in the first round [2]", ge=1)
    warm_kd: float = hp(0.5, LogUniform(0.1, 5), "weight of the divergence in the first round [2]", ge=0)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        stages = [name for name, _ in model.encoder.named_children()]
        if not isinstance(model.encoder, nn.Sequential) or self.layer not in stages[:-1]:
            raise ConfigError(f"method.layer = {self.layer}: the encoder of model = {config.model} has no such layer "
                              f"with another behind it; there are: {', '.join(stages[:-1]) or 'none'}")

    @property
    def sees_each(self) -> tuple[str, ...]:
        return ("samples",)

    # at a client

    def join(self, client: Client, message: Message) -> Reply:
        size = math.ceil(self.share * len(client) - 1e-9)
        client.state["shared"] = torch.randperm(len(client), generator=client.order)[:size].sort().values      # [3]
        return client.reply()

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "mixed", "divergence", "correlation")

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        objective = self.objective(client, message)
        first = "buffer" not in message
        loss = sgd(client, objective, epochs=client.config.local.epochs * (self.warm_up if first else 1))
        return client.reply(model=self.shared(client.model), loss=loss, **reply_of(objective, self.terms))

    def objective(self, client: Client, message: Message) -> Objective:
        model, received = client.model, copy.deepcopy(client.model).requires_grad_(False).eval()
        (lower, upper), (_, frozen) = halves(model, self.layer), halves(received, self.layer)

        @recordable
        def first(batch: Batch) -> dict[str, Tensor]:                           # [2]
            a = lower(batch.x)
            logits = model.classifier(upper(a))
            return {"cross_entropy": F.cross_entropy(logits, batch.y),
                    "divergence": self.warm_kd * divergence(received(batch.x), logits),
                    "correlation": self.dcor * distance_correlation(batch.x, a)}

        if "buffer" not in message:
            return Terms(client, first)
        shared, labels = message["buffer"]["a"], message["buffer"]["y"]

        def terms(batch: Batch) -> dict[str, Tensor]:
            a = lower(batch.x)                                                  # [B, ...]
            rows = torch.randint(len(labels), (len(batch.y),), generator=client.order)
            rows = rows.to(client.device, non_blocking=True)
            other, y = shared[rows], labels[rows]
            lam = torch.rand(len(rows), 3, generator=client.order).median(1).values                     # [B] [5]
            lam = lam.to(client.device, non_blocking=True)
            wide = lam.view(-1, *[1] * (a.ndim - 1))
            logits = model.classifier(upper(wide * a + (1 - wide) * other))
            mixed = lam * F.cross_entropy(logits, batch.y, reduction="none") + (1 - lam) * F.cross_entropy(
                logits, y, reduction="none")
            return {"cross_entropy": F.cross_entropy(model.classifier(upper(a)), batch.y), "mixed": mixed.mean(),
                    "divergence": self.kd * divergence(received.classifier(frozen(other)),
                                                       model.classifier(upper(other))),
                    "correlation": self.dcor * distance_correlation(batch.x, a)}        # [4]

        return Terms(client, terms)

    @torch.no_grad()
    def upload(self, client: Client, message: Message) -> Reply:
        """The activations of the samples that the client shares, and their labels, by number."""
        client.receive(message["encoder"])
        batch = client.samples.batch(client.state["shared"].to(client.device))
        with autocast(client):
            a = halves(client.model.eval(), self.layer)[0](batch.x).float().contiguous()
        return client.reply(samples={i: {"a": a[i].clone(), "y": y} for i, y in enumerate(batch.y.tolist())})

    # at the server

    def message(self, server: Server) -> Message:
        return super().message(server) | ({"buffer": server.state["buffer"]} if "buffer" in server.state else {})

    def round(self, server: Server, fleet: Fleet) -> None:
        message = self.message(server)
        got = fleet.ask(self.train, self.sample(server, fleet), message, model=mean.like(message["model"]),
                        loss=mean.like(0.0), **asked_for(self.terms))
        server.step(got["model"])
        server.log(loss=got["loss"], **figure_of(got))
        ids = list(got.weights)
        like = {"a": torch.empty(self.activation_shape(server), device="meta"), "y": 0}
        most = max(math.ceil(self.share * fleet.sizes[id] - 1e-9) for id in ids)
        samples = fleet.ask(self.upload, ids, {"encoder": tree.snapshot(server.model.entries("encoder."))},
                            samples=each.within(dict.fromkeys(range(most), like)))["samples"]
        held = [sample for of_client in samples.values() for sample in of_client.values()]
        server.state["buffer"] = {"a": torch.stack([sample["a"] for sample in held]),
                                  "y": torch.tensor([sample["y"] for sample in held])}
        server.log(buffer=len(held))

    @torch.no_grad()
    def activation_shape(self, server: Server) -> torch.Size:
        """Of one image's activations."""
        height, width, channels = server.facts.shape
        x = torch.zeros(1, channels, height, width, device=server.device)
        return halves(server.model.eval(), self.layer)[0](x).shape[1:]


def halves(model: SplitModel, layer: str) -> tuple[nn.Sequential, nn.Sequential]:
    """The encoder up to a layer, and what is behind it."""
    assert isinstance(model.encoder, nn.Sequential)
    place = [name for name, _ in model.encoder.named_children()].index(layer) + 1
    return model.encoder[:place], model.encoder[place:]


def divergence(received: Tensor, logits: Tensor) -> Tensor:
    """KL(p || q), p the softmax of the received model's logits [B, C], q that of the client's; mean over the batch."""
    p, q = received.float().log_softmax(1), logits.float().log_softmax(1)
    return F.kl_div(q, p, reduction="batchmean", log_target=True)


def distance_correlation(x: Tensor, a: Tensor) -> Tensor:
    """Of two sets of B points, of any dimensions each; in [0, 1] (Szekely et al., 2007), a scalar in float32.

    Args:
        x, a: [B, ...].
    """
    with torch.autocast(x.device.type, enabled=False):
        p, q = centred_distances(x.flatten(1).float()), centred_distances(a.flatten(1).float())
        least = 1e-7                        # of a batch of equal points, and below the roots, as in the code
        return ((p * q).mean().clamp(min=0) + least).sqrt() / (
            ((p * p).mean() + least).sqrt() * ((q * q).mean() + least).sqrt()).sqrt()


def centred_distances(x: Tensor) -> Tensor:
    """Euclidean distances of B points [B, d], their means over rows and columns taken off, [B, B]."""
    squares = x.square().sum(1)
    # where the difference is rounded to nothing, as on the diagonal, the root has no gradient
    d = (squares[:, None] + squares[None] - 2 * x @ x.T).clamp(min=1e-12).sqrt()
    return d - d.mean(0, keepdim=True) - d.mean(1, keepdim=True) + d.mean()
