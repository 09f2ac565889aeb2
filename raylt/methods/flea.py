"""FLea: clients share activations of a few samples and train on mixtures with other clients' activations (Xia et al.,
KDD 2024).

This follows SFD's reading of the paper, and the authors' code for details that neither text states. Decisions:
[1] The activations are those after `layer`. SFD takes them after the fifth convolution of ResNet-18, its first stage.
[2] The first round has no buffer: three times the epochs of cross-entropy, half the divergence from the received model
    on the client's own images, and the distance correlation.
[3] A client shares the same samples in all rounds, which it draws at random. After each round in which it took part,
    it shares their activations from the averaged encoder, without augmentation. The buffer holds only the activations
    of the last round.
[4] The weights of the divergence and of the distance correlation are constant; the code lowers the latter from 3 to 1.
[5] The shares in a mixture follow Beta(2, 2), the distribution of the median of three uniform draws.
[6] Each batch draws its shared samples with replacement; the code iterates over the buffer in shuffled passes.
Activations of images leave the clients: the server and every client see them.
"""

import copy
import math
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import each
from raylt.core.method import Method, train_clients, train_model
from raylt.core.server import Server
from raylt.core.training.loss_terms import Terms
from raylt.core.training.sgd import Objective, autocast, take_statistics
from raylt.data.samples import Batch
from raylt.data.task import Task
from raylt.errors import count_of
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.layers import check_cut, halves
from raylt.models.split import SplitModel
from raylt.ops.distillation import divergence
from raylt.ops.moments import LONGEST_FEATURE
from raylt.recordability import not_recordable
from raylt.seeds import seed_for
from raylt.tree import Tree


class FLea(Method):
    """FedAvg on mixtures of a client's activations with activations that other clients share."""

    name: ClassVar[str] = "flea"
    paper: ClassVar[str] = "Xia et al., KDD 2024"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2312.02327"

    layer: str = hp("stage1", Choice("stage1", "stage2"), "layer of the encoder after which activations are shared [1]")
    share: float = hp(0.1, Uniform(0.05, 0.5), "fraction of its samples that a client shares", gt=0, le=1)
    kd: float = hp(1.0, LogUniform(0.1, 10), "lambda_1, weight of the divergence from the received model", ge=0)
    dcor: float = hp(3.0, LogUniform(0.1, 10), "lambda_2, weight of the distance correlation", ge=0)
    warm_up: int = hp(3, Choice(1, 3), "epochs in the first round, as a multiple of a round's [2]", ge=1)
    warm_kd: float = hp(0.5, LogUniform(0.1, 5), "weight of the divergence in the first round [2]", ge=0)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_cut("method.layer", self.layer, config, model)

    @property
    def sees_each(self) -> tuple[str, ...]:
        return ("samples",)

    # at a client

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "mixed", "divergence", "correlation")

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        first = "buffer" not in message
        epochs = client.epochs * (self.warm_up if first else 1)
        parts = train_model(self, client, message, epochs)
        return client.reply(model=self.shared(client.model), **parts)

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the loss on mixtures of the client's activations with shared activations.

        Before activations were shared, it is a warm-up loss on only the client's images.
        """
        model = client.model
        take_statistics(client)
        received = copy.deepcopy(model).requires_grad_(False).eval()
        lower, upper = halves(model, self.layer)
        _, frozen_upper = halves(received, self.layer)

        def first(batch: Batch) -> dict[str, Tensor]:  # [2]
            a = lower(batch.x)
            logits = model.classifier(upper(a))
            return {
                "cross_entropy": F.cross_entropy(logits, batch.y),
                "divergence": self.warm_kd * divergence(logits, teacher=received(batch.x)),
                "correlation": self.dcor * distance_correlation(batch.x, a),
            }

        if "buffer" not in message:
            return Terms(client, first)
        shared, labels = message["buffer"]["a"], message["buffer"]["y"]

        @not_recordable  # the mixtures are drawn on the host
        def terms(batch: Batch) -> dict[str, Tensor]:
            a = lower(batch.x)  # [B, ...]
            rows = torch.randint(len(labels), (len(batch.y),), generator=client.order)  # [6]
            rows = rows.to(client.device, non_blocking=True)
            shared_a, shared_y = shared[rows], labels[rows]
            lam = torch.rand(len(rows), 3, generator=client.order).median(1).values  # [B] [5]
            lam = lam.to(client.device, non_blocking=True)
            wide = lam.view(-1, *[1] * (a.ndim - 1))
            logits = model.classifier(upper(wide * a + (1 - wide) * shared_a))
            mixed = lam * F.cross_entropy(logits, batch.y, reduction="none") + (1 - lam) * F.cross_entropy(
                logits, shared_y, reduction="none"
            )
            return {
                "cross_entropy": F.cross_entropy(model.classifier(upper(a)), batch.y),
                "mixed": mixed.mean(),
                "divergence": self.kd
                * divergence(model.classifier(upper(shared_a)), teacher=received.classifier(frozen_upper(shared_a))),
                "correlation": self.dcor * distance_correlation(batch.x, a),
            }  # [4]

        return Terms(client, terms)

    @torch.no_grad()
    def upload(self, client: Client, message: Message) -> Reply:
        """Upload the activations and labels of the samples that the client shares with other clients."""
        client.receive(message["encoder"])
        batch = client.samples.batch(self.shared_rows(client).to(client.device))
        with autocast(client):
            a = halves(client.model.eval(), self.layer)[0](batch.x).float().contiguous()
        return client.reply(samples={i: {"a": a[i].clone(), "y": y} for i, y in enumerate(batch.y.tolist())})

    def shared_rows(self, client: Client) -> Tensor:
        """Return the row numbers of the samples that a client shares, int64, the same in all rounds [3]."""
        draws = torch.Generator().manual_seed(seed_for(client.config.seed, "order", "join", 0, client.id))
        size = shared_samples(self.share, len(client))
        return torch.randperm(len(client), generator=draws)[:size].sort().values

    # at the server

    def message(self, server: Server) -> Message:
        return super().message(server) | ({"buffer": server.state["buffer"]} if "buffer" in server.state else {})

    def round(self, server: Server, fleet: Fleet) -> None:
        ids = list(train_clients(self, server, fleet).weights)
        like = {"a": torch.empty(self.activation_shape(server), device="meta"), "y": 0}
        most = max(shared_samples(self.share, fleet.sizes[id]) for id in ids)
        samples = fleet.ask(
            self.upload,
            ids,
            {"encoder": tree.snapshot(server.model.entries("encoder."))},
            samples=each.within(dict.fromkeys(range(most), like))
            .up_to(LONGEST_FEATURE)
            .over_samples(partial(shared_fault, share=self.share, classes=server.model.classes)),
        )["samples"]
        buffer = [sample for of_client in samples.values() for sample in of_client.values()]
        server.state["buffer"] = {
            "a": torch.stack([sample["a"] for sample in buffer]),
            "y": torch.tensor([sample["y"] for sample in buffer]),
        }
        server.log(buffer=len(buffer))

    @torch.no_grad()
    def activation_shape(self, server: Server) -> torch.Size:
        """Return the shape of one image's activations at the cut layer."""
        height, width, channels = server.spec.shape
        x = torch.zeros(1, channels, height, width, device=server.device)
        return halves(server.model.eval(), self.layer)[0](x).shape[1:]


def shared_samples(share: float, n: int) -> int:
    """Return the number of samples that a client with n samples shares."""
    return math.ceil(share * n - 1e-9)


def shared_fault(n: int, parts: Tree, share: float, classes: int) -> str | None:
    """Return the reason why uploaded samples cannot come from a client with n samples, or None if they can.

    Args:
        n: Number of samples of the client.
        parts: The parts of its reply.
        share: Share of its samples that a client shares.
        classes: Number of classes.
    """
    samples = parts["samples"]
    if len(samples) != shared_samples(share, n):
        return f"has {count_of(len(samples), 'sample')}, but the client shares {shared_samples(share, n)}"
    wrong = [sample["y"] for sample in samples.values() if sample["y"] >= classes]
    return f"has the label {wrong[0]} of {classes} classes" if wrong else None


def distance_correlation(x: Tensor, a: Tensor) -> Tensor:
    """Return the distance correlation of two sets of B points, a float32 scalar in [0, 1] (Szekely et al., 2007).

    Args:
        x: The first set, [B, ...].
        a: The second set, [B, ...]; its other dimensions may differ.
    """
    with torch.autocast(x.device.type, enabled=False):
        p = centred_distances(x.flatten(1).float())
        q = centred_distances(a.flatten(1).float())
        least = 1e-7  # added for batches of equal points, and under the roots, as in the authors' code
        return ((p * q).mean().clamp(min=0) + least).sqrt() / (
            ((p * p).mean() + least).sqrt() * ((q * q).mean() + least).sqrt()
        ).sqrt()


def centred_distances(x: Tensor) -> Tensor:
    """Return the Euclidean distances [B, B] between points [B, d], with row and column means subtracted."""
    squares = x.square().sum(1)
    # without the minimum, the root would have no gradient at differences of 0, such as on the diagonal
    d = (squares[:, None] + squares[None] - 2 * x @ x.T).clamp(min=1e-12).sqrt()
    return d - d.mean(0, keepdim=True) - d.mean(1, keepdim=True) + d.mean()
